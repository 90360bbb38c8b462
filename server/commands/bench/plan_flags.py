"""The flags of `quire bench steps` and `quire bench plan`. Imports argparse."""

import argparse
import re

from server.commands.bench.flags import add_engine_flags, rate
from server.config.value_types import deadline, integer, share, text

_MOST_TOKENS = 2**24


def add_steps_flags(parser: argparse.ArgumentParser) -> None:
    """Add those of steps."""
    add_engine_flags(parser)
    add = parser.add_argument
    add("--context", type=integer(1, _MOST_TOKENS), default=512, metavar="N", help="of the rows that decode (512)")
    add("--num-steps", type=integer(3, 10_000), default=20, metavar="N", help="timed for each point (20)")
    add("--max-seconds", type=deadline, default=180.0, metavar="S", help="leave out what would take longer (180)")
    _add_json(parser)


def add_plan_flags(parser: argparse.ArgumentParser) -> None:
    """Add those of plan, but for --goodput."""
    add = parser.add_argument
    add("--steps", type=text, required=True, metavar="FILE", help="what quire bench steps --json wrote")
    add("--against", type=text, metavar="FILE", help="a report of quire bench serve: its load, and its figures beside")
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--rate", type=rate, default=0.0, metavar="R", help="Poisson arrivals per second, of the fleet")
    load.add_argument("--concurrency", type=integer(1, 65_536), default=1, metavar="N", help="or a closed loop (1)")
    add("--num-requests", type=integer(1, 10**6), default=2000, metavar="N", help="how many are sent (2000)")
    add("--input-len", type=lengths, default=(512, 512), metavar="N[-M]", help="prompt tokens, even from N to M (512)")
    add("--output-len", type=lengths, default=(128, 128), metavar="N[-M]", help="tokens of an answer (128)")
    add("--shared-prefix", type=integer(0, _MOST_TOKENS), default=0, metavar="N", help="tokens all prompts begin with")
    add("--seed", type=integer(0, 2**31), default=0, metavar="N", help="of lengths and arrivals (0)")
    add("--replicas", type=_replicas, default=1, metavar="N", help="or auto: the fewest that keep --goodput (1)")
    add("--share", type=share, default=0.99, metavar="F", help="of the requests that must keep it (0.99)")
    add(
        "--policy",
        choices=("least-requests", "round-robin"),
        default="least-requests",
        metavar="NAME",
        help="of the router: least-requests or round-robin",
    )
    add("--overhead-ms", type=_milliseconds, default=2.0, metavar="MS", help="of HTTP and router, a request (2)")
    add("--max-num-seqs", type=integer(1, 16_384), metavar="N", help="instead of the measured machine's")
    add("--max-num-batched-tokens", type=integer(1, 32_768), metavar="N", help="the same")
    add("--max-num-mixed-tokens", type=integer(1, 32_768), metavar="N", help="the same")
    add("--kv-tokens", type=integer(16, 2**40), metavar="N", help="the same: tokens that the KV cache holds")
    add("--price", type=_price, metavar="P", help="of a replica per hour: adds the price of a million tokens")
    _add_json(parser)


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=text, metavar="FILE", help="write every figure here")


def lengths(value: str) -> tuple[int, int]:
    """Parse a number of tokens, or a range of them."""
    match = re.fullmatch(r"(\d{1,8})(?:-(\d{1,8}))?", value)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high <= _MOST_TOKENS:
        raise argparse.ArgumentTypeError(
            f"{value!r} is not a number of tokens from 1 to {_MOST_TOKENS:,}, or two: 100-900"
        )
    return low, high


def _replicas(value: str) -> int:
    return 0 if value == "auto" else integer(1, 4096)(value)


def _price(value: str) -> float:
    try:
        return deadline(value)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{value!r} is not a price above 0, up to 86,400") from None


def _milliseconds(value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 60_000:
        raise argparse.ArgumentTypeError(f"{value!r} is not a number of milliseconds from 0 to 60,000")
    return number
