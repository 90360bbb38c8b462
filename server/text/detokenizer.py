"""Detokenizer: token ids to text, a few at a time. StopChecker: stop strings in that text. Imports tokenizers only.

The texts of push() and finish(), joined, equal the decode of all ids at once, or, with a context (earlier tokens of
the same text), the text that they add to its decode. A character whose bytes are spread over several tokens appears
whole, with the token that completes it. One Detokenizer belongs to one choice of one request.

    ByteLevelDetokenizer   byte-level BPE (Llama 3, Qwen, GPT-2): a token is bytes, whatever its neighbours are
    WindowDetokenizer      any other decoder (Metaspace, ByteFallback, WordPiece, ...): decodes a short window again

The stop string that matches is the one that ends earliest, the longest of those that end together; so the result
depends on the text alone, never on how it was cut into deltas. Only text that may still become a stop string is held
back.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer

_MAX_HELD_TOKENS = 16  # tokens: an undecodable run is given out rather than held back for ever
_NUM_CONTEXT_TOKENS = 6  # as vLLM: more than any decoder's rule for neighbours looks at
_MAX_CHARACTER_TOKENS = 4  # bytes of one UTF-8 character


class Detokenizer(Protocol):
    """Incremental decoding of one token stream."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that is certain after these tokens."""
        ...

    def finish(self) -> str:
        """Return what was held back; an incomplete character becomes U+FFFD, as in a whole decode."""
        ...


class TokenBytes:
    """The bytes of each token of a byte-level vocabulary, looked up once per id. Shared by all requests of a worker."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._by_id: dict[int, bytes] = {}

    def __call__(self, token_id: int) -> bytes:
        """Return the token's bytes, b"" for an id that the tokenizer does not know."""
        data = self._by_id.get(token_id)
        if data is None:
            data = self._by_id[token_id] = self._bytes_of(self._tokenizer.id_to_token(token_id))
        return data

    @staticmethod
    def _bytes_of(token: str | None) -> bytes:
        if token is None:
            return b""
        # As tokenizers' ByteLevel decoder: a token with a character outside the table (an added one) is its own UTF-8.
        try:
            return bytes([_BYTE_OF_CHAR[char] for char in token])
        except KeyError:
            return token.encode()


class ByteLevelDetokenizer:
    """Bytes per token and one incremental UTF-8 decoder: O(1) per token."""

    def __init__(self, token_bytes: TokenBytes, *, hidden_ids: frozenset[int], context: Sequence[int] = ()) -> None:
        self._token_bytes = token_bytes
        self._hidden_ids = hidden_ids
        self._held = b""  # the beginning of a character
        self.push(context[-_MAX_CHARACTER_TOKENS:])  # it may end inside a character

    def push(self, token_ids: Sequence[int]) -> str:
        hidden, token_bytes = self._hidden_ids, self._token_bytes
        data = self._held + b"".join([token_bytes(id_) for id_ in token_ids if id_ not in hidden])
        text, num_decoded = codecs.utf_8_decode(data, "replace", False)  # False: what may go on is not decoded
        self._held = data[num_decoded:]
        return text

    def finish(self) -> str:
        held, self._held = self._held, b""
        return codecs.utf_8_decode(held, "replace", True)[0]


class WindowDetokenizer:
    """Decodes the last emitted tokens with and without the new ones; the difference is new text.

    The idea is TGI's and vLLM's (detokenize_incrementally): one window of context makes leading-space rules cancel out.
    A run of byte tokens that is not UTF-8 as a whole can differ from a whole decode in its number of U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, *, hidden_ids: frozenset[int], context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._hidden_ids = hidden_ids
        self._window = self._last_shown(context)
        self._num_given = len(self._window)  # tokens of the window whose text is out
        self._given_text = self._decode(self._window)  # decode(window[:num_given])

    def push(self, token_ids: Sequence[int]) -> str:
        parts = []
        for token_id in token_ids:
            # A hidden token would be an empty window, and the leading space of the next token would be lost.
            if not self._is_shown(token_id):
                continue
            self._window.append(token_id)
            text = self._decode(self._window)
            is_held = text.endswith("\ufffd") and len(self._window) - self._num_given < _MAX_HELD_TOKENS
            if not is_held and not self._given_text.startswith(text):
                parts.append(self._give(text))
        return "".join(parts)

    def finish(self) -> str:
        if self._num_given == len(self._window):
            return ""
        return self._give(self._decode(self._window))

    def _is_shown(self, token_id: int) -> bool:
        return token_id not in self._hidden_ids and self._tokenizer.id_to_token(token_id) is not None

    def _last_shown(self, context: Sequence[int]) -> list[int]:
        """The end of the context as a window: its first token must not lie inside a character."""
        window: list[int] = []
        for token_id in reversed(context):
            if len(window) >= _NUM_CONTEXT_TOKENS and not self._decode(window).startswith("\ufffd"):
                break
            if len(window) == _NUM_CONTEXT_TOKENS + _MAX_CHARACTER_TOKENS:
                break
            if self._is_shown(token_id):
                window.insert(0, token_id)
        return window

    def _give(self, text: str) -> str:
        given = self._given_text
        if not text.startswith(given):
            given = given.rstrip("\ufffd")  # a context ended inside a character, which is complete now
        new_text = text[len(given) :]
        self._window = self._window[self._num_given :]
        self._num_given = len(self._window)
        self._given_text = self._decode(self._window)
        return new_text

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def _byte_of_char() -> dict[str, int]:
    """The alphabet of byte-level BPE (GPT-2, encoder.py, bytes_to_unicode), inverted."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    table.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return table


_BYTE_OF_CHAR = _byte_of_char()


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
