"""PreparedReply: a checked request that has not started. ReplyOptions: the optional parts of its answer. Pure."""

import msgspec

from engine.interface.protocol import SamplingParams
from server.api.schemas import ChatBody, CompletionBody
from server.api.sse import ReplyHead
from server.generation.generation import CompletionStream


class ReplyOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The optional parts of the answer."""

    is_stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    logprobs: int | None = None  # None: none; else how many alternatives per token are shown
    echoes_logprobs: bool = False  # of the prompt, before the answer's own
    prompt_logprobs: int | None = None  # the same in a list of their own


class PreparedReply(msgspec.Struct, frozen=True):
    """A checked request that has not started."""

    head: ReplyHead
    generation: CompletionStream
    options: ReplyOptions
    headers: dict[str, str]  # of the answer: names what was ignored
    ignored: list[str]  # the same names


def reply_options(body: ChatBody | CompletionBody, params: SamplingParams) -> ReplyOptions:
    """Return the options of a checked body."""
    options = body.stream_options
    return ReplyOptions(
        is_stream=bool(body.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
        return_token_ids=bool(body.return_token_ids),
        logprobs=params.logprobs,
        echoes_logprobs=isinstance(body, CompletionBody) and bool(body.echo) and body.logprobs is not None,
        prompt_logprobs=body.prompt_logprobs,
    )
