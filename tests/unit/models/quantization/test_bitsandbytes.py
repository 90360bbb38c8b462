"""bitsandbytes's checkpoints are read to the bit, and quantising on load makes the same.

bitsandbytes_checkpoints/ holds tiny Llamas that transformers 5.17 and bitsandbytes 0.50.2 wrote on a CPU, each with the
logits of the model that their dequantize() gives; nf4_double has scales for more than one run of 256 scales.
"""

import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed
from transformers import LlamaConfig, Phi3Config

from benchmarks.quantized_weights import requantize
from kernels.linear import reference
from models.config.model_config import ModelConfig
from models.errors import ModelError
from models.parallel import TensorParallel
from models.quantization.bitsandbytes import Bnb4Bit, Bnb4BitLinear, BnbInt8
from models.quantization.linear_method import LinearPart
from models.weights.weights import Weights
from tests.support.models_harness import CPU
from tests.support.quantized_checkpoints import edit, load_model, logits_of
from tests.support.rank_group import run_ranks
from tests.support.reference import save_checkpoint
from tests.support.tensor_parallel_rank import PROMPT as RANKS_PROMPT
from tests.support.tensor_parallel_rank import run_rank
from tests.unit.models.quantization.test_fp8 import SHAPE

FOLDER = Path(__file__).parents[1] / "bitsandbytes_checkpoints"
PLAIN = FOLDER / "unquantized"
NF4 = Bnb4Bit("nf4", is_stored=True)
NF4_CONFIG = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
LAYER = "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize("name", ["nf4", "nf4_double", "fp4_as_bfloat16", "int8"])
def test_checkpoints_give_the_logits_of_the_weights_that_bitsandbytes_sees(name):
    expected = load_file(FOLDER / name / "logits.safetensors")["logits"]
    torch.testing.assert_close(logits_of(FOLDER / name), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "flag"), [("nf4", "bitsandbytes-nf4"), ("int8", "bitsandbytes-int8")])
def test_quantising_on_load_makes_what_bitsandbytes_stored(name, flag):
    assert torch.equal(logits_of(PLAIN, flag), logits_of(FOLDER / name))


def test_4bit_codes_and_scales_are_bitsandbytes_to_the_bit():
    plain, stored = (load_file(FOLDER / name / "model.safetensors") for name in ("unquantized", "nf4"))
    for name in [name for name in plain if name.endswith("_proj.weight")]:
        packed, scales = reference.quantize_nf4(plain[name])
        assert torch.equal(packed.flatten(), stored[name].flatten())
        assert torch.equal(scales.flatten(), stored[f"{name}.absmax"])
        assert torch.equal(torch.tensor(reference.NF4_TABLE), stored[f"{name}.quant_map"])


def test_8bit_integers_and_scales_are_bitsandbytes_to_the_bit():
    plain, stored = (load_file(FOLDER / name / "model.safetensors") for name in ("unquantized", "int8"))
    for name in [name for name in plain if name.endswith("_proj.weight")]:
        values, largest = reference.quantize_int8(plain[name])
        assert torch.equal(values, stored[name])
        assert torch.equal(largest, stored[name.replace("weight", "SCB")])


def test_zeros_stay_zeros():
    for quantize, dequantize in (
        (reference.quantize_int8, reference.dequantize_int8),
        (reference.quantize_nf4, lambda *w: reference.dequantize_4bit(*w[:2], torch.tensor(reference.NF4_TABLE), w[2])),
    ):
        assert not dequantize(*quantize(torch.zeros(2, 64)), torch.float32).any()


@pytest.mark.parametrize("name", ["nf4", "nf4_double", "int8"])
@pytest.mark.parametrize("dim", [0, 1])
def test_ranks_take_shares_of_codes_and_scales(name, dim):
    inner = 320 if name == "nf4_double" else 128
    part, shape = ("gate_proj", (inner, 64)) if dim == 0 else ("down_proj", (64, inner))
    w = Weights.from_folder(FOLDER / name, device=CPU, dtype=torch.float32) / "model.layers.0.mlp"
    method = BnbInt8(is_stored=True) if name == "int8" else Bnb4BitLinear(NF4)

    def dense(rank, size):
        params = method.load(w, [LinearPart(part, *shape, dim=dim, rank=rank, size=size)])
        if name == "int8":
            return reference.dequantize_int8(params.values, params.largest, torch.float32)
        return reference.dequantize_lut4(params, torch.float32)

    size = 5 if inner == 320 else 2
    assert torch.equal(torch.cat([dense(rank, size) for rank in range(size)], dim), dense(0, 1))


@pytest.mark.slow
def test_two_ranks_give_the_logits_of_one(tmp_path):
    save_checkpoint(tmp_path / "source", LlamaConfig(**SHAPE | {"intermediate_size": 256}))
    stores = {"int8": (as_int8, {"load_in_8bit": True}), "nf4": (as_nf4, NF4_CONFIG)}
    folders = [
        requantize(tmp_path / "source", tmp_path / name, store, {"quant_method": "bitsandbytes"} | config)
        for name, (store, config) in stores.items()
    ]
    run_ranks(run_rank, 2, tmp_path / "store", folders)
    for folder, rank in itertools.product(folders, range(2)):
        logits = torch.load(folder / f"logits-2-{rank}.pt")
        torch.testing.assert_close(logits, logits_of(folder, prompt=RANKS_PROMPT), atol=1e-4, rtol=0)


@pytest.mark.parametrize("flag", ["bitsandbytes-int8", "bitsandbytes-nf4"])
def test_merged_projections_of_a_checkpoint_are_read_as_bands(tmp_path, flag):
    save_checkpoint(tmp_path / "phi3", Phi3Config(**SHAPE, original_max_position_embeddings=64))
    store, config = (as_int8, {"load_in_8bit": True}) if flag.endswith("int8") else (as_nf4, NF4_CONFIG)
    folder = requantize(tmp_path / "phi3", tmp_path / "stored", store, {"quant_method": "bitsandbytes"} | config)
    assert torch.equal(logits_of(folder), logits_of(tmp_path / "phi3", flag))


def as_int8(_, weight):
    values, largest = reference.quantize_int8(weight)
    return {"weight": values, "SCB": largest}


def as_nf4(_, weight):
    packed, scales = reference.quantize_nf4(weight)
    state = json.dumps({"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)})
    return {
        "weight": packed.view(-1, 1),
        "weight.absmax": scales.flatten(),
        "weight.quant_map": torch.tensor(reference.NF4_TABLE),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(state.encode()), dtype=torch.uint8),
    }


def test_ranks_that_would_cut_blocks_are_refused():
    with pytest.raises(ModelError, match=r"self_attn\.o_proj: 2 ranks have 32 inputs each, .*only at multiples of 64"):
        load_model(FOLDER / "nf4", tp=TensorParallel(0, 2, distributed.GroupMember.NON_GROUP_MEMBER))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("nf4", {"weight.absmax": None}, r"down_proj\.weight\.absmax is missing .* is quantized"),
        ("nf4", {"weight.quant_map": None}, r"down_proj\.weight\.quant_map is missing"),
        ("nf4", {"weight.quant_state.bitsandbytes__nf4": None}, r"quant_state\.bitsandbytes__nf4 is missing"),
        ("nf4", {"weight.quant_state.bitsandbytes__nf4": b"{"}, r"quant_state\.bitsandbytes__nf4: malformed"),
        (
            "nf4",
            {
                "weight.quant_state.bitsandbytes__nf4": b'{"quant_type": "nf4", "blocksize": 128, "shape": [64, 128]}',
            },
            r"are \('nf4', 128, \[64, 128\]\), but config\.json requires \('nf4', 64, \[64, 128\]\)",
        ),
        (
            "nf4",
            {"weight": torch.zeros(8, 1, dtype=torch.uint8)},
            r"weight has shape \[8, 1\], .* requires \[4096, 1\]",
        ),
        ("nf4", {"weight": torch.zeros(4096, 1)}, r"down_proj\.weight is float32, but config\.json requires uint8"),
        ("nf4", {"weight.absmax": torch.zeros(3)}, r"absmax has shape \[3\], but config\.json requires \[128\]"),
        ("nf4_double", {"weight.nested_quant_map": None}, r"nested_quant_map is missing"),
        ("int8", {"SCB": None}, r"down_proj\.SCB is missing .* is quantized"),
        ("int8", {"weight": torch.zeros(64, 128)}, r"down_proj\.weight is float32, but config\.json requires int8"),
        ("int8", {"weight_format": torch.tensor(2, dtype=torch.uint8)}, r"weight_format is 2: only 0, row-major"),
    ],
)
def test_what_is_wrong_with_a_checkpoint_is_said(tmp_path, name, change, message):
    folder = shutil.copytree(FOLDER / name, tmp_path / name)

    def apply(tensors):
        for key, tensor in change.items():
            tensors.pop(f"{LAYER}.{key}")
            if tensor is not None:
                data = torch.tensor(list(tensor), dtype=torch.uint8) if isinstance(tensor, bytes) else tensor
                tensors[f"{LAYER}.{key}"] = data

    edit(folder, apply)
    with pytest.raises(ModelError, match=message):
        load_model(folder)


def test_a_matrix_whose_rows_are_not_whole_blocks_is_not_quantised_on_load(tmp_path):
    w = Weights.dummy(device=CPU, dtype=torch.float32)
    with pytest.raises(ModelError, match="x: its 96 inputs are not a multiple of the blocks of 64"):
        Bnb4BitLinear(Bnb4Bit("nf4", is_stored=False)).load(w, [LinearPart("x", 8, 96, dim=0, rank=0, size=1)])


def test_bytes_of_weights_are_counted_as_stored():
    config = ModelConfig.from_folder(PLAIN)
    shapes = [(64, 64), (32, 64), (32, 64), (64, 64), (128, 64), (128, 64), (64, 128)]
    expected = config.weight_bytes(torch.bfloat16) - 2 * sum(n * k for n, k in shapes)
    for n, k in shapes:
        w = Weights.dummy(device=CPU, dtype=torch.bfloat16)
        params = Bnb4BitLinear(Bnb4Bit("nf4", is_stored=False)).load(w, [LinearPart("x", n, k, 0, 0, 1)])
        expected += params.packed.nbytes + params.scales.nbytes
    assert config.quantized("bitsandbytes-nf4").weight_bytes(torch.bfloat16) == expected
