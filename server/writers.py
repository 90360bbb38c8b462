"""From events to the bytes of an answer, whole or streamed. Imports server only.

A writer belongs to one request. The whole answer is the fold of the same events that the stream sends one by one.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar

import msgspec
from msgspec import UNSET

from engine.protocol import TokenLogprobs
from server.chunks import TextChoice, TextCompletion, TextLogprobs
from server.detokenizer import Detokenizer
from server.fold import FoldedChoice, fold, timings_of, usage_of
from server.generation import Ended, Event, Generation, Piece
from server.tokenizer import Tokenizer
from server.validate import ReplyOptions

_MIN_LOGPROB = -9999.0  # JSON has no infinity; OpenAI's own floor
_encoder = msgspec.json.Encoder()

E = TypeVar("E", contravariant=True)


class ReplyHead(msgspec.Struct, frozen=True):
    """What every chunk of an answer repeats."""

    id: str
    created: int  # Unix time, seconds
    model: str


class Writer(Protocol[E]):
    """Makes one kind of answer of one kind of events."""

    def opening(self) -> list[msgspec.Struct]:
        """Chunks before the first event."""
        ...

    def chunk(self, event: E, *, is_last: bool) -> msgspec.Struct | None:
        """The chunk of one event, if it shows anything. `is_last`: no chunk of a choice comes after it."""
        ...

    def closing(self) -> msgspec.Struct | None:
        """The usage chunk, if it was asked for."""
        ...

    def whole(self, events: Sequence[E]) -> msgspec.Struct:
        """The answer as one body."""
        ...


def sse_event(chunk: msgspec.Struct) -> bytes:
    """Return one server-sent event."""
    return b"data: " + _encoder.encode(chunk) + b"\n\n"


class TextWriter:
    """text_completion. `echo`: the prompts' texts to put before the answers, or None."""

    def __init__(
        self,
        head: ReplyHead,
        options: ReplyOptions,
        *,
        generation: Generation,
        tokenizer: Tokenizer,
        echo: list[str] | None,
    ) -> None:
        self._head = head
        self._options = options
        self._generation = generation
        self._tokenizer = tokenizer
        self._echo = echo
        self._positions: dict[int, tuple[Detokenizer, int]] = {}  # choice → its text so far, and its characters

    def opening(self) -> list[msgspec.Struct]:
        """One chunk per choice when the prompts are echoed or their ids shown."""
        if self._echo is None and not self._options.return_token_ids:
            return []
        num_choices = len(self._generation.spec.prompts) * self._generation.spec.n
        return [self._chunk(self._choice(i, self._echo_text(i), [])) for i in range(num_choices)]

    def chunk(self, event: Event, *, is_last: bool) -> msgspec.Struct | None:
        """A text or finish chunk."""
        if isinstance(event, Ended):
            chunk = self._chunk(TextChoice(event.index, "", finish_reason=event.finish_reason))
            if is_last and not self._options.include_usage:
                chunk.timings = timings_of(self._generation.stats())
            return chunk
        if not event.text and event.logprobs is None and not self._options.return_token_ids:
            return None
        choice = TextChoice(event.index, event.text, self._logprobs(event.logprobs, event))
        choice.token_ids = event.token_ids if self._options.return_token_ids else UNSET
        return self._chunk(choice)

    def closing(self) -> msgspec.Struct | None:
        """The usage chunk."""
        if not self._options.include_usage:
            return None
        stats = self._generation.stats()
        return TextCompletion(
            id=self._head.id,
            created=self._head.created,
            model=self._head.model,
            choices=[],
            usage=usage_of(stats),
            timings=timings_of(stats),
        )

    def whole(self, events: Sequence[Event]) -> msgspec.Struct:
        """The fold of the events."""
        choices = []
        for folded in fold(events):
            choice = self._choice(folded.index, self._echo_text(folded.index) + folded.text, folded.token_ids)
            choice.logprobs = self._logprobs(folded.logprobs, folded)
            choice.finish_reason = folded.finish_reason
            choices.append(choice)
        stats = self._generation.stats()
        return TextCompletion(
            id=self._head.id,
            created=self._head.created,
            model=self._head.model,
            choices=choices,
            usage=usage_of(stats),
            timings=timings_of(stats),
        )

    def _chunk(self, choice: TextChoice) -> TextCompletion:
        chunk = TextCompletion(id=self._head.id, created=self._head.created, model=self._head.model, choices=[choice])
        if self._options.continuous_usage:
            chunk.usage = usage_of(self._generation.stats())
        elif self._options.include_usage:
            chunk.usage = None
        return chunk

    def _choice(self, index: int, text: str, token_ids: list[int]) -> TextChoice:
        choice = TextChoice(index, text)
        if self._options.return_token_ids:
            choice.token_ids = token_ids
            choice.prompt_token_ids = list(self._generation.spec.prompts[index // self._generation.spec.n])
        return choice

    def _echo_text(self, index: int) -> str:
        return self._echo[index // self._generation.spec.n] if self._echo is not None else ""

    def _logprobs(self, logprobs: list[TokenLogprobs] | None, source: Piece | FoldedChoice) -> TextLogprobs | None:
        if logprobs is None:
            return None
        result = TextLogprobs([], [], [], [])
        spec = self._generation.spec
        detokenizer, offset = self._positions.get(source.index) or (
            self._tokenizer.detokenizer(
                skip_special_tokens=spec.skip_special_tokens, context=spec.text_context(source.index)
            ),
            0,
        )
        for token_id, entry in zip(source.token_ids, logprobs, strict=True):
            token = self._token(token_id)
            result.text_offset.append(offset)
            result.tokens.append(token)
            result.token_logprobs.append(finite_logprob(entry.logprob))
            tops = top_entries(entry, self._options.logprobs or 0)
            result.top_logprobs.append(
                {token: finite_logprob(entry.logprob)} | {self._token(i): finite_logprob(v) for i, v in tops}
            )
            offset += len(detokenizer.push((token_id,)))
        self._positions[source.index] = detokenizer, offset
        return result

    def _token(self, token_id: int) -> str:
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:  # OpenAI's form for part of a character; U+FFFD would make dict keys collide
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def top_entries(entry: TokenLogprobs, num_top: int) -> list[tuple[int, float]]:
    """Return the first alternatives at a token's place, with their log-probabilities."""
    return list(zip(entry.top_token_ids, entry.top_logprobs, strict=True))[:num_top]


def finite_logprob(logprob: float) -> float:
    """Return what JSON can hold."""
    return max(logprob, _MIN_LOGPROB)
