"""An error of reading a quantised layer names its tensor and its scheme, in every scheme."""

import json
import re

import pytest
import torch
from safetensors.torch import save_file

from kernels.linear.reference import NF4_TABLE
from models.errors import ModelError
from models.fields import Fields
from models.quantization.linear_method import LinearPart
from models.quantization.schemes import ON_LOAD, PerLayer, choose_quantization, parse_quantization
from models.weights.weights import Weights

OUT, IN = 128, 256
LAYER = "model.layers.0.mlp.down_proj"
FP8 = torch.float8_e4m3fn
CODES, INT8 = torch.zeros(OUT, IN // 2, dtype=torch.uint8), torch.zeros(OUT, IN, dtype=torch.int8)
WEIGHT8 = torch.zeros(OUT, IN).to(FP8)


def compressed(format_, weights, activations=None):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "format": format_, "config_groups": {"group_0": group}}


def numbers(bits, kind, strategy, **fields):
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False, **fields}


def words(*shape):
    return torch.zeros(shape, dtype=torch.int32)


def nf4_state():
    state = {"quant_type": "nf4", "blocksize": 64, "shape": [OUT, IN], "dtype": "bfloat16"}
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


# quantization_config, the tensors of a layer, the tensor of its scales, words of its scheme
SCHEMES = {
    "fp8": (
        {"quant_method": "fp8"},
        {"weight": WEIGHT8, "weight_scale": torch.ones(1)},
        "weight_scale",
        "fp8",
    ),
    "fp8_static": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        {"weight": WEIGHT8, "weight_scale": torch.ones(1), "input_scale": torch.ones(1)},
        "input_scale",
        "fp8",
    ),
    "fp8_blocks": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"weight": WEIGHT8, "weight_scale_inv": torch.ones(1, 2)},
        "weight_scale_inv",
        "fp8 (e4m3; scales: weights by 128",
    ),
    "fp8_rows": (
        compressed("float-quantized", numbers(8, "float", "channel"), numbers(8, "float", "token", dynamic=True)),
        {"weight": WEIGHT8, "weight_scale": torch.ones(OUT, 1)},
        "weight_scale",
        "fp8",
    ),
    "w8a8": (
        compressed("int-quantized", numbers(8, "int", "channel"), numbers(8, "int", "token", dynamic=True)),
        {"weight": INT8, "weight_scale": torch.ones(OUT, 1)},
        "weight_scale",
        "int8",
    ),
    "pack-quantized": (
        compressed("pack-quantized", numbers(4, "int", "group", group_size=128)),
        {
            "weight_packed": words(OUT, IN // 8),
            "weight_scale": torch.ones(OUT, 2),
            "weight_shape": torch.tensor([OUT, IN]),
        },
        "weight_scale",
        "pack-quantized",
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
        {"qweight": words(IN, OUT // 8), "qzeros": words(2, OUT // 8), "scales": torch.ones(2, OUT)},
        "scales",
        "awq (4-bit integers",
    ),
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False},
        {"qweight": words(IN // 8, OUT), "qzeros": words(2, OUT // 8), "scales": torch.ones(2, OUT)},
        "scales",
        "gptq (4-bit integers",
    ),
    "mxfp4": (
        {"quant_method": "mxfp4", "modules_to_not_convert": ["self_attn"]},
        {"weight": CODES, "weight_scale": torch.full((OUT, IN // 32), 127, dtype=torch.uint8)},
        "weight_scale",
        "mxfp4 (e2m1",
    ),
    "nvfp4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        {"weight": CODES, "weight_scale": torch.ones(OUT, IN // 16).to(FP8), "weight_scale_2": torch.ones(1)},
        "weight_scale",
        "nvfp4 (e2m1",
    ),
    "nf4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        {
            "weight": CODES.view(-1, 1),
            "weight.absmax": torch.ones(OUT * IN // 64),
            "weight.quant_map": torch.tensor(NF4_TABLE),
            "weight.quant_state.bitsandbytes__nf4": nf4_state(),
        },
        "weight.absmax",
        "bitsandbytes nf4",
    ),
    "bitsandbytes-int8": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        {"weight": INT8, "SCB": torch.ones(OUT)},
        "SCB",
        "bitsandbytes int8",
    ),
}
CHANGES = {
    "missing": lambda scales: None,
    "of another shape": lambda scales: torch.ones(3, 5).to(scales.dtype),
    "of another dtype": lambda scales: torch.ones(scales.shape, dtype=torch.int16),
}


def load_layer(folder, quantization, tensors):
    folder.mkdir(exist_ok=True)
    save_file({f"{LAYER}.{name}": tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    w = Weights.from_folder(folder, device=torch.device("cpu"), dtype=torch.float32)
    PerLayer(quantization).load(w / "model.layers.0" / "mlp", [LinearPart("down_proj", OUT, IN, 0, rank=0, size=1)])


def check_layer(folder, quantization):
    """Check the headers of what load_layer() saved."""
    w = Weights.of_headers(folder, dtype=torch.float32)
    PerLayer(quantization).load(w / "model.layers.0" / "mlp", [LinearPart("down_proj", OUT, IN, 0, rank=0, size=1)])
    w.finish(has_tied_embeddings=False)


def config_of(kind):
    found = parse_quantization(Fields({"quantization_config": SCHEMES[kind][0]}, "config.json"))
    assert found is not None
    return found


@pytest.mark.parametrize("kind", SCHEMES)
def test_wrong_scales_are_an_error_that_names_layer_and_scheme(tmp_path, kind):
    _, tensors, scales, words_of_scheme = SCHEMES[kind]
    config = config_of(kind)
    described = config.scheme_of(LAYER).describe()
    assert described.startswith(words_of_scheme)
    load_layer(tmp_path, config, tensors)  # as it should be
    for change in CHANGES.values():
        wrong = change(tensors[scales])
        others = {name: tensor for name, tensor in tensors.items() if name != scales}
        with pytest.raises(ModelError) as caught:
            load_layer(tmp_path, config, others if wrong is None else others | {scales: wrong})
        assert f"{LAYER}." in str(caught.value)
        assert str(caught.value).endswith(f"; the layer is quantized as {described}")


@pytest.mark.parametrize("kind", SCHEMES)
def test_headers_alone_show_what_reading_a_layer_would_find(tmp_path, kind):
    _, tensors, _, _ = SCHEMES[kind]
    config = config_of(kind)
    described = config.scheme_of(LAYER).describe()
    load_layer(tmp_path, config, tensors)
    check_layer(tmp_path, config)
    for name in tensors:
        for change in CHANGES.values():
            wrong = change(tensors[name])
            others = {each: tensor for each, tensor in tensors.items() if each != name}
            with pytest.raises(ModelError):
                load_layer(tmp_path, config, others if wrong is None else others | {name: wrong})
            if name.endswith("quant_state.bitsandbytes__nf4") and wrong is not None and wrong.dtype != torch.int16:
                continue  # its length is that of a text
            with pytest.raises(ModelError) as caught:
                check_layer(tmp_path, config)
            assert f"{LAYER}." in str(caught.value)
            assert name in str(caught.value)
            assert str(caught.value).endswith(f"; the layer is quantized as {described}")


@pytest.mark.parametrize("kind", SCHEMES)
def test_headers_show_tensors_that_a_layer_does_not_read(tmp_path, kind):
    _, tensors, _, _ = SCHEMES[kind]
    load_layer(tmp_path, config_of(kind), tensors | {"weight_of_old": torch.ones(1)})
    with pytest.raises(ModelError, match=r"1 tensors have no place in the model: .*down_proj\.weight_of_old"):
        check_layer(tmp_path, config_of(kind))


# e4m3 and the powers of two have tests of their own below
FLOAT_SCALES = [kind for kind in SCHEMES if kind not in ("mxfp4", "nvfp4")]


@pytest.mark.parametrize("kind", FLOAT_SCALES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_a_scale_that_no_format_has_is_an_error_that_names_its_tensor(tmp_path, kind, bad):
    if bad == -1.0 and kind in ("w8a8", "pack-quantized", "awq", "gptq"):
        pytest.skip("AutoRound writes negative scales of integers")
    _, tensors, scales, _ = SCHEMES[kind]
    wrong = tensors[scales].clone()
    wrong.view(-1)[-1] = bad
    with pytest.raises(ModelError, match=rf"{re.escape(LAYER)}\.{re.escape(scales)} .*{bad}.* quantized as "):
        load_layer(tmp_path, config_of(kind), tensors | {scales: wrong})


@pytest.mark.parametrize("kind", ["fp8_blocks", "fp8_rows", "w8a8", "pack-quantized", "nf4", "bitsandbytes-int8"])
def test_a_block_of_zeros_may_have_the_scale_0(tmp_path, kind):
    _, tensors, scales, _ = SCHEMES[kind]
    zero = tensors[scales].clone()
    zero.view(-1)[-1] = 0.0
    load_layer(tmp_path, config_of(kind), tensors | {scales: zero})


@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4"])
def test_scales_that_are_no_numbers_are_an_error_that_names_layer_and_scheme(tmp_path, kind):
    _, tensors, scales, _ = SCHEMES[kind]
    nan = torch.full_like(tensors[scales].view(torch.uint8), 255).view(tensors[scales].dtype)
    words_of_error = rf"{re.escape(LAYER)}\.{scales} has scales that are .*not a number; .* quantized as {kind} \(e2m1"
    with pytest.raises(ModelError, match=words_of_error):
        load_layer(tmp_path, config_of(kind), tensors | {scales: nan})


def test_a_scheme_that_no_linear_layer_can_have_is_an_error_that_names_the_layer(tmp_path):
    # of experts only, but the name of a dense layer matches
    config = parse_quantization(Fields({"quantization_config": {"quant_method": "mxfp4"}}, "config.json"))
    w = Weights.dummy(device=torch.device("cpu"), dtype=torch.float32)
    part = LinearPart("gate_proj", OUT, IN, 0, rank=0, size=1)
    with pytest.raises(ModelError, match=r"^model\.mlp\.experts\.gate_proj: mxfp4 .* not supported for linear layers$"):
        PerLayer(config).load(w / "model.mlp.experts", [part])


@pytest.mark.parametrize("name", ON_LOAD)
def test_a_layer_that_is_quantized_on_load_is_said_to_be(tmp_path, name):
    config = choose_quantization(None, name)
    described = re.escape(ON_LOAD[name].describe())
    load_layer(tmp_path, config, {"weight": torch.ones(OUT, IN)})
    with pytest.raises(ModelError, match=rf"down_proj\.weight has shape .*; .* quantized on load as {described}$"):
        load_layer(tmp_path, config, {"weight": torch.ones(OUT, 7)})
