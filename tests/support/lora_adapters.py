"""Adapter folders as PEFT writes them, made by hand, and the checkpoints that they give when they are merged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
MERGED = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")  # Phi-3's

# Of layers of the gated delta rule: Qwen3-Next's, Qwen3.5's, OLMo-Hybrid's
DELTA_NET = tuple(
    f"linear_attn.{name}"
    for name in (
        *("in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
        *("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj", "o_proj"),
    )
)
# Of Kimi-Linear's recurrent and latent attention
KIMI = (
    *(f"self_attn.{name}_proj" for name in ("b", "f_a", "f_b", "g_a", "g_b")),
    *("self_attn.q_a_proj", "self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa"),
)
# Of LFM2, Granite 4, Bamba, Falcon-H1 and Llama 4, and of the only block of Nemotron-H's layers
HYBRID = (
    *("conv.in_proj", "conv.out_proj", "self_attn.out_proj", "mamba.in_proj", "mamba.out_proj"),
    *("feed_forward.w1", "feed_forward.w2", "feed_forward.w3"),
    *("feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj"),
    *(f"feed_forward.shared_expert.{name}_proj" for name in ("gate", "up", "down")),
    *("shared_mlp.input_linear", "shared_mlp.output_linear"),
    *(f"mixer.{name}_proj" for name in ("in", "out", "q", "k", "v", "o", "up", "down", "fc1_latent", "fc2_latent")),
    *("mixer.shared_experts.up_proj", "mixer.shared_experts.down_proj"),
)


def modules(names: Sequence[str], layers: Sequence[int] = (0, 1, 2), *, root: str = "model") -> list[str]:
    """The same modules in each layer. root: where a checkpoint has its layers."""
    return [f"{root}.layers.{layer}.{name}" for layer in layers for name in names]


def adapter_config(**changes: Any) -> dict[str, Any]:
    """What PEFT writes, as far as it matters, and some of what does not."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "somebody/some-model",
        "r": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.1,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "layers_to_transform": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "megatron_core": "megatron.core",
        "qalora_group_size": 16,
    }
    return config | changes


def make_tensors(base: Path, ranks: Mapping[str, int], *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random A and B for each module of a checkpoint; ranks: module → rank."""
    weights = load_file(base / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, rank in ranks.items():
        out_features, in_features = weights[f"{module}.weight"].shape
        a, b = (
            torch.randn(rank, in_features, generator=generator),
            torch.randn(out_features, rank, generator=generator),
        )
        tensors[f"base_model.model.{module}.lora_A.weight"] = a * in_features**-0.5
        tensors[f"base_model.model.{module}.lora_B.weight"] = b * 0.1
    return tensors


def save_adapter(folder: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> Path:
    """Write both files; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def save_merged(
    folder: Path, base: Path, tensors: Mapping[str, torch.Tensor], scales: Mapping[str, float] | float
) -> Path:
    """The base checkpoint with scale * B @ A added to each module; returns the folder."""
    shutil.copytree(base, folder)
    weights = load_file(base / "model.safetensors")
    for name, a in tensors.items():
        if ".lora_A." in name:
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            scale = scales if isinstance(scales, float) else scales[module]
            added = scale * tensors[name.replace("lora_A", "lora_B")] @ a
            weights[f"{module}.weight"] = weights[f"{module}.weight"].float() + added
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
