"""Chat events as an OpenAI Response, whole or as its stream of named events. Imports server only.

created ─ in_progress ─ (items, see responses_output.py)* ─ completed | incomplete | error, failed
"""

import secrets
import time
from collections.abc import Sequence

import msgspec

from engine.interface.errors import Overloaded, RequestError, ServiceError
from server.api.error_replies import public_message
from server.api.responses.objects import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    Response,
    ResponseFault,
    ResponsesEcho,
    ResponsesUsage,
)
from server.api.responses.responses_events import (
    ErrorEvent,
    ResponseCompleted,
    ResponseCreated,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
)
from server.api.responses.responses_output import COMPLETED, IN_PROGRESS, INCOMPLETE, Logprobs, ResponsesOutput
from server.api.sse import ReplyHead, named_event
from server.api.streaming import PING
from server.generation.chat_events import ChatEvent
from server.generation.chat_generation import ChatGeneration
from server.generation.generation import Ended

_FAILED = "failed"


class ResponsesWriter:
    """Makes one answer. `logprobs`: turns a text event's into OpenAI's, or None where they were not asked for."""

    ping = PING

    def __init__(
        self,
        head: ReplyHead,
        echo: ResponsesEcho,
        *,
        generation: ChatGeneration,
        logprobs: Logprobs | None,
        is_sealed: bool,
        is_summary: bool,
    ) -> None:
        self._head = head
        self._echo = echo
        self._generation = generation
        self._output = ResponsesOutput(
            make_id=make_item_id, logprobs=logprobs, is_sealed=is_sealed, is_summary=is_summary
        )
        self._num_events = 0
        self._is_cut = False

    def opening(self) -> bytes:
        """created and in_progress."""
        response = self._response(IN_PROGRESS)
        return self._encode([ResponseCreated(response=response), ResponseInProgress(response=response)])

    def event(self, event: ChatEvent, *, is_last: bool) -> bytes:
        """What one chat event adds to the items."""
        return self._encode(self._feed(event))

    def closing(self) -> bytes:
        """The whole answer once more, as OpenAI sends it."""
        if self._is_cut:
            return self._encode([ResponseIncomplete(response=self._response(INCOMPLETE))])
        return self._encode([ResponseCompleted(response=self._response(COMPLETED))])

    def failed(self, error: ServiceError, *, request_id: str) -> bytes:
        """The error as an event, and the answer as far as it came."""
        message = public_message(error, request_id=request_id)
        events = self._output.close(INCOMPLETE)
        response = self._response(_FAILED)
        response.error = ResponseFault(_fault_code(error), message)
        events += [ErrorEvent(code=error.code, message=message, param=error.param), ResponseFailed(response=response)]
        return self._encode(events)

    def whole(self, events: Sequence[ChatEvent]) -> msgspec.Struct:
        """The fold of the events."""
        for event in events:
            self._feed(event)
        return self._response(INCOMPLETE if self._is_cut else COMPLETED)

    def _feed(self, event: ChatEvent) -> list[msgspec.Struct]:
        if isinstance(event, Ended):
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

    def _encode(self, events: Sequence[msgspec.Struct]) -> bytes:
        encoded = []
        for event in events:
            event.sequence_number = self._num_events  # type: ignore[attr-defined]
            self._num_events += 1
            encoded.append(named_event(event))
        return b"".join(encoded)


def make_item_id(prefix: str) -> str:
    """Return an id of OpenAI's form."""
    return f"{prefix}_{secrets.token_hex(24)}"


def _fault_code(error: ServiceError) -> str:
    """Return which of the codes that OpenAI's Response may have comes closest."""
    if isinstance(error, Overloaded):
        return "rate_limit_exceeded"
    return "invalid_prompt" if isinstance(error, RequestError) else "server_error"
