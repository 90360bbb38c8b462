"""The flags of what is behind and beside the KV cache: host memory, a disk, its events, other engines. Never torch.

server/config/serve_flags.py adds them to the group of memory and batching. Imports argparse, server.config.
"""

import argparse
import importlib.util

from server.config.disaggregation import add_disaggregation_flags, shown_counts
from server.config.value_types import UsageError, kv_events, size, size_or_word, text

DEFAULT_HOST_MEMORY = "auto"  # engine/startup/host_memory.py chooses the size


def add_kv_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags."""
    add = group.add_argument
    add(
        "--kv-host-memory",
        type=size_or_word,
        default=DEFAULT_HOST_MEMORY,
        metavar="SIZE",
        help="host memory for blocks that leave the KV cache, e.g. 32GiB, off, or auto: a share of it on cuda (auto)",
    )
    add("--kv-disk", type=text, metavar="DIR", help="folder for blocks of host memory, found after a restart (off)")
    add("--kv-disk-size", type=size, metavar="SIZE", help="the most bytes of --kv-disk (64GiB)")
    events_help = "events of the prefix cache for routers, in vLLM's form (off)"
    add("--kv-events-config", type=kv_events, metavar="JSON", help=events_help)
    add_disaggregation_flags(group)


def check_kv_events(arguments: argparse.Namespace) -> None:
    """Raise UsageError if events of the prefix cache are asked for and cannot be published."""
    if arguments.kv_events_config is None:
        return
    if arguments.no_prefix_caching:
        raise UsageError(
            "--kv-events-config publishes what the prefix cache has, and --no-prefix-caching disables that:"
            " use one of the two."
        )
    if arguments.disaggregate is not None:
        raise UsageError(
            "--kv-events-config publishes the prefix cache of one engine at its endpoint, and --disaggregate"
            f" {shown_counts(arguments.disaggregate)} has several: use one of the two."
        )
    if importlib.util.find_spec("zmq") is None:
        raise UsageError(
            "--kv-events-config publishes over ZeroMQ, and the package pyzmq is not installed: pip install pyzmq."
        )
