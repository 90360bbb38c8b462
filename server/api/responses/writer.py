"""ResponsesWriter: the events of a chat as an OpenAI Response, whole or as named events. Imports server only.

    created ─ in_progress ─ items* ─ completed | incomplete | error, failed

ResponsesOutput turns the events into the items of the answer, each with its own stream events:

    reasoning ─┐                       added ─ part added ─ delta* ─ text done ─ part done ─ item done
    text ──────┼→ one open item ─→
    tool call ─┘                       added ─────────────── delta* ─ arguments done ───── item done
                 (of a custom tool)    added ─────────────── delta* ─ input done ───────── item done

One item is open at a time: an event of another kind, or another call, closes it. The whole answer is the list of items
from the same events.
"""

import secrets
import time
from collections.abc import Callable, Sequence

import msgspec

from engine.interface.errors import Overloaded, RequestError, ServiceError
from server.api.as_chat import seal
from server.api.error_replies import public_message
from server.api.objects import ChatTokenLogprob
from server.api.responses.custom_tools import CustomInput
from server.api.responses.objects import (
    ArgumentsDelta,
    ArgumentsDone,
    CustomCallOutput,
    CustomInputDelta,
    CustomInputDone,
    ErrorEvent,
    FunctionCallOutput,
    IncompleteDetails,
    InputTokensDetails,
    ItemAdded,
    ItemDone,
    MessageOutput,
    OutputItem,
    OutputText,
    OutputTextDelta,
    OutputTextDone,
    OutputTokensDetails,
    PartAdded,
    PartDone,
    ReasoningOutput,
    ReasoningText,
    ReasoningTextDelta,
    ReasoningTextDone,
    Response,
    ResponseCompleted,
    ResponseCreated,
    ResponseFailed,
    ResponseFault,
    ResponseIncomplete,
    ResponseInProgress,
    ResponsesEcho,
    ResponsesUsage,
    StreamEvent,
    SummaryPartAdded,
    SummaryPartDone,
    SummaryText,
    SummaryTextDelta,
    SummaryTextDone,
)
from server.api.sse import PING, ReplyHead, TextEvent, named_event
from server.generation.events import ChoiceFinished, Event, TextDelta, ToolArguments, ToolCallStart
from server.generation.generation import CompletionStream

IN_PROGRESS, COMPLETED, INCOMPLETE = "in_progress", "completed", "incomplete"

Logprobs = Callable[[TextDelta], list[ChatTokenLogprob]]


class ResponsesOutput:
    """The items so far. `make_id` gives an id for a prefix.

    `is_sealed`: reasoning is also given sealed; `is_summary`: it is given as its own summary, not as content.
    `custom_names`: of the tools whose calls have an input instead of arguments.
    """

    def __init__(
        self,
        *,
        make_id: Callable[[str], str],
        logprobs: Logprobs | None,
        is_sealed: bool,
        is_summary: bool,
        custom_names: frozenset[str] = frozenset(),
    ) -> None:
        self.items: list[OutputItem] = []
        self._make_id = make_id
        self._logprobs = logprobs
        self._is_sealed = is_sealed
        self._is_summary = is_summary
        self._custom_names = custom_names
        self._custom_input = CustomInput()  # of the open custom call
        self._open: OutputItem | None = None
        self._texts: list[str] = []  # of the open item
        self._entries: list[ChatTokenLogprob] = []  # the log-probabilities of the open message
        self._early_entries: list[ChatTokenLogprob] = []  # since the last item, without text yet

    def feed(self, event: Event) -> list[StreamEvent]:
        """Return the stream events of one chat event. ChoiceFinished closes the open item."""
        match event:
            case TextDelta(kind="text"):
                return self._feed_text(event)
            case TextDelta():
                return self._feed_reasoning(event.text) if event.text else []
            case ToolCallStart():
                self._early_entries = []
                return [*self.close(COMPLETED), *self._begin(self._call_item(event))]
            case ToolArguments():
                return self._feed_arguments(event.text)
            case _:
                events = [] if self.items or self._open else self._begin_message()  # there is always an item
                return [*events, *self.close(self._last_status(event.finish_reason))]

    def extend(self, event: TextDelta) -> MessageOutput | None:
        """Add text to the open message and return it, if there is no more to do but to send text_delta()."""
        item = self._open
        if event.kind != "text" or not event.text or self._logprobs is not None or not isinstance(item, MessageOutput):
            return None
        self._texts.append(event.text)
        return item

    def text_delta(self, item: MessageOutput, text: str) -> OutputTextDelta:
        """Return the event of new text, without log-probabilities, of the open message."""
        return OutputTextDelta(item_id=item.id, output_index=len(self.items), delta=text)

    def close(self, status: str) -> list[StreamEvent]:
        """End the open item, if one is."""
        item, self._open = self._open, None
        if item is None:
            return []
        text, index = "".join(self._texts), len(self.items)
        item.status = status
        self.items.append(item)
        events: list[StreamEvent]
        match item:
            case MessageOutput():
                item.content = [OutputText(text=text, logprobs=self._entries)]
                events = [
                    OutputTextDone(item_id=item.id, output_index=index, text=text, logprobs=self._entries),
                    PartDone(item_id=item.id, output_index=index, part=item.content[0]),
                ]
            case ReasoningOutput():
                events = self._close_reasoning(item, text, index)
            case FunctionCallOutput():
                item.arguments = text or "{}"
                done = ArgumentsDone(item_id=item.id, output_index=index, name=item.name, arguments=item.arguments)
                events = [] if text else [self._arguments_delta(item, index, item.arguments)]
                events.append(done)
            case CustomCallOutput():
                rest = self._custom_input.finish()
                events = [CustomInputDelta(item_id=item.id, output_index=index, delta=rest)] if rest else []
                item.input = self._custom_input.text
                events.append(CustomInputDone(item_id=item.id, output_index=index, input=item.input))
        return [*events, ItemDone(output_index=index, item=item)]

    def _last_status(self, finish_reason: str) -> str:
        """The open item's, at the end: a call whose arguments the model left unfinished ends by "stop", too."""
        is_call = isinstance(self._open, FunctionCallOutput | CustomCallOutput)
        is_cut_call = is_call and self._texts and finish_reason != "tool_calls"
        return INCOMPLETE if finish_reason == "length" or is_cut_call else COMPLETED

    def _feed_text(self, event: TextDelta) -> list[StreamEvent]:
        entries = self._logprobs(event) if self._logprobs is not None else []
        is_open = isinstance(self._open, MessageOutput)
        if not event.text and not is_open:
            self._early_entries += entries  # of tokens that the message may begin with
            return []
        if not event.text and not entries:
            return []
        events = [] if is_open else [*self.close(COMPLETED), *self._begin_message()]
        assert self._open is not None
        entries, self._early_entries = self._early_entries + entries, []
        self._texts.append(event.text)
        self._entries += entries
        delta = OutputTextDelta(item_id=self._open.id, output_index=len(self.items), delta=event.text, logprobs=entries)
        return [*events, delta]

    def _feed_reasoning(self, text: str) -> list[StreamEvent]:
        events = []
        if not isinstance(self._open, ReasoningOutput):
            item = ReasoningOutput(id=self._make_id("rs"), status=IN_PROGRESS)
            events = [*self.close(COMPLETED), *self._begin(item), self._reasoning_part_added(item)]
        assert self._open is not None
        self._early_entries = []
        self._texts.append(text)
        kind = SummaryTextDelta if self._is_summary else ReasoningTextDelta
        return [*events, kind(item_id=self._open.id, output_index=len(self.items), delta=text)]

    def _reasoning_part_added(self, item: ReasoningOutput) -> StreamEvent:
        if self._is_summary:
            return SummaryPartAdded(item_id=item.id, output_index=len(self.items), part=SummaryText())
        return PartAdded(item_id=item.id, output_index=len(self.items), part=ReasoningText())

    def _close_reasoning(self, item: ReasoningOutput, text: str, index: int) -> list[StreamEvent]:
        item.encrypted_content = seal(text) if self._is_sealed else None
        if self._is_summary:
            item.summary = [SummaryText(text=text)]
            return [
                SummaryTextDone(item_id=item.id, output_index=index, text=text),
                SummaryPartDone(item_id=item.id, output_index=index, part=item.summary[0]),
            ]
        item.content = [ReasoningText(text=text)]
        return [
            ReasoningTextDone(item_id=item.id, output_index=index, text=text),
            PartDone(item_id=item.id, output_index=index, part=item.content[0]),
        ]

    def _feed_arguments(self, text: str) -> list[StreamEvent]:
        if not text:
            return []
        self._texts.append(text)
        if isinstance(self._open, CustomCallOutput):
            new = self._custom_input.push(text)
            delta = CustomInputDelta(item_id=self._open.id, output_index=len(self.items), delta=new)
            return [delta] if new else []
        assert isinstance(self._open, FunctionCallOutput), "arguments outside of a call"
        return [self._arguments_delta(self._open, len(self.items), text)]

    def _call_item(self, event: ToolCallStart) -> FunctionCallOutput | CustomCallOutput:
        if event.name in self._custom_names:
            self._custom_input = CustomInput()
            return CustomCallOutput(id=self._make_id("ctc"), status=IN_PROGRESS, call_id=event.id, name=event.name)
        return FunctionCallOutput(id=self._make_id("fc"), status=IN_PROGRESS, call_id=event.id, name=event.name)

    def _begin_message(self) -> list[StreamEvent]:
        item = MessageOutput(id=self._make_id("msg"), status=IN_PROGRESS)
        return [*self._begin(item), PartAdded(item_id=item.id, output_index=len(self.items), part=OutputText())]

    def _begin(self, item: OutputItem) -> list[StreamEvent]:
        self._open, self._texts, self._entries = item, [], []
        # A copy: the item is filled when it is closed, which may be before this event is written.
        return [ItemAdded(output_index=len(self.items), item=msgspec.structs.replace(item))]

    @staticmethod
    def _arguments_delta(item: FunctionCallOutput, index: int, text: str) -> ArgumentsDelta:
        return ArgumentsDelta(item_id=item.id, output_index=index, delta=text)


_FAILED = "failed"


class ResponsesWriter:
    """Makes one answer. `logprobs`: turns a text event's into OpenAI's, or None where they were not asked for."""

    ping = PING

    def __init__(
        self,
        head: ReplyHead,
        echo: ResponsesEcho,
        *,
        generation: CompletionStream,
        logprobs: Logprobs | None,
        is_sealed: bool,
        is_summary: bool,
        custom_names: frozenset[str] = frozenset(),
    ) -> None:
        self._head = head
        self._echo = echo
        self._generation = generation
        self._output = ResponsesOutput(
            make_id=make_item_id,
            logprobs=logprobs,
            is_sealed=is_sealed,
            is_summary=is_summary,
            custom_names=custom_names,
        )
        self._num_events = 0
        self._is_cut = False
        self._text_events: dict[str, _TextEvents] = {}  # by the id of their message

    def opening(self) -> bytes:
        """created and in_progress."""
        response = self._response(IN_PROGRESS)
        return self._encode([ResponseCreated(response=response), ResponseInProgress(response=response)])

    def event(self, event: Event, *, is_last: bool) -> bytes:
        """Return the stream events of one chat event as bytes."""
        if isinstance(event, TextDelta) and (item := self._output.extend(event)) is not None:
            write = self._text_events.get(item.id)
            if write is None:
                write = self._text_events[item.id] = _TextEvents(self._output.text_delta(item, TextEvent.TEXT))
            self._num_events += 1
            return write(event.text, self._num_events - 1)
        return self._encode(self._feed(event))

    def closing(self) -> bytes:
        """The last event, with the whole answer."""
        if self._is_cut:
            return self._encode([ResponseIncomplete(response=self._response(INCOMPLETE))])
        return self._encode([ResponseCompleted(response=self._response(COMPLETED))])

    def failed(self, error: ServiceError, *, request_id: str) -> bytes:
        """The error as an event, and the incomplete answer."""
        message = public_message(error, request_id=request_id)
        events = self._output.close(INCOMPLETE)
        response = self._response(_FAILED)
        response.error = ResponseFault(_fault_code(error), message)
        events += [ErrorEvent(code=error.code, message=message, param=error.param), ResponseFailed(response=response)]
        return self._encode(events)

    def whole(self, events: Sequence[Event]) -> msgspec.Struct:
        """The answer as one body."""
        for event in events:
            self._feed(event)
        return self._response(INCOMPLETE if self._is_cut else COMPLETED)

    def _feed(self, event: Event) -> list[StreamEvent]:
        if isinstance(event, ChoiceFinished):
            self._is_cut = event.finish_reason == "length"
        return self._output.feed(event)

    def _response(self, status: str) -> Response:
        params, echo = self._generation.spec.params, msgspec.structs.asdict(self._echo)
        for name, drawn_with in (("temperature", params.temperature), ("top_p", params.top_p)):
            echo[name] = drawn_with if echo[name] is None else echo[name]
        return Response(
            id=self._head.id,
            created_at=self._head.created,
            completed_at=int(time.time()) if status == COMPLETED else None,
            status=status,
            incomplete_details=IncompleteDetails("max_output_tokens") if status == INCOMPLETE else None,
            model=self._head.model,
            output=list(self._output.items),
            usage=None if status == IN_PROGRESS else self._usage(),
            **echo,
        )

    def _usage(self) -> ResponsesUsage:
        stats = self._generation.stats()
        return ResponsesUsage(
            input_tokens=stats.num_prompt_tokens,
            input_tokens_details=InputTokensDetails(stats.num_cached_tokens),
            output_tokens=stats.num_output_tokens,
            output_tokens_details=OutputTokensDetails(stats.num_reasoning_tokens),
            total_tokens=stats.num_prompt_tokens + stats.num_output_tokens,
        )

    def _encode(self, events: Sequence[StreamEvent]) -> bytes:
        encoded = []
        for event in events:
            event.sequence_number = self._num_events
            self._num_events += 1
            encoded.append(named_event(event))
        return b"".join(encoded)


class _TextEvents:
    """Writes the events of a message's text, which differ in the text and in their number."""

    def __init__(self, sample: OutputTextDelta) -> None:
        """`sample`: the event of TextEvent.TEXT with the number 0."""
        head, number, rest = named_event(sample).partition(b'"sequence_number":')
        self._head = head + number
        self._rest = TextEvent(rest.removeprefix(b"0"))

    def __call__(self, text: str, number: int) -> bytes:
        return b"%b%d%b" % (self._head, number, self._rest(text))


def make_item_id(prefix: str) -> str:
    """Return an id of OpenAI's form."""
    return f"{prefix}_{secrets.token_hex(24)}"


def _fault_code(error: ServiceError) -> str:
    """Return the closest error code of OpenAI's Response."""
    if isinstance(error, Overloaded):
        return "rate_limit_exceeded"
    return "invalid_prompt" if isinstance(error, RequestError) else "server_error"
