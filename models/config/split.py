"""Whether a model splits over ranks, by its config: before a rank starts, or a weight is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from models.config.matrices import check_shares
from models.errors import ModelError

if TYPE_CHECKING:
    from models.config.model_config import ModelConfig


def check_split(model: ModelConfig, tp_size: int) -> None:
    """Raise ModelError naming what tp_size ranks cannot share."""
    counts = {"num_heads": model.num_heads}
    if False in model.sparse_layers:
        counts["intermediate_size"] = model.intermediate_size
    if model.experts is not None:
        counts["intermediate_size of each expert"] = model.experts.intermediate_size
        counts["shared_expert_intermediate_size"] = model.experts.shared_intermediate_size
    for name, count in counts.items():
        if count % tp_size != 0:
            raise ModelError(f"{model.architecture}: {name} {count} does not split over {tp_size} ranks")
    if model.num_kv_heads % tp_size != 0 and tp_size % model.num_kv_heads != 0:
        raise ModelError(
            f"{model.architecture}: num_kv_heads {model.num_kv_heads} neither splits over {tp_size} ranks"
            " nor divides them, so its heads cannot be replicated"
        )
    check_shares(model, tp_size)
