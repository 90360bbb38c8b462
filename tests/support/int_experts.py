"""Checkpoints whose experts and other projections are integers, each beside the float32 checkpoint that it means."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file

from benchmarks.quantized_weights import awq_tensors, gptq_tensors, packed_tensors, quantize
from tests.support.checkpoints import make_config
from tests.support.int_checkpoints import (
    AWQ,
    IntFormat,
    asymmetric_packed_tensors,
    edit_config,
    gptq_config,
    gptq_tensors_with_biases,
    ordered_packed_tensors,
    packed_config,
)
from tests.support.reference import save_checkpoint

FORMATS = {
    "awq": IntFormat(AWQ | {"group_size": 32}, awq_tensors, group_size=32),
    "awq_channel": IntFormat(AWQ | {"group_size": -1}, awq_tensors, group_size=-1),
    "gptq": IntFormat(gptq_config(group_size=32), gptq_tensors, group_size=32),
    "gptq_symmetric": IntFormat(
        gptq_config(group_size=32, sym=True), gptq_tensors_with_biases, is_symmetric=True, group_size=32
    ),
    "gptq_8bit": IntFormat(gptq_config(bits=8, group_size=32), gptq_tensors, bits=8, group_size=32),
    # one group has no order
    "gptq_channel_desc_act": IntFormat(gptq_config(group_size=-1, desc_act=True), gptq_tensors, group_size=-1),
    "gptq_desc_act": IntFormat(gptq_config(desc_act=True), gptq_tensors, is_ordered=True),
    "packed": IntFormat(packed_config(group_size=32), packed_tensors, is_symmetric=True, group_size=32),
    "packed_asymmetric": IntFormat(
        packed_config(symmetric=False, group_size=32), asymmetric_packed_tensors, group_size=32
    ),
    "packed_channel": IntFormat(
        packed_config(strategy="channel", group_size=None), packed_tensors, is_symmetric=True, group_size=-1
    ),
    "packed_8bit": IntFormat(
        packed_config(num_bits=8, strategy="channel", group_size=None), packed_tensors,
        bits=8, is_symmetric=True, group_size=-1,
    ),
    "packed_ordered": IntFormat(
        packed_config(actorder="group"), ordered_packed_tensors, is_symmetric=True, is_ordered=True
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A kind of tests/support/checkpoints.py with sizes that hold whole groups."""

    kind: str
    sizes: dict[str, int]


FAMILIES = {
    "qwen3_moe": Family("qwen3_moe", {"moe_intermediate_size": 96, "head_dim": 24}),
    "mixtral": Family("mixtral", {"intermediate_size": 96}),
    "glm4_moe": Family("glm4_moe", {"moe_intermediate_size": 32}),
    "deepseek_v3": Family(
        "deepseek_v3", {"moe_intermediate_size": 64, "kv_lora_rank": 32, "q_lora_rank": 32, "v_head_dim": 8}
    ),
    "qwen3_next": Family("qwen3_next", {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}),
    "qwen3_5_moe": Family("qwen3_5_moe", {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}),
}


def save_int_experts(
    dense: Path,
    packed: Path,
    form: IntFormat,
    *,
    family: str = "qwen3_moe",
    quantizes_attention: bool = True,
    sizes: dict[str, int] | None = None,
) -> None:
    """Save a model in integers in all experts, and in all other projections that fill whole groups and words.

    sizes: fields of the config instead of the family's own.
    """
    chosen = FAMILIES[family]
    config = make_config(chosen.kind)
    for name, size in ({"hidden_size": 64} | chosen.sizes | (sizes or {})).items():
        setattr(config, name, size)
    save_checkpoint(dense, config)
    stored, tensors, skipped = load_file(dense / "model.safetensors"), {}, ["lm_head"]
    for index, (name, tensor) in enumerate(sorted(stored.items())):
        layer, _, suffix = name.rpartition(".")
        if suffix != "weight" or not _is_quantized(layer, tensor.shape, form, quantizes_attention=quantizes_attention):
            tensors[name] = tensor
            skipped += [layer] if suffix == "weight" else []
            continue
        matrix = quantize(
            tensor, bits=form.bits, group_size=form.group_size, is_symmetric=form.is_symmetric,
            order_seed=index if form.is_ordered else None,
        )  # fmt: skip
        tensors |= {f"{layer}.{key}": value.contiguous() for key, value in form.tensors(matrix).items()}
        stored[name] = matrix.dense()
    save_file(stored, dense / "model.safetensors", metadata={"format": "pt"})
    packed.mkdir()
    save_file(tensors, packed / "model.safetensors")
    (packed / "config.json").write_text((dense / "config.json").read_text())
    names = {"awq": "modules_to_not_convert", "gptq": "modules_to_not_convert", "compressed-tensors": "ignore"}
    edit_config(packed, quantization_config=form.config | {names[form.config["quant_method"]]: skipped})


def _is_quantized(layer: str, shape: tuple[int, ...], form: IntFormat, *, quantizes_attention: bool) -> bool:
    if ".experts." in layer:
        return True
    is_projection = layer.startswith("model.layers.") and layer.endswith(("proj", "proj_with_mqa"))
    if not is_projection or not (quantizes_attention or ".mlp." in layer):
        return False
    group = max(form.group_size, 8)
    return shape[0] % 8 == 0 and shape[1] % group == 0
