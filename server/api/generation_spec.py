"""GenerationSpec factories: check a parsed body and build a GenerationSpec within the model's limits. Pure.

Order of a request: check_chat / check_completion (features), then the text side makes token ids, then
chat_spec / completion_spec (limits of the model). Raises RequestErrors that name field, value and limit.
The sampling parameters are declared in server/api/sampling_fields.py. Imports engine.interface and server.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from engine.interface.errors import InvalidParameter, PromptTooLong, UnsupportedFeature
from engine.interface.protocol import EngineReady, GrammarSpec, SamplingParams
from engine.interface.tenant import Tenant
from server.api.known_fields import CHAT_FIELDS, COMPLETION_FIELDS, MESSAGE_FIELDS, refuse_known
from server.api.limits import LIMITS
from server.api.prompt_pins import pin_s_of
from server.api.sampling_fields import ModelFacts, check_ids, wire_values
from server.api.schemas import RESERVED_TEMPLATE_KWARGS, ChatBody, CompletionBody
from server.config.api_keys import cache_salt_of
from server.generation.spec import GenerationSpec


class RequestContext(NamedTuple):
    """Request data besides the body: arrival, the server's deadline, a drawn seed, the hash of its key, its tenant."""

    arrival_s: float
    timeout_s: float | None
    seed: int
    key_hash: str = ""
    tenant: Tenant = Tenant()

    def timeout_of(self, timeout_s: float | None) -> float | None:
        """Return the timeout in seconds from arrival of a request with its own `timeout_s`."""
        return min((seconds for seconds in (timeout_s, self.timeout_s) if seconds is not None), default=None)


MAX_CHILDREN = 1024  # engine requests of one HTTP request: prompts × n
_COMPLETION_MAX_TOKENS = 16  # OpenAI's default


def check_chat(body: ChatBody) -> None:
    """Refuse unsupported features, and fields that contradict each other."""
    refuse_known(body, CHAT_FIELDS)
    for i, message in enumerate(body.messages):
        if message.model_extra:
            refuse_known(message, MESSAGE_FIELDS, at=f"messages[{i}]")
    _check_common(body)
    _refuse_unless(
        body.functions is None or body.function_call == "none",
        "functions",
        "functions (the predecessor of tools)",
    )
    _refuse_unless(body.function_call in (None, "none", "auto"), "function_call", "functions")
    _refuse_unless(body.modalities in (None, [], ["text"]), "modalities", "output other than text")
    _refuse_unless(body.audio is None, "audio", "audio output")
    _refuse_unless(body.prediction is None, "prediction", "predicted output")
    _refuse_unless(body.web_search_options is None, "web_search_options", "web search")
    if body.top_logprobs and not body.logprobs:
        raise InvalidParameter("top_logprobs needs logprobs to be true.", param="top_logprobs")
    if body.continue_final_message and body.add_generation_prompt:
        raise InvalidParameter(
            "continue_final_message and add_generation_prompt exclude each other.", param="continue_final_message"
        )
    reserved = RESERVED_TEMPLATE_KWARGS.intersection(body.chat_template_kwargs or {})
    if reserved:
        name = min(reserved)
        raise InvalidParameter(
            f"chat_template_kwargs must not contain {name}, which the server sets.", param="chat_template_kwargs"
        )


def check_completion(body: CompletionBody) -> None:
    """Refuse unsupported features."""
    refuse_known(body, COMPLETION_FIELDS)
    _check_common(body)
    _refuse_unless(body.suffix in (None, ""), "suffix", "fill-in-the-middle")
    if body.max_tokens == 0 and not body.echo and body.prompt_logprobs is None:
        raise InvalidParameter(
            "max_tokens = 0 needs echo or prompt_logprobs, without which there is no answer.", param="max_tokens"
        )


def chat_spec(
    body: ChatBody,
    token_ids: Sequence[int],
    *,
    model: ModelFacts,
    context: RequestContext,
    grammar: GrammarSpec | None = None,
    shrinks_max_tokens: bool = False,
    format_stops: Iterable[int] = (),
) -> GenerationSpec:
    """Check a chat request against the model's limits.

    Without max_tokens it has generation_config.json's max_new_tokens, or else the rest of the context.

    `format_stops`: tokens that end an answer in the format of the model's chats.
    """
    limits = model.limits
    if model.tokenizer.vocab_size > limits.vocab_size:  # a template may write tokens that the model lacks
        check_ids(token_ids, "messages", limits)
    _check_choices(body.n or 1, limits)
    name = "max_completion_tokens" if body.max_completion_tokens is not None else "max_tokens"
    asked = body.max_completion_tokens or body.max_tokens
    if shrinks_max_tokens and asked is not None:
        asked = min(asked, max(limits.max_model_len - len(token_ids), 1))
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    default = model.defaults.max_new_tokens or limits.max_model_len
    if logprobs is not None:  # else a request without max_tokens would be refused for an answer that it seldom gets
        room = LIMITS.answer_entries - _num_prompt_entries(body, [token_ids])
        default = min(default, max(room // ((body.n or 1) * (logprobs + 1)), 1))
    max_tokens = _fit(len(token_ids), asked=asked, asked_by=name, default=default, limits=limits, param="messages")
    return _spec(
        body,
        prompts=(tuple(token_ids),),
        continues_prompt=bool(body.continue_final_message),
        max_tokens=max_tokens,
        max_name=name,
        logprobs=logprobs,
        model=model,
        context=context,
        grammar=grammar,
        format_stops=format_stops,
    )


def completion_spec(
    body: CompletionBody,
    prompts: Sequence[Sequence[int]],
    *,
    model: ModelFacts,
    context: RequestContext,
    grammar: GrammarSpec | None = None,
    grammar_param: str | None = None,
    lora_index: int = 0,
) -> GenerationSpec:
    """Check a completion request against the model's limits; max_tokens is 16 unless given."""
    limits = model.limits
    if len(prompts) * (body.n or 1) > MAX_CHILDREN:
        raise InvalidParameter(
            f"{len(prompts)} prompts × n = {body.n} are {len(prompts) * (body.n or 1)} choices, "
            f"the limit is {MAX_CHILDREN}.",
            param="n",
        )
    _check_choices(len(prompts) * (body.n or 1), limits)
    if not all(prompts):
        raise InvalidParameter(f"prompt[{list(map(bool, prompts)).index(False)}] has no tokens.", param="prompt")
    max_tokens = min(
        _fit(
            len(prompt),
            asked=body.max_tokens,
            asked_by="max_tokens",
            default=_COMPLETION_MAX_TOKENS,
            limits=limits,
            param="prompt",
        )
        for prompt in prompts
    )
    total, most = sum(map(len, prompts)), LIMITS.prompt_tokens_of(limits.max_model_len)
    if total > most:
        raise InvalidParameter(
            f"prompt has {total} tokens in all, the limit is {most}: send it in several requests.", param="prompt"
        )
    for prompt in prompts:  # after the lengths: a body of ids far over the context is not walked
        check_ids(prompt, "prompt", limits)
    spec = _spec(
        body,
        prompts=tuple(map(tuple, prompts)),
        continues_prompt=True,
        max_tokens=max_tokens,
        max_name="max_tokens",
        logprobs=body.logprobs,
        model=model,
        context=context,
        grammar=grammar,
        grammar_param=grammar_param,
        lora_index=lora_index,
    )
    if max_tokens:
        return spec
    params = msgspec.structs.replace(spec.params, max_tokens=1)
    return msgspec.structs.replace(spec, params=params, is_scoring_only=True)


def _check_choices(num_choices: int, limits: EngineReady) -> None:
    most = limits.max_num_seqs + limits.max_queued_requests
    if num_choices > most:
        raise InvalidParameter(
            f"{num_choices} choices are more than this server holds: {limits.max_num_seqs} at once and "
            f"{limits.max_queued_requests} in its queue.",
            param="n",
        )


def _check_common(body: ChatBody | CompletionBody) -> None:
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidParameter(
            "prompt_logprobs are not part of streams: stream must be false.", param="prompt_logprobs"
        )
    _refuse_unless(body.best_of in (None, body.n or 1), "best_of", "best_of other than n")
    if body.stream_options is not None and not body.stream:
        raise InvalidParameter("stream_options needs stream to be true.", param="stream_options")


def _refuse_unless(is_fine: bool, field: str, feature: str) -> None:
    if not is_fine:
        raise UnsupportedFeature(f"{field}: {feature} is not supported by this server yet.", param=field)


def _fit(num_prompt: int, *, asked: int | None, asked_by: str, default: int, limits: EngineReady, param: str) -> int:
    """Return max_tokens so that prompt and answer fit the context. `asked_by`, `param`: the fields of both."""
    rest = limits.max_model_len - num_prompt
    if rest < 1:
        raise PromptTooLong(
            f"This model's maximum context length is {limits.max_model_len} tokens, of which at least one is for the "
            f"answer, but the prompt has {num_prompt} tokens.",
            param=param,
        )
    if asked is None:
        return min(default, rest)
    if asked > rest:
        raise PromptTooLong(
            f"This model's maximum context length is {limits.max_model_len} tokens, but {num_prompt + asked} were "
            f"asked for: {num_prompt} in the prompt and {asked_by} = {asked}, which can be {rest} at most.",
            param=asked_by,
        )
    return asked


def _spec(
    body: ChatBody | CompletionBody,
    *,
    prompts: tuple[tuple[int, ...], ...],
    continues_prompt: bool,
    max_tokens: int,
    max_name: str,
    logprobs: int | None,
    model: ModelFacts,
    context: RequestContext,
    grammar: GrammarSpec | None,
    grammar_param: str | None = None,
    lora_index: int = 0,
    format_stops: Iterable[int] = (),
) -> GenerationSpec:
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidParameter(f"min_tokens is {min_tokens}, more than {max_name} = {max_tokens}.", param="min_tokens")
    _check_entries(body, prompts, max_tokens=max_tokens, max_name=max_name, logprobs=logprobs)
    values = {"seed": context.seed} | wire_values(body, model)
    if values["top_p"] == 0:
        values |= {"top_p": 1.0, "top_k": 1}  # nothing but the most likely token
    eos_ids = () if body.ignore_eos else (*model.defaults.eos_token_ids, *format_stops)
    values["stop_token_ids"] = list(dict.fromkeys([*eos_ids, *values.get("stop_token_ids", ())]))
    return GenerationSpec(
        prompts=prompts,
        n=body.n or 1,
        params=SamplingParams(
            max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=_prompt_logprobs(body), **values
        ),
        stop=tuple(body.stop or ()),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        continues_prompt=continues_prompt,
        cache_salt=cache_salt_of(context.key_hash, body.cache_salt or ""),
        open_salt=cache_salt_of(context.key_hash, ""),
        pin_s=pin_s_of(body.prompt_cache_key, body.prompt_cache_retention) if isinstance(body, ChatBody) else 0.0,
        priority=body.priority or 0,
        tenant=context.tenant,
        grammar=grammar,
        grammar_param=grammar_param,
        lora_index=lora_index,
        timeout_s=context.timeout_of(body.timeout),
        arrival_s=context.arrival_s,
    )


def _check_entries(
    body: ChatBody | CompletionBody,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    max_name: str,
    logprobs: int | None,
) -> None:
    """Refuse an answer with too many log-probabilities. A token has those of `logprobs` alternatives and its own."""
    num_choices, of_prompts = len(prompts) * (body.n or 1), _num_prompt_entries(body, prompts)
    of_answer = 0 if logprobs is None else num_choices * max_tokens * (logprobs + 1)
    if of_prompts + of_answer <= LIMITS.answer_entries:
        return
    param = "prompt_logprobs" if body.prompt_logprobs is not None and of_prompts > of_answer else "logprobs"
    if isinstance(body, ChatBody) and body.top_logprobs and param == "logprobs":
        param = "top_logprobs"
    raise InvalidParameter(
        f"The answer may have {of_prompts + of_answer} log-probabilities, {of_answer} of {num_choices} choices with "
        f"{max_name} = {max_tokens} and {of_prompts} of prompts; the limit is {LIMITS.answer_entries}.",
        param=param,
    )


def _num_prompt_entries(body: ChatBody | CompletionBody, prompts: Sequence[Sequence[int]]) -> int:
    num_top = _prompt_logprobs(body)
    return 0 if num_top is None else (body.n or 1) * sum(map(len, prompts)) * (num_top + 1)


def _prompt_logprobs(body: ChatBody | CompletionBody) -> int | None:
    counts = [body.prompt_logprobs, body.logprobs if isinstance(body, CompletionBody) and body.echo else None]
    return max((count for count in counts if count is not None), default=None)
