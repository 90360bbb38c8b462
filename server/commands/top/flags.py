"""The flags of `quire top`. Imports argparse; server/commands/top/run.py is imported when the command runs.

Exit codes: 0 quit or printed, 2 wrong usage, 3 no server.
"""

import argparse

from server.commands.target_flags import DEFAULT_URL, add_server_flags
from server.config.value_types import AnyParser, deadline

_EXAMPLES = """\
examples:
  quire top                                   q quits
  quire top --url http://gpu-host:8000 --json | jq .recent.ttft_s.p95
"""


def add_top(commands: "argparse._SubParsersAction[AnyParser]") -> None:
    """Add `top`."""
    parser = commands.add_parser(
        "top",
        help="watch a running server in the terminal",
        description="Requests, KV cache, throughput and latencies of a running server, live.",
        usage="quire top [--url URL] [flags]",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=_run)
    add = parser.add_argument
    add("--interval", type=deadline, default=1.0, metavar="S", help="seconds between samples (1)")
    add("--window", type=deadline, default=5.0, metavar="S", help="seconds that count as recent (5)")
    add("--once", action="store_true", help="print one sample as text and exit (the default without a terminal)")
    add("--json", action="store_true", help="print one sample as JSON and exit")
    add_server_flags(parser, url_help=f"the server ({DEFAULT_URL})")


def _run(arguments: argparse.Namespace) -> int:
    from server.commands.top.run import run

    return run(arguments)
