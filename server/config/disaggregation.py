"""The flags of prefill and decode engines: --disaggregate, --disaggregate-from, --kv-transport. Never torch."""

import argparse
import importlib.util
import re
from typing import TYPE_CHECKING

from server.config.value_types import UsageError, integer, limited

if TYPE_CHECKING:
    from engine.interface.config import PeerConfig

_MOST_ENGINES = 16  # of each role
_DEFAULT_MIN_TOKENS = 256
_FORM = re.compile(r"([0-9]+)p([0-9]+)d")


@limited("1p1d to 16p16d")
def engine_counts(text: str) -> tuple[int, int]:
    """Parse numbers of prefill and decode engines: 1p1d."""
    match = _FORM.fullmatch(text.strip().lower())
    counts = (int(match[1]), int(match[2])) if match is not None else (0, 0)
    if not all(1 <= count <= _MOST_ENGINES for count in counts):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not of the form 1p1d: prefill engines and decode engines, 1 to {_MOST_ENGINES} of each"
        )
    return counts


def add_disaggregation_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags."""
    add = group.add_argument
    add(
        "--disaggregate",
        type=engine_counts,
        metavar="NpMd",
        help="N engines compute long prompts and M decode, each on its own GPU, e.g. 1p1d (one engine does both)",
    )
    add(
        "--disaggregate-from",
        type=integer(1, 2**24),
        metavar="N",
        help=f"tokens of a prompt from which a prefill engine computes it ({_DEFAULT_MIN_TOKENS})",
    )
    add(
        "--kv-transport",
        choices=("shared-memory", "nixl"),
        metavar="NAME",
        help="how blocks go from engine to engine: shared-memory or nixl (shared-memory)",
    )


def peer_of(arguments: argparse.Namespace) -> "PeerConfig | None":
    """Return the first decode engine's part, from which the launcher makes the others'; None: one engine does all.

    Raises StartupError for flags that exclude each other.
    """
    counts = arguments.disaggregate
    if counts is None:
        for flag in ("--disaggregate-from", "--kv-transport"):
            value = getattr(arguments, flag.removeprefix("--").replace("-", "_"))
            if value is not None:
                raise UsageError(f"{flag} {value} needs --disaggregate, for example 1p1d.")
        return None
    shown = "{}p{}d".format(*counts)
    if arguments.tensor_parallel_size > 1:
        raise UsageError(
            f"--disaggregate {shown} gives each engine one device, and --tensor-parallel-size is"
            f" {arguments.tensor_parallel_size}: use one of the two."
        )
    if arguments.no_prefix_caching:
        raise UsageError(
            f"--disaggregate {shown} hands over blocks of the prefix cache, which --no-prefix-caching disables:"
            " use one of the two."
        )
    if arguments.standby:
        raise UsageError(
            f"--disaggregate {shown} has no engine that stands by, which --standby asks for: use one of both."
        )
    if arguments.kv_transport == "nixl" and importlib.util.find_spec("nixl") is None:
        raise UsageError("--kv-transport nixl needs NIXL, which is not installed: pip install 'quire[disaggregate]'.")
    from engine.interface.config import PeerConfig

    return PeerConfig(
        role="decode",
        index=0,
        num_prefill=counts[0],
        num_decode=counts[1],
        transport=arguments.kv_transport or "shared-memory",
    )


def min_prefill_tokens(arguments: argparse.Namespace) -> int:
    """Return the length of the prompts that prefill engines compute."""
    return arguments.disaggregate_from or _DEFAULT_MIN_TOKENS
