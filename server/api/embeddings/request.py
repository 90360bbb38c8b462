"""prepare_embeddings: check a parsed embeddings body and make its spec: prompts, ids, limits. Imports server only."""

import secrets

import msgspec
from starlette.requests import Request

from engine.interface.errors import InvalidParameter, PromptTooLong
from engine.interface.protocol import EngineReady
from server.api.app_state import AppState
from server.api.as_chat import named_extras
from server.api.embeddings.run import EmbeddingRun, EmbeddingSpec
from server.api.embeddings.schema import EmbeddingBody
from server.api.large_bodies import body_size, while_wanted, with_body
from server.api.limits import LIMITS
from server.api.request_record import record_of
from server.api.sampling_fields import check_ids
from server.config.api_keys import cache_salt_of
from server.text.embedding_model import EmbeddingModel


class PreparedEmbeddings(msgspec.Struct, frozen=True):
    """A checked embeddings request that has not started."""

    model: str
    run: EmbeddingRun
    is_base64: bool
    headers: dict[str, str]  # of the answer: names what was ignored


async def prepare_embeddings(app_state: AppState, body: EmbeddingBody, request: Request) -> PreparedEmbeddings:
    """Check and encode a request. Raises ServiceErrors."""
    limits, embedding = app_state.limits(), app_state.embedding_model()
    record = record_of(request.scope)
    record.model = model = app_state.model_name(body.model)
    headers = app_state.ignored_header(
        named_extras(body.model_extra or {}, known=set(), at="") + app_state.drop_priority(body, record)
    )
    dimensions = body.dimensions or limits.hidden_size
    if dimensions > limits.hidden_size:
        raise InvalidParameter(
            f"dimensions is {dimensions}; this model's embeddings have {limits.hidden_size}.", param="dimensions"
        )
    if isinstance(body.input[0], str):
        prefix = _prefix(body.prompt_name, embedding)
        texts = [prefix + text for text in body.input]
        inputs = await while_wanted(request, app_state.encode_texts(texts, num_bytes=body_size(request), param="input"))
    else:
        if body.prompt_name:
            raise InvalidParameter("prompt_name is for texts: token ids are taken as they are.", param="prompt_name")
        inputs = body.input
    await with_body(request, lambda: _check_inputs(inputs, limits))
    context = app_state.request_context(record)
    spec = EmbeddingSpec(
        inputs=inputs,
        pooling=embedding.pooling,
        dimensions=dimensions,
        max_inputs_at_once=limits.max_num_seqs + min(limits.max_num_seqs, limits.max_queued_requests),
        max_tokens_at_once=limits.max_queued_tokens,
        cache_salt=cache_salt_of(context.key_hash, body.cache_salt or ""),
        open_salt=cache_salt_of(context.key_hash, ""),
        priority=body.priority or 0,
        tenant=context.tenant,
        lora_index=app_state.lora_index(model),
        timeout_s=context.timeout_of(body.timeout),
        arrival_s=context.arrival_s,
    )
    run = EmbeddingRun(
        spec, request_id=f"embd-{secrets.token_hex(16)}", client=app_state.client, metrics=app_state.metrics
    )
    return PreparedEmbeddings(model, run, body.encoding_format == "base64", headers)


def _prefix(name: str | None, embedding: EmbeddingModel) -> str:
    if name is None:
        return embedding.default_prompt
    if name and name not in embedding.prompts:
        known = ", ".join(embedding.prompts) or "none"
        raise InvalidParameter(f"prompt_name {name!r} is unknown; this model has {known}.", param="prompt_name")
    return embedding.prompts[name] if name else ""


def _check_inputs(inputs: list[list[int]], limits: EngineReady) -> None:
    for index, token_ids in enumerate(inputs):
        if not token_ids:
            raise InvalidParameter(f"input[{index}] has no tokens.", param="input")
        if len(token_ids) > limits.max_model_len:
            raise PromptTooLong(
                f"This model's maximum context length is {limits.max_model_len} tokens, but input[{index}] has"
                f" {len(token_ids)}.",
                param="input",
            )
    total, limit = sum(map(len, inputs)), LIMITS.prompt_tokens_of(limits.max_model_len)
    if total > limit:
        raise InvalidParameter(
            f"input has {total} tokens in all, the limit is {limit}: send it in several requests.",
            param="input",
        )
    for token_ids in inputs:
        check_ids(token_ids, "input", limits)
