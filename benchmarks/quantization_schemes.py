"""SCHEMES: every way to quantise a model, as measured by benchmarks/quantization.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Candidate:
    """One way to quantise a model: the flag's value, or a checkpoint's quantization_config."""

    flag: str = "auto"
    section: Mapping[str, Any] | None = None


def _float8(weights: str, activations: str) -> dict[str, Any]:
    kind = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": kind | {"strategy": weights},
        "input_activations": kind | {"strategy": activations, "dynamic": activations == "token"},
    }
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}


def _integers(num_bits: int, group_size: int | None) -> dict[str, Any]:
    kind = {"num_bits": num_bits, "type": "int", "symmetric": True, "group_size": group_size}
    weights = kind | {"strategy": "channel" if group_size is None else "group"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


def _float4(kind: str, group_size: int) -> dict[str, Any]:
    strategy = "tensor_group" if kind == "nvfp4" else "group"
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": strategy, "group_size": group_size}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": f"{kind}-pack-quantized", "config_groups": groups}


def _w8a8() -> dict[str, Any]:
    kind = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": kind | {"strategy": "channel"},
        "input_activations": kind | {"strategy": "token", "dynamic": True},
    }
    return {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0": group}}


SCHEMES: dict[str, Candidate] = {
    "bf16": Candidate("none"),
    "fp8": Candidate("fp8"),
    "fp8-static": Candidate(section=_float8("tensor", "tensor")),
    "fp8-blocks": Candidate(section={"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "nf4": Candidate("bitsandbytes-nf4"),
    "int8": Candidate("bitsandbytes-int8"),
    "awq": Candidate(section={"quant_method": "awq", "bits": 4, "group_size": 128}),
    "gptq-8bit": Candidate(section={"quant_method": "gptq", "bits": 8, "group_size": 128}),
    "packed-32": Candidate(section=_integers(4, 32)),
    "packed-8bit": Candidate(section=_integers(8, None)),
    "w8a8": Candidate(section=_w8a8()),
    "mxfp4": Candidate(section=_float4("mxfp4", 32)),
    "nvfp4": Candidate(section=_float4("nvfp4", 16)),
}
