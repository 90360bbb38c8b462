"""Sizes of the host memory behind the KV pool, from --kv-host-memory and measured rates. Imports torch, indirectly."""

import logging

import msgspec

from engine.device.kv_cache import KVCachePlan
from engine.device.memory import format_size, free_host_bytes, num_host_gpus
from engine.interface.config import EngineConfig, HostTierConfig, PeerConfig
from engine.interface.errors import StartupError

logger = logging.getLogger(__name__)

# What `auto` takes, on CUDA: this share of what is free, within the cgroup's limit, of which an engine takes the part
# of its GPUs among the machine's, since the others may have engines, too; and at most so much. It is pinned after the
# start, and is lost for other programs
AUTO_SHARE = 0.25
AUTO_MOST_BYTES = 16 * 2**30
# Copies of so long in each direction, in a step without decode rows and in one with them, for which they wait
_COPIES_OF_A_STEP_S = 0.002
_COPIES_BESIDE_DECODES_S = 0.001
# Of the time beside decode rows, for copies to the host for which nobody waits. 3 % of it, if 1 ms in each
# direction took 0.45 ms of a decode step, as they did before they followed the step's inputs
UNASKED_SHARE = 0.03 / 0.45
# Of the time that the step's prompt tokens take: less than the 16 % of 1 ms in 6.3 ms. Prompts of Llama 3.1 8B on an
# H100 fill a GiB of blocks in 0.3 s, which needs 27 GB/s
_COPIES_OF_PROMPTS = 0.125
# An engine that takes prompts of others admits them late if it copies less. The steps of one that computes prompts for
# others are many times as long
_COPIES_OF_A_PEER_S = {"decode": 0.004, "prefill": 0.05}


def check_host_memory(config: EngineConfig, plan: KVCachePlan, *, taken_bytes: int) -> None:
    """Raise StartupError if --kv-host-memory cannot be met. taken_bytes: of free memory, what the start takes besides.

    Called before other ranks start, since each of them takes its share at its own time.
    """
    wanted = config.kv_host_memory_bytes
    if wanted is None:
        return
    asked = f"--kv-host-memory {format_size(wanted)}"
    if not config.enable_prefix_caching:
        raise StartupError(
            f"{asked} keeps blocks of the prefix cache, which --no-prefix-caching disables: use one of the two."
        )
    least = config.tensor_parallel_size * plan.bytes_per_block
    if wanted < least:
        raise StartupError(
            f"{asked} is less than one block of this model's KV cache: use at least {format_size(least)}."
        )
    free = max(free_host_bytes() - taken_bytes, 0)
    if wanted > free:
        beside = f" beside {format_size(taken_bytes)} for weights and KV cache" if taken_bytes else ""
        raise StartupError(
            f"{asked} is more than the {format_size(free)} of this machine's memory that are free{beside}:"
            " use a smaller size."
        )


def auto_host_bytes(num_ranks: int) -> int:
    """Return the bytes that `auto` takes on CUDA for so many GPUs together."""
    return min(int(free_host_bytes() * _auto_share(num_ranks, num_gpus=num_host_gpus())), AUTO_MOST_BYTES)


def choose_host_memory(config: EngineConfig, plan: KVCachePlan, *, device_type: str) -> EngineConfig:
    """Return the configuration with the size of host memory, if the engine is to choose it; tell it and the reason.

    Called after check_host_memory(), before other ranks start.
    """
    if not config.chooses_host_memory or config.kv_host_memory_bytes is not None:
        return config
    least = config.tensor_parallel_size * plan.bytes_per_block
    num_ranks, num_gpus = config.tensor_parallel_size, num_host_gpus()
    share = _auto_share(num_ranks, num_gpus=num_gpus)
    num_bytes = auto_host_bytes(num_ranks)
    if not config.enable_prefix_caching:
        num_bytes, reason = 0, "--no-prefix-caching leaves nothing to keep"
    elif device_type != "cuda":
        num_bytes, reason = (
            0,
            f"on {device_type} the KV cache is in the same memory: a larger --kv-cache-memory is better",
        )
    elif num_bytes < least:
        num_bytes, reason = 0, f"{share:.3g} of the free memory is less than one block"
    else:
        part = f" (a quarter, for {num_ranks} of {num_gpus} GPUs)" if num_ranks < num_gpus else ""
        most = format_size(AUTO_MOST_BYTES)
        reason = f"{share:.3g} of the free memory{part}, at most {most}; --kv-host-memory off: none"
    size = format_size(num_bytes) if num_bytes else "off"
    logger.info("host memory behind the KV cache size=%r reason=%r", size, reason)
    return msgspec.structs.replace(config, kv_host_memory_bytes=num_bytes or None, chooses_host_memory=False)


def describe_tiers(config: EngineConfig) -> str:
    """Return what is behind the pool, as the end of a sentence."""
    host = config.kv_host_memory_bytes
    behind = "" if host is None else f", {format_size(host)} of host memory behind it"
    return behind if config.kv_disk is None else f"{behind}, then {config.kv_disk}"


def num_host_slots(config: EngineConfig, plan: KVCachePlan) -> int:
    """Return the pages for which each rank has host memory; 0: none."""
    return (config.kv_host_memory_bytes or 0) // (config.tensor_parallel_size * plan.bytes_per_page)


def host_tier_config(
    num_slots: int,
    *,
    page_s: float,
    tokens_per_s: float | None,
    peer: PeerConfig | None = None,
    has_disk: bool = False,
) -> HostTierConfig | None:
    """Return the scheduler's part of it; None: there is no host memory.

    page_s: seconds to copy a page. tokens_per_s: of prompts, at best; None: unknown.
    """
    if not num_slots:
        return None
    copies_s = _COPIES_OF_A_STEP_S if peer is None else _COPIES_OF_A_PEER_S[peer.role]
    beside_s = _COPIES_BESIDE_DECODES_S if peer is None else copies_s
    token_s = 1 / tokens_per_s if tokens_per_s else 0.0
    return HostTierConfig(
        num_slots=num_slots,
        max_copies=_num_copies(copies_s, page_s, num_slots),
        max_copies_beside=_num_copies(beside_s, page_s, num_slots),
        copies_per_token=_COPIES_OF_PROMPTS * token_s / page_s if page_s else 0.0,
        unasked_share=UNASKED_SHARE if peer is None else None,
        copies_leaving=peer is None and not has_disk,
        page_s=page_s,
        token_s=token_s,
    )


def _auto_share(num_ranks: int, *, num_gpus: int) -> float:
    """Return the share of free memory for so many GPUs of a machine's."""
    return AUTO_SHARE * min(num_ranks / num_gpus, 1.0)


def _num_copies(copies_s: float, page_s: float, num_slots: int) -> int:
    """Return how many pages are copied in this time; all if the rate is unknown."""
    return min(max(int(copies_s / page_s), 1), num_slots) if page_s else num_slots
