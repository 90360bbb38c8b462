"""Stop strings over streamed text. Imports nothing of ours.

A match is the one that ends earliest, the longest of those that end together; so the result depends on the text
alone, never on how it was cut into deltas. Text that may still become a stop string is held back, no more than that.
"""

from collections.abc import Sequence


class StopChecker:
    """Finds the first stop string in text that arrives in pieces: O(characters × stop strings) in all.

    One Knuth-Morris-Pratt automaton per stop string (Knuth, Morris, Pratt 1977, §2): its state is the length of the
    longest suffix seen that begins the stop string, so the longest state is exactly what must be held back.
    """

    def __init__(self, stop: Sequence[str], *, include_in_output: bool = False) -> None:
        self._stop = tuple(stop)
        self._failures = [_failure_function(text) for text in self._stop]
        self._states = [0] * len(self._stop)
        self._first_chars = frozenset(text[0] for text in self._stop)
        self._held = ""
        self._include_in_output = include_in_output
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Return the text to give out; `matched` is set once a stop string is complete. Later text is dropped."""
        if self.matched is not None:
            return ""
        if not self._held and self._first_chars.isdisjoint(text):
            return text
        buffer = self._held + text
        for end in range(len(self._held) + 1, len(buffer) + 1):
            if self._advance(buffer[end - 1]):
                assert self.matched is not None
                self._held = ""
                return buffer[: end if self._include_in_output else end - len(self.matched)]
        num_held = max(self._states)
        cut = len(buffer) - num_held
        self._held = buffer[cut:]
        return buffer[:cut]

    def finish(self) -> str:
        """Return the held text: the stream ended, so it is no stop string."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> bool:
        for i, (stop, failure) in enumerate(zip(self._stop, self._failures, strict=True)):
            state = self._states[i]
            while state and stop[state] != char:
                state = failure[state - 1]
            if stop[state] == char:
                state += 1
            if state == len(stop):
                if self.matched is None or len(stop) > len(self.matched):
                    self.matched = stop
                state = failure[state - 1]
            self._states[i] = state
        return self.matched is not None


def _failure_function(text: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    failure = [0] * len(text)
    state = 0
    for i in range(1, len(text)):
        while state and text[i] != text[state]:
            state = failure[state - 1]
        if text[i] == text[state]:
            state += 1
        failure[i] = state
    return failure
