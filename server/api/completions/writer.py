"""From events to the bytes of an answer, whole or streamed. Imports server only.

A writer belongs to one request. The whole answer is the fold of the same events that the stream sends one by one.

Events of a generation, joined into whole choices, and its counts as usage and timings. Imports server only.
"""

from collections.abc import Sequence

import msgspec
from msgspec import UNSET

from engine.interface.protocol import TokenLogprobs
from server.api.logprobs import LegacyLogprobs, prompt_logprobs_of
from server.api.objects import TextChoice, TextCompletion, TextLogprobs, timings_of, usage_of
from server.api.reply_options import ReplyOptions
from server.api.sse import ReplyHead
from server.generation.generation import Ended, Event, Generation, Piece
from server.text.tokenizer import Tokenizer


class FoldedChoice(msgspec.Struct):
    """All events of one choice, joined."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: str


def fold(events: Sequence[Event]) -> list[FoldedChoice]:
    """Join the events of each choice, in order of index."""
    pieces: dict[int, list[Piece]] = {}
    reasons: dict[int, str] = {}
    for event in events:
        if isinstance(event, Ended):
            reasons[event.index] = event.finish_reason
        else:
            pieces.setdefault(event.index, []).append(event)
    choices = []
    for index in sorted(reasons):
        own = pieces.get(index, [])
        logprobs = [entry for piece in own for entry in piece.logprobs or ()]
        choices.append(
            FoldedChoice(
                index,
                "".join(piece.text for piece in own),
                [id_ for piece in own for id_ in piece.token_ids],
                logprobs if any(piece.logprobs is not None for piece in own) else None,
                reasons[index],
            )
        )
    return choices


_encoder = msgspec.json.Encoder()


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
        self._legacy: dict[int, LegacyLogprobs] = {}  # of the choices that have begun

    def opening(self) -> list[msgspec.Struct]:
        """One chunk per choice when the prompts are echoed or their ids shown."""
        has_echo = self._echo is not None and not self._options.echoes_logprobs  # else it comes with its logprobs
        if not has_echo and not self._options.return_token_ids:
            return []
        choices = range(self._generation.num_choices)
        return [self._chunk(self._choice(i, self._echo_text(i) if has_echo else "", [])) for i in choices]

    def chunk(self, event: Event, *, is_last: bool) -> msgspec.Struct | None:
        """A text or finish chunk."""
        begins = event.index not in self._legacy and self._options.echoes_logprobs
        echo = self._echo_text(event.index) if begins else ""
        if isinstance(event, Ended):
            choice = TextChoice(event.index, echo, self._logprobs(None, event), event.finish_reason)
            chunk = self._chunk(choice)
            if is_last and not self._options.include_usage:
                chunk.timings = timings_of(self._generation.stats())
            return chunk
        if not event.text and event.logprobs is None and not self._options.return_token_ids:
            return None
        choice = TextChoice(event.index, echo + event.text, self._logprobs(event.logprobs, event))
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
            if self._options.prompt_logprobs is not None:
                choice.prompt_logprobs = prompt_logprobs_of(
                    self._prompt(folded.index),
                    self._generation.prompt_logprobs(folded.index),
                    num_top=self._options.prompt_logprobs,
                    tokenizer=self._tokenizer,
                )
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
            choice.prompt_token_ids = list(self._prompt(index))
        return choice

    def _echo_text(self, index: int) -> str:
        return self._echo[index // self._generation.spec.n] if self._echo is not None else ""

    def _logprobs(
        self, logprobs: list[TokenLogprobs] | None, source: Piece | Ended | FoldedChoice
    ) -> TextLogprobs | None:
        """The logprobs of new tokens, and before the first of a choice those of an echoed prompt."""
        begins = source.index not in self._legacy and self._options.echoes_logprobs
        if logprobs is None and not begins:
            return None
        result = TextLogprobs([], [], [], [])
        if begins:
            prompt = self._prompt(source.index)
            entries = [None, *self._generation.prompt_logprobs(source.index)]
            self._make_legacy(context=(), offset=0).extend(result, prompt, entries)
        if source.index not in self._legacy:
            context = self._generation.spec.text_context(source.index)
            offset = len(self._echo_text(source.index)) if self._options.echoes_logprobs else 0
            self._legacy[source.index] = self._make_legacy(context=context, offset=offset)
        if logprobs is not None and not isinstance(source, Ended):
            self._legacy[source.index].extend(result, source.token_ids, logprobs)
        return result

    def _make_legacy(self, *, context: Sequence[int], offset: int) -> LegacyLogprobs:
        skip = self._generation.spec.skip_special_tokens
        detokenizer = self._tokenizer.detokenizer(skip_special_tokens=skip, context=context)
        return LegacyLogprobs(self._tokenizer, detokenizer, num_top=self._options.logprobs or 0, offset=offset)

    def _prompt(self, index: int) -> tuple[int, ...]:
        spec = self._generation.spec
        return spec.prompts[index // spec.n]
