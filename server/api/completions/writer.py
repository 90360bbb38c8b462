"""TextWriter: the events of a completion as text_completion, whole or as a stream. Imports server only.

The whole answer is collected from the same events that the stream sends one by one.
"""

from collections.abc import Sequence

import msgspec
from msgspec import UNSET

from engine.interface.errors import ServiceError
from engine.interface.protocol import TokenLogprobs
from server.api.collected import CollectedChoice, collect_choices
from server.api.logprobs import LegacyLogprobs, prompt_logprobs_of
from server.api.objects import TextChoice, TextCompletion, TextLogprobs, cache_of, timings_of, usage_of
from server.api.reply_options import PreparedReply
from server.api.sse import PING, SSE_DONE, TextEvent, data_events, data_failure
from server.generation.events import ChoiceFinished, Event, TextDelta
from server.text.detokenizer import Detokenizer
from server.text.tokenizer import Tokenizer


class TextWriter:
    """Makes one answer. `echo`: the prompts' texts to put before the answers, or None."""

    ping = PING

    def __init__(self, completion: PreparedReply, *, tokenizer: Tokenizer, echo: list[str] | None) -> None:
        self._head, self._options, self._generation = completion.head, completion.options, completion.generation
        self._tokenizer = tokenizer
        self._echo = echo
        self._legacy: dict[int, LegacyLogprobs] = {}  # of the choices that have begun
        options = self._options
        self._shows_text_alone = not (options.return_token_ids or options.continuous_usage or options.echoes_logprobs)
        self._text_events: dict[int, TextEvent] = {}  # by choice

    def opening(self) -> bytes:
        """One chunk per choice when the prompts are echoed or their ids shown."""
        has_echo = self._echo is not None and not self._options.echoes_logprobs  # else it comes with its logprobs
        if not has_echo and not self._options.return_token_ids:
            return b""
        choices = range(self._generation.num_choices)
        chunks = [self._chunk(self._choice(i, self._echo_text(i) if has_echo else "", [])) for i in choices]
        return data_events(*chunks)

    def event(self, event: Event, *, is_last: bool) -> bytes:
        """A text or finish chunk."""
        if isinstance(event, TextDelta) and event.logprobs is None and self._shows_text_alone:
            return self._text_event(event) if event.text else b""
        assert isinstance(event, TextDelta | ChoiceFinished), "a completion calls no tools"
        begins = event.index not in self._legacy and self._options.echoes_logprobs
        echo = self._echo_text(event.index) if begins else ""
        if isinstance(event, ChoiceFinished):
            choice = TextChoice(event.index, echo, self._logprobs(None, event), event.finish_reason)
            chunk = self._chunk(choice)
            if is_last and not self._options.include_usage:
                stats = self._generation.stats()
                chunk.timings, chunk.cache = timings_of(stats), cache_of(stats)
            return data_events(chunk)
        if not event.text and event.logprobs is None and not self._options.return_token_ids:
            return b""
        choice = TextChoice(event.index, echo + event.text, self._logprobs(event.logprobs, event))
        choice.token_ids = event.token_ids if self._options.return_token_ids else UNSET
        return data_events(self._chunk(choice))

    def closing(self) -> bytes:
        """The usage chunk, if it was asked for."""
        if not self._options.include_usage:
            return SSE_DONE
        return data_events(self._with_totals(self._chunk())) + SSE_DONE

    def failed(self, error: ServiceError, *, request_id: str) -> bytes:
        """The error."""
        return data_failure(error, request_id=request_id)

    def whole(self, events: Sequence[Event]) -> msgspec.Struct:
        """The answer as one body."""
        choices = []
        for collected in collect_choices(events):
            choice = self._choice(
                collected.index, self._echo_text(collected.index) + collected.text, collected.token_ids
            )
            choice.logprobs = self._logprobs(collected.logprobs, collected)
            choice.finish_reason = collected.finish_reason
            if self._options.prompt_logprobs is not None:
                choice.prompt_logprobs = prompt_logprobs_of(
                    self._prompt(collected.index),
                    self._generation.prompt_logprobs(collected.index),
                    num_top=self._options.prompt_logprobs,
                    tokenizer=self._tokenizer,
                )
            choices.append(choice)
        return self._with_totals(self._chunk(*choices))

    def _text_event(self, event: TextDelta) -> bytes:
        write = self._text_events.get(event.index)
        if write is None:
            write = TextEvent(data_events(self._chunk(TextChoice(event.index, TextEvent.TEXT))))
            self._text_events[event.index] = write
        return write(event.text)

    def _with_totals(self, answer: TextCompletion) -> TextCompletion:
        stats = self._generation.stats()
        answer.usage, answer.timings, answer.cache = usage_of(stats), timings_of(stats), cache_of(stats)
        return answer

    def _chunk(self, *choices: TextChoice) -> TextCompletion:
        head = self._head
        chunk = TextCompletion(id=head.id, created=head.created, model=head.model, choices=list(choices))
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
        self, logprobs: list[TokenLogprobs] | None, source: TextDelta | ChoiceFinished | CollectedChoice
    ) -> TextLogprobs | None:
        """The logprobs of new tokens, and before the first of a choice those of an echoed prompt."""
        begins = source.index not in self._legacy and self._options.echoes_logprobs
        if logprobs is None and not begins:
            return None
        result = TextLogprobs([], [], [], [])
        if begins:
            prompt = self._prompt(source.index)
            entries = [None, *self._generation.prompt_logprobs(source.index)]
            text = self._echo_text(source.index)
            shown = {id_ for id_ in self._tokenizer.special_ids.intersection(prompt) if self._name(id_) in text}
            detokenizer = self._tokenizer.detokenizer(skip_special_tokens=True, visible_ids=frozenset(shown))
            self._make_legacy(detokenizer, offset=0).extend(result, prompt, entries)
        if source.index not in self._legacy:
            context = self._generation.spec.text_context(source.index)
            offset = len(self._echo_text(source.index)) if self._options.echoes_logprobs else 0
            skip = self._generation.spec.skip_special_tokens
            detokenizer = self._tokenizer.detokenizer(skip_special_tokens=skip, context=context)
            self._legacy[source.index] = self._make_legacy(detokenizer, offset=offset)
        if logprobs is not None and not isinstance(source, ChoiceFinished):
            self._legacy[source.index].extend(result, source.token_ids, logprobs)
        return result

    def _make_legacy(self, detokenizer: Detokenizer, *, offset: int) -> LegacyLogprobs:
        return LegacyLogprobs(self._tokenizer, detokenizer, num_top=self._options.logprobs or 0, offset=offset)

    def _name(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")

    def _prompt(self, index: int) -> tuple[int, ...]:
        spec = self._generation.spec
        return spec.prompts[index // spec.n]
