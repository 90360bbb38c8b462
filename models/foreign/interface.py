"""The seam to transformers' models: an attention function under a name of Quire's, and a mask that can be asked.

transformers' attention layers look their attention function up by the name in the config and pass it the keyword
arguments that the model was called with. So a model whose config names ATTENTION calls, in each attention, the object
that its caller passed as `quire_attend`. Under PROBE the model builds masks, too: each is a tensor with the attributes
of MaskRule, so that a probe sees which keys a query may attend to. Under ATTENTION no mask is built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from models.errors import ModelError

ATTENTION, PROBE = "quire", "quire_probe"


class Attend(Protocol):
    """What a model calls in each of its attentions."""

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,  # [1, num_heads, T, head_dim]
        key: torch.Tensor,  # [1, num_kv_heads, T, head_dim]
        value: torch.Tensor,  # [1, num_kv_heads, T, v_head_dim]
        mask: torch.Tensor | None,
        options: dict[str, Any],  # by keyword: scaling, sliding_window, softcap, s_aux and what the model adds
    ) -> torch.Tensor:  # [1, T, num_heads, v_head_dim]
        """Compute one attention."""
        ...


@dataclass(frozen=True)
class MaskRule:
    """Which keys a query may attend to, as transformers states it: allows(batch, head, query, key)."""

    allows: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

    def is_causal_window(self, window: int | None, *, longest: int) -> bool:
        """Return whether the rule is causal, with a sliding window if one is given, up to position `longest`.

        Asked at both sides of each place where such a rule changes, and of powers of two, where chunks would begin.
        """
        edges = {0, 1, 2, 3, longest - 1, *((1 << power) for power in range(2, longest.bit_length()))}
        if window is not None:
            edges |= {window * factor for factor in (1, 2, 3)}
        with torch.device("cpu"):  # also inside a probe on the meta device
            return self._is_causal_window(edges, window, longest)

    def _is_causal_window(self, edges: set[int], window: int | None, longest: int) -> bool:
        near = sorted({edge + step for edge in edges for step in (-1, 0, 1) if 0 <= edge + step < longest})
        queries, keys = torch.tensor(near)[:, None], torch.tensor(near)[None, :]
        if window is not None:  # and each query at the far end of its own window
            own = torch.stack([queries[:, 0] - window + step for step in (0, 1)], dim=1).clamp(min=0)
            return self._agrees(queries, keys, window) and self._agrees(queries, own, window)
        return self._agrees(queries, keys, None)

    def _agrees(self, queries: torch.Tensor, keys: torch.Tensor, window: int | None) -> bool:
        queries, keys = torch.broadcast_tensors(queries, keys)
        zero = torch.zeros((), dtype=torch.int64)
        wanted = keys <= queries
        if window is not None:
            wanted &= keys > queries - window
        found = [
            bool(self.allows(zero, zero, query, key))
            for query, key in zip(queries.flatten(), keys.flatten(), strict=True)
        ]
        return torch.tensor(found).equal(wanted.flatten())


def rule_of(mask: torch.Tensor | None) -> MaskRule | None:
    """Return the rule that a mask built under PROBE carries; None if it carries none."""
    return getattr(mask, "quire_rule", None)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    quire_attend: Attend | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    if quire_attend is None:
        raise ModelError(
            f"{type(module).__name__}: transformers' own class does not let its attention be replaced: its layers keep"
            " the arguments of the model from it"
        )
    return quire_attend(module, query, key, value, attention_mask, options), None


def _probe_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., torch.Tensor],
    **_: Any,
) -> torch.Tensor:
    mask = torch.empty(batch_size, 1, q_length, kv_length, dtype=torch.bool, device="meta")
    mask.quire_rule = MaskRule(mask_function)  # type: ignore[attr-defined]
    return mask


AttentionInterface.register(ATTENTION, _attend)
AttentionInterface.register(PROBE, _attend)
AttentionMaskInterface.register(PROBE, _probe_mask)
