"""Checkpoints of packed experts, each beside the float32 checkpoint that it means, dequantised by others' code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from kernels.moe.storage import ExpertMatrix
from tests.support.checkpoints import make_config
from tests.support.reference import save_checkpoint

MXFP4_CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
}  # fmt: skip
# Only experts: quantised linear layers round activations too
FP8_CONFIG = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": [
        "lm_head", "self_attn", "mlp.gate", "mlp.shared_experts", "model.layers.0",
        "block_sparse_moe.gate", "block_sparse_moe.shared_experts",
    ],
}  # fmt: skip
BLOCK = 128


def num_bytes(matrices: Sequence[ExpertMatrix]) -> int:
    """The bytes of the tensors of packed matrices, without the table of 32 bytes that codes in planes look up."""
    tensors = [
        value
        for matrix in matrices
        for name, value in vars(matrix).items()
        if torch.is_tensor(value) and name != "table"
    ]
    return sum(tensor.nbytes for tensor in tensors)


def save_mxfp4(dense: Path, packed: Path) -> None:
    """Save gpt-oss as published, and what it means in the unquantised layout."""
    config = make_config("gpt_oss")
    config.hidden_size, config.intermediate_size = 96, 64
    save_checkpoint(dense, config)
    tensors = load_file(dense / "model.safetensors")
    stored = dict(tensors)
    generator = torch.Generator().manual_seed(1)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, inputs, outputs = tensors[name].shape
        shape = (num_experts, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(121, 124, shape, dtype=torch.uint8, generator=generator)
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, scales
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
        del stored[name]
    save_file(tensors, dense / "model.safetensors")
    _save_beside(dense, packed, stored, MXFP4_CONFIG)


def save_fp8_blocks(dense: Path, packed: Path, *, kind: str = "qwen3_moe", width: int = 144) -> None:
    """Save experts in e4m3 with a scale per block, 0.5 to 2 times the weights' own, and what they mean."""
    config = make_config(kind)
    config.hidden_size = 160
    setattr(config, "intermediate_size" if kind == "minimax_m2" else "moe_intermediate_size", width)
    save_checkpoint(dense, config)
    tensors = load_file(dense / "model.safetensors")
    stored = dict(tensors)
    generator = torch.Generator().manual_seed(1)
    for name in [name for name in tensors if ".experts." in name and not name.startswith("model.layers.0.")]:
        values = tensors[name].to(torch.float8_e4m3fn)
        shape = [-(-size // BLOCK) for size in values.shape]
        scales = 0.5 + 1.5 * torch.rand(shape, generator=generator)
        stored[name], stored[f"{name}_scale_inv"] = values, scales
        wide = scales.repeat_interleave(BLOCK, 0)[: values.shape[0]].repeat_interleave(BLOCK, 1)[:, : values.shape[1]]
        tensors[name] = values.float() * wide
    save_file(tensors, dense / "model.safetensors")
    _save_beside(dense, packed, stored, FP8_CONFIG)


def _save_beside(dense: Path, packed: Path, stored: dict[str, torch.Tensor], config: dict[str, object]) -> None:
    shutil.copytree(dense, packed)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, packed / "model.safetensors")
    raw = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))
