"""Checkpoints of integers in the published formats, each beside the dense checkpoint that it means exactly.

The packers (benchmarks/quantized_weights.py) are written from the formats' definitions, value by value, and share
nothing with what reads them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from benchmarks.quantized_weights import Integers, awq_tensors, gptq_tensors, pack, packed_tensors, quantize

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj")


def gptq_v2_tensors(matrix: Integers) -> dict[str, torch.Tensor]:
    return gptq_tensors(matrix, is_v2=True)


def gptq_tensors_with_biases(matrix: Integers) -> dict[str, torch.Tensor]:
    return gptq_tensors(matrix) | {"bias": torch.zeros(matrix.codes.shape[0], dtype=torch.float16)}


def asymmetric_packed_tensors(matrix: Integers) -> dict[str, torch.Tensor]:
    zeros = pack(matrix.zeros, matrix.bits).T.contiguous()
    return packed_tensors(matrix) | {"weight_zero_point": zeros}


def ordered_packed_tensors(matrix: Integers) -> dict[str, torch.Tensor]:
    return packed_tensors(matrix) | {"weight_g_idx": torch.from_numpy(matrix.group_of.astype(np.int32))}


def packed_config(**weights: object) -> dict[str, object]:
    """quantization_config of a compressed-tensors checkpoint whose layers are all alike."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16} | weights
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


@dataclass(frozen=True)
class IntFormat:
    """One kind of checkpoint."""

    config: dict[str, object]  # its quantization_config
    tensors: Callable[[Integers], dict[str, torch.Tensor]]  # by what they are called below the layer's name
    is_symmetric: bool = False
    group_size: int = 16
    bits: int = 4
    is_ordered: bool = False  # inputs belong to groups in an order of their own, one for each layer's input
    has_own_orders: bool = False  # and one for each projection, too
    skipped: tuple[str, ...] = ()  # projections that stay dense


def gptq_config(**fields: object) -> dict[str, object]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": False} | fields


def auto_round_config(**fields: object) -> dict[str, object]:
    common = {"quant_method": "auto-round", "bits": 4, "group_size": 16, "sym": False, "data_type": "int"}
    return common | {"packing_format": "auto_round:auto_gptq", "block_name_to_quantize": "model.layers"} | fields


def auto_round_tensors(matrix: Integers) -> dict[str, torch.Tensor]:
    tensors = gptq_tensors(matrix)
    del tensors["g_idx"]
    return tensors


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}
FORMATS = {
    "awq": IntFormat(AWQ, awq_tensors),
    "awq_channel": IntFormat(AWQ | {"group_size": -1}, awq_tensors, group_size=-1),
    "awq_skips": IntFormat(AWQ | {"modules_to_not_convert": ["down_proj"]}, awq_tensors, skipped=("down_proj",)),
    "gptq": IntFormat(gptq_config(), gptq_tensors),
    "gptq_symmetric": IntFormat(gptq_config(sym=True), gptq_tensors_with_biases, is_symmetric=True),
    "gptq_channel": IntFormat(gptq_config(group_size=-1), gptq_tensors, group_size=-1),
    "gptq_8bit": IntFormat(gptq_config(bits=8), gptq_tensors, bits=8),
    "gptq_v2": IntFormat(gptq_config(checkpoint_format="gptq_v2"), gptq_v2_tensors),
    "gptq_desc_act": IntFormat(gptq_config(desc_act=True), gptq_tensors, is_ordered=True),
    "gptq_own_orders": IntFormat(gptq_config(desc_act=True), gptq_tensors, is_ordered=True, has_own_orders=True),
    "gptq_dynamic": IntFormat(
        gptq_config(dynamic={"-:.*down_proj": {}}), gptq_tensors, skipped=("down_proj",)
    ),
    "auto_round": IntFormat(
        auto_round_config(extra_config={r".*\.down_proj": {"bits": 16, "data_type": "float"}}),
        auto_round_tensors,
        skipped=("down_proj",),
    ),
    "auto_round_awq": IntFormat(auto_round_config(packing_format="auto_round:auto_awq"), awq_tensors),
    "packed": IntFormat(packed_config(), packed_tensors, is_symmetric=True),
    "packed_asymmetric": IntFormat(packed_config(symmetric=False), asymmetric_packed_tensors),
    "packed_channel": IntFormat(
        packed_config(strategy="channel", group_size=None), packed_tensors, is_symmetric=True, group_size=-1
    ),
    "packed_8bit": IntFormat(
        packed_config(num_bits=8, symmetric=False), asymmetric_packed_tensors, bits=8
    ),
    "packed_ordered": IntFormat(
        packed_config(actorder="group"), ordered_packed_tensors, is_symmetric=True, is_ordered=True
    ),
    "packed_ignore": IntFormat(
        packed_config() | {"ignore": ["lm_head", r"re:model\.layers\.\d+\.mlp\.(gate|up)_proj"]},
        packed_tensors,
        is_symmetric=True,
        skipped=("gate_proj", "up_proj"),
    ),
}  # fmt: skip


def with_groups_of(size: int, kind: IntFormat) -> IntFormat:
    """The same kind with smaller groups, if it has groups."""
    if kind.group_size == -1:
        return kind
    config = json.loads(json.dumps(kind.config))
    groups = config.get("config_groups")
    (config if groups is None else groups["group_0"]["weights"])["group_size"] = size
    return replace(kind, group_size=size, config=config)


def save_quantized(dense: Path, folder: Path, kind: IntFormat) -> None:
    """Quantise the checkpoint `dense` into `folder`, and overwrite its weights with what the quantised ones mean."""
    stored, tensors = load_file(dense / "model.safetensors"), {}
    for index, (name, tensor) in enumerate(sorted(stored.items())):
        layer, _, suffix = name.rpartition(".")
        projection = layer.rpartition(".")[2]
        if suffix != "weight" or projection not in PROJECTIONS or projection in kind.skipped:
            tensors[name] = tensor
            continue
        matrix = quantize(
            tensor,
            bits=kind.bits,
            group_size=kind.group_size,
            is_symmetric=kind.is_symmetric,
            order_seed=(index if kind.has_own_orders else 5) if kind.is_ordered else None,
        )
        tensors |= {f"{layer}.{key}": value for key, value in kind.tensors(matrix).items()}
        stored[name] = matrix.dense()
    save_file(stored, dense / "model.safetensors", metadata={"format": "pt"})
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    shutil.copy(dense / "config.json", folder / "config.json")
    edit_config(folder, quantization_config=kind.config)


def edit_config(folder: Path, **fields: object) -> None:
    """Change fields of a folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
