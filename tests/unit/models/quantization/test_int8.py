"""Linear layers of 8-bit integers: their checkpoints are read as they were written, and what is wrong is said."""

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed

from benchmarks import quantized_weights
from benchmarks.quantized_weights import requantize
from kernels.linear import eight_bits, rounding
from models.errors import ModelError
from models.layers.linear import ColumnLinear, RowLinear
from models.parallel import TensorParallel
from models.quantization import int8 as int8_method
from models.quantization.int8 import Int8
from tests.support.quantized_checkpoints import PROMPT, load_model, logits_of, relative_error
from tests.support.rank_group import run_ranks
from tests.support.reference import reference_logits, save_checkpoint
from tests.support.tensor_parallel_rank import PROMPT as RANKS_PROMPT
from tests.support.tensor_parallel_rank import run_rank
from tests.unit.models.quantization.test_float4 import (
    INT8,
    LAYER,
    LLAMA,
    W8A8,
    W8A8_STATIC,
    change_layer,
    read,
    weights_of,
    whole_part,
    with_activations,
    with_weights,
)  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    save_checkpoint(folder, LLAMA)
    return folder


def int8(_, weight):
    return quantized_weights.by_int8(weight)


def int8_static(name, weight):
    size = float(weight.abs().amax()) / 127
    values = (weight / size).round().to(torch.int8)
    input_scale = torch.tensor(0.1 if name.endswith(("o_proj", "down_proj")) else 0.05)
    return {"weight": values, "weight_scale": torch.tensor([size]), "input_scale": input_scale}


def int8_dense(store):
    def stored(name, weight):
        tensors = store(name, weight)
        return {"weight": tensors["weight"].float() * tensors["weight_scale"]}

    return stored


@pytest.mark.parametrize(("store", "config"), [(int8, W8A8), (int8_static, W8A8_STATIC)])
def test_layers_of_integers_give_what_their_weights_give_but_for_the_rounding_of_activations(
    store, config, source, tmp_path
):
    folder = requantize(source, tmp_path / "quantised", store, config)
    dense = requantize(source, tmp_path / "dense", int8_dense(store), None)
    layers = [
        [module for module in load_model(each).modules() if isinstance(module, ColumnLinear | RowLinear)]
        for each in (folder, dense)
    ]
    for linear, expected in zip(*layers, strict=True):
        size = linear.params.params[0].weight.shape[1]
        x = torch.randn(16, size)
        assert 0.0 < relative_error(linear(x), expected(x)) < 0.03
    if store is int8:  # static scales of inputs that nobody measured are coarse
        assert relative_error(logits_of(folder), reference_logits(dense, PROMPT)) < 0.1


@pytest.mark.parametrize(("store", "config"), [(int8, W8A8), (int8_static, W8A8_STATIC)])
def test_inputs_that_the_op_before_rounds_give_the_same_logits(store, config, source, tmp_path, monkeypatch):
    folder = requantize(source, tmp_path / "quantised", store, config)
    num_rounded = []
    round_before = rounding.round_rows
    monkeypatch.setattr(rounding, "round_rows", lambda *args: num_rounded.append(1) or round_before(*args))
    monkeypatch.setattr(int8_method, "can_pack_int8", lambda _: False)  # as on a GPU
    logits = logits_of(folder)
    assert not num_rounded
    monkeypatch.setattr(eight_bits, "rounds_before", lambda _: True)
    assert torch.equal(logits_of(folder), logits)
    assert len(num_rounded) == 5  # norms, less the first layer's before attention, and activations


def test_activations_that_are_whole_numbers_of_their_scale_are_multiplied_exactly(source, tmp_path):
    folder = requantize(source, tmp_path / "quantised", int8, W8A8)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.down_proj"
    dense = tensors[f"{name}.weight"].double() * tensors[f"{name}.weight_scale"].double()
    x = torch.randint(-127, 128, (7, 192)).float()
    x[:, 0] = 127
    found = load_model(folder).layers[0].mlp.down_proj(x)
    torch.testing.assert_close(found.double(), x.double() @ dense.T, rtol=1e-5, atol=1e-4)


def test_merged_parts_of_static_integers_share_their_largest_scale(source, tmp_path):
    def store(name, weight):
        return int8_static(name, weight) | {"input_scale": torch.tensor(0.5 if name.endswith("up_proj") else 0.25)}

    w = weights_of(requantize(source, tmp_path / "quantised", store, W8A8_STATIC))
    params = (
        Int8("tensor", "static").make_method().load(w, [whole_part(name, 192) for name in ("gate_proj", "up_proj")])
    )
    assert params.input_scale == 0.5
    assert len(params.scales.unique()) == 2


@pytest.mark.parametrize(
    ("store", "config", "change", "message"),
    [
        (int8, W8A8, {"weight_scale": None}, rf"{LAYER}\.weight_scale is missing .* is quantized"),
        (int8, W8A8, {"weight": torch.zeros(128, 192)}, rf"{LAYER}\.weight is float32, but .* int8"),
        (int8, W8A8, {"weight_scale": torch.ones(127)}, rf"{LAYER}\.weight_scale has shape \[127\]"),
        (int8_static, W8A8_STATIC, {"input_scale": None}, rf"{LAYER}\.input_scale is missing"),
        (int8_static, W8A8_STATIC, {"input_scale": torch.zeros(1)}, rf"{LAYER}\.input_scale is 0\.0"),
    ],
)
def test_what_is_wrong_with_integers_is_said(store, config, change, message, source, tmp_path):
    folder = requantize(source, tmp_path / "quantised", store, config)
    change_layer(folder, change)
    with pytest.raises(ModelError, match=message):
        load_model(folder)


@pytest.mark.parametrize("tp_size", [2])
def test_a_model_of_integers_splits_anywhere(tp_size, source, tmp_path):
    folder = requantize(source, tmp_path / "quantised", int8, W8A8)
    load_model(folder, tp=TensorParallel(0, tp_size, distributed.GroupMember.NON_GROUP_MEMBER))


@pytest.mark.slow
def test_two_ranks_give_the_logits_of_one(source, tmp_path):
    folder = requantize(source, tmp_path / "quantised", int8, W8A8)
    run_ranks(run_rank, 2, tmp_path / "store", [folder])
    expected = logits_of(folder, prompt=RANKS_PROMPT)
    for rank in range(2):
        # ranks of row layers scale tokens by the share of their inputs that they hold
        assert relative_error(torch.load(folder / f"logits-2-{rank}.pt"), expected) < 0.05


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (with_weights(W8A8, num_bits=4), r"weights \(4-bit int, by channel"),
        (with_weights(W8A8, symmetric=False), r"weights \(8-bit int, by channel, symmetric False"),
        (with_weights(W8A8, strategy="group", group_size=128), r"weights \(8-bit int, by group"),
        (with_activations(W8A8, None), "8-bit integer weights without 8-bit activations are not supported"),
        (with_activations(W8A8, INT8 | {"strategy": "token", "dynamic": True, "symmetric": False}), "symmetric False"),
        (with_activations(W8A8, INT8 | {"strategy": "token", "dynamic": False}), r"activations \(8-bit int, by token"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(section, message):
    with pytest.raises(ModelError, match=message):
        read(section)


def test_a_checkpoint_says_how_it_is_scaled():
    up = "model.layers.0.mlp.up_proj"
    assert read(W8A8).quantization.scheme_of(up) == Int8("row", "token")
    assert read(W8A8_STATIC).quantization.scheme_of(up) == Int8("tensor", "static")
