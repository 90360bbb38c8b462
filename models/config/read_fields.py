"""Single fields of a config.json: its class, its text part, heads, norms, activation and dtype."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from models.architecture import Architecture
from models.config.lfm2 import read_mlp_width, read_tied
from models.config.mamba2 import read_num_blocks
from models.config.unread_fields import check_vision_fields
from models.errors import ModelError
from models.fields import Fields
from models.registry_text import with_text_part

Activation = Literal["silu", "gelu_tanh", "relu2", "xielu"]
Norm = Literal["llama", "olmo2", "gemma", "layer", "layer_bias"]  # see models/layers/norm.py
DTYPES = ("float32", "float16", "bfloat16")
# The names in config.json for each activation (models.registry.Architecture.activation)
_ACTIVATION_NAMES = {
    "silu": ("silu", "swish"),
    "gelu_tanh": ("gelu_pytorch_tanh",),
    "legacy_gelu_tanh": ("gelu_pytorch_tanh", "gelu"),
    "relu2": ("relu2",),
    "xielu": ("xielu",),
}
MAX_LAYERS = 10_000  # larger models do not exist, and each layer has an entry in lists
# Fields that a multimodal config states outside its text part
_WHOLE_MODEL_FIELDS = (
    "dtype",
    "torch_dtype",
    "bos_token_id",
    "eos_token_id",
    "quantization_config",
    "tie_word_embeddings",
)


def architecture_name(raw: Mapping[str, Any], where: str) -> str:
    """Return the one name in `architectures`. Raises ModelError."""
    if not isinstance(raw, Mapping):
        raise ModelError(f"{where}: expected a JSON object, found {type(raw).__name__}")
    names = raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ModelError(f"{where}: architectures must be a list of one name, found {names!r}")
    return names[0]


def text_part(raw: Mapping[str, Any], architecture: Architecture, where: str) -> tuple[Architecture, Fields]:
    """Return the text part's row, and its config over the row's defaults; an explicit null counts as a value."""
    if architecture.text_config is None:
        return architecture, _over_defaults(raw, architecture, where)
    if architecture.may_have_flat_text and raw.get(architecture.text_config) is None:
        flat = {name: value for name, value in raw.items() if name != "vision_config"}
        if flat.get("model_type") == architecture.model_type.removesuffix("_text"):
            flat["model_type"] = architecture.model_type
        return architecture, _over_defaults(flat, architecture, where)
    text = Fields(raw, where).section(architecture.text_config).raw
    model_type = str(text.get("model_type"))
    is_other = model_type in [row.model_type for row in architecture.other_text_parts]
    row = with_text_part(architecture, model_type) if is_other else architecture
    whole = {name: raw[name] for name in _WHOLE_MODEL_FIELDS if raw.get(name) is not None}
    copies = tuple(text) if architecture.may_have_flat_text else ()  # beside text_config, which transformers reads
    check_vision_fields(raw, where=where, read=(*_WHOLE_MODEL_FIELDS, *copies))
    return row, _over_defaults({**text, **whole}, row, where)


def _over_defaults(raw: Mapping[str, Any], row: Architecture, where: str) -> Fields:
    """Return the fields of a file over the row's defaults. A usual name counts where the row's own is missing."""
    names, defaults = dict(row.names), dict(row.defaults)
    for usual, name in row.names.items():
        if row.takes_usual_names and usual in raw and name not in raw:
            del names[usual]
            defaults.pop(name, None)
    return Fields({**defaults, **raw}, where, names=names)


def refuse_other_type(config: Fields, architecture: Architecture) -> None:
    """Raise ModelError if the config is of another class than the architecture's."""
    found = config.get("model_type")
    if found not in (None, architecture.model_type):
        served = " or ".join(repr(row.model_type) for row in (architecture, *architecture.other_text_parts))
        raise ModelError(
            f"{config.where}: model_type {found!r} is not supported for this architecture: served is {served}"
        )


def read_heads(config: Fields, hidden_size: int) -> tuple[int, int, int]:
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


def read_intermediate_size(config: Fields, architecture: Architecture) -> int:
    """Return the width of the dense MLP."""
    if architecture.model_type == "lfm2":
        return read_mlp_width(config)
    if architecture.recurrence == "granite" and config.get("num_local_experts") == 0:
        config.pass_over("intermediate_size")
        return config.count("shared_intermediate_size")
    if architecture.experts == "cohere2" and config.get("intermediate_size") is None:
        return config.count("moe_intermediate_size")
    return config.count("intermediate_size")


def read_num_layers(config: Fields, architecture: Architecture) -> int:
    """Return the number of layers."""
    if architecture.recurrence == "nemotron":
        num_layers = read_num_blocks(config, architecture)
        return Fields({"num_hidden_layers": num_layers}, config.where).count("num_hidden_layers", most=MAX_LAYERS)
    return config.count("num_hidden_layers", most=MAX_LAYERS)


def read_tied_embeddings(config: Fields, architecture: Architecture) -> bool:
    """Return whether the LM head is the embedding."""
    return read_tied(config) if architecture.recurrence == "lfm2" else config.flag("tie_word_embeddings")


def read_qkv_bias(config: Fields, architecture: Architecture) -> bool:
    """Return whether q, k and v have a bias."""
    if isinstance(architecture.qkv_bias, bool):
        return architecture.qkv_bias
    return config.flag("attention_bias" if architecture.qkv_bias == "config" else "qkv_bias")


def read_qk_norm(config: Fields, architecture: Architecture) -> Literal["none", "head", "unit", "width"]:
    """Return the norm of queries and keys that the config asks for."""
    if architecture.qk_norm == "head_if_used":
        return "head" if config.flag("use_qk_norm") else "none"
    if architecture.qk_norm == "unit_if_used":
        return "unit" if config.flag("use_qk_norm") else "none"
    return architecture.qk_norm


def read_num_draft_layers(config: Fields) -> int:
    """Return the number of layers after the last that guess further tokens."""
    value = config.get("num_nextn_predict_layers")
    return 0 if value in (0, None) else config.count("num_nextn_predict_layers", most=MAX_LAYERS)


def read_norm(config: Fields, architecture: Architecture) -> tuple[Norm, float]:
    """Return the kind of the norms over hidden_size, and the number added to their mean squares."""
    if architecture.norm != "layer_unless_rms":
        return architecture.norm, config.positive("rms_norm_eps", default=1e-6)
    config.pass_over("layer_norm_eps")
    if config.get("rms_norm_eps") is None:
        return "layer", config.positive("layer_norm_eps", default=1e-5)
    return "llama", config.positive("rms_norm_eps")


def read_activation(config: Fields, architecture: Architecture) -> Activation:
    """Return the architecture's activation. Raises ModelError if the config names another one."""
    names = _ACTIVATION_NAMES[architecture.activation]
    field = "hidden_act" if config.get("hidden_activation") is None else "hidden_activation"
    found = config.get(field)
    if found is not None and found not in names:
        raise ModelError(f"{config.where}: {field} {found!r} is not supported: supported is {names[0]!r}")
    return "gelu_tanh" if architecture.activation == "legacy_gelu_tanh" else architecture.activation


def read_dtype(config: Fields) -> str:
    """Return the dtype of the checkpoint, one of DTYPES. Raises ModelError."""
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    if name not in DTYPES:
        raise ModelError(f"{config.where}: dtype {name!r} is not supported: supported are {', '.join(DTYPES)}")
    return name
