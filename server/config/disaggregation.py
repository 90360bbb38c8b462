"""The flags of prefill and decode engines: --disaggregate, --disaggregate-from, --kv-transport. Never torch.

Those of other hosts are in server/config/host_links.py.
"""

import argparse
import importlib.util
import re
import secrets
from typing import TYPE_CHECKING

from server.config.host_links import MOST_ENGINES, add_host_link_flags, check_transport, host_links_of, shown
from server.config.value_types import UsageError, integer, limited

if TYPE_CHECKING:
    from engine.interface.config import PeerConfig

_DEFAULT_MIN_TOKENS = 256
_NUMBERS_OF_A_SERVER = 256  # its decode engines are told apart from those of others by a random first number
_FORM = re.compile(r"(?:([0-9]+)p)?(?:([0-9]+)d)?")


@limited("1p1d to 16p16d; with other hosts also 1p to 16p, or 1d to 16d")
def engine_counts(text: str) -> tuple[int, int]:
    """Parse numbers of prefill and decode engines: 1p1d. 1p has no decode engine, and 1d no prefill engine: 0."""
    match = _FORM.fullmatch(text.strip().lower())
    given = [count for count in match.groups() if count is not None] if match is not None else []
    if match is None or not given or not all(1 <= int(count) <= MOST_ENGINES for count in given):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not of the form 1p1d: prefill engines and decode engines, 1 to {MOST_ENGINES} of each"
        )
    return int(match[1] or 0), int(match[2] or 0)


def shown_counts(counts: tuple[int, int]) -> str:
    """Return numbers of engines as --disaggregate takes them."""
    return "".join(f"{count}{role}" for count, role in zip(counts, "pd", strict=True) if count)


def add_disaggregation_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags."""
    add = group.add_argument
    add(
        "--disaggregate",
        type=engine_counts,
        metavar="NpMd",
        help="N engines compute long prompts and M decode, each on GPUs of its own, e.g. 1p1d; with other hosts also 1p"
        " or 1d (one engine does both)",
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
        help="how blocks go from engine to engine: shared-memory or nixl (shared-memory; with other hosts nixl)",
    )
    add_host_link_flags(group)


def peer_of(arguments: argparse.Namespace) -> "PeerConfig | None":
    """Return the first decode engine's part, from which the launcher makes the others'; None: one engine does all.

    Without a decode engine it is the first prefill engine's. Raises StartupError for flags that exclude each other.
    """
    counts, listen, hosts = arguments.disaggregate, arguments.disaggregate_listen, arguments.prefill_hosts or []
    if counts is None:
        for flag, value, example in (
            ("--disaggregate-from", arguments.disaggregate_from, "1p1d"),
            ("--kv-transport", arguments.kv_transport, "1p1d"),
            ("--disaggregate-listen", listen and listen.address, "1p"),
            ("--prefill-hosts", shown(hosts) or None, "1d"),
        ):
            if value is not None:
                raise UsageError(f"{flag} {value} needs --disaggregate, for example {example}.")
        host_links_of(arguments)
        return None
    named = shown_counts(counts)
    _check_sides(arguments, counts)
    if arguments.no_prefix_caching:
        raise UsageError(
            f"--disaggregate {named} hands over blocks of the prefix cache, which --no-prefix-caching disables:"
            " use one of the two."
        )
    if arguments.standby:
        raise UsageError(
            f"--disaggregate {named} has no engine that stands by, which --standby asks for: use one of both."
        )
    is_on_several_hosts = host_links_of(arguments) is not None
    transport = check_transport(arguments) if is_on_several_hosts else arguments.kv_transport or "shared-memory"
    if transport == "nixl" and importlib.util.find_spec("nixl") is None:
        cause = "" if arguments.kv_transport else f"Blocks go to other hosts by NIXL (--disaggregate {named}): "
        raise UsageError(f"{cause}--kv-transport nixl needs NIXL, which is not installed: pip install nixl.")
    from engine.interface.config import PeerConfig

    return PeerConfig(
        role="decode" if counts[1] else "prefill",
        index=0,
        num_prefill=counts[0],
        num_decode=counts[1],
        prefill_hosts=hosts,
        is_on_several_hosts=is_on_several_hosts,
        first_decode=(1 + secrets.randbelow(2**40)) * _NUMBERS_OF_A_SERVER if hosts else 0,
        transport=transport,
    )


def _check_sides(arguments: argparse.Namespace, counts: tuple[int, int]) -> None:
    """Raise UsageError if prefill engines have nobody to decode, or the other way round."""
    (num_prefill, num_decode), named = counts, shown_counts(counts)
    hosts = shown(arguments.prefill_hosts or [])
    if not num_decode and arguments.disaggregate_listen is None:
        raise UsageError(
            f"--disaggregate {named} computes prompts for other hosts alone: --disaggregate-listen HOST:PORT says where"
            " they find it, or 1p1d decodes here, too."
        )
    if not num_decode and hosts:
        raise UsageError(f"--prefill-hosts {hosts} needs an engine that decodes, and --disaggregate {named} has none.")
    if not num_decode and arguments.disaggregate_from is not None:
        raise UsageError(
            f"--disaggregate-from {arguments.disaggregate_from} is for hosts that decode, and --disaggregate {named}"
            " has no engine that does."
        )
    if not num_prefill and not hosts:
        raise UsageError(
            f"--disaggregate {named} computes no prompts: --prefill-hosts HOST:PORT names hosts that do, or 1p1d"
            " computes them here."
        )
    if not num_prefill and arguments.disaggregate_listen is not None:
        raise UsageError(
            f"--disaggregate-listen {arguments.disaggregate_listen.address} lends prefill engines, and --disaggregate"
            f" {named} has none."
        )


def min_prefill_tokens(arguments: argparse.Namespace) -> int:
    """Return the length of the prompts that prefill engines compute."""
    return arguments.disaggregate_from or _DEFAULT_MIN_TOKENS
