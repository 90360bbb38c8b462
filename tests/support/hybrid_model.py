"""A tiny model with layers of every kind, and random weights from a seed: attention, convolutions, delta rule, Mamba-2.

It belongs to no family. The engine loads it as any other: only its config and its build are replaced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional

from engine.core.step import StepPlan
from engine.device.cuda_graph import DecodeSize
from engine.device.input_batch import MixedShape, PackedStep
from engine.device.model_runner import ModelRunner
from engine.interface.config import EngineConfig
from engine.offline import OfflineEngine
from engine.startup import load as startup
from engine.startup import rehearsal
from kernels import ops
from kernels.elementwise.reference import UNSCALED
from kernels.states import StateMetadata, StateView
from models.config.layer_state import LayerState
from models.config.model_config import ModelConfig
from models.config.recurrence import DeltaNetConfig, Mamba2Config, ShortConvConfig
from models.context import ForwardContext
from models.layers.rotary import make_cos_sin_caches
from models.parallel import TensorParallel
from models.weights.weights import Weights

VOCAB_SIZE, HIDDEN_SIZE, MAX_TOKENS = 97, 32, 320
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 16
DELTA = DeltaNetConfig(num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=16, conv_width=4)
MAMBA = Mamba2Config(hidden_size=HIDDEN_SIZE, num_heads=4, head_dim=16, num_groups=2, state_size=16, conv_width=4)
CONV = ShortConvConfig(num_channels=HIDDEN_SIZE, conv_width=3, hidden_size=HIDDEN_SIZE)
STATES: dict[str, LayerState] = {
    "conv": CONV.layer_state,
    "delta": DELTA.layer_state,
    "mamba": MAMBA.layer_state,
    "both": MAMBA.layer_state,  # beside attention
}
# as LFM2, Qwen3-Next, Nemotron-H, Falcon-H1, and all at once
LAYERS = {
    "convolutions": ("conv", "attention", "conv", "conv"),
    "delta rule": ("delta", "delta", "delta", "attention"),
    "mamba": ("mamba", "none", "attention", "mamba"),
    "side by side": ("both", "both"),
    "every kind": ("conv", "attention", "delta", "mamba", "attention", "both"),
}
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 48,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": MAX_TOKENS,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


@dataclass(frozen=True)
class HybridConfig(ModelConfig):
    """A config whose parameters are counted without a family."""

    @property
    def num_parameters(self) -> int:
        return 100_000

    @property
    def num_active_parameters(self) -> int:
        return 100_000


def hybrid_config(*layers: str) -> HybridConfig:
    """Return the config of a model with these layers: attention, none, or a name of STATES."""
    base = ModelConfig.from_json({**_CONFIG, "num_hidden_layers": len(layers)})
    values = {field.name: getattr(base, field.name) for field in dataclasses.fields(base)}
    has_attention = [layer in ("attention", "both") for layer in layers]
    values["caches"] = tuple(cache if has else None for cache, has in zip(base.caches, has_attention, strict=True))
    values["states"] = tuple(STATES.get(layer) for layer in layers)
    return HybridConfig(**values)


@contextmanager
def served(config: ModelConfig) -> Iterator[None]:
    """Let the engine find this config in every folder, and build its model."""
    with (
        patch.object(startup, "read_config", lambda *_: config),
        patch.object(startup, "build", Hybrid),
        patch.object(rehearsal, "build", Hybrid),
    ):
        yield


def load_hybrid(*layers: str, **changes: object) -> OfflineEngine:
    """Load an engine over a model with these layers."""
    settings = {"block_size": 4, "max_num_batched_tokens": 80, "max_num_seqs": 16, "device": "cpu"} | changes
    config = EngineConfig(model=str(Path(__file__).parent), load_format="dummy", **settings)
    with served(hybrid_config(*layers)):
        return OfflineEngine.load(config)


@dataclass
class PaddedDecodes:
    """In the place of DecodeGraphs, on any device: steps with up to 3 more rows."""

    runner: ModelRunner

    def replay(self, req_index: torch.Tensor, *, is_grouped: bool) -> DecodeSize:
        padding = self.runner._state.padding_row
        num_rows = min(len(req_index) + 3, self.runner._max_num_seqs)
        self.padded = functional.pad(req_index, (0, num_rows - len(req_index)), value=padding)
        self.hidden = self.runner._run_decode(self.padded, self.runner._max_model_len, is_grouped=is_grouped)
        return DecodeSize(num_rows, is_grouped)

    def output(self, size: DecodeSize) -> tuple[torch.Tensor, torch.Tensor]:
        return self.hidden, self.padded


@dataclass
class PaddedMixed:
    """In the place of MixedGraphs: steps with one more row, and some more tokens."""

    runner: ModelRunner

    def fitting_shape(self, needed: MixedShape) -> MixedShape | None:
        most = self.runner._shapes[-1]
        shape = MixedShape(needed.num_tokens + 5, min(needed.num_rows + 3, most.num_rows), needed.num_prefills + 1)
        return shape if shape.num_tokens <= most.num_tokens else None

    def grouped_shape(self, needed: MixedShape, plain: MixedShape, *, spared_s: float) -> MixedShape | None:
        return self.fitting_shape(needed)

    def replay(self, packed: PackedStep, *, is_grouped: bool) -> torch.Tensor:
        return self.runner._run_mixed(packed.shape, self.runner._max_model_len, is_grouped=is_grouped)


def pad_steps(offline: OfflineEngine) -> OfflineEngine:
    """Let every step be padded as if it were replayed as a graph."""
    runner = offline.loaded.runner
    runner._decode_graphs = PaddedDecodes(runner)  # type: ignore[assignment]
    runner.mixed_graphs = PaddedMixed(runner)  # type: ignore[assignment]
    return offline


class Untouched:
    """Fills the pool with a number before the first request, and finds it again where no request may write."""

    def __init__(self, offline: OfflineEngine) -> None:
        self.rows = offline.loaded.runner._kv_pool.rows
        self.rows.fill_(7.0)
        self.lent: set[int] = set()
        executor = offline.engine._executor
        forward = executor.forward

        def note(plan: StepPlan):
            self.lent |= {page for row in plan.rows for _, _, pages in row.new_blocks for page in pages}
            self.lent |= {page for _, page in plan.copies_out}
            return forward(plan)

        executor.forward = note  # type: ignore[method-assign]

    def check(self) -> None:
        """Page 0 takes keys and values of the first token of a unit, and no states; pages never lent take nothing."""
        others = sorted({*range(1, self.rows.shape[1])} - self.lent)
        assert self.lent
        assert others
        assert bool((self.rows[:, others] == 7.0).all())
        assert bool((self.rows[:, 0, NUM_KV_HEADS * HEAD_DIM :] == 7.0).all())


class Hybrid(nn.Module):
    """See models.build.Model; takes device and dtype of `w`, and makes its weights itself."""

    def __init__(self, config: ModelConfig, w: Weights, tp: TensorParallel) -> None:
        super().__init__()
        assert tp.size == 1
        self.generator = torch.Generator().manual_seed(1)
        self.device, self.dtype = w.device, w.dtype
        self.embedding = self.random(VOCAB_SIZE, HIDDEN_SIZE)
        tables = make_cos_sin_caches(config, device=w.device, dtype=w.dtype)
        self.mixers: list[list] = []
        self.mlps: list[tuple[torch.Tensor, torch.Tensor]] = []
        for layer, (cache, state) in enumerate(zip(config.caches, config.states, strict=True)):
            self.mixers.append([])
            if cache is not None:
                table = next(table for table in tables[layer:] if table is not None)
                self.mixers[-1].append(self.attention(layer, table))
            if state is not None:
                self.mixers[-1].append(self.recurrence(layer, state))
            self.mlps.append((self.random(HIDDEN_SIZE, 48), self.random(48, HIDDEN_SIZE)))
        self.head = self.random(HIDDEN_SIZE, VOCAB_SIZE)

    def random(self, *shape: int) -> torch.Tensor:
        """Return a matrix that keeps the size of what it is multiplied by."""
        values = torch.randn(shape, generator=self.generator) * 1.5 * shape[0] ** -0.5
        return values.to(self.device, self.dtype)

    def attention(self, layer: int, table: torch.Tensor) -> partial:
        num_outputs = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
        return partial(
            attend, layer, table, self.random(HIDDEN_SIZE, num_outputs), self.random(NUM_HEADS * HEAD_DIM, HIDDEN_SIZE)
        )

    def recurrence(self, layer: int, state: LayerState) -> partial:
        channels = state.conv.num_rows
        weight, bias = self.random(channels, state.conv.row_size + 1), self.random(channels, 1)[:, 0]
        weight = weight * channels**0.5
        advance, num_outputs = {
            STATES["conv"]: (_conv, channels),
            STATES["delta"]: (_delta, DELTA.num_value_heads * DELTA.value_dim),
            STATES["mamba"]: (_mamba, MAMBA.num_heads * MAMBA.head_dim),
        }[state]
        matrices = self.random(HIDDEN_SIZE, state.num_inputs), self.random(num_outputs, HIDDEN_SIZE)
        return partial(recur, layer, partial(advance, weight, bias), *matrices)

    def forward(self, input_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        hidden = functional.embedding(input_ids, self.embedding)
        for mixers, (up, down) in zip(self.mixers, self.mlps, strict=True):
            normed = _norm(hidden)
            for mixer in mixers:
                hidden = hidden + mixer(normed, ctx)
            hidden = hidden + functional.silu(_norm(hidden) @ up) @ down
        return _norm(hidden)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.head


def attend(
    layer: int, table: torch.Tensor, qkv: torch.Tensor, output: torch.Tensor, x: torch.Tensor, ctx: ForwardContext
) -> torch.Tensor:
    """Attend over the layer's keys and values."""
    cache = ctx.kv_caches[layer]
    assert cache is not None
    keys, values, scales = cache.keys, cache.values, cache.scales_or(UNSCALED)
    metadata = ctx.attention[cache.table]
    arguments = (x @ qkv, None, None, 1e-6, ctx.positions, table, keys, values, metadata.slot_mapping)
    q = ops.norm_rope_write_kv(*arguments, num_heads=NUM_HEADS, kv_scales=scales)
    out = ctx.backend.forward(q, keys, values, metadata, scale=HEAD_DIM**-0.5, kv_scales=scales)
    return out.flatten(1) @ output


def recur(
    layer: int, advance: partial, inputs: torch.Tensor, output: torch.Tensor, x: torch.Tensor, ctx: ForwardContext
) -> torch.Tensor:
    """Advance the layer's states."""
    assert ctx.states is not None
    return ctx.states.advance(layer, x @ inputs, advance) @ output


Views = tuple[StateView, ...]


def _conv(
    weight: torch.Tensor, bias: torch.Tensor, inputs: torch.Tensor, views: Views, rows: StateMetadata
) -> torch.Tensor:
    return ops.causal_conv(inputs, weight, bias, views[0], rows, has_silu=False)


def _delta(
    weight: torch.Tensor, bias: torch.Tensor, inputs: torch.Tensor, views: Views, rows: StateMetadata
) -> torch.Tensor:
    mixed, gates = inputs.split((weight.shape[0], 2 * DELTA.num_value_heads), dim=1)
    mixed = ops.causal_conv(mixed, weight, bias, views[0], rows, has_silu=True)
    num_keys = DELTA.num_key_heads * DELTA.key_dim
    q, k, v = mixed.split((num_keys, num_keys, DELTA.num_value_heads * DELTA.value_dim), dim=1)
    q, k = (part.unflatten(1, (-1, DELTA.key_dim)) for part in (q, k))
    decay, beta = gates.float().chunk(2, dim=1)
    v = v.unflatten(1, (-1, DELTA.value_dim))
    decay = -0.2 * functional.softplus(decay)
    return ops.gated_delta_rule(q, k, v, decay, beta.sigmoid(), views[1], rows, scale=DELTA.key_dim**-0.5).flatten(1)


def _mamba(
    weight: torch.Tensor, bias: torch.Tensor, inputs: torch.Tensor, views: Views, rows: StateMetadata
) -> torch.Tensor:
    mixed, dt = inputs.split((weight.shape[0], MAMBA.num_heads), dim=1)
    mixed = ops.causal_conv(mixed, weight, bias, views[0], rows, has_silu=True)
    num_values, num_keys = MAMBA.num_heads * MAMBA.head_dim, MAMBA.num_groups * MAMBA.state_size
    x, b, c = mixed.split((num_values, num_keys, num_keys), dim=1)
    b, c = (part.unflatten(1, (-1, MAMBA.state_size)) for part in (b, c))
    decay = -torch.linspace(0.05, 0.5, MAMBA.num_heads, device=inputs.device)
    skip = torch.ones(MAMBA.num_heads, device=inputs.device)
    x = x.unflatten(1, (-1, MAMBA.head_dim))
    return ops.mamba2(x, b, c, functional.softplus(dt.float()), decay, skip, views[1], rows).flatten(1)


def _norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6).to(x.dtype)
