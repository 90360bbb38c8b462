"""Sizes of the host memory behind the KV pool, from --kv-host-memory and measured rates. Imports torch, indirectly."""

from engine.device.kv_cache import KVCachePlan
from engine.device.memory import format_size, free_host_bytes
from engine.interface.config import EngineConfig, HostTierConfig, PeerConfig
from engine.interface.errors import StartupError

# Copies of so long in each direction end before a short decode step does, beside which they run
_COPIES_OF_A_STEP_S = 0.002
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
    least = config.tensor_parallel_size * plan.bytes_per_page * max(group.pages_per_block for group in plan.groups)
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


def describe_tiers(config: EngineConfig) -> str:
    """Return what is behind the pool, as the end of a sentence."""
    host = config.kv_host_memory_bytes
    behind = "" if host is None else f", {format_size(host)} of host memory behind it"
    return behind if config.kv_disk is None else f"{behind}, then {config.kv_disk}"


def num_host_slots(config: EngineConfig, plan: KVCachePlan) -> int:
    """Return the pages for which each rank has host memory; 0: none."""
    return (config.kv_host_memory_bytes or 0) // (config.tensor_parallel_size * plan.bytes_per_page)


def host_tier_config(
    num_slots: int, *, page_s: float, tokens_per_s: float | None, peer: PeerConfig | None = None
) -> HostTierConfig | None:
    """Return the scheduler's part of it; None: there is no host memory.

    page_s: seconds to copy a page. tokens_per_s: of prompts, at best; None: unknown.
    """
    if not num_slots:
        return None
    copies_s = _COPIES_OF_A_STEP_S if peer is None else _COPIES_OF_A_PEER_S[peer.role]
    max_copies = min(max(int(copies_s / page_s), 1), num_slots) if page_s else num_slots
    return HostTierConfig(
        num_slots=num_slots,
        max_copies=max_copies,
        page_s=page_s,
        token_s=1 / tokens_per_s if tokens_per_s else 0.0,
    )
