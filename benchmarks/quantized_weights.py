"""Writes trained weights in the published forms of quantised checkpoints, rounded to nearest.

The packers of integers are written from the formats' definitions, value by value, and share no code with the readers,
so that tests can check the readers against them. `store_of` selects the form for a quantization_config.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from kernels.e2m1 import quantize_mxfp4, quantize_nvfp4
from kernels.linear.reference import FP8_MAX, quantize_blocks, quantize_rows
from kernels.linear.w8a8 import quantize_rows_int8

# A projection's name without ".weight", and its matrix → its tensors, by their names below the projection
Store = Callable[[str, torch.Tensor], Mapping[str, torch.Tensor]]
# A projection's name → the largest magnitude of its input
InputAmax = Callable[[str], float]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
STRAIGHT = tuple(range(8))
_MIN_SCALE = 2.0**-24  # the smallest fp16 number: scale of groups of zeros


def requantize(source: Path, target: Path, store: Store, config: Mapping[str, Any] | None) -> Path:
    """Copy a checkpoint into one file, its projections converted by `store`, with this quantization_config."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors", "*.safetensors.index.json"))
    tensors = {
        name: tensor for path in sorted(source.glob("*.safetensors")) for name, tensor in load_file(path).items()
    }
    for name in [name for name in tensors if name.endswith("_proj.weight") or ".in_proj_" in name]:
        layer = name.removesuffix(".weight")
        stored = store(layer, tensors.pop(name))
        tensors |= {f"{layer}.{key}": value.contiguous() for key, value in stored.items()}
    save_file(tensors, target / "model.safetensors")
    raw = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))
    return target


def store_of(section: Mapping[str, Any], input_amax: InputAmax) -> Store:
    """Return the function that stores a matrix in this quantization_config's form; see quantization_schemes.SCHEMES."""
    method = section["quant_method"]
    if method == "fp8":
        return lambda _, weight: by_block(weight, *section["weight_block_size"])
    if method in ("awq", "gptq"):
        tensors_of = {"awq": awq_tensors, "gptq": gptq_tensors}[method]
        sizes = {"bits": section["bits"], "group_size": section["group_size"]}
        return lambda _, weight: tensors_of(quantize(weight, is_symmetric=False, **sizes))
    weights = section["config_groups"]["group_0"]["weights"]
    by_format = {"mxfp4-pack-quantized": by_mxfp4, "nvfp4-pack-quantized": by_nvfp4, "int-quantized": by_int8}
    if section["format"] in by_format:
        return lambda _, weight: by_format[section["format"]](weight)
    if weights["type"] == "float":
        return lambda name, weight: by_tensor(weight) | {"input_scale": torch.tensor(input_amax(name) / FP8_MAX)}
    sizes = {"bits": weights["num_bits"], "group_size": weights["group_size"] or -1}
    return lambda _, weight: packed_tensors(quantize(weight, is_symmetric=True, **sizes))


def by_tensor(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return 8-bit floats with one scale."""
    values, scales = quantize_rows(weight.reshape(1, -1))
    return {"weight": values.view(weight.shape), "weight_scale": scales}


def by_block(weight: torch.Tensor, rows: int = 128, columns: int = 128) -> dict[str, torch.Tensor]:
    """Return 8-bit floats with a scale per block."""
    values, scales = quantize_blocks(weight, rows, columns)
    return {"weight": values, "weight_scale_inv": scales}


def by_mxfp4(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return 4-bit floats with a power of two per 32 inputs, as llm-compressor writes them."""
    packed, scales = quantize_mxfp4(weight)
    return {"weight_packed": packed, "weight_scale": scales}


def by_nvfp4(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return 4-bit floats with an 8-bit one per 16 inputs and the inverse factor, as llm-compressor writes them."""
    packed, scales, factor = quantize_nvfp4(weight)
    return {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": factor.reciprocal()[None]}


def by_int8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return 8-bit integers with a scale per output."""
    values, scales = quantize_rows_int8(weight)
    return {"weight": values, "weight_scale": scales[:, None]}


@dataclass(frozen=True)
class Integers:
    """A quantised [N, K] matrix: (codes - zeros[group_of]) * scales[group_of]."""

    codes: np.ndarray  # [N, K]
    scales: torch.Tensor  # [G, N] fp16
    zeros: np.ndarray  # [G, N]
    group_of: np.ndarray  # [K]
    bits: int

    def dense(self) -> torch.Tensor:
        """Return [N, K] fp32, the dequantised values."""
        scales = self.scales.float().numpy()[self.group_of].T
        return torch.from_numpy((self.codes - self.zeros[self.group_of].T) * scales)


def quantize(
    weight: torch.Tensor, *, bits: int, group_size: int, is_symmetric: bool, order_seed: int | None = None
) -> Integers:
    """Round to nearest. group_size -1: one group. order_seed: inputs belong to groups in a random order."""
    values = weight.float().numpy()
    num_inputs, top = values.shape[1], (1 << bits) - 1
    size = num_inputs if group_size == -1 else group_size
    group_of = np.arange(num_inputs) // size
    if order_seed is not None:
        group_of = np.random.default_rng(order_seed).permutation(group_of)
    group_scales, group_zeros = [], []
    for group in range(num_inputs // size):
        members = values[:, group_of == group]
        low, high = members.min(1).clip(max=0), members.max(1).clip(min=0)
        if is_symmetric:
            scale = 2 * np.maximum(-low, high) / top
            zero = np.full(len(scale), (top + 1) // 2)
        else:
            scale = (high - low) / top
            zero = np.rint(-low / scale.clip(min=_MIN_SCALE)).clip(0, top).astype(int)
        group_scales.append(scale.clip(min=_MIN_SCALE).astype(np.float16))
        group_zeros.append(zero)
    scales, zeros = np.stack(group_scales), np.stack(group_zeros)
    codes = np.rint(values / scales[group_of].T.astype(np.float32) + zeros[group_of].T).clip(0, top).astype(int)
    return Integers(codes, torch.from_numpy(scales), zeros, group_of, bits)


def pack(values: np.ndarray, bits: int, order: tuple[int, ...] = STRAIGHT) -> torch.Tensor:
    """[A, B] → [A, B / per word] int32: the i-th field of a word, from its lowest bits, is its value order[i]."""
    per_word = 32 // bits
    words = np.zeros((values.shape[0], -(-values.shape[1] // per_word)), dtype=np.uint64)
    for column in range(values.shape[1]):
        field = order.index(column % per_word)
        words[:, column // per_word] |= values[:, column].astype(np.uint64) << np.uint64(bits * field)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


def awq_tensors(matrix: Integers) -> dict[str, torch.Tensor]:
    """Return a layer's tensors as AutoAWQ writes them."""
    return {
        "qweight": pack(matrix.codes.T, 4, AWQ_ORDER),
        "qzeros": pack(matrix.zeros, 4, AWQ_ORDER),
        "scales": matrix.scales,
    }


def gptq_tensors(matrix: Integers, *, is_v2: bool = False) -> dict[str, torch.Tensor]:
    """Return a layer's tensors as AutoGPTQ writes them, zero points minus 1, or GPTQModel in format 2."""
    zeros = pack(matrix.zeros, matrix.bits)
    if not is_v2:
        ones = sum(1 << shift for shift in range(0, 32, matrix.bits))
        zeros = torch.from_numpy(zeros.numpy() - np.int32(ones))
    return {
        "qweight": pack(matrix.codes, matrix.bits).T.contiguous(),
        "qzeros": zeros,
        "scales": matrix.scales,
        "g_idx": torch.from_numpy(matrix.group_of.astype(np.int32)),
    }


def packed_tensors(matrix: Integers) -> dict[str, torch.Tensor]:
    """Return a symmetric pack-quantized layer's tensors as llm-compressor writes them."""
    return {
        "weight_packed": pack(matrix.codes, matrix.bits),
        "weight_scale": matrix.scales.T.contiguous(),
        "weight_shape": torch.tensor(matrix.codes.shape),
    }
