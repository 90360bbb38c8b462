"""Checkpoints of packed integers give the logits of the dense weights that they mean, or are refused by name."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, Phi3Config, Qwen3Config

from models.build import build
from models.config.model_config import ModelConfig, ModelError
from models.layers.linear import make_linear_method
from models.parallel import TensorParallel
from models.quantization.gptq import Gptq
from models.quantization.linear_method import LinearPart
from models.weights.weights import Weights
from tests.support import int_checkpoints
from tests.support.checkpoints import TINY
from tests.support.int_checkpoints import FORMATS, Integers, edit_config, save_quantized
from tests.support.models_harness import CPU, PagedRunner, load
from tests.support.reference import reference_logits, save_checkpoint

pytestmark = pytest.mark.slow

LLAMA = LlamaConfig(**TINY, num_key_value_heads=2)
BIASED = LlamaConfig(**TINY, num_key_value_heads=2, attention_bias=True, mlp_bias=True)
QWEN3 = Qwen3Config(**TINY, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True)
PHI3 = Phi3Config(**TINY, num_key_value_heads=2, pad_token_id=None)
PROMPT = [3, 90, 17, 4, 55, 8, 8, 61]


def logits_of(folder, **options):
    runner = PagedRunner(load(folder, **options), ModelConfig.from_folder(folder))
    return runner.step([(runner.add_row(), PROMPT)])[0]


def assert_exact(tmp_path, config, kind):
    dense, folder = tmp_path / "dense", tmp_path / "quantized"
    save_checkpoint(dense, config)
    save_quantized(dense, folder, FORMATS[kind])
    expected = reference_logits(dense, PROMPT)
    assert expected.std() > 0.5  # flat logits would hide errors
    torch.testing.assert_close(logits_of(folder), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_gives_the_logits_of_the_dense_weights_it_means(kind, tmp_path):
    assert_exact(tmp_path, LLAMA, kind)


@pytest.mark.parametrize("kind", ["awq", "gptq_desc_act", "gptq_own_orders", "packed_asymmetric"])
def test_layers_with_biases(kind, tmp_path):
    assert_exact(tmp_path, BIASED, kind)


@pytest.mark.parametrize("kind", ["awq", "gptq", "packed"])
def test_qwen3(kind, tmp_path):
    assert_exact(tmp_path, QWEN3, kind)


@pytest.mark.parametrize("kind", ["awq", "gptq", "gptq_desc_act", "packed_asymmetric"])
def test_projections_that_the_checkpoint_has_merged(kind, tmp_path):
    assert_exact(tmp_path, PHI3, kind)


@pytest.fixture
def awq(tmp_path):
    return quantized(tmp_path, "awq")


def quantized(tmp_path, kind):
    save_checkpoint(tmp_path / "dense", LLAMA)
    save_quantized(tmp_path / "dense", tmp_path / kind, FORMATS[kind])
    return tmp_path / kind


def edit(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(("kind", "suffix"), [("awq", "scales"), ("gptq", "scales"), ("packed", "weight_scale")])
def test_scales_may_be_negative_as_autoround_writes_them(kind, suffix, tmp_path):
    folder, name = quantized(tmp_path, kind), "model.layers.0.self_attn.o_proj"
    edit(folder, lambda tensors: tensors[f"{name}.{suffix}"].neg_())
    edit(tmp_path / "dense", lambda tensors: tensors[f"{name}.weight"].neg_())
    torch.testing.assert_close(logits_of(folder), reference_logits(tmp_path / "dense", PROMPT), atol=1e-4, rtol=0)


def test_a_zero_point_of_0_borrows_from_its_neighbour_in_gptq_v1_and_is_read_back(tmp_path):
    codes, zeros = np.full((8, 8), 3), np.array([[5, 0, 7, 0, 0, 1, 15, 0]])
    matrix = Integers(codes, torch.ones(1, 8).half(), zeros, np.zeros(8, dtype=int), bits=4)
    tensors = int_checkpoints.gptq_tensors(matrix)
    save_file({f"o.{key}": value for key, value in tensors.items()}, tmp_path / "model.safetensors")
    w = Weights.from_folder(tmp_path, device=CPU, dtype=torch.float32)
    method = Gptq(4, None, has_order=False, is_v2=False).make_method()
    params = method.load(w, [LinearPart("o", 8, 8, dim=0, rank=0, size=1)])
    assert torch.equal(method.apply(params, torch.eye(8), None).T, matrix.dense().float())


def test_a_bias_that_only_the_checkpoint_knows_is_added(tmp_path):
    folder = quantized(tmp_path, "gptq_symmetric")
    before = logits_of(folder)
    edit(folder, lambda tensors: tensors["model.layers.0.self_attn.o_proj.bias"].fill_(1.0))
    assert (logits_of(folder) - before).abs().max() > 0.1


@pytest.mark.parametrize(("kind", "bytes_per_weight"), [("awq", 0.5), ("gptq_8bit", 1.0), ("packed_channel", 0.5)])
def test_config_and_loaded_model_agree_on_bytes(kind, bytes_per_weight, tmp_path):
    config = ModelConfig.from_folder(quantized(tmp_path, kind))
    scheme = config.quantization.scheme_of("model.layers.0.mlp.up_proj")
    size = 4096 * 4096
    assert scheme.matrix_bytes(4096, 4096, itemsize=2) >= size * bytes_per_weight
    if scheme.group_size is None:
        assert scheme.matrix_bytes(4096, 4096, itemsize=2) < size * (bytes_per_weight + 0.01)
    assert config.weight_bytes(torch.float16) != config.num_parameters * 2


def test_random_weights_of_a_quantized_config_run(awq):
    config = ModelConfig.from_folder(awq)
    model = build(config, Weights.dummy(device=CPU, dtype=torch.float32), TensorParallel())
    runner = PagedRunner(model, config)
    assert runner.step([(runner.add_row(), PROMPT)])[0].isfinite().all()


def test_random_shares_of_ranks_are_the_whole_matrix(awq):
    config = ModelConfig.from_folder(awq)
    w = Weights.dummy(device=CPU, dtype=torch.float32) / "model.layers.0"
    method = make_linear_method(config)

    def dense(part):
        return method.apply(method.load(w, [part]), torch.eye(part.inputs), None).T

    whole = dense(LinearPart("o_proj", 32, 32, dim=0, rank=0, size=1))
    assert whole.std() == pytest.approx(0.02, rel=0.1)
    for dim in (0, 1):
        shares = [dense(LinearPart("o_proj", 32, 32, dim=dim, rank=rank, size=2)) for rank in range(2)]
        torch.testing.assert_close(torch.cat(shares, dim), whole)


O_PROJ = "model.layers.1.self_attn.o_proj"
# kind, tensor, what becomes of it (None: it is gone), what is said
DAMAGED = [
    ("awq", "scales", None, r"awq: tensor \S*o_proj\.scales with shape \[2, 32\] is missing"),
    ("awq", "qzeros", None, r"awq: tensor \S*o_proj\.qzeros with shape \[2, 4\] is missing"),
    ("awq", "qweight", torch.float16, r"\.safetensors: tensor \S*o_proj\.qweight is float16, but .* int32"),
    ("awq", "qweight", (16, 4), r"\.safetensors: tensor \S*o_proj\.qweight has shape \[16, 4\], but .*\[32, 4\]"),
    ("awq", "scales", torch.int32, r"\.safetensors: tensor \S*o_proj\.scales is int32, but .* float32"),
    ("gptq", "qweight", (8, 32), r"tensor \S*o_proj\.qweight has shape \[8, 32\], but .* \[4, 32\]"),
    ("gptq_desc_act", "g_idx", None, r"tensor \S*o_proj\.g_idx is missing"),
    ("gptq", "g_idx", (31,), r"tensor \S*o_proj\.g_idx has shape \[31\], but .* \[32\]"),
    ("packed", "weight_scale", None, r"tensor \S*o_proj\.weight_scale with shape \[32, 2\] is missing"),
    ("packed", "weight_packed", torch.int64, r"tensor \S*o_proj\.weight_packed is int64, but .* int32"),
    ("packed_asymmetric", "weight_zero_point", None, r"tensor \S*_zero_point with shape \[4, 2\] is missing"),
    ("packed_ordered", "weight_g_idx", None, r"tensor \S*o_proj\.weight_g_idx is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "damage", "message"), DAMAGED)
def test_a_damaged_tensor_is_named_with_its_file(kind, name, damage, message, tmp_path):
    folder, name = quantized(tmp_path, kind), f"{O_PROJ}.{name}"

    def change(tensors):
        if damage is None:
            del tensors[name]
        elif isinstance(damage, tuple):
            tensors[name] = torch.zeros(damage, dtype=tensors[name].dtype)
        else:
            tensors[name] = tensors[name].to(damage)

    edit(folder, change)
    with pytest.raises(ModelError, match=message):
        load(folder)


@pytest.mark.parametrize("group", [-2, 2])
def test_groups_that_do_not_exist_are_refused(group, tmp_path):
    folder = quantized(tmp_path, "gptq_desc_act")
    edit(folder, lambda tensors: tensors[f"{O_PROJ}.g_idx"].__setitem__(0, group))
    with pytest.raises(ModelError, match=r"o_proj\.g_idx has group numbers outside 0 to 1"):
        load(folder)


def test_weight_shape_must_be_that_of_the_model(tmp_path):
    folder = quantized(tmp_path, "packed")
    edit(folder, lambda tensors: tensors[f"{O_PROJ}.weight_shape"].__setitem__(1, 31))
    with pytest.raises(ModelError, match=r"o_proj\.weight_shape says \[32, 31\], but config.json requires \[32, 32\]"):
        load(folder)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("awq", {"bits": 3}, "config.json: quantization_config: bits 3 is not supported: supported are 4"),
        ("awq", {"bits": 8}, "bits 8 is not supported: supported are 4"),
        ("awq", {"version": "gemv"}, "version 'gemv' is not supported: supported is 'gemm'"),
        ("awq", {"group_size": 0}, "group_size must be a positive integer, found 0"),
        ("awq", {"group_size": "128"}, "group_size must be a positive integer, found '128'"),
        ("awq", {"modules_to_not_convert": 7}, "modules_to_not_convert must be a list of layer names, found 7"),
        ("awq", {"group_size": 128}, "q_proj has 32 inputs, which is not a multiple of group_size 128"),
        ("gptq", {"bits": 3}, "config.json: quantization_config: bits 3 is not supported: supported are 4, 8"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported"),
        ("gptq", {"is_marlin_format": True}, "is_marlin_format True is not supported"),
        ("gptq", {"pack_dtype": "int16"}, "pack_dtype 'int16' is not supported"),
        ("gptq", {"lm_head": True}, "lm_head true is not supported"),
        ("gptq", {"desc_act": "yes"}, "desc_act must be"),
        ("gptq", {"dynamic": []}, "g_idx"),
        ("gptq", {"dynamic": {"(": {}}}, "dynamic: 're:(' is not a regular expression"),
        ("gptq", {"dynamic": {"+:.*up_proj": {"bits": 2}}}, "dynamic +:.*up_proj: bits 2 is not supported"),
        ("packed", int_checkpoints.packed_config(num_bits=3), "weights (3-bit int, by group, symmetric True"),
        ("packed", int_checkpoints.packed_config(strategy="block"), "by block"),
        ("packed", int_checkpoints.packed_config(strategy="tensor"), "by tensor"),
        ("packed", int_checkpoints.packed_config(dynamic=True), "dynamic True"),
        ("packed", int_checkpoints.packed_config(type="float"), "4-bit float"),
    ],
)
def test_what_is_not_read_is_refused_by_name(kind, fields, message, tmp_path):
    folder = quantized(tmp_path, kind)
    edit_config(folder, quantization_config=FORMATS[kind].config | fields)
    if fields == {"dynamic": []}:  # an empty list is no exception
        load(folder)
        return
    with pytest.raises(ModelError, match=re.escape(message)):
        load(folder)


@pytest.mark.parametrize(
    ("kind", "dim", "size", "message"),
    [
        ("awq", 1, 4, "o_proj: 4 ranks have 8 inputs each, but awq .* is split only at multiples of 16"),
        ("awq", 0, 8, "o_proj: 8 ranks have 4 outputs each, but awq .* is split only at multiples of 8"),
        ("gptq", 1, 4, "o_proj: 4 ranks have 8 inputs each, but gptq .* is split only at multiples of 16"),
        ("packed", 1, 4, "o_proj: 4 ranks have 8 inputs each, but pack-quantized .* is split only at multiples of 16"),
    ],
)
def test_ranks_that_would_cut_a_group_or_a_word_are_refused(kind, dim, size, message, tmp_path):
    folder = quantized(tmp_path, kind)
    w = Weights.from_folder(folder, device=CPU, dtype=torch.float32) / O_PROJ.removesuffix(".o_proj")
    method = make_linear_method(ModelConfig.from_folder(folder))
    with pytest.raises(ModelError, match=message):
        method.load(w, [LinearPart("o_proj", 32, 32, dim=dim, rank=0, size=size)])


def test_gptq_exceptions_by_pattern_have_settings_of_their_own(tmp_path):
    folder = quantized(tmp_path, "gptq")
    dynamic = {
        "-:.*layers\\.1\\..*": {},
        "+:.*up_proj": {"bits": 8, "group_size": -1},
        ".*down_proj": {"desc_act": True},
    }
    edit_config(folder, quantization_config=FORMATS["gptq"].config | {"dynamic": dynamic})
    quantization = ModelConfig.from_folder(folder).quantization
    plain = Gptq(4, 16, has_order=False, is_v2=False, is_symmetric=False)
    assert quantization.scheme_of("model.layers.0.mlp.gate_proj") == plain
    assert quantization.scheme_of("model.layers.0.mlp.up_proj") == Gptq(
        8, None, has_order=False, is_v2=False, is_symmetric=False
    )
    assert quantization.scheme_of("model.layers.0.mlp.down_proj") == Gptq(
        4, 16, has_order=True, is_v2=False, is_symmetric=False
    )
    assert quantization.scheme_of("model.layers.1.mlp.up_proj") is None


def test_the_flag_may_say_what_the_checkpoint_is_and_nothing_else(awq):
    config = ModelConfig.from_folder(awq)
    assert config.quantized("awq") == config.quantized("auto") == config
    for other in ("gptq", "compressed-tensors", "fp8", "none"):
        with pytest.raises(ModelError, match=f"--quantization {other}: the checkpoint is quantized as awq already"):
            config.quantized(other)
    plain = ModelConfig.from_folder(awq.parent / "dense")
    with pytest.raises(ModelError, match="--quantization awq: the checkpoint is not"):
        plain.quantized("awq")
