"""Rehearsals with a small model: one layer of each kind, random weights. Imports torch.

serve_small(): before a start compiles kernels, to record which it launches.
rehearse_beside(): in a standby, while another engine serves: it makes the device's context and loads kernels, libraries
and Python's own first calls, so that a takeover finds them done. Then it gives the memory back.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import time
from collections.abc import Callable

import msgspec
import torch

from engine.device.kv_cache import KVCachePlan, smallest_pool_bytes
from engine.interface.units import GIB, format_size
from engine.startup.loaded_engine import LoadedEngine
from engine.startup.setup import Captured, Setup
from engine.tensor_parallel.process_group import unconnected_one_shot_all_reduce
from models.build import build
from models.weights.weights import Weights

logger = logging.getLogger(__name__)

Serve = Callable[[LoadedEngine], None]

_POOL_BYTES = GIB  # of a rehearsal beside an engine
_LEFT_BYTES = GIB  # of the device, for the engine that serves meanwhile


def serve_small(
    setup: Setup, plan: KVCachePlan, serve: Serve | None, *, graphs: Captured = Captured.NONE
) -> LoadedEngine:
    """Run `serve` on one rank's share of a small model, with full pools per layer."""
    model_config = setup.model_config.one_layer_of_each_kind()
    small = dataclasses.replace(setup, model_config=model_config, backend=type(setup.backend)())
    adapters = None if setup.adapters is None else setup.adapters.stack(is_partial=True)
    weights = Weights.dummy(device=setup.device, dtype=setup.dtype, adapters=adapters)
    sums = unconnected_one_shot_all_reduce(setup.tp.size, setup.device, width=model_config.hidden_size)
    with torch.inference_mode():
        model = build(model_config, weights, dataclasses.replace(setup.tp, one_shot_all_reduce=sums))
    loaded = small.assemble(model, plan, lambda done, total: None, {}, graphs=graphs)
    if serve is not None:
        serve(loaded)
    return loaded


def rehearse_beside(setup: Setup, serve: Serve) -> bool:
    """Run a small model as a start runs its model, if the device has room; return True if it did. Blocks.

    Any failure only costs time when this process takes over.
    """
    if not _can_rehearse(setup):
        return False
    started_s = time.monotonic()
    config = msgspec.structs.replace(setup.config, kv_cache_memory_bytes=None, max_model_len=None)
    model_config = setup.model_config.one_layer_of_each_kind()
    small = dataclasses.replace(setup, config=config, model_config=model_config)
    pool_bytes = max(_POOL_BYTES, smallest_pool_bytes(config, small.plan_pages(), longest=1))
    small = dataclasses.replace(small, config=msgspec.structs.replace(config, kv_cache_memory_bytes=pool_bytes))
    needed = small.weight_bytes + small.step_bytes + pool_bytes + _LEFT_BYTES
    free = torch.cuda.mem_get_info(setup.device)[0]
    if free < needed:
        logger.info("standby rehearses nothing free=%r needed=%r", format_size(free), format_size(needed))
        return False
    try:
        plan = small.plan_pool(has_weights=True)
        serve_small(small, plan, serve, graphs=Captured.SOME).close()
        torch.cuda.synchronize(setup.device)
    except Exception as error:  # an error that also affects serving occurs there again
        logger.warning("standby's rehearsal failed: %s: %s", type(error).__name__, str(error)[:200])
        return False
    finally:
        gc.collect()  # graphs and their runner reference each other
        torch.cuda.empty_cache()
    logger.info("standby rehearsed seconds=%.2f kept=%r", time.monotonic() - started_s, _kept(setup.device, free))
    return True


def _can_rehearse(setup: Setup) -> bool:
    return setup.device.type == "cuda" and setup.tp.size == 1 and not setup.model_config.is_foreign


def _kept(device: torch.device, free_before: int) -> str:
    """Return the device memory that the rehearsal has not given back, beside the context."""
    return format_size(max(free_before - torch.cuda.mem_get_info(device)[0], 0))
