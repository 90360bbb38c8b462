"""NgramIndex: where a text has stood before, so that it can be guessed how it goes on. Plain Python; imports nothing.

Prompt lookup (A. Saxena, github.com/apoorvumang/prompt-lookup-decoding, 2023): what followed the last tokens when they
occurred before is likely to follow them again. Here the occurrences are found by an index that grows with the text
instead of a scan. Each entry links to the one before it with the same tokens: 4 bytes a token and a dict of distinct
n-grams.
"""

from __future__ import annotations

from array import array

_MAX_CANDIDATES = 16  # occurrences compared, the latest ones
_MAX_INDEXED = 1024  # tokens per call, of which there is one for each row of a step: about a quarter of a millisecond


class NgramIndex:
    """The tokens of one request, which only grow, and their n-grams of `shortest` tokens by content."""

    def __init__(self, *, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest
        self._tokens = array("i")
        # A place is the number of tokens up to the end of an n-gram; 0: none. The latest of each n-gram, by its tokens
        # packed into one int, and for each place the one before it with the same n-gram
        self._latest: dict[int, int] = {}
        self._previous = array("i", [0])
        self._key = 0  # of the n-gram at the last place that is indexed
        self._mask = (1 << 32 * shortest) - 1

    @property
    def num_tokens(self) -> int:
        """How many tokens extend() was given."""
        return len(self._tokens)

    def extend(self, token_ids: list[int]) -> None:
        """Append tokens to the text."""
        self._tokens.extend(token_ids)

    def continuation(self, count: int) -> list[int]:
        """Return `count` tokens that followed the longest of the text's ends that occurred before; [] if none did.

        Compared are the last `shortest` to `longest` tokens; of equally long matches the latest counts. A match that
        reaches into the continuation goes on as it began: its text repeats itself.
        """
        self._index()
        found = self._find()
        if not found:
            return []
        tokens, period = self._tokens, len(self._tokens) - found
        following = tokens[found : found + count].tolist()
        while len(following) < count:
            following.append(following[-period])
        return following

    def _index(self) -> None:
        """Note the n-grams that another token follows, the newest of a long text in later calls."""
        tokens, latest, previous, key = self._tokens, self._latest, self._previous, self._key
        first = len(previous) - 1
        for place, token_id in enumerate(tokens[first : min(len(tokens) - 1, first + _MAX_INDEXED)], first + 1):
            key = (key << 32 | token_id) & self._mask
            if place < self._shortest:
                previous.append(0)
            else:
                previous.append(latest.get(key, 0))
                latest[key] = place
        self._key = key

    def _find(self) -> int:
        """Return the place of the best earlier occurrence of the text's end, or 0."""
        tokens, end = self._tokens, len(self._tokens)
        if end <= self._shortest:
            return 0
        key = 0
        for token_id in tokens[-self._shortest :]:
            key = key << 32 | token_id
        place, best, best_length = self._latest.get(key, 0), 0, 0
        for _ in range(_MAX_CANDIDATES):
            if not place or best_length == self._longest:
                break
            length, limit = self._shortest, min(self._longest, place)
            while length < limit and tokens[place - 1 - length] == tokens[end - 1 - length]:
                length += 1
            if length > best_length:
                best, best_length = place, length
            place = self._previous[place]
        return best
