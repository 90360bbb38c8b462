"""ModelConfig: the normalised fields of a Hugging Face config.json. No other module reads config.json.

A missing field takes the default of the architecture's transformers class; sizes must be given.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from kernels.attention.base import AttentionSpec
from models.config.layers import (
    ExpertsConfig,
    Multipliers,
    find_rope_layers,
    find_sliding_layers,
    find_windows,
    parse_experts,
    parse_multipliers,
)
from models.config.rope import RopeConfig, find_context_len, parse_ropes
from models.config.size import check_split, count_parameters, saved_bytes
from models.config.unread_fields import check_unread_fields, check_vision_fields
from models.errors import ModelError, parse_json
from models.fields import Fields
from models.quantization.config import QuantizationConfig
from models.quantization.schemes import choose_quantization, parse_quantization
from models.registry import Architecture, find_architecture

DTYPES = ("float32", "float16", "bfloat16")
# The names in config.json for each activation (models.registry.Architecture.activation)
_ACTIVATION_NAMES = {
    "silu": ("silu", "swish"),
    "gelu_tanh": ("gelu_pytorch_tanh",),
    "legacy_gelu_tanh": ("gelu_pytorch_tanh", "gelu"),
}
# A sentence-transformers folder has this file: an embedding model, whose LM head, if it has one, is not used
_MAX_LAYERS = 10_000  # larger models do not exist, and each layer has an entry in lists
EMBEDDING_FILE = "modules.json"
# Fields that a multimodal config states outside its text part
_WHOLE_MODEL_FIELDS = (
    "dtype",
    "torch_dtype",
    "bos_token_id",
    "eos_token_id",
    "quantization_config",
    "tie_word_embeddings",
)


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder-only transformer, constant for the life of the process."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of a dense MLP
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context_len: int  # tokens of one request that the positions cover
    rms_norm_eps: float
    norm: Literal["llama", "olmo2", "gemma"]  # see models/layers/norm.py
    num_layer_norms: int  # norms over hidden_size in each layer
    activation: Literal["silu", "gelu_tanh"]  # of the MLP's gate
    tie_word_embeddings: bool
    has_lm_head: bool  # False: an embedding model, which cannot generate
    has_qkv_bias: bool
    has_output_bias: bool  # bias of the attention's output projection
    has_mlp_bias: bool
    qk_norm: Literal["none", "head", "width"]  # RMS norm before RoPE: over each head, or over all heads together
    sliding_windows: tuple[int | None, ...]  # per layer, in tokens; None: the whole context
    ropes: tuple[RopeConfig | None, ...]  # per layer; None: no positions
    experts: ExpertsConfig | None
    sparse_layers: tuple[bool, ...]  # per layer: True if its MLP is a mixture of experts
    multipliers: Multipliers
    dtype: str  # dtype of the checkpoint, one of DTYPES
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    quantization: QuantizationConfig | None  # scheme of the linear layers; None: all have `dtype`

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read folder/config.json. Raises ModelError naming the folder and the field."""
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise ModelError(f"{folder}: no config.json, so this is not a model folder")
        config = cls.from_json(parse_json(path.read_bytes(), where=str(path)), where=str(path))
        return dataclasses.replace(config, has_lm_head=False) if (Path(folder) / EMBEDDING_FILE).is_file() else config

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], *, where: str = "config.json") -> ModelConfig:
        """Normalise a parsed config.json. where: names it in errors. Raises ModelError."""
        name = _architecture_name(raw, where)
        architecture = find_architecture(name)
        architecture, config = _text_part(raw, architecture, where)
        _refuse_other_type(config, architecture)
        hidden_size, num_layers = config.count("hidden_size"), config.count("num_hidden_layers", most=_MAX_LAYERS)
        num_heads, num_kv_heads, head_dim = _heads(config, hidden_size)
        max_positions = config.count("max_position_embeddings")
        has_rope = find_rope_layers(config, architecture, num_layers)
        is_sliding = find_sliding_layers(config, architecture, has_rope)
        ropes = parse_ropes(
            config,
            architecture,
            has_rope=has_rope,
            is_sliding=is_sliding,
            head_dim=head_dim,
            max_position_embeddings=max_positions,
        )
        max_context_len = find_context_len(ropes, architecture, max_positions)
        quantization = parse_quantization(config)
        experts, sparse_layers = parse_experts(config, architecture, num_layers, quantization)
        model = cls(
            architecture=name,
            vocab_size=config.count("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=config.count("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_context_len=max_context_len,
            rms_norm_eps=config.positive("rms_norm_eps", default=1e-6),
            norm=architecture.norm,
            num_layer_norms=architecture.num_layer_norms,
            activation=_activation(config, architecture),
            tie_word_embeddings=config.flag("tie_word_embeddings"),
            has_lm_head=architecture.has_lm_head,
            has_qkv_bias=_qkv_bias(config, architecture),
            has_output_bias=config.flag("attention_bias") and architecture.has_output_bias,
            has_mlp_bias=config.flag("mlp_bias") and architecture.has_mlp_bias,
            qk_norm=architecture.qk_norm,
            sliding_windows=find_windows(config, is_sliding, max_context_len=max_context_len),
            ropes=ropes,
            experts=experts,
            sparse_layers=sparse_layers,
            multipliers=parse_multipliers(config, architecture, hidden_size=hidden_size, head_dim=head_dim),
            dtype=_dtype(config),
            bos_token_id=next(iter(config.token_ids("bos_token_id")), None),
            eos_token_ids=config.token_ids("eos_token_id"),
            quantization=quantization,
        )
        check_unread_fields(config, architecture)
        return model

    def quantized(self, wanted: str) -> ModelConfig:
        """Return this model with the flag --quantization applied. Raises ModelError if the checkpoint rules it out."""
        return dataclasses.replace(self, quantization=choose_quantization(self.quantization, wanted))

    def with_max_model_len(self, max_model_len: int | None) -> ModelConfig:
        """Return this model limited to requests of max_model_len tokens (None: its own limit, which is never exceeded).

        longrope uses its short factors if the limit is at most the original length, otherwise its long factors.
        """
        limit = self.max_context_len if max_model_len is None else max_model_len
        return dataclasses.replace(self, max_context_len=min(limit, self.max_context_len))

    def one_layer_of_each_kind(self) -> ModelConfig:
        """Return this model with the fewest layers that include every kind of layer it has."""
        kinds = dict.fromkeys(zip(self.sliding_windows, self.ropes, self.sparse_layers, strict=True))
        windows, ropes, sparse_layers = zip(*kinds, strict=True)
        return dataclasses.replace(
            self, num_layers=len(kinds), sliding_windows=windows, ropes=ropes, sparse_layers=sparse_layers
        )

    @property
    def num_parameters(self) -> int:
        """Count the parameters of the whole model; tied embeddings count once."""
        return count_parameters(self, 0 if self.experts is None else self.experts.num_experts)

    @property
    def num_active_parameters(self) -> int:
        """Count the parameters that one token uses: num_parameters without the experts it is not routed to."""
        return count_parameters(self, 0 if self.experts is None else self.experts.num_experts_per_tok)

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of the whole model's weights on the device; unquantized ones have `dtype`."""
        return self.num_parameters * dtype.itemsize - saved_bytes(self, dtype)

    def num_kv_heads_per_rank(self, tp_size: int) -> int:
        """Return the KV heads that one rank stores: its share, or one replicated head if ranks outnumber heads."""
        return max(self.num_kv_heads // tp_size, 1)

    def kv_bytes_per_token(self, tp_size: int, kv_dtype: torch.dtype) -> int:
        """Return the bytes of KV cache that one token takes on one rank, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads_per_rank(tp_size) * self.head_dim * kv_dtype.itemsize

    def share_of_rank(self, tp_size: int) -> ModelConfig:
        """Return the sizes that one of tp_size ranks holds. Used for arithmetic, never to build a model."""
        return dataclasses.replace(
            self,
            vocab_size=-(-self.vocab_size // tp_size),
            intermediate_size=self.intermediate_size // tp_size,
            num_heads=self.num_heads // tp_size,
            num_kv_heads=self.num_kv_heads_per_rank(tp_size),
            experts=None if self.experts is None else self.experts.share_of_rank(tp_size),
        )

    def attention_spec(
        self,
        tp_size: int,
        dtype: torch.dtype,
        device: torch.device,
        block_size: int | None = None,
        *,
        kv_dtype: torch.dtype | None = None,
    ) -> AttentionSpec:
        """Return the attention backend's requirements for one rank of this model."""
        return AttentionSpec(
            num_heads=self.num_heads // tp_size,
            num_kv_heads=self.num_kv_heads_per_rank(tp_size),
            head_dim=self.head_dim,
            dtype=dtype,
            device=device,
            block_size=block_size,
            kv_dtype=kv_dtype,
        )

    def check_tensor_parallel(self, tp_size: int) -> None:
        """Raise ModelError unless the model splits over tp_size ranks."""
        check_split(self, tp_size)


def _architecture_name(raw: Mapping[str, Any], where: str) -> str:
    if not isinstance(raw, Mapping):
        raise ModelError(f"{where}: expected a JSON object, found {type(raw).__name__}")
    names = raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ModelError(f"{where}: architectures must be a list of one name, found {names!r}")
    return names[0]


def _text_part(raw: Mapping[str, Any], architecture: Architecture, where: str) -> tuple[Architecture, Fields]:
    """Return the text part's row, and its config over the row's defaults; an explicit null counts as a value."""
    if architecture.text_config is None:
        return architecture, Fields({**architecture.defaults, **raw}, where)
    text = Fields(raw, where).section(architecture.text_config).raw
    others = {row.model_type: row for row in architecture.other_text_parts}
    row = others.get(str(text.get("model_type")), architecture)
    whole = {name: raw[name] for name in _WHOLE_MODEL_FIELDS if raw.get(name) is not None}
    check_vision_fields(raw, where=where, read=_WHOLE_MODEL_FIELDS)
    return row, Fields({**row.defaults, **text, **whole}, where)


def _refuse_other_type(config: Fields, architecture: Architecture) -> None:
    """Raise ModelError if the config is of another class than the architecture's."""
    found = config.get("model_type")
    if found not in (None, architecture.model_type):
        served = " or ".join(repr(row.model_type) for row in (architecture, *architecture.other_text_parts))
        raise ModelError(
            f"{config.where}: model_type {found!r} is not supported for this architecture: served is {served}"
        )


def _heads(config: Fields, hidden_size: int) -> tuple[int, int, int]:
    """Return the numbers of query heads and KV heads, and the head dimension."""
    num_heads = config.count("num_attention_heads")
    num_kv_heads = config.count("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads != 0:
        raise ModelError(
            f"{config.where}: num_attention_heads {num_heads} is not divisible by num_key_value_heads {num_kv_heads}"
        )
    if config.get("head_dim") is None and hidden_size % num_heads != 0:
        raise ModelError(
            f"{config.where}: hidden_size {hidden_size} is not divisible by num_attention_heads {num_heads},"
            " and head_dim is not given"
        )
    head_dim = config.count("head_dim", default=max(hidden_size // num_heads, 1))
    if head_dim % 2 != 0:
        raise ModelError(f"{config.where}: head_dim {head_dim} is odd, but RoPE rotates pairs")
    return num_heads, num_kv_heads, head_dim


def _qkv_bias(config: Fields, architecture: Architecture) -> bool:
    if isinstance(architecture.qkv_bias, bool):
        return architecture.qkv_bias
    return config.flag("attention_bias" if architecture.qkv_bias == "config" else "qkv_bias")


def _activation(config: Fields, architecture: Architecture) -> Literal["silu", "gelu_tanh"]:
    """Return the architecture's activation. Raises ModelError if the config names another one."""
    names = _ACTIVATION_NAMES[architecture.activation]
    field = "hidden_act" if config.get("hidden_activation") is None else "hidden_activation"
    found = config.get(field)
    if found is not None and found not in names:
        raise ModelError(f"{config.where}: {field} {found!r} is not supported: supported is {names[0]!r}")
    return "silu" if architecture.activation == "silu" else "gelu_tanh"


def _dtype(config: Fields) -> str:
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    if name not in DTYPES:
        raise ModelError(f"{config.where}: dtype {name!r} is not supported: supported are {', '.join(DTYPES)}")
    return name
