"""Checkpoints of single experts in 8- and 4-bit floats, NF4 and FP4, each beside the float32 one that it means."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from kernels.linear.reference import NF4_TABLE
from tests.support.checkpoints import make_config
from tests.support.reference import save_checkpoint

# Only experts are quantised, and not those of layer 0: quantised linear layers may round activations, too
IGNORED = ["lm_head", "self_attn", "mlp.gate", "mlp.shared_experts", "block_sparse_moe.gate", "model.layers.0"]
_FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
_FLOAT4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
Stored = tuple[dict[str, torch.Tensor], torch.Tensor]  # by suffix of the matrix's name; what they mean, float32


def compressed(format_: str, weights: dict[str, Any], activations: dict[str, Any] | None) -> dict[str, Any]:
    """A quantization_config of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    config = {"quant_method": "compressed-tensors", "format": format_, "quantization_status": "compressed"}
    return config | {"config_groups": {"group_0": group}, "ignore": IGNORED}


FP8_ROWS = compressed(
    "float-quantized", _FLOAT8 | {"strategy": "channel"}, _FLOAT8 | {"strategy": "token", "dynamic": True}
)
FP8_TENSOR = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": IGNORED}
NVFP4 = compressed("nvfp4-pack-quantized", _FLOAT4, _FLOAT4 | {"dynamic": "local"})
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": [f"*{name}*" for name in IGNORED]}
MXFP4 = compressed("mxfp4-pack-quantized", _FLOAT4 | {"strategy": "group", "group_size": 32}, None)
NF4 = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "llm_int8_skip_modules": IGNORED,
}


def _fp8_rows(weight: torch.Tensor, generator: torch.Generator) -> Stored:
    values = weight.to(torch.float8_e4m3fn)
    scales = (0.5 + torch.rand(weight.shape[0], 1, generator=generator)).bfloat16()
    return {".weight": values, ".weight_scale": scales}, values.float() * scales.float()


def _fp8_tensor(weight: torch.Tensor, generator: torch.Generator) -> Stored:
    values, scale = weight.to(torch.float8_e4m3fn), 0.5 + torch.rand((), generator=generator)
    tensors = {".weight": values, ".weight_scale": scale, ".input_scale": torch.tensor(0.01)}
    return tensors, values.float() * scale


def _random_e2m1(n: int, k: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of random codes, and their values, by the bits: a sign, two of exponent, one of mantissa."""
    codes = torch.randint(0, 16, (n, k), generator=generator)
    exponent, mantissa = (codes >> 1) & 3, (codes & 1) / 2
    sizes = torch.where(exponent == 0, mantissa, (1 + mantissa) * 2.0 ** (exponent - 1))
    return (codes[:, 0::2] | (codes[:, 1::2] << 4)).to(torch.uint8), torch.where(codes >= 8, -sizes, sizes)


def _mxfp4(weight: torch.Tensor, generator: torch.Generator) -> Stored:
    n, k = weight.shape
    packed, values = _random_e2m1(n, k, generator)
    exponents = torch.randint(-6, -3, (n, k // 32), generator=generator)
    tensors = {".weight_packed": packed, ".weight_scale": (exponents + 127).to(torch.uint8)}
    return tensors, values * (2.0**exponents).repeat_interleave(32, 1)


def _nvfp4(weight: torch.Tensor, generator: torch.Generator) -> Stored:
    n, k = weight.shape
    packed, values = _random_e2m1(n, k, generator)
    scales = (200 * (0.5 + torch.rand(n, k // 16, generator=generator))).to(torch.float8_e4m3fn)
    global_scale = 3000 * (0.5 + torch.rand(1, generator=generator))
    meant = values * (scales.float() / global_scale).repeat_interleave(16, 1)
    tensors = {
        ".weight_packed": packed,
        ".weight_scale": scales,
        ".weight_global_scale": global_scale,
        ".input_global_scale": torch.tensor([7.0]),
    }
    return tensors, meant


def _modelopt(weight: torch.Tensor, generator: torch.Generator) -> Stored:
    """NVFP4 under ModelOpt's names; the factor itself, not its inverse."""
    tensors, meant = _nvfp4(weight, generator)
    stored = {".weight": tensors[".weight_packed"], ".weight_scale": tensors[".weight_scale"]}
    stored |= {".weight_scale_2": 1 / tensors[".weight_global_scale"][0], ".input_scale": torch.tensor(0.01)}
    return stored, meant


def _nf4(weight: torch.Tensor, generator: torch.Generator) -> Stored:
    return _lut4("nf4", torch.tensor(NF4_TABLE), weight, generator)


def _fp4(weight: torch.Tensor, generator: torch.Generator) -> Stored:
    sizes = torch.tensor([0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0]) / 12
    return _lut4("fp4", torch.cat((sizes, -sizes)), weight, generator)


def _lut4(kind: str, table: torch.Tensor, weight: torch.Tensor, generator: torch.Generator) -> Stored:
    """With quantised scales, as bnb_4bit_use_double_quant makes them."""
    n, k = weight.shape
    codes = torch.randint(0, 16, (n * k,), generator=generator)
    indices = torch.randint(0, 256, (n * k // 64,), generator=generator).to(torch.uint8)
    nested_map = torch.linspace(-1.0, 1.0, 256)
    nested = 0.1 + 0.1 * torch.rand(-(-indices.numel() // 256), generator=generator)
    scales = nested_map[indices.int()] * nested[torch.arange(indices.numel()) // 256] + 0.4
    state = {"quant_type": kind, "blocksize": 64, "shape": [n, k], "dtype": "bfloat16"}
    state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.4}
    tensors = {
        ".weight": ((codes[0::2] << 4) | codes[1::2]).to(torch.uint8)[:, None],
        ".weight.absmax": indices,
        ".weight.quant_map": table,
        ".weight.nested_absmax": nested,
        ".weight.nested_quant_map": nested_map,
        f".weight.quant_state.bitsandbytes__{kind}": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    return tensors, (table[codes] * scales.repeat_interleave(64)).view(n, k)


# scheme → quantization_config, what stores a matrix, hidden size and size of an expert
SCHEMES: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor, torch.Generator], Stored], int, int]] = {
    "fp8_rows": (FP8_ROWS, _fp8_rows, 56, 40),
    "fp8_tensor": (FP8_TENSOR, _fp8_tensor, 56, 40),
    "nvfp4": (NVFP4, _nvfp4, 80, 48),
    "modelopt": (MODELOPT, _modelopt, 80, 48),
    "mxfp4": (MXFP4, _mxfp4, 96, 64),
    "nf4": (NF4, _nf4, 64, 192),
    "fp4": (NF4 | {"bnb_4bit_quant_type": "fp4"}, _fp4, 64, 64),
}


def save_float_experts(
    dense: Path, packed: Path, *, scheme: str, kind: str = "qwen3_moe", width: int | None = None
) -> None:
    """Save a checkpoint, and what it means. width: of an expert."""
    section, store, hidden_size, default_width = SCHEMES[scheme]
    config = make_config(kind)
    config.hidden_size = hidden_size
    name = "intermediate_size" if kind == "mixtral" else "moe_intermediate_size"
    setattr(config, name, width or default_width)
    save_checkpoint(dense, config)
    tensors = load_file(dense / "model.safetensors")
    stored = dict(tensors)
    generator = torch.Generator().manual_seed(1)
    for name in [name for name in tensors if ".experts." in name and not name.startswith("model.layers.0.")]:
        found, meant = store(tensors[name], generator)
        del stored[name]
        stored |= {name.removesuffix(".weight") + suffix: tensor.contiguous() for suffix, tensor in found.items()}
        tensors[name] = meant.contiguous()
    save_file(tensors, dense / "model.safetensors")
    shutil.copytree(dense, packed)
    save_file(stored, packed / "model.safetensors")
    raw = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(raw | {"quantization_config": section}))
