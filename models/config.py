"""ModelConfig: a Hugging Face config.json with its names normalised once. Nothing else reads config.json.

Missing fields take the default of the architecture's transformers class, where it has one that every checkpoint means.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kernels.attention.base import AttentionSpec
from models.errors import ModelError
from models.registry import Architecture, find_architecture
from models.rope_config import RopeConfig, parse_rope

DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder-only transformer, fixed for the life of the process."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    has_qkv_bias: bool
    has_output_bias: bool  # the attention's output projection
    has_mlp_bias: bool
    has_qk_norm: bool  # RMS norm of each query and key head before RoPE
    sliding_windows: tuple[int | None, ...]  # per layer, in tokens; None: the whole context
    rope: RopeConfig
    dtype: str  # of the checkpoint: one of DTYPES
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read folder/config.json. Raises ModelError naming the folder and the field."""
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise ModelError(f"{folder}: no config.json, so this is not a model folder")
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ModelError(f"{path}: malformed JSON: {error}") from error
        return cls.from_json(raw, where=str(path))

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], *, where: str = "config.json") -> ModelConfig:
        """Normalise a parsed config.json. where: names it in errors. Raises ModelError."""
        if not isinstance(raw, Mapping):
            raise ModelError(f"{where}: expected a JSON object, found {type(raw).__name__}")
        architecture_name = _architecture_name(raw, where)
        architecture = find_architecture(architecture_name)
        _refuse_unsupported(raw, where)
        hidden_size = _count(raw, "hidden_size", where)
        num_heads = _count(raw, "num_attention_heads", where)
        num_kv_heads = _count(raw, "num_key_value_heads", where, default=num_heads)
        if num_heads % num_kv_heads != 0:
            raise ModelError(
                f"{where}: num_attention_heads {num_heads} is not divisible by num_key_value_heads {num_kv_heads}"
            )
        if raw.get("head_dim") is None and hidden_size % num_heads != 0:
            raise ModelError(
                f"{where}: hidden_size {hidden_size} is not divisible by num_attention_heads {num_heads},"
                " and head_dim is not given"
            )
        head_dim = _count(raw, "head_dim", where, default=hidden_size // num_heads)
        if head_dim % 2 != 0:
            raise ModelError(f"{where}: head_dim {head_dim} is odd, and RoPE rotates pairs")
        num_layers = _count(raw, "num_hidden_layers", where)
        max_position_embeddings = _count(raw, "max_position_embeddings", where)
        attention_bias = bool(raw.get("attention_bias", False))
        return cls(
            architecture=architecture_name,
            vocab_size=_count(raw, "vocab_size", where),
            hidden_size=hidden_size,
            intermediate_size=_count(raw, "intermediate_size", where),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=max_position_embeddings,
            rms_norm_eps=_eps(raw, where),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            has_qkv_bias=attention_bias if architecture.qkv_bias == "config" else architecture.qkv_bias,
            has_output_bias=attention_bias and architecture.has_output_bias,
            has_mlp_bias=bool(raw.get("mlp_bias", False)) and architecture.has_mlp_bias,
            has_qk_norm=architecture.has_qk_norm,
            sliding_windows=_sliding_windows(raw, architecture, num_layers, where),
            rope=parse_rope(raw, where=where, max_position_embeddings=max_position_embeddings),
            dtype=_dtype(raw, where),
            bos_token_id=next(iter(_token_ids(raw, "bos_token_id", where)), None),
            eos_token_ids=_token_ids(raw, "eos_token_id", where),
        )

    @property
    def max_context_len(self) -> int:
        """Tokens of one request that positions reach: linear and yarn scaling stretch what the config was trained for.

        llama3 checkpoints state the stretched length themselves.
        """
        if self.rope.type == "linear":
            return int(self.max_position_embeddings * self.rope.factor)
        if self.rope.type == "yarn":
            stretched = int(self.rope.original_max_position_embeddings * self.rope.factor)
            return max(self.max_position_embeddings, stretched)
        return self.max_position_embeddings

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, tied embeddings counted once."""
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * q_size + 2 * kv_size)
        attention += (q_size + 2 * kv_size) * self.has_qkv_bias + self.hidden_size * self.has_output_bias
        attention += 2 * self.head_dim * self.has_qk_norm
        mlp = 3 * self.hidden_size * self.intermediate_size
        mlp += (2 * self.intermediate_size + self.hidden_size) * self.has_mlp_bias
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_layers * (attention + mlp + 2 * self.hidden_size) + self.hidden_size

    def num_kv_heads_per_rank(self, tp_size: int) -> int:
        """KV heads that one rank stores: its share, or one replicated head when there are more ranks than heads."""
        return max(self.num_kv_heads // tp_size, 1)

    def kv_bytes_per_token(self, tp_size: int, dtype: torch.dtype) -> int:
        """Bytes of KV cache that one token takes on one rank, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads_per_rank(tp_size) * self.head_dim * dtype.itemsize

    def attention_spec(
        self, tp_size: int, dtype: torch.dtype, device: torch.device, block_size: int | None = None
    ) -> AttentionSpec:
        """What one rank of this model asks of an attention backend."""
        return AttentionSpec(
            num_heads=self.num_heads // tp_size,
            num_kv_heads=self.num_kv_heads_per_rank(tp_size),
            head_dim=self.head_dim,
            dtype=dtype,
            device=device,
            block_size=block_size,
        )

    def check_tensor_parallel(self, tp_size: int) -> None:
        """Raise ModelError unless the model splits over tp_size ranks."""
        for name, count in (("num_heads", self.num_heads), ("intermediate_size", self.intermediate_size)):
            if count % tp_size != 0:
                raise ModelError(f"{self.architecture}: {name} {count} does not split over {tp_size} ranks")
        if self.num_kv_heads % tp_size != 0 and tp_size % self.num_kv_heads != 0:
            raise ModelError(
                f"{self.architecture}: num_kv_heads {self.num_kv_heads} neither splits over {tp_size} ranks"
                " nor divides them, so its heads cannot be replicated"
            )


def _architecture_name(raw: Mapping[str, Any], where: str) -> str:
    names = raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ModelError(f"{where}: architectures must be a list of one name, found {names!r}")
    return names[0]


def _refuse_unsupported(raw: Mapping[str, Any], where: str) -> None:
    quantization = raw.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise ModelError(f"{where}: quantization_config ({method}) is not supported yet: use an unquantized checkpoint")
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"{where}: hidden_act {activation!r} is not supported: supported is 'silu'")


def _count(raw: Mapping[str, Any], name: str, where: str, *, default: int | None = None) -> int:
    value = raw.get(name)
    value = default if value is None else value
    if value is None:
        raise ModelError(f"{where}: {name} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ModelError(f"{where}: {name} must be a positive integer, found {value!r}")
    return value


def _eps(raw: Mapping[str, Any], where: str) -> float:
    value = raw.get("rms_norm_eps", 1e-6)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ModelError(f"{where}: rms_norm_eps must be a positive number, found {value!r}")
    return float(value)


def _dtype(raw: Mapping[str, Any], where: str) -> str:
    name = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if name not in DTYPES:
        raise ModelError(f"{where}: dtype {name!r} is not supported: supported are {', '.join(DTYPES)}")
    return name


def _token_ids(raw: Mapping[str, Any], name: str, where: str) -> tuple[int, ...]:
    value = raw.get(name)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in ids):
        raise ModelError(f"{where}: {name} must be a token id or a list of them, found {value!r}")
    return tuple(ids)


def _sliding_windows(
    raw: Mapping[str, Any], architecture: Architecture, num_layers: int, where: str
) -> tuple[int | None, ...]:
    """Each layer's window. The rules are those of transformers' MistralConfig and Qwen2Config/Qwen3Config."""
    if architecture.sliding_layers == "none":
        return (None,) * num_layers
    # A null window is none; one that is left out is transformers' default of 4096
    if "sliding_window" in raw and raw["sliding_window"] is None:
        return (None,) * num_layers
    window = _count(raw, "sliding_window", where, default=4096)
    if architecture.sliding_layers == "every":
        return (window,) * num_layers
    if not raw.get("use_sliding_window", False):
        return (None,) * num_layers
    layer_types = raw.get("layer_types")
    if layer_types is None:
        num_full_layers = raw.get("max_window_layers", 28)
        if isinstance(num_full_layers, bool) or not isinstance(num_full_layers, int):
            raise ModelError(f"{where}: max_window_layers must be an integer, found {num_full_layers!r}")
        return tuple(window if layer >= num_full_layers else None for layer in range(num_layers))
    if not isinstance(layer_types, list) or not all(isinstance(kind, str) for kind in layer_types):
        raise ModelError(f"{where}: layer_types must be a list of names, found {layer_types!r}")
    if len(layer_types) != num_layers:
        raise ModelError(f"{where}: layer_types has {len(layer_types)} entries for {num_layers} layers")
    unknown = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ModelError(f"{where}: layer_types {unknown} are not supported")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)
