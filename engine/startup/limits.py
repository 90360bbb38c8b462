"""Limits: the requests and tokens of a step, their defaults, and the memory of such a step. Imports torch.

sharing_rates() estimates when it pays to group decode rows that begin with the same blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.device.cuda_graph import GROUPED_TOKEN_SIZES, graph_sizes, grouped_sizes, mixed_shapes
from engine.interface.config import EngineConfig, SharingRates
from engine.interface.errors import StartupError
from engine.interface.units import GIB, MIB
from models.config.model_config import ModelConfig
from models.config.size import attention_values_per_token, mlp_values_per_token

_MANY_SAMPLES = 256  # positions of a step
# Memory of a graph on a GPU: about 10 MiB, and a reserve. Those that are captured when the engine is idle count, too
_GRAPH_BYTES = 14 * MIB
# Requests at once and tokens of a step by the GPU's memory, the largest first: a step's memory is not the KV cache's.
# Steps of 8,192 tokens have 1 % more throughput than those of 2,048 (docs/explanation/performance.md)
_BY_MEMORY = ((40 * GIB, 256, 8192), (12 * GIB, 128, 2048), (0, 32, 1024))
_ON_CPU = (64, 512)
# Of grouped decode rows on an H100 (benchmarks/notes.md): reading shared keys and values again, which come from L2, at
# 6 to 9 TB/s; products of the shared pass; pass and merge in each layer; the kernels that group a step's rows; one more
# group there; and the pieces of shared keys, for each of which a row stores, then reads an output in float32
_READ_BYTES_S, _SHARED_FLOPS = 7e12, 250e12
_LAUNCH_S, _GROUPING_S, _GROUP_S = 50e-6, 15e-6, 2e-6
_PIECES = 2
_MAX_HEAD_DIM = 256  # larger heads are not grouped (kernels/attention/triton_shared.py)
_MAX_QUERY_HEADS = 16  # of a KV head: with more, a tile has few rows, and each tile reads the shared keys


@dataclass(frozen=True)
class Limits:
    """Limits of concurrent requests and of tokens per step; see EngineConfig."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_samples: int | None = None  # maximum sampled positions of a step with drafts; None: no drafts


def choose_limits(config: EngineConfig, *, gpu_bytes: int | None) -> Limits:
    """Return the limits, with defaults where the user set none. Raises StartupError for incompatible limits.

    gpu_bytes: the memory of the smallest CUDA device; None: another device.
    """
    usual_seqs, usual_tokens = _ON_CPU
    if gpu_bytes is not None:
        usual_seqs, usual_tokens = next((seqs, tokens) for least, seqs, tokens in _BY_MEMORY if gpu_bytes >= least)
    num_seqs = config.max_num_seqs or min(usual_seqs, config.max_num_batched_tokens or 256)
    batched = config.max_num_batched_tokens or max(usual_tokens, num_seqs)
    for flag, tokens in (
        ("--max-num-batched-tokens", batched),
        ("--max-decode-step-tokens", config.max_decode_step_tokens or batched),
    ):
        if tokens < num_seqs:
            raise StartupError(
                f"{flag} {tokens} is less than --max-num-seqs {num_seqs}: "
                "each running request needs one token per step."
            )
    if config.speculative is None:
        return Limits(num_seqs, batched)
    # Memory for num_seqs positions is reserved in any case; few requests with drafts may need more
    with_drafts = min(num_seqs * (1 + config.speculative.num_tokens), _MANY_SAMPLES, batched)
    return Limits(num_seqs, batched, max(num_seqs, with_drafts))


def step_bytes(
    model: ModelConfig, limits: Limits, dtype: torch.dtype, *, vocab_size: int, max_model_len: int | None = None
) -> int:
    """Return an upper estimate of a step's memory: widest layer, logits, penalty counts, graphs, latents.

    model: its dimensions on one rank; vocab_size: of the whole model; max_model_len: None if requests may be as long as
    the model's context.
    """
    widest = 4 * model.hidden_size + mlp_values_per_token(model) + attention_values_per_token(model)
    # Inputs of a recurrence, the same after its convolution, and what its scan keeps of them
    widest += 4 * max((state.num_inputs for state in model.states if state is not None), default=0)
    num_samples = max(limits.max_num_seqs, limits.max_num_samples or 0)
    logits = num_samples * vocab_size * (4 * 4 + 5) * model.has_lm_head
    # Some quantised matrices are dequantised while they are multiplied
    dense = 0 if model.quantization is None else 2 * model.intermediate_size * model.hidden_size * dtype.itemsize
    latent = model.latent_sizes
    longest = min(model.max_context_len, max_model_len or model.max_context_len)
    latents = 0 if latent is None else latent.step_bytes(longest, dtype.itemsize)
    activations = 2 * limits.max_num_batched_tokens * widest * dtype.itemsize
    return activations + logits + dense + latents + _num_graphs(limits) * _GRAPH_BYTES


def _num_graphs(limits: Limits) -> int:
    """Return the most graphs that are captured under these limits."""
    shapes = mixed_shapes(limits.max_num_seqs, limits.max_num_batched_tokens, max_num_samples=limits.max_num_samples)
    grouped = len(grouped_sizes(limits.max_num_seqs)) + len(GROUPED_TOKEN_SIZES)
    return len(graph_sizes(limits.max_num_seqs)) + len(shapes) + grouped


def sharing_rates(model: ModelConfig, kv_dtype: torch.dtype) -> SharingRates | None:
    """Return what grouping decode rows costs; None: no layer of the model reads shared keys once.

    model: its dimensions on one rank. A row's time per key is that of all layers with grouped rows together.
    """
    caches = [
        cache
        for cache in model.kv_caches
        if cache.reach is None
        and not cache.values_in_keys
        and max(cache.head_dim, cache.v_head_dim) <= _MAX_HEAD_DIM
        and model.num_heads <= _MAX_QUERY_HEADS * cache.num_kv_heads
    ]
    if not caches or model.is_foreign:
        return None
    numbers = sum(cache.num_kv_heads * (cache.head_dim + cache.v_head_dim) for cache in caches)
    key_s = numbers * kv_dtype.itemsize / _READ_BYTES_S
    row_s = sum(2 * _PIECES * 4 * model.num_heads * cache.v_head_dim for cache in caches) / _READ_BYTES_S
    products_s = sum(2 * model.num_heads * (cache.head_dim + cache.v_head_dim) for cache in caches) / _SHARED_FLOPS
    return SharingRates(
        key_us=key_s * 1e6,
        step_keys=round((len(caches) * _LAUNCH_S + _GROUPING_S) / key_s),
        group_keys=round(_GROUP_S / key_s),
        row_keys=round(row_s / key_s),
        shared_percent=round(100 * products_s / key_s),
    )
