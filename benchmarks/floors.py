"""The least time that a run of `quire bench offline` can take, by the bytes that its steps read and its prompts' FLOPs.

    floors(report)  → seconds of each workload's floor, of a JSON of that command

A step reads the parts of the model that every token uses once, the experts that its rows choose, each row's keys and
values, and reads and writes each row's state. Rows choose independently, each expert being as likely as any other, so n
rows meet E (1 - (1 - k / E) ^ n) of E experts in the mean. All requests of a workload run at once: a card that has not
the memory for them needs more steps. Prompts take the FLOPs of their matrices and of causal attention, without those of
recurrences, or the bytes of one step, whichever takes longer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.report import Report
from benchmarks.workloads import workload
from engine.startup.device_choice import resolve_kv_dtype
from models.config.layer_cache import LayerCache
from models.config.model_config import ModelConfig
from models.config.size import quantized_experts, quantized_matrices
from models.quantization.fp8 import Fp8, Fp8Block
from models.quantization.int8 import Int8

SHAPES = Path("benchmarks/shapes")
WORKLOADS = ("single", "batch8", "mixed64", "prefill16")
_ROUNDED = (Fp8, Fp8Block, Int8)  # activations are rounded, too, and multiplied in 8 bits


@dataclass(frozen=True)
class Card:
    """A GPU: what it was measured to read, and to multiply in 16 and 8 bits."""

    name: str
    memory_bytes: float
    bytes_per_s: float
    flops: float = 798e12
    flops_8_bits: float = 1596e12


H100 = Card("H100", 80e9, 3.01e12)  # of 3.35 nominal, a copy on the device
H200 = Card("H200", 141e9, 4.31e12)  # an estimate: the same share of 4.8 nominal
CARDS = {"NVIDIA H100 80GB HBM3": H100, "NVIDIA H200": H200}


class StepCosts:
    """Bytes and FLOPs of a model's steps. Built once of a config; holds only numbers."""

    def __init__(self, config: ModelConfig, kv_dtype: torch.dtype = torch.bfloat16) -> None:
        self._config, self._experts = config, config.experts
        none, one = (_with_experts(config, count).weight_bytes(torch.bfloat16) for count in (0, 1))
        embedding = 0 if config.tie_word_embeddings else 2 * config.vocab_size * config.hidden_size
        self._dense_bytes, self._expert_bytes = none - embedding, one - none
        self._kv_bytes: Counter[int | None] = Counter()  # of a token, by the most tokens that a layer looks back
        for cache in config.kv_caches:
            self._kv_bytes[cache.reach] += _owner(config, cache).token_bytes(kv_dtype)

    def weight_bytes(self, num_rows: int) -> float:
        """Return the bytes of weights that a step with num_rows rows reads."""
        experts = self._experts
        if experts is None:
            return self._dense_bytes
        missed = (1 - experts.num_experts_per_tok / experts.num_experts) ** num_rows
        return self._dense_bytes + self._expert_bytes * experts.num_experts * (1 - missed)

    def row_bytes(self, context_len: int) -> int:
        """Return the bytes of keys, values and states that a decoding row with so many tokens reads and writes."""
        return self.kv_bytes(context_len) + self.state_bytes

    def kv_bytes(self, context_len: int) -> int:
        """Return the bytes of keys and values that a row with so many tokens reads."""
        return sum(count * min(context_len, reach or context_len) for reach, count in self._kv_bytes.items())

    @property
    def state_bytes(self) -> int:
        """The bytes of states that a row reads and writes."""
        return 2 * self._config.state_bytes

    @property
    def head_bytes(self) -> int:
        """The bytes of the matrix that gives logits, in 16 bits."""
        return 2 * self._config.vocab_size * self._config.hidden_size

    @property
    def logits_bytes(self) -> int:
        """The bytes of a token's logits, in 16 bits."""
        return 2 * self._config.vocab_size

    def prompt_s(self, prompt_lens: Sequence[int], card: Card) -> float:
        """Return the seconds of the FLOPs of prompts, each of which has logits for its last token."""
        flops, flops_8_bits = self.product_flops(sum(prompt_lens), len(prompt_lens))
        flops += sum(self.attention_flops(length) for length in prompt_lens)
        return flops / card.flops + flops_8_bits / card.flops_8_bits

    def product_flops(self, num_tokens: int, num_logits: int) -> tuple[int, int]:
        """Return the FLOPs of the matrices, in 16 bits and in 8, of tokens of which so many have logits."""
        config = self._config
        chosen = config if self._experts is None else _with_experts(config, self._experts.num_experts_per_tok)
        matrices = [(matrix, scheme, 1) for matrix, scheme in quantized_matrices(config) if not matrix.is_expanded]
        rounded = sum(
            count * matrix.out_features * matrix.in_features
            for matrix, scheme, count in (*matrices, *quantized_experts(chosen))
            if isinstance(scheme, _ROUNDED)
        )
        head = config.vocab_size * config.hidden_size
        others = config.num_active_parameters - (1 if config.tie_word_embeddings else 2) * head - rounded
        return 2 * (num_tokens * others + num_logits * head), 2 * num_tokens * rounded

    def attention_flops(self, num_tokens: int, behind: int = 0) -> int:
        """Return the FLOPs of causal attention of a prompt's tokens, behind others that were computed before."""
        latent, total = self._config.latent, 0
        for cache in self._config.kv_caches:
            width = cache.head_dim + cache.v_head_dim if latent is None else latent.head_dim + latent.v_head_dim
            pairs = _num_pairs(behind + num_tokens, cache.reach) - _num_pairs(behind, cache.reach)
            total += 2 * self._config.num_heads * width * pairs
        return total


def floor_s(costs: StepCosts, requests: Sequence[tuple[int, int]], card: Card, *, num_gpus: int = 1) -> float:
    """Return the least seconds of requests that begin together. requests: (tokens of the prompt, of the answer).

    num_gpus: which share weights, heads and products evenly.
    """
    prompts = [num_input for num_input, _ in requests]
    seconds = max(costs.prompt_s(prompts, card), costs.weight_bytes(sum(prompts)) / card.bytes_per_s)
    for step in range(1, max(num_output for _, num_output in requests)):
        contexts = [num_input + step for num_input, num_output in requests if num_output > step]
        num_bytes = costs.weight_bytes(len(contexts)) + sum(map(costs.row_bytes, contexts))
        seconds += num_bytes / card.bytes_per_s
    return seconds / num_gpus


def floors(report: Report) -> dict[str, float]:
    """Return the floor of each of WORKLOADS in a report of `quire bench offline --shape`, in seconds."""
    arguments = report["args"]
    costs = StepCosts(
        ModelConfig.from_folder(SHAPES / arguments["shape"]).quantized(arguments["quantization"]),
        resolve_kv_dtype(arguments["kv_cache_dtype"], torch.bfloat16, torch.device("cpu")),
    )
    card, num_gpus = CARDS[report["versions"]["gpu"]], arguments["tensor_parallel_size"]
    return {
        name: floor_s(costs, workload_lens(name), card, num_gpus=num_gpus)
        for name in report["workloads"]
        if name in WORKLOADS
    }


@functools.cache
def workload_lens(name: str) -> tuple[tuple[int, int], ...]:
    """Return the tokens of each request's prompt and answer."""
    return tuple((len(prompt), num_output) for prompt, num_output in workload(name))


def _num_pairs(num_tokens: int, reach: int | None) -> int:
    """Return the pairs of a query and a key of a row's first tokens."""
    seen = min(num_tokens, reach or num_tokens)  # the last tokens see so many, the first ones fewer
    return seen * (seen + 1) // 2 + (num_tokens - seen) * seen


def _with_experts(config: ModelConfig, count: int) -> ModelConfig:
    """Return this model with so many experts in each mixture."""
    experts = config.experts
    return config if experts is None else dataclasses.replace(
        config, experts=dataclasses.replace(experts, num_on_rank=count)
    )  # fmt: skip


def _owner(config: ModelConfig, cache: LayerCache) -> LayerCache:
    return cache if cache.shares is None else config.cache(cache.shares)
