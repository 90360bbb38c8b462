"""Scales of an fp8 pool: read under every name that checkpoints give them, and acting on that pool alone."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, Olmo2Config, Phi3Config, Qwen2Config

from kernels.elementwise.reference import FP8, UNSCALED, KVScales
from models.config.model_config import ModelConfig, ModelError
from models.layers.attention import SelfAttention
from models.parallel import TensorParallel
from tests.support.checkpoints import TINY
from tests.support.models_harness import PagedRunner, load
from tests.support.reference import save_checkpoint

PROMPT = [3, 90, 17, 4, 55, 8, 8, 61]
SCALE_NAMES = ("k_scale", "v_scale")
LAYER = "model.layers.1.self_attn"
CONFIGS = {
    "llama": LlamaConfig(**TINY, num_key_value_heads=2),
    "phi3": Phi3Config(**TINY, num_key_value_heads=2, pad_token_id=None),
    "olmo2": Olmo2Config(**TINY, num_key_value_heads=2, pad_token_id=None),
}


@pytest.fixture
def folder(tmp_path):
    save_checkpoint(tmp_path, CONFIGS["llama"])
    return tmp_path


def add(folder, tensors):
    """Add tensors to model.safetensors; plain numbers become tensors of no dimension."""
    tensors = {name: torch.as_tensor(value, dtype=torch.float32) for name, value in tensors.items()}
    save_file(load_file(folder / "model.safetensors") | tensors, folder / "model.safetensors")


def scales_of(folder):
    return [module.kv_scales for module in load(folder).modules() if isinstance(module, SelfAttention)]


def logits(folder, *, pool=FP8):
    runner = PagedRunner(load(folder), ModelConfig.from_folder(folder), dtype=pool)
    row = runner.add_row()
    return torch.cat(runner.step([(row, PROMPT[:5])]) + runner.step([(row, PROMPT[5:6])]))


@pytest.mark.parametrize(("tensors", "expected"), [
    ({"k_scale": 0.5, "v_scale": 0.25}, KVScales(0.5, 0.25)),
    ({"k_scale": [0.5], "v_scale": [0.25], "q_scale": [3.0], "prob_scale": 1.0}, KVScales(0.5, 0.25)),
    ({"k_scale": [[0.5], [0.5]], "v_scale": [0.25, 0.25]}, KVScales(0.5, 0.25)),  # of each head, and equal
    ({"k_scale": [0.5, 2.0, 1.0], "v_scale": 0.25}, KVScales(2.0, 0.25)),  # of other parts than heads
    ({"k_proj.k_scale": 0.5, "v_proj.v_scale": 0.25}, KVScales(0.5, 0.25)),
    ({"k_proj.output_scale": 0.5, "v_proj.output_scale": [0.25]}, KVScales(0.5, 0.25)),
    ({"kv_scale": 0.5}, KVScales(0.5, 0.5)),
    ({"kv_scale": 4.0, "k_scale": 0.5, "v_scale": 0.25}, KVScales(0.5, 0.25)),
    ({"v_scale": 0.25}, KVScales(1.0, 0.25)),
])  # fmt: skip
@pytest.mark.parametrize("kind", CONFIGS)
def test_scales_are_read_by_every_name_and_leave_no_tensor_over(tmp_path, kind, tensors, expected):
    save_checkpoint(tmp_path, CONFIGS[kind])
    add(tmp_path, {f"{LAYER}.{name}": value for name, value in tensors.items()})
    assert scales_of(tmp_path) == [UNSCALED, expected, UNSCALED]


@pytest.mark.parametrize("v_scale", [None, 0.25, [[[0.25]], [[0.125]]]])
def test_scales_of_each_head_are_those_of_this_ranks_heads(tmp_path, v_scale):
    save_checkpoint(tmp_path, LlamaConfig(**TINY, num_key_value_heads=2))
    values = {} if v_scale is None else {f"{LAYER}.v_scale": v_scale}
    add(tmp_path, {f"{LAYER}.k_scale": [0.5, 2.0]} | values)
    all_v = torch.as_tensor(1.0 if v_scale is None else v_scale).flatten().expand(2)
    for size, rank, heads in ((1, 0, [0, 1]), (2, 0, [0]), (2, 1, [1]), (4, 1, [0]), (4, 2, [1])):
        model = load(tmp_path, tp=TensorParallel(rank, size))
        first, scales, _ = (module.kv_scales for module in model.modules() if isinstance(module, SelfAttention))
        assert first == UNSCALED
        assert scales.k.tolist() == [[0.5, 2.0][head] for head in heads]
        assert scales.v.tolist() == all_v[heads].tolist()


def test_a_head_may_have_keys_and_values_that_fp8_has_not_if_the_other_has_small_ones(folder):
    """As the case of the layer's scales, for one of two heads: the other's numbers would be lost with its scale."""
    expected = logits(folder)
    tensors = load_file(folder / "model.safetensors")
    changes = {}
    for layer in range(3):
        for name, factor in (("q_proj", 2.0**-15), ("k_proj", 2.0**15), ("v_proj", 2.0**15), ("o_proj", 2.0**-15)):
            weight = tensors[f"model.layers.{layer}.self_attn.{name}.weight"].clone()
            half = weight.shape[name == "o_proj"] // 2  # the first KV head, and the query heads over it
            (weight.T if name == "o_proj" else weight)[:half] *= factor
            changes[f"model.layers.{layer}.self_attn.{name}.weight"] = weight
    for scales, is_same in ((2.0**15, False), ([2.0**15, 1.0], True)):
        names = [f"model.layers.{layer}.self_attn.{name}" for layer in range(3) for name in SCALE_NAMES]
        add(folder, changes | dict.fromkeys(names, scales))
        assert torch.equal(logits(folder), expected) == is_same


def test_they_are_not_rounded_to_the_models_dtype(folder):
    add(folder, {f"{LAYER}.k_scale": 0.0123456789})
    model = load(folder, dtype=torch.bfloat16)
    found = [module.kv_scales.k for module in model.modules() if isinstance(module, SelfAttention)]
    assert found[1] == pytest.approx(0.0123456789, rel=1e-7)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), [0.5, -0.5], []])
def test_a_scale_that_is_none_is_refused_by_its_name(folder, value):
    add(folder, {f"{LAYER}.v_scale": value})
    with pytest.raises(ModelError, match=rf"tensor {LAYER}.v_scale must hold positive numbers"):
        load(folder)


def test_without_scales_the_logits_are_nearly_those_of_a_whole_pool(folder):
    whole, rounded = logits(folder, pool=torch.float32), logits(folder)
    assert 0.0 < float((rounded - whole).norm() / whole.norm()) < 0.1


def test_a_scale_makes_room_for_keys_and_values_that_fp8_has_not(folder):
    """Keys 2,048 times as large, asked for by queries as much smaller: powers of two, so nothing is rounded anew."""
    expected = logits(folder)
    tensors = load_file(folder / "model.safetensors")
    changes = {}
    for layer in range(3):
        for name, factor in (("q_proj", 1 / 2048), ("k_proj", 2048), ("v_proj", 2048), ("o_proj", 1 / 2048)):
            full_name = f"model.layers.{layer}.self_attn.{name}.weight"
            changes[full_name] = tensors[full_name] * factor
    add(folder, changes)
    clipped = logits(folder)
    assert clipped.isfinite().all()
    assert float((clipped - expected).norm() / expected.norm()) > 0.1
    add(folder, {f"model.layers.{layer}.self_attn.{name}": 2048.0 for layer in range(3) for name in SCALE_NAMES})
    assert torch.equal(logits(folder), expected)


def test_a_pool_that_is_not_fp8_ignores_them(folder):
    expected = logits(folder, pool=torch.float32)
    add(folder, {f"{LAYER}.k_scale": 0.001, f"{LAYER}.v_scale": 0.001})
    assert torch.equal(logits(folder, pool=torch.float32), expected)
    assert not torch.equal(logits(folder), expected)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_the_key_bias_is_that_of_the_checkpoint(tmp_path, num_kv_heads):
    save_checkpoint(tmp_path, Qwen2Config(**TINY, num_key_value_heads=num_kv_heads))
    layer = next(module for module in load(tmp_path).modules() if isinstance(module, SelfAttention))
    stored = load_file(tmp_path / "model.safetensors")["model.layers.0.self_attn.k_proj.bias"]
    assert torch.equal(layer.key_bias, stored)


def test_an_fp8_token_takes_half_of_what_a_bf16_one_does():
    config = ModelConfig.from_json(CONFIGS["llama"].to_dict() | {"architectures": ["LlamaForCausalLM"]})
    for tp_size in (1, 2, 4):
        fp8, bf16 = (config.kv_bytes_per_token(tp_size, dtype) for dtype in (FP8, torch.bfloat16))
        assert fp8 * 2 == bf16
        assert config.attention_spec(tp_size, torch.bfloat16, torch.device("cpu"), kv_dtype=FP8).has_other_pool
