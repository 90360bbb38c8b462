"""foreign_config(): the ModelConfig of an architecture that only transformers knows.

Sizes come from the class itself, built without weights (models.foreign.probe), not from the spelling of a config.json.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from models.config.layer_cache import LayerCache
from models.config.layers import Multipliers
from models.config.model_config import EMBEDDING_FILE, ModelConfig
from models.config.read_fields import DTYPES
from models.errors import ModelError, parse_json
from models.foreign.interface import ATTENTION
from models.foreign.model import ForeignModel
from models.foreign.probe import AttentionCall, failure, probe, refuse_class

# Names of the context's length, the usual one first
_CONTEXT_FIELDS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
_NUM_TOKENS = 3
_SERVED_LAYER_TYPES = {"full_attention", "sliding_attention"}


def foreign_class(folder: Path) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """Return transformers' own class of a folder, and its config. Never code of the checkpoint. Raises ModelError."""
    where = folder / "config.json"
    raw = parse_json(where.read_bytes(), where=str(where))
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    cls = getattr(transformers, name, None) if isinstance(name, str) and not name.startswith("_") else None
    if not (isinstance(cls, type) and issubclass(cls, PreTrainedModel) and cls.config_class is not None):
        raise ModelError(f"{where}: transformers {transformers.__version__} has no class {name!r} of its own either")
    if raw.get("quantization_config"):
        raise ModelError(
            f"{where}: quantization_config: transformers' own classes are served without quantisation only"
        )
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # whatever a config class raises on a value
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"{where}: transformers cannot read it: {reason}") from error
    if not isinstance(config, cls.config_class):
        raise ModelError(f"{where}: model_type {config.model_type!r} is not that of {name}")
    # Youtu's class sets that token's embedding to zeros after it has been loaded. Some config classes check assignments
    vars(config)["pad_token_id"] = None
    return cls, config


def foreign_config(folder: Path) -> ModelConfig:
    """Return the normalised config of a folder that transformers' own class serves. Raises ModelError."""
    folder = Path(folder)
    cls, config = foreign_class(folder)
    where = f"{folder / 'config.json'}"
    refuse_class(cls, config)
    context = _context(config, where)
    _check_layer_types(config, where)
    calls = probe(cls, config, longest=context)
    first = calls[0]
    dtype = str(config.dtype or "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise ModelError(f"{where}: dtype {dtype!r} is not supported: supported are {', '.join(DTYPES)}")
    eos = config.eos_token_id
    hidden_size = _size(config, "hidden_size", where)
    return ModelConfig(
        architecture=cls.__name__,
        vocab_size=_size(config, "vocab_size", where),
        hidden_size=hidden_size,
        intermediate_size=int(getattr(config, "intermediate_size", None) or 4 * hidden_size),
        num_layers=len(calls),
        num_heads=max(call.num_heads for call in calls),
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        max_context_len=context,
        rms_norm_eps=1e-6,
        norm="llama",
        num_layer_norms=2,
        activation="silu",
        tie_word_embeddings=bool(config.tie_word_embeddings),
        has_lm_head=not (folder / EMBEDDING_FILE).is_file(),
        has_head_bias=False,
        has_qkv_bias=False,
        has_output_bias=False,
        has_output_gate=False,
        has_mlp_bias=False,
        qk_norm="none",
        caches=tuple(LayerCache(call.num_kv_heads, call.head_dim, call.v_head_dim, call.window) for call in calls),
        states=(None,) * len(calls),
        recurrence=None,
        has_sinks=any(call.has_sinks for call in calls),
        ropes=(None,) * len(calls),
        experts=None,
        bare_layers=(False,) * len(calls),
        sparse_layers=(False,) * len(calls),
        multipliers=Multipliers(attention=first.scale),
        dtype=dtype,
        bos_token_id=config.bos_token_id if isinstance(config.bos_token_id, int) else None,
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),),
        quantization=None,
        body_prefix="",
        gemma4=None,
        transformers_parameters=_count(cls, config, calls),
    )


def _context(config: PreTrainedConfig, where: str) -> int:
    for name in _CONTEXT_FIELDS:
        found = getattr(config, name, None)
        if isinstance(found, int) and found > 0:
            return found
    raise ModelError(f"{where}: the context's length is missing: none of {', '.join(_CONTEXT_FIELDS)} is given")


def _size(config: PreTrainedConfig, name: str, where: str) -> int:
    found = getattr(config, name, None)
    if not isinstance(found, int) or found <= 0:
        raise ModelError(f"{where}: {name} must be a positive integer, found {found!r}")
    return found


def _check_layer_types(config: PreTrainedConfig, where: str) -> None:
    """Refuse layers that are not attention: they keep something of earlier tokens that Quire's cache does not have."""
    for kind in dict.fromkeys(getattr(config, "layer_types", None) or ()):
        if kind not in _SERVED_LAYER_TYPES:
            served = ", ".join(sorted(_SERVED_LAYER_TYPES))
            raise ModelError(f"{where}: layer_types has {kind!r}; transformers' own classes are served with {served}")


def _count(cls: type[PreTrainedModel], config: PreTrainedConfig, calls: Sequence[AttentionCall]) -> int:
    """Return the number of the model's parameters; tied ones count once. Raises ModelError if its parts fail apart."""
    options: dict[str, Any] = {"attn_implementation": ATTENTION, "dtype": torch.bfloat16}
    with torch.device("meta"):
        model = cls._from_config(copy.deepcopy(config), **options).eval()
    model.tie_weights()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    with failure(cls.__name__), torch.device("meta"), torch.no_grad():
        ForeignModel(model, calls).try_parts(_NUM_TOKENS)
    return num_parameters
