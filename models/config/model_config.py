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
from kernels.attention.latent import LatentSizes
from models.config.experts import ExpertsConfig, parse_experts
from models.config.gemma4 import Gemma4Config, parse_gemma4
from models.config.latent import LatentConfig, parse_latent
from models.config.layer_cache import LayerCache, keep_layers
from models.config.layer_state import LayerState
from models.config.layers import Multipliers, parse_multipliers, plan_layers
from models.config.mamba2 import find_bare_layers
from models.config.read_fields import (
    Activation,
    Norm,
    architecture_name,
    read_activation,
    read_dtype,
    read_heads,
    read_intermediate_size,
    read_norm,
    read_num_draft_layers,
    read_num_layers,
    read_qk_norm,
    read_qkv_bias,
    read_tied_embeddings,
    refuse_other_type,
    text_part,
)
from models.config.recurrence import RecurrenceConfig
from models.config.rope import RopeConfig
from models.config.size import check_split, count_parameters, quantized_experts, saved_bytes
from models.config.unread_fields import check_unread_fields
from models.errors import ModelError, parse_json
from models.quantization.config import QuantizationConfig
from models.quantization.schemes import choose_quantization, parse_quantization
from models.registry import current_name, find_architecture
from models.registry_text import text_part_name

# A sentence-transformers folder has this file: an embedding model, whose LM head, if it has one, is not used
EMBEDDING_FILE = "modules.json"


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder-only transformer, constant for the life of the process."""

    architecture: str
    body_prefix: str  # location of embedding, layers and last norm in the checkpoint, or in its text part
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of a dense MLP
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context_len: int  # tokens of one request that the positions cover
    rms_norm_eps: float
    norm: Norm
    num_layer_norms: int  # norms over hidden_size in each layer
    activation: Activation  # of the MLP's gate; "relu2" and "xielu": of an MLP without one
    tie_word_embeddings: bool
    has_lm_head: bool  # False: an embedding model, which cannot generate
    has_head_bias: bool  # bias of the LM head
    has_qkv_bias: bool
    has_output_bias: bool  # bias of the attention's output projection
    has_output_gate: bool  # the query projection yields a gate for each head's output, too
    has_mlp_bias: bool
    # RMS norm over each head, with a weight or ("unit") without, or over all heads together
    qk_norm: Literal["none", "head", "unit", "width"]
    # per layer: what attention keeps of each token, and for how long; None: a layer without attention
    caches: tuple[LayerCache | None, ...]
    states: tuple[LayerState | None, ...]  # per layer: what a recurrence keeps of a request; None: none
    recurrence: RecurrenceConfig | None  # of all recurrent layers
    has_sinks: bool  # attention has a learned logit for each head beside those of keys
    ropes: tuple[RopeConfig | None, ...]  # per layer; None: no positions
    experts: ExpertsConfig | None
    sparse_layers: tuple[bool, ...]  # per layer: True if its MLP is a mixture of experts
    bare_layers: tuple[bool, ...]  # per layer: True if it has no MLP
    gemma4: Gemma4Config | None
    multipliers: Multipliers
    dtype: str  # dtype of the checkpoint, one of DTYPES
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    quantization: QuantizationConfig | None  # scheme of the linear layers; None: all have `dtype`
    # Parameters of transformers' own class, which computes the model (models/foreign); None: Quire's own layers do
    transformers_parameters: int | None = None
    latent: LatentConfig | None = None  # latent attention in all layers
    num_draft_layers: int = 0  # layers of the checkpoint after the last, which guess further tokens and are not read

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
        name = current_name(architecture_name(raw, where), raw.get("model_type"))
        architecture = find_architecture(name)
        whole = architecture
        architecture, config = text_part(raw, whole, where)
        name = text_part_name(name, whole, architecture)
        refuse_other_type(config, architecture)
        hidden_size, num_layers = config.count("hidden_size"), read_num_layers(config, architecture)
        latent = parse_latent(config, architecture)
        if latent is None:
            num_heads, num_kv_heads, head_dim = read_heads(config, hidden_size)
        else:
            num_heads, num_kv_heads, head_dim = config.count("num_attention_heads"), 1, latent.head_dim
        layers = plan_layers(
            config, architecture, num_layers, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
            latent=latent,
        )  # fmt: skip
        quantization = parse_quantization(config)
        experts, sparse_layers = parse_experts(config, architecture, num_layers, quantization)
        norm, norm_eps = read_norm(config, architecture)
        model = cls(
            architecture=name,
            body_prefix=architecture.body_prefix,
            vocab_size=config.count("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=read_intermediate_size(config, architecture),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_context_len=layers.max_context_len,
            rms_norm_eps=norm_eps,
            norm=norm,
            num_layer_norms=architecture.num_layer_norms,
            activation=read_activation(config, architecture),
            tie_word_embeddings=read_tied_embeddings(config, architecture),
            has_lm_head=architecture.has_lm_head,
            has_head_bias=architecture.has_head_bias and config.flag("lm_head_bias"),
            has_qkv_bias=read_qkv_bias(config, architecture),
            has_output_bias=architecture.has_output_bias and config.flag(architecture.output_bias),
            has_output_gate=architecture.has_output_gate,
            has_mlp_bias=config.flag("mlp_bias") and architecture.has_mlp_bias,
            qk_norm=read_qk_norm(config, architecture),
            caches=layers.caches,
            states=layers.states,
            recurrence=layers.recurrence,
            gemma4=parse_gemma4(config) if architecture.layers == "gemma4" else None,
            latent=latent,
            has_sinks=architecture.has_sinks,
            ropes=layers.ropes,
            experts=experts,
            sparse_layers=sparse_layers,
            bare_layers=find_bare_layers(config, architecture, num_layers),
            multipliers=parse_multipliers(config, architecture, hidden_size=hidden_size, head_dim=head_dim),
            dtype=read_dtype(config),
            bos_token_id=next(iter(config.token_ids("bos_token_id")), None),
            eos_token_ids=config.token_ids("eos_token_id"),
            quantization=quantization,
            num_draft_layers=read_num_draft_layers(config) if architecture.has_draft_layers else 0,
        )
        check_unread_fields(config, architecture)
        return model

    @property
    def is_foreign(self) -> bool:
        """True if transformers' own class computes the model (models/foreign)."""
        return self.transformers_parameters is not None

    def quantized(self, wanted: str) -> ModelConfig:
        """Return this model with the flag --quantization applied. Raises ModelError if the checkpoint rules it out."""
        if self.is_foreign and wanted not in ("auto", "none"):
            raise ModelError(f"{self.architecture}: --quantization {wanted} needs Quire's own layers, which it has not")
        return dataclasses.replace(self, quantization=choose_quantization(self.quantization, wanted))

    def with_max_model_len(self, max_model_len: int | None) -> ModelConfig:
        """Return this model limited to requests of max_model_len tokens (None: its own limit, which is never exceeded).

        longrope uses its short factors if the limit is at most the original length, otherwise its long factors.
        """
        limit = self.max_context_len if max_model_len is None else max_model_len
        return dataclasses.replace(self, max_context_len=min(limit, self.max_context_len))

    @property
    def layers_of_each_kind(self) -> list[int]:
        """The fewest layers that include every kind of layer, and those whose keys and values they share; ascending."""
        kinds = {kind: layer for layer, kind in reversed(list(enumerate(self._layer_kinds())))}
        caches = (self.caches[layer] for layer in kinds.values())
        owners = (cache.shares for cache in caches if cache is not None)
        return sorted({*kinds.values(), *(owner for owner in owners if owner is not None)})

    def _layer_kinds(self) -> list[tuple[object, ...]]:
        return list(zip(self.caches, self.states, self.ropes, self.sparse_layers, self.bare_layers, strict=True))

    def one_layer_of_each_kind(self) -> ModelConfig:
        """Return this model with the fewest layers that include every kind of layer it has.

        Of the first layer's kind there are two, if the model has two: only a later layer's first norm adds a residual,
        which a product or a rounding may do with it.
        """
        kinds = self._layer_kinds()
        again = kinds.index(kinds[0], 1) if kinds[0] in kinds[1:] else 0
        kept = sorted({*self.layers_of_each_kind, again})
        return dataclasses.replace(
            self,
            num_layers=len(kept),
            caches=keep_layers(self.caches, kept),
            states=tuple(self.states[layer] for layer in kept),
            ropes=tuple(self.ropes[layer] for layer in kept),
            sparse_layers=tuple(self.sparse_layers[layer] for layer in kept),
            bare_layers=tuple(self.bare_layers[layer] for layer in kept),
        )

    @property
    def sliding_windows(self) -> tuple[int | None, ...]:
        """Each layer's window in tokens; None: the whole context, or no attention."""
        return tuple(None if cache is None else cache.window for cache in self.caches)

    def cache(self, layer: int) -> LayerCache:
        """Return what a layer with attention keeps of each token."""
        cache = self.caches[layer]
        assert cache is not None, f"layer {layer} has no attention"
        return cache

    @property
    def kv_caches(self) -> list[LayerCache]:
        """What the layers with attention keep of each token."""
        return [cache for cache in self.caches if cache is not None]

    @property
    def state_bytes(self) -> int:
        """The bytes of one request's state over all recurrent layers, without the rests of its pieces."""
        return sum(state.num_bytes for state in self.states if state is not None)

    @property
    def has_gated_mlp(self) -> bool:
        """Return True if the dense MLP multiplies its inner values by a gate."""
        return self.activation not in ("relu2", "xielu")

    def mlp_size(self, layer: int) -> int:
        """Return the intermediate size of a layer's dense MLP."""
        is_wide = self.gemma4 is not None and self.gemma4.has_wide_mlp and self.cache(layer).shares is not None
        return 2 * self.intermediate_size if is_wide else self.intermediate_size

    def has_dense_mlp(self, layer: int) -> bool:
        """Return True if the layer has a dense MLP, with or without experts beside it."""
        if self.bare_layers[layer]:
            return False
        return not self.sparse_layers[layer] or (self.experts is not None and self.experts.has_dense_mlp)

    def projections(self, layer: int) -> tuple[str, ...]:
        """Return the names of the layer's projections of hidden states to queries, keys and values."""
        cache = self.cache(layer)
        if cache.shares is not None:
            return ("q_proj",)
        return ("q_proj", "k_proj") if cache.values_are_keys else ("q_proj", "k_proj", "v_proj")

    @property
    def num_parameters(self) -> int:
        """Count the parameters of the whole model; tied embeddings count once."""
        if self.transformers_parameters is not None:
            return self.transformers_parameters
        return count_parameters(self, 0 if self.experts is None else self.experts.num_stored)

    @property
    def num_active_parameters(self) -> int:
        """Count the parameters that one token uses: num_parameters without the experts it is not routed to."""
        if self.transformers_parameters is not None:
            return self.transformers_parameters  # its experts are not known apart
        return count_parameters(self, 0 if self.experts is None else self.experts.num_experts_per_tok)

    def describe_quantization(self) -> str | None:
        """Return a short text for logs and reports; None: no weight is quantised."""
        if self.quantization is None:
            return None
        text = self.quantization.describe()
        keeps_experts = self.quantization.is_on_load and self.experts is not None and not any(quantized_experts(self))
        return f"{text}; experts stay as they are" if keeps_experts else text

    def weight_bytes(self, dtype: torch.dtype, device: torch.device | None = None) -> int:
        """Return the bytes of the whole model's weights on the device; unquantized ones have `dtype`.

        device: None: no particular one, on which experts stay in the arrangement in which they are read.
        """
        return self.num_parameters * dtype.itemsize - saved_bytes(self, dtype, device)

    def num_kv_heads_per_rank(self, tp_size: int) -> int:
        """Return the KV heads that one rank stores: its share, or one replicated head if ranks outnumber heads."""
        return max(self.num_kv_heads // tp_size, 1)

    def kv_bytes_per_token(self, tp_size: int, kv_dtype: torch.dtype) -> int:
        """Return the bytes of KV cache that one token takes on one rank, over all layers."""
        return sum(cache.share_of_rank(tp_size).token_bytes(kv_dtype) for cache in self.kv_caches)

    def share_of_rank(self, tp_size: int, *, is_expert_parallel: bool = False) -> ModelConfig:
        """Return the sizes that one of tp_size ranks holds at most. Used for arithmetic, never to build a model."""
        experts, recurrence = self.experts, self.recurrence
        return dataclasses.replace(
            self,
            vocab_size=-(-self.vocab_size // tp_size),
            intermediate_size=self.intermediate_size // tp_size,
            num_heads=self.num_heads // tp_size,
            num_kv_heads=self.num_kv_heads_per_rank(tp_size),
            caches=tuple(None if cache is None else cache.share_of_rank(tp_size) for cache in self.caches),
            states=tuple(None if state is None else state.share_of_rank(tp_size) for state in self.states),
            recurrence=None if recurrence is None else recurrence.share_of_rank(tp_size),
            experts=None if experts is None else experts.share_of_rank(tp_size, is_expert_parallel=is_expert_parallel),
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
        """Return the requirements of one rank of this model on the attention backend: of its widest layers."""
        caches = self.kv_caches
        return AttentionSpec(
            num_heads=self.num_heads // tp_size,
            num_kv_heads=min(cache.share_of_rank(tp_size).num_kv_heads for cache in caches),
            head_dim=max(cache.head_dim for cache in caches),
            dtype=dtype,
            device=device,
            block_size=block_size,
            kv_dtype=kv_dtype,
            value_head_dim=max(cache.v_head_dim for cache in caches),
            has_sinks=self.has_sinks,
            has_chunks=any(cache.chunk is not None for cache in caches),
            frees_windows=any(cache.reach is not None for cache in caches),
            has_latents=all(cache.values_in_keys for cache in caches),
        )

    @property
    def latent_sizes(self) -> LatentSizes | None:
        """The sizes that choose between the forms of latent attention; None: the model has none."""
        if self.latent is None:
            return None
        sizes = self.latent
        return LatentSizes(self.num_heads, sizes.rank, sizes.rope_dim, sizes.nope_dim, sizes.v_head_dim)

    def check_tensor_parallel(self, tp_size: int, *, is_expert_parallel: bool = False) -> None:
        """Raise ModelError unless the model splits over tp_size ranks, with whole experts or with parts of each."""
        if self.is_foreign and tp_size > 1:
            raise ModelError(f"{self.architecture}: transformers' own class does not split over {tp_size} ranks: use 1")
        check_split(self, tp_size, is_expert_parallel=is_expert_parallel)
