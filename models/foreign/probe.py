"""probe(): finds out, without weights, what a model of transformers computes in its attentions.

The class is built on the meta device and called once. Each attention is recorded in the order of the calls: its shapes,
its constants and the rule of its mask. What Quire's attention and cache cannot compute is refused, with the reason.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from models.errors import ModelError
from models.foreign.interface import PROBE, rule_of
from models.registry import is_served

_NUM_TOKENS = 3
# Keyword arguments of an attention that change nothing for a causal text model in evaluation
_HARMLESS_OPTIONS = {
    "dropout",
    "position_ids",
    "use_cache",
    "logits_to_keep",
    "output_router_logits",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "cache_position",
    "labels",
    "encoder_hidden_states",
    "is_causal",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
}
_READ_OPTIONS = {"scaling", "sliding_window", "softcap", "s_aux"}
_PARTS = ("text_config", "vision_config", "audio_config")  # of a checkpoint for more than text
# RoPE whose angles depend on the longest position of the batch: a text would depend on its neighbours
_BATCH_ROPES = ("dynamic", "longrope")


@dataclass(frozen=True)
class AttentionCall:
    """One attention of the model's forward pass."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    window: int | None  # tokens; None: the whole context
    softcap: float  # 0: none
    has_sinks: bool


def probe(cls: type[PreTrainedModel], config: PreTrainedConfig, *, longest: int) -> tuple[AttentionCall, ...]:
    """Return the attentions of one forward pass, in order. longest: the context in tokens. Raises ModelError."""
    name = cls.__name__
    config = copy.deepcopy(config)
    recorder = _Recorder(name, longest)
    with failure(name), torch.device("meta"):
        model = cls._from_config(config, attn_implementation=PROBE, dtype=torch.bfloat16).eval()
        ids = torch.zeros(1, _NUM_TOKENS, dtype=torch.int64)
        positions = torch.arange(_NUM_TOKENS)[None]
        with torch.no_grad():
            # With a mask of ones the masks do not also look for several texts in one row of position_ids
            mask = torch.ones(1, _NUM_TOKENS, dtype=torch.int64)
            model(ids, attention_mask=mask, position_ids=positions, use_cache=False, quire_attend=recorder)
    if not recorder.calls:
        raise ModelError(f"{name}: it has no attention that Quire's could replace")
    return tuple(recorder.calls)


@contextmanager
def failure(name: str) -> Iterator[None]:
    """Turn whatever a class of transformers raises into a ModelError that names both; device faults pass."""
    try:
        yield
    except (ModelError, torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0][:200]
        if "meta tensor" in reason:
            reason = f"its forward pass reads the values of tensors, which Quire cannot examine ({reason})"
        raise ModelError(
            f"{name}: transformers' own class fails with Quire's attention: {type(error).__name__}: {reason}"
        ) from error


class _Recorder:
    """An Attend that records each call."""

    def __init__(self, name: str, longest: int) -> None:
        self.name = name
        self.longest = longest
        self.calls: list[AttentionCall] = []

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        unknown = [
            option
            for option, found in options.items()
            if option not in _READ_OPTIONS | _HARMLESS_OPTIONS and found is not None
        ]
        if unknown:
            raise self._refusal(f"an attention takes {', '.join(sorted(unknown))}")
        if query.shape[2] != _NUM_TOKENS or key.shape[2] != _NUM_TOKENS or query.shape[0] != 1:
            raise self._refusal("an attention is not over the tokens of the text")
        if query.shape[1] % key.shape[1] != 0:
            raise self._refusal(f"{query.shape[1]} query heads are no multiple of {key.shape[1]} key heads")
        window, scaling, softcap = (options.get(option) for option in ("sliding_window", "scaling", "softcap"))
        if window is not None and window < 1:
            raise ModelError(f"{self.name}: sliding_window must be a positive integer, found {window!r}")
        self._check_sinks(options.get("s_aux"), num_heads=query.shape[1])
        if getattr(module, "is_causal", True) is False:
            raise self._refusal("an attention also sees later tokens")
        rule = rule_of(mask)
        if rule is None:
            raise self._refusal("an attention has a mask of the class's own, which Quire cannot examine")
        if not rule.is_causal_window(window, longest=self.longest):
            raise self._refusal("the mask of an attention is neither causal nor a sliding window that it is told of")
        self.calls.append(
            AttentionCall(
                num_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                head_dim=query.shape[3],
                v_head_dim=value.shape[3],
                scale=float(query.shape[3] ** -0.5 if scaling is None else scaling),
                window=window if window is None else int(window),
                softcap=float(softcap or 0.0),
                has_sinks=options.get("s_aux") is not None,
            )
        )
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])

    def _check_sinks(self, sinks: Any, *, num_heads: int) -> None:
        if sinks is None or (isinstance(sinks, torch.Tensor) and sinks.shape == (num_heads,)):
            return
        found = f"shape {[*sinks.shape]}" if isinstance(sinks, torch.Tensor) else f"type {type(sinks).__name__}"
        raise self._refusal(f"an attention has s_aux of {found}, not one number for each of its {num_heads} heads")

    def _refusal(self, reason: str) -> ModelError:
        return ModelError(f"{self.name}: it cannot be served by transformers' own class, since {reason}")


def refuse_class(cls: type[PreTrainedModel], config: PreTrainedConfig) -> None:
    """Raise ModelError for a class that needs more than attention over its own earlier tokens."""
    name = cls.__name__
    if config.is_encoder_decoder:
        raise ModelError(f"{name}: an encoder and a decoder; Quire serves decoders only")
    if parts := [part.removesuffix("_config") for part in config.sub_configs if part in _PARTS]:
        if is_served(name):
            raise ModelError(
                f"{name}: a model of several parts ({', '.join(parts)}), whose text part transformers' own class does"
                " not compute by itself; Quire's own layers do: leave --model-impl transformers out"
            )
        raise ModelError(
            f"{name}: a model of several parts ({', '.join(parts)}), whose text part Quire cannot serve by itself; of"
            " other such models it can (docs/reference/models.md)"
        )
    if getattr(cls, "_is_stateful", False):
        raise ModelError(
            f"{name}: layers that keep a state, which transformers' own class cannot keep in Quire's cache"
        )
    if getattr(config, "num_kv_shared_layers", None):
        raise ModelError(
            f"{name}: num_kv_shared_layers: layers that read the keys and values of another layer, for which"
            " transformers' own class has no place in Quire's cache"
        )
    if not cls._supports_attention_backend:
        raise ModelError(f"{name}: transformers' own class does not let its attention be replaced")
    for kind in _rope_types(getattr(config, "rope_parameters", None)):
        if kind in _BATCH_ROPES:
            raise ModelError(
                f"{name}: rope_type {kind!r}, which transformers' own class applies by the longest text of a batch"
            )


def _rope_types(parameters: Any) -> set[str]:
    """Return the types of rope_parameters, which may hold one entry, or one for each type of layer."""
    if not isinstance(parameters, Mapping):
        return set()
    nested = [kind for value in parameters.values() for kind in _rope_types(value)]
    return {*nested, *([str(parameters["rope_type"])] if "rope_type" in parameters else [])}
