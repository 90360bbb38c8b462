"""Log-probabilities: OpenAI's legacy form, and vLLM's form for prompts. Imports server only."""

from collections.abc import Sequence
from typing import TypeVar, cast

import msgspec

from engine.interface.protocol import TokenLogprobs
from server.api.objects import PromptLogprob, TextLogprobs
from server.text.detokenizer import Detokenizer
from server.text.tokenizer import Tokenizer

T = TypeVar("T")
_MIN_LOGPROB = -9999.0  # JSON has no infinity; OpenAI's own floor


class LegacyLogprobs:
    """Makes one choice's `logprobs`, piece by piece. `num_top`: alternatives shown per token.

    text_offset counts the characters of the text that were complete before a token.
    """

    def __init__(self, tokenizer: Tokenizer, detokenizer: Detokenizer, *, num_top: int, offset: int) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = detokenizer
        self._num_top = num_top
        self._offset = offset

    def extend(
        self, result: TextLogprobs, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]
    ) -> TextLogprobs:
        """Append tokens, None for one without a log-probability, and return the result."""
        for token_id, entry in zip(token_ids, entries, strict=True):
            token = self._text(token_id)
            result.text_offset.append(self._offset)
            result.tokens.append(token)
            result.token_logprobs.append(None if entry is None else finite_logprob(entry.logprob))
            result.top_logprobs.append(None if entry is None else self._tops(token, entry))
            self._offset += len(self._detokenizer.push((token_id,)))
        return result

    def _tops(self, token: str, entry: TokenLogprobs) -> dict[str, float]:
        """The token itself, then the others; where another token has the same text, the token itself is shown."""
        own = {token: finite_logprob(entry.logprob)}
        tops = {self._text(id_): finite_logprob(value) for id_, value in top_entries(entry, self._num_top)}
        return written(own | tops | own)

    def _text(self, token_id: int) -> str:
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:  # OpenAI's form for part of a character; U+FFFD would make dict keys collide
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def prompt_logprobs_of(
    prompt: Sequence[int], entries: Sequence[TokenLogprobs], *, num_top: int, tokenizer: Tokenizer
) -> list[dict[int, PromptLogprob] | None]:
    """Return per token of the prompt its own entry and the most likely ones, by id; None for the first."""

    def entry_of(token_id: int, logprob: float, rank: int) -> PromptLogprob:
        text = tokenizer.token_bytes(token_id).decode("utf-8", "replace")
        return PromptLogprob(finite_logprob(logprob), rank, text)

    result: list[dict[int, PromptLogprob] | None] = [None]
    for token_id, entry in zip(prompt[1:], entries, strict=True):
        shown = {token_id: entry_of(token_id, entry.logprob, entry.rank)}
        for rank, (top_id, logprob) in enumerate(top_entries(entry, num_top), 1):
            shown.setdefault(top_id, entry_of(top_id, logprob, rank))
        result.append(written(shown))
    return result


def written(entry: T) -> T:
    """Return the JSON of one token's entry in its place.

    To keep half a million objects, and to write them at once, would stop all other threads.
    """
    return cast("T", msgspec.Raw(msgspec.json.encode(entry)))


def top_entries(entry: TokenLogprobs, num_top: int) -> list[tuple[int, float]]:
    """Return the first alternatives at a token's place, with their log-probabilities."""
    return list(zip(entry.top_token_ids, entry.top_logprobs, strict=True))[:num_top]


def finite_logprob(logprob: float) -> float:
    """Return a number that JSON can hold."""
    return max(logprob, _MIN_LOGPROB)
