"""RequestFactory: makes a Request from an AddRequest, if the engine can serve it. Plain Python; never torch.

HTTP workers validate requests for their clients. Here the values are checked once more, because a wrong one could end
the engine for all: a token id outside the vocabulary or an unknown adapter is a device fault, a number that does not
fit its tensor raises within a step, and a time that is not a number breaks the order of the queue.
"""

import math
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from engine.core.request import EmbeddingAccumulator, Request
from engine.core.speculative import Drafter
from engine.core.thinking import ThinkingState
from engine.interface.config import SchedulerConfig
from engine.interface.errors import InvalidParameter, PromptTooLong, UnsupportedFeature
from engine.interface.protocol import AddRequest, SamplingParams, ThinkingBudget

# By field of SamplingParams. The server's bounds are within these.
BOUNDS: dict[str, tuple[float, float]] = {
    "max_tokens": (1, 2**31 - 1),
    "min_tokens": (0, 2**31 - 1),
    "temperature": (0, 2),
    "top_k": (0, 2**31 - 1),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 10),
    "seed": (0, 2**63 - 1),
    "logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
}
_BIAS_BOUNDS = (-100, 100)
_PRIORITY_BOUNDS = (-(2**31), 2**31 - 1)
_PIN_BOUNDS = (0, 24 * 60 * 60)
_WEIGHT_BOUNDS = (0.01, 100)
_KV_SHARE_BOUNDS = (0.001, 1)
_MAX_IDS = 2**18  # of one field


@dataclass(frozen=True, kw_only=True)
class RequestFactory:
    """Checks requests against the model's facts. make_drafter: see EngineParts."""

    vocab_size: int
    num_loras: int
    can_generate: bool
    make_drafter: Callable[[SamplingParams], Drafter | None] | None
    adapter_digests: Sequence[bytes] = ()  # of the adapters, the first of lora_index 1; (): their numbers name them

    def make(self, message: AddRequest, *, client_id: int) -> Request:
        """Make the request. Raises InvalidParameter or UnsupportedFeature."""
        self._check(message)
        request = Request(
            message.request_id,
            [],
            message.params,
            arrival_s=message.arrival_s,
            cache_salt=message.cache_salt,
            open_salt=message.open_salt,
            priority=message.priority,
            pin_s=message.pin_s,
            client_id=client_id,
            lora_index=message.lora_index,
            adapter_digest=self.adapter_digests[message.lora_index - 1]
            if self.adapter_digests and message.lora_index
            else b"",
            packed_prompt=message.prompt,
            # a key without a name is a tenant by itself, known by the salt of its requests
            tenant_id=f"name {message.tenant.name}" if message.tenant.name else message.open_salt,
            weight=message.tenant.weight,
            kv_share=message.tenant.kv_share,
            counts_prompt=message.counts_prompt,
            hand_over=message.hand_over,
        )
        if message.pooling is not None:
            request.embedding = EmbeddingAccumulator(message.pooling, message.num_prompt_tokens)
        elif not self.can_generate:
            raise UnsupportedFeature("This model has no language-model head: it makes embeddings and no text.")
        elif message.grammar is None and not message.params.has_filter and self.make_drafter is not None:
            request.drafter = self.make_drafter(message.params)
        if message.thinking is not None:
            request.thinking = ThinkingState(message.thinking)
            if request.drafter is not None:
                request.drafter.thinking = request.thinking
        if message.num_replays or message.output:
            _go_on(request, message)
        return request

    def _check(self, message: AddRequest) -> None:
        params = message.params
        self._check_prompt(message.prompt, "prompt")
        if message.output:
            self._check_prompt(message.output, "output")
        _check_bounds(message.num_prompt_logprobs, "num_prompt_logprobs", (0, max(0, message.num_prompt_tokens - 1)))
        if message.output and (message.pooling is not None or not (message.num_replays or message.hand_over)):
            raise InvalidParameter(
                "Only a replayed request for tokens, or one of two engines, has an output.", param="output"
            )
        if len(message.output) // 4 >= max(params.max_tokens, 1):
            raise InvalidParameter(
                f"The output has {len(message.output) // 4} tokens; of max_tokens = {params.max_tokens} none is left.",
                param="output",
            )
        for name, (low, high) in BOUNDS.items():
            value = getattr(params, name)
            if value is not None and not low <= value <= high:  # as _check_bounds(), which a first token waits for
                _check_bounds(value, name, (low, high))
        for number in (params.logprobs, params.prompt_logprobs):
            if number is not None:
                _check_bounds(number, "logprobs", (0, self.vocab_size))
        for value in params.logit_bias.values():
            _check_bounds(value, "logit_bias", _BIAS_BOUNDS)
        _check_bounds(message.priority, "priority", _PRIORITY_BOUNDS)
        _check_bounds(message.pin_s, "pin_s", _PIN_BOUNDS)
        _check_bounds(message.tenant.weight, "weight", _WEIGHT_BOUNDS)
        _check_bounds(message.tenant.kv_share, "kv_share", _KV_SHARE_BOUNDS)
        if not math.isfinite(message.arrival_s):
            raise InvalidParameter(f"The arrival time is {message.arrival_s}; it must be finite.")
        if message.deadline_s is not None and not math.isfinite(message.deadline_s):
            raise InvalidParameter(f"The deadline is {message.deadline_s}; it must be finite.")
        if not 0 <= message.lora_index <= self.num_loras:
            raise InvalidParameter(
                f"There is no adapter {message.lora_index}; {self.num_loras} are loaded.", param="model"
            )
        self._check_ids(params.logit_bias, "logit_bias", most=_MAX_IDS)
        self._check_ids(params.stop_token_ids, "stop_token_ids", most=_MAX_IDS)
        if params.allowed_token_ids or params.bad_words:
            self._check_filter(params)
        if message.thinking is not None:
            self._check_thinking(message.thinking)

    def _check_prompt(self, packed: bytes, name: str) -> None:
        """Raise InvalidParameter unless packed tokens are a whole number of token ids, and all exist."""
        if len(packed) % 4:
            raise InvalidParameter(f"The {name} has {len(packed)} bytes; token ids have 4 bytes each.", param=name)
        unsigned = np.frombuffer(packed, np.uint32)  # in which negative ids are large
        if packed and np.maximum.reduce(unsigned) >= self.vocab_size:
            ids = unsigned.view(np.int32)
            self._check_ids([int(ids.min()), int(ids.max())], name)

    def _check_thinking(self, budget: ThinkingBudget) -> None:
        _check_bounds(budget.max_tokens, "thinking_token_budget", (0, 2**31 - 1))
        groups = (
            budget.start_ids,
            budget.opening_ids,
            budget.forced_ids,
            budget.not_after_ids,
            [budget.end_id],
        )
        for token_ids in groups:
            self._check_ids(token_ids, "thinking_token_budget", most=_MAX_IDS)
        if not budget.start_ids or not budget.forced_ids:
            raise InvalidParameter(
                "A limit of reasoning needs start_ids and forced_ids.", param="thinking_token_budget"
            )

    def _check_filter(self, params: SamplingParams) -> None:
        """Raise InvalidParameter unless all ids exist and at least one token may be sampled first."""
        self._check_ids(params.allowed_token_ids, "allowed_token_ids", most=_MAX_IDS)
        if not all(params.bad_words):
            raise InvalidParameter("A word of bad_words has no tokens.", param="bad_words")
        self._check_ids([token_id for word in params.bad_words for token_id in word], "bad_words", most=_MAX_IDS)
        bad = {word[0] for word in params.bad_words if len(word) == 1}
        if bad and all(token_id in bad for token_id in params.allowed_token_ids or range(self.vocab_size)):
            raise InvalidParameter(
                f"The {len(bad)} tokens that are bad_words leave none to sample: there are "
                f"{len(params.allowed_token_ids) or self.vocab_size} allowed ones.",
                param="bad_words",
            )

    def _check_ids(self, token_ids: Collection[int], name: str, *, most: int | None = None) -> None:
        """Raise InvalidParameter unless all ids exist, and at most `most` are given."""
        if most is not None and len(token_ids) > most:
            raise InvalidParameter(f"The field {name} has {len(token_ids)} token ids, the limit is {most}.", param=name)
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self.vocab_size):
            wrong = min(token_ids) if min(token_ids) < 0 else max(token_ids)
            raise InvalidParameter(
                f"Token id {wrong} is outside the vocabulary of {self.vocab_size} tokens.", param=name
            )


def check_length(request: Request, config: SchedulerConfig, *, max_num_tokens: int, num_pages: int) -> None:
    """Raise PromptTooLong or InvalidParameter for a request that could never be served.

    max_num_tokens: of the longest request that runs alone; num_pages: of the pool.
    """
    num_prompt, max_tokens = request.num_prompt_tokens, request.params.max_tokens
    if not num_prompt or max_tokens < 1:
        raise InvalidParameter(
            f"The prompt has {num_prompt} tokens and max_tokens is {max_tokens}; both must be at least 1."
        )
    most = max_num_tokens - (request.embedding is None)
    if request.num_tokens > most:  # a replayed request has output as well
        raise PromptTooLong(
            f"The prompt has {request.num_tokens} tokens; at most {most} leave room for {max_num_tokens - most} more"
            f" (max_model_len {config.max_model_len}, KV cache {num_pages} pages)."
        )


def _go_on(request: Request, message: AddRequest) -> None:
    """Put a replayed request where an earlier engine left it. Its matcher follows when its grammar is compiled."""
    request.output_token_ids = array("i", message.output).tolist()
    request.num_replayed_tokens = len(request.output_token_ids)
    request.num_prompt_logprobs = message.num_prompt_logprobs
    if request.thinking is not None:
        request.thinking.advance(request.output_token_ids)


def _check_bounds(value: float, name: str, bounds: tuple[float, float]) -> None:
    low, high = bounds
    if not low <= value <= high:  # written so that it refuses NaN
        raise InvalidParameter(f"The value {value} of {name} is not from {low} to {high}.", param=name)
