"""Layers of one row in one kernel: which layers and steps have it, and that it is told what their own forward reads."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from kernels.attention.base import AttentionMetadata
from kernels.attention.torch_ref import TorchAttention
from kernels.attention.triton_backend import TritonAttention
from kernels.states import StateMetadata
from models.build import build
from models.config.model_config import ModelConfig
from models.context import ForwardContext, LayerKV, StepStates
from models.layers import row_loop
from models.layers.causal_lm import DecoderLayer
from models.layers.layer_loop import LayerLoop
from models.layers.row_loop import RowLoop
from models.quantization import schemes
from models.weights.weights import Weights
from tests.support.checkpoints import TINY, make_config
from tests.support.compiled_kernels import needs_triton
from tests.support.models_harness import CPU, SINGLE, PagedRunner
from tests.support.reference import save_checkpoint

BF16 = torch.bfloat16
PROMPT = list(range(3, 20))
SIZES = TINY | {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
NOT_TAKEN = ("gemma2", "gemma3", "gpt_oss", "qwen3_moe", "qwen3_next", "deepseek_v2", "glm4", "cohere2", "olmo2",
             "llama_all_biases", "qwen2", "qwen2_windows")  # fmt: skip

# What layers may have that the kernel has not: the part, its attribute, another value
MORE: dict[str, tuple[str, str, Any]] = {
    "window": ("self_attn.attention", "sliding_window", 8),
    "chunk": ("self_attn.attention", "chunk", 8),
    "soft cap": ("self_attn.attention", "softcap", 30.0),
    "sinks": ("self_attn.attention", "sinks", torch.zeros(4)),
    "factors of queries": ("self_attn.attention", "query_factors", torch.ones(4)),
    "neighbours as pairs": ("self_attn.attention", "is_interleaved", True),
    "norms behind the rotation": ("self_attn.attention", "norms_rotated", True),
    "a part that is rotated": ("self_attn.attention", "cos_sin_cache", torch.zeros(64, 8, dtype=BF16)),
    "angles in float32": ("self_attn.attention", "cos_sin_cache", torch.zeros(64, 16)),
    "an output gate": ("self_attn", "has_output_gate", True),
    "a bias": ("self_attn.qkv_proj", "bias", torch.zeros(128, dtype=BF16)),
    "another method": ("mlp.gate_up_proj", "method", None),
    "a partial sum": ("self_attn.o_proj", "is_partial", True),
    "two ranks": ("self_attn.o_proj", "tp", SimpleNamespace(size=2)),
    "gelu": ("mlp", "is_gelu", True),
    "a factor of gates": ("mlp", "gate_factor", 2.0),
    "another epsilon than before attention": ("mlp_norm", "eps", 0.5),
    "a norm in float32": ("mlp_norm", "weight", torch.ones(64)),
    "a matrix in float16": ("mlp.down_proj", "params", {"weight": torch.zeros(64, 64, dtype=torch.float16)}),
    "a matrix by columns": ("mlp.down_proj", "params", {"weight": torch.zeros(64, 64, dtype=BF16).t()}),
    "fewer gates than ups": ("mlp.gate_up_proj", "params", {"weight": torch.zeros(96, 64, dtype=BF16)}),
    "an address between": (
        "mlp.down_proj",
        "params",
        {"weight": torch.zeros(64 * 64 + 1, dtype=BF16)[1:].view(64, 64)},
    ),
}
# What the kernel has, but of one value in all layers
OTHER: dict[str, tuple[str, str, Any]] = {
    "another scale": ("self_attn.attention", "scale", 0.5),
    "another epsilon of heads": ("self_attn.attention", "eps", 0.5),
    "other angles": ("self_attn.attention", "cos_sin_cache", torch.zeros(64, 16, dtype=BF16)),
}

pytestmark = [needs_triton, pytest.mark.slow]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The layers of each step that the kernel computed: on the CPU, phase by phase."""
    from kernels.row_layers import arithmetic, exchange, gluon_layers, phases
    from tests.support.gluon_on_cpu import KernelOnCpu

    found: list[int] = []
    row_layers, kernel = gluon_layers.row_layers, gluon_layers._layers_kernel

    def by_phases(hidden: torch.Tensor, addresses: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        found.append(addresses.shape[0])
        residual, out = torch.zeros_like(hidden), hidden
        for row in addresses:
            inputs = out + residual
            results = [row_layers(inputs, row[None], *arguments, **options, phase=phase) for phase in range(5)]
            out, residual = results[4][0], results[3][1]
        return out, residual

    def of(layers: Any, plain: Any, caches: Any) -> RowLoop | None:
        loop = read(layers, plain, caches)
        if loop is not None:
            tensors = [*(p for layer in layers for p in _tensors(layer)), *(x for kv in caches for x in kv[:2])]
            on_cpu = KernelOnCpu(kernel, (arithmetic, exchange, phases, gluon_layers), tensors)
            monkeypatch.setattr(gluon_layers, "_layers_kernel", on_cpu)
        return loop

    read = RowLoop.of
    shape = partial(gluon_layers.LayerShape, programs=4, output_parts=2)
    monkeypatch.setattr(gluon_layers, "LayerShape", shape)
    monkeypatch.setattr(gluon_layers, "row_layers", by_phases)
    monkeypatch.setattr(gluon_layers, "is_measured", lambda shape, device: True)
    monkeypatch.setattr(row_loop, "gluon_layers", gluon_layers)
    monkeypatch.setattr(row_loop, "is_hopper", lambda device: True)
    monkeypatch.setattr(row_loop, "on_triton", lambda hidden: True)
    monkeypatch.setattr(row_loop, "_BACKEND", "torch")
    monkeypatch.setattr(schemes, "can_pack", lambda weight: False)
    monkeypatch.setattr("models.layers.layer_loop.products_level", lambda: 1)
    monkeypatch.setattr("models.layers.layer_loop._Native.of", of)
    return found


def _tensors(layer: Any) -> list[torch.Tensor]:
    attention, mlp = layer.self_attn, layer.mlp
    matrices = [
        part.params["weight"] for part in (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    ]
    norms = (layer.attention_norm, layer.mlp_norm, attention.attention.q_norm, attention.attention.k_norm)
    return [*matrices, *(norm.weight for norm in norms if norm is not None)]


def build_model(folder: Path, hf_config: Any) -> tuple[Any, ModelConfig]:
    save_checkpoint(folder, hf_config)
    config = ModelConfig.from_folder(folder)
    return build(config, Weights.from_folder(folder, device=CPU, dtype=BF16), SINGLE), config


def decode(model: Any, config: ModelConfig) -> torch.Tensor:
    """A prompt, then steps of its row alone, of two rows, and of a row and a prompt."""
    runner = PagedRunner(model, config, dtype=BF16)
    rows = [runner.add_row() for _ in range(3)]
    logits = [*runner.step([(rows[0], PROMPT)]), *runner.step([(rows[0], [7])]), *runner.step([(rows[0], [8])])]
    logits += runner.step([(rows[1], PROMPT[:3])])
    logits += runner.step([(rows[0], [9]), (rows[1], [3])]) + runner.step([(rows[0], [4]), (rows[2], [5, 6])])
    return torch.cat([each.float() for each in logits])


def test_steps_of_one_row_are_computed_by_the_kernel(tmp_path: Path, steps: list[int]) -> None:
    model, config = build_model(tmp_path, Qwen3Config(**SIZES, head_dim=16))
    found = decode(model, config)
    assert steps == [config.num_layers] * 2
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LayerLoop, "_native_for", lambda self, caches: None)
        expected = decode(model, config)
    assert steps == [config.num_layers] * 2
    assert (found - expected).abs().max() < 0.1 * expected.std()  # roundings of bf16 add up over the layers


@pytest.mark.parametrize("kind", NOT_TAKEN)
@pytest.mark.table(most=4)
def test_other_layers_are_not_taken(kind: str, tmp_path: Path, steps: list[int]) -> None:
    model, config = build_model(tmp_path, make_config(kind))
    runner = PagedRunner(model, config, dtype=BF16)
    assert RowLoop.of(model.layers, DecoderLayer, runner.kv_caches) is None


def test_a_model_says_which_steps_the_kernel_computes(tmp_path: Path, steps: list[int]) -> None:
    model, config = build_model(tmp_path / "plain", Qwen3Config(**SIZES, head_dim=16))
    caches = PagedRunner(model, config, dtype=BF16).kv_caches
    assert model.describe_decode(caches) == "steps of one row have all layers in one kernel"
    other, config = build_model(tmp_path / "other", make_config("gemma2"))
    assert other.describe_decode(PagedRunner(other, config, dtype=BF16).kv_caches) is None


@pytest.mark.parametrize("has_each", [True, False])
def test_layers_are_not_taken_if_each_or_one_has_something_more(
    has_each: bool, tmp_path: Path, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, config = build_model(tmp_path, Qwen3Config(**SIZES, head_dim=16))
    caches = PagedRunner(model, config, dtype=BF16).kv_caches
    taken = set()
    for name, (part, attribute, value) in (MORE | OTHER).items():
        with monkeypatch.context() as patch:
            for layer in model.layers if has_each else model.layers[-1:]:
                patch.setattr(layer.get_submodule(part), attribute, value)
            taken |= set() if RowLoop.of(model.layers, DecoderLayer, caches) is None else {name}
    assert taken == (set(OTHER) if has_each else set())
    assert RowLoop.of(model.layers, DecoderLayer, caches) is not None
    for layer in model.layers:
        layer.self_attn.attention.k_norm = None  # heads of queries alone have norms
    assert RowLoop.of(model.layers, DecoderLayer, caches) is None


def test_pools_that_the_kernel_does_not_read_are_not_taken(tmp_path: Path, steps: list[int]) -> None:
    model, config = build_model(tmp_path, Qwen3Config(**SIZES, head_dim=16))
    caches = PagedRunner(model, config, dtype=BF16).kv_caches
    keys, values, *_ = last = caches[-1]
    wide, odd = torch.zeros(*keys.shape[:3], 32, dtype=BF16), torch.zeros(*keys.shape[:3], 17, dtype=BF16)[..., :16]
    halves = [LayerKV(kv.keys.half(), kv.values.half()) for kv in caches]
    others = {
        "none of the first layer": [None, *caches[1:]],
        "none of the last layer": [*caches[:-1], None],
        "float16": halves,
        "values that lie elsewhere than keys": [LayerKV(kv.keys, wide[..., :16]) for kv in caches],
        "values of a head apart": [LayerKV(wide[..., ::2], wide[..., ::2]) for _ in caches],
        "heads at odd places": [LayerKV(odd, odd) for _ in caches],
        "another distance of slots": [*caches[:-1], LayerKV(wide[..., :16], wide[..., :16])],
        "another block table": [*caches[:-1], last._replace(table=1)],
    }
    assert [name for name, other in others.items() if RowLoop.of(model.layers, DecoderLayer, other)] == []
    assert RowLoop.of(model.layers, DecoderLayer, [*caches[:-1], LayerKV(keys.clone(), values.clone())])


def test_steps_with_something_beside_the_row_are_not_taken(tmp_path: Path, steps: list[int]) -> None:
    model, config = build_model(tmp_path, Qwen3Config(**SIZES, head_dim=16))
    loop = RowLoop.of(model.layers, DecoderLayer, PagedRunner(model, config, dtype=BF16).kv_caches)
    assert loop is not None
    hidden, one = torch.zeros(1, 64, dtype=BF16), torch.ones(1, dtype=torch.int32)
    decode = AttentionMetadata(
        query_start_loc=torch.tensor([0, 1]), seq_lens=one, block_table=one[None], slot_mapping=one, max_query_len=1,
        max_seq_len=1, num_decodes=1,
    )  # fmt: skip
    ctx = ForwardContext(one, [decode], TorchAttention(), [])
    assert loop.takes(hidden, ctx)
    others = {
        "a prompt of one token": replace(ctx, attention=[replace(decode, num_decodes=None)]),
        "a row without tokens": replace(ctx, attention=[replace(decode, seq_lens=torch.ones(2, dtype=torch.int32))]),
        "inputs of each layer": replace(ctx, layer_inputs=torch.zeros(1, 2, 4)),
        "states": replace(ctx, states=StepStates([], StateMetadata(one, one, one, one, None, 1, 1), None)),
        "another pool": replace(ctx, backend=TritonAttention()),
    }
    assert [name for name, other in others.items() if loop.takes(hidden, other)] == []
    assert not loop.takes(torch.zeros(2, 64, dtype=BF16), ctx)


def test_chosen_layers_are_those_of_the_step(tmp_path: Path, steps: list[int]) -> None:
    model, config = build_model(tmp_path, Qwen3Config(**SIZES, head_dim=16))
    loop = RowLoop.of(model.layers, DecoderLayer, PagedRunner(model, config, dtype=BF16).kv_caches)
    assert loop is not None
    whole = loop._addresses_of(None)
    assert loop._addresses_of([0]).tolist() == whole[:1].tolist()
    assert loop._addresses_of([0]) is loop._addresses_of([0])


def test_layers_whose_matrices_have_other_sizes_are_not_taken(tmp_path: Path, steps: list[int]) -> None:
    model, config = build_model(tmp_path, Qwen3Config(**SIZES, head_dim=16))
    caches = PagedRunner(model, config, dtype=BF16).kv_caches
    assert RowLoop.of(model.layers, DecoderLayer, caches) is not None
    for layer in model.layers:  # as where keys are values, too
        params = layer.self_attn.qkv_proj.params
        params["weight"] = params["weight"][:-32]
    assert RowLoop.of(model.layers, DecoderLayer, caches) is None
