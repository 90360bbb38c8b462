"""The command `quire bench`. Imports argparse; `benchmarks` is imported here only, when one of its commands runs.

Exit codes: 0 done, 1 the measurement failed in part or whole, 2 wrong usage, 3 the model cannot be loaded.
"""

import argparse
import sys
from collections.abc import Callable
from typing import NamedTuple

from server.commands.bench.flags import (
    add_kernels_flags,
    add_offline_flags,
    add_plan_flags,
    add_report_flags,
    add_serve_flags,
    add_steps_flags,
)
from server.config.help_format import Sections, add_short_help
from server.config.value_types import AnyParser

Formatter = type[argparse.HelpFormatter]

_EXAMPLES = """\
examples:
  quire bench offline single batch8 --model ./my-model
  quire bench serve --concurrency 1,8,64 --html report.html
  quire bench kernels --plot kernels.png
  quire bench report old.json new.json --html report.html
  quire bench plan --steps steps.json --rate 40 --replicas 2
"""
_OFFLINE_EXAMPLES = """\
examples:
  quire bench offline single
  quire bench offline mixed256 prefill --shape llama-3.1-8b --json new.json
"""
_SERVE_EXAMPLES = """\
examples:
  quire bench serve --concurrency 1,8,64 --html report.html
  quire bench serve --url https://host/v1 --rate 8 --goodput ttft:500,tpot:50
"""
_KERNELS_EXAMPLES = """\
examples:
  quire bench kernels --json kernels.json --plot kernels.png
  quire bench kernels decode --batches 1,64 --contexts 1024,4096
"""
_REPORT_EXAMPLES = """\
examples:
  quire bench report new.json --png report.png
  quire bench report before.json after.json --html report.html
"""
_STEPS_EXAMPLES = """\
examples:
  quire bench steps --model ./my-model --json steps.json
"""
_PLAN_EXAMPLES = """\
examples:
  quire bench plan --steps steps.json --concurrency 64 --replicas 2
  quire bench plan --steps steps.json --against serve.json
"""
_OFFLINE_MOST_USED = {
    "what": ("workloads", "--model", "--shape", "--device", "--max-model-len", "--runs"),
    "results": ("--html", "--json", "--compare"),
}
_SERVE_MOST_USED = {
    "server": ("--url", "--api-key"),
    "load": ("--concurrency", "--rate", "--input-len", "--output-len", "--workload"),
    "results": ("--html", "--json", "--compare"),
}
_STEPS_MOST_USED = {
    "what": ("--model", "--shape", "--device", "--max-model-len", "--max-num-seqs"),
    "measurement": ("--context", "--num-steps", "--json"),
}
_PLAN_MOST_USED = {
    "fleet": ("--steps", "--replicas", "--goodput", "--json"),
    "load": ("--rate", "--concurrency", "--num-requests", "--input-len", "--output-len", "--against"),
}
_WITH_GOODPUT = ("serve", "plan")


class _Kind(NamedTuple):
    """A kind of benchmark, as --help shows it. most_used: the flags of the short help; None where all fit a screen."""

    name: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    usage: str
    summary: str
    examples: str
    most_used: Sections | None = None


def add_bench(commands: "argparse._SubParsersAction[AnyParser]", formatter: Formatter) -> None:
    """Add `bench` and its six commands."""
    bench = commands.add_parser(
        "bench",
        help="measure the engine, a server or the kernels",
        description="Measure the engine, a server or the kernels.",
        epilog=_EXAMPLES,
        formatter_class=formatter,
        allow_abbrev=False,
    )
    kinds = bench.add_subparsers(dest="bench", required=True, metavar="KIND", title="kinds")
    for kind in _KINDS:
        parser = kinds.add_parser(
            kind.name,
            help=kind.summary,
            description=f"{kind.summary[0].upper()}{kind.summary[1:]}.",
            usage=f"quire bench {kind.name} {kind.usage} [flags]",
            epilog=kind.examples,
            formatter_class=formatter,
            allow_abbrev=False,
            add_help=kind.most_used is None,
        )
        if kind.most_used is not None:
            add_short_help(parser, kind.most_used)
        kind.add_flags(parser)
        if kind.name in _WITH_GOODPUT:
            limits = "limits in ms, e.g. ttft:500,tpot:50,e2el:5000"
            parser.add_argument("--goodput", type=_goodput, metavar="LIMITS", help=limits)
        parser.add_argument("--debug", action="store_true", help="show tracebacks")
        parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    """Run a benchmark; turn its own error into a sentence and an exit code."""
    from benchmarks.report import BenchError

    try:
        return _measure(arguments)
    except BenchError as error:
        if arguments.debug:
            raise
        print(f"quire: error: {error}", file=sys.stderr)
        return error.exit_code


def _measure(arguments: argparse.Namespace) -> int:
    match arguments.bench:
        case "offline":
            from benchmarks.offline import run
        case "serve":
            from benchmarks.serve import run
        case "kernels":
            from benchmarks.attention import run
        case "report":
            from benchmarks.report_cli import run
        case "steps":
            from benchmarks.steps import run
        case _:
            from benchmarks.plan import run
    return run(arguments)


def _goodput(value: str) -> dict[str, float]:
    from benchmarks.latency import parse_goodput

    try:
        return parse_goodput(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


_KINDS = (
    _Kind(
        "offline",
        add_offline_flags,
        "WORKLOAD …",
        "measure workloads through the engine alone",
        _OFFLINE_EXAMPLES,
        _OFFLINE_MOST_USED,
    ),
    _Kind(
        "serve",
        add_serve_flags,
        "[--url URL]",
        "measure load on any OpenAI-compatible server",
        _SERVE_EXAMPLES,
        _SERVE_MOST_USED,
    ),
    _Kind(
        "kernels", add_kernels_flags, "[PART]", "measure attention kernels beside their baselines", _KERNELS_EXAMPLES
    ),
    _Kind("report", add_report_flags, "RUN.json …", "draw what others wrote with --json", _REPORT_EXAMPLES),
    _Kind(
        "steps",
        add_steps_flags,
        "[--model MODEL]",
        "measure how long steps take, for plan",
        _STEPS_EXAMPLES,
        _STEPS_MOST_USED,
    ),
    _Kind(
        "plan",
        add_plan_flags,
        "--steps FILE",
        "simulate a fleet: throughput, latencies",
        _PLAN_EXAMPLES,
        _PLAN_MOST_USED,
    ),
)
