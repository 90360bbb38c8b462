"""The flags of `quire bench`. Imports argparse; `benchmarks` is imported when one of its commands runs, and only here.

Exit codes: 0 done, 1 the measurement failed in part or whole, 2 wrong usage, 3 a model that cannot be loaded.
"""

import argparse
import sys
from collections.abc import Callable
from typing import NamedTuple

from server.flags import BACKEND_NAMES, KV_CACHE_DTYPES, QUANTIZATION_NAMES, deadline, integer, size, text
from server.short_help import Sections, add_short_help
from server.speculative_flags import add_speculative_flags

Formatter = type[argparse.HelpFormatter]

_EXAMPLES = """\
examples:
  quire bench offline single batch8 --model ./my-model
  quire bench serve --concurrency 1,8,64 --html report.html
  quire bench kernels --plot kernels.png
  quire bench report old.json new.json --html report.html
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
_OFFLINE_MOST_USED = {
    "what": ("workloads", "--model", "--shape", "--device", "--max-model-len", "--runs"),
    "results": ("--html", "--json", "--compare"),
}
_SERVE_MOST_USED = {
    "server": ("--url", "--api-key"),
    "load": ("--concurrency", "--rate", "--num-requests", "--input-len", "--output-len"),
    "results": ("--html", "--json", "--compare"),
}
_MAX_CONCURRENCIES = 32  # of one run


class _Kind(NamedTuple):
    """A kind of benchmark, as --help shows it. most_used: the flags of the short help; None where all fit a screen."""

    name: str
    usage: str
    summary: str
    examples: str
    most_used: Sections | None = None


def add_bench(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", formatter: Formatter) -> None:
    """Add `bench` and its four commands."""
    bench = commands.add_parser(
        "bench",
        help="measure the engine, a server or the kernels",
        description="Measure the engine, a server or the kernels.",
        epilog=_EXAMPLES,
        formatter_class=formatter,
        allow_abbrev=False,
    )
    kinds = bench.add_subparsers(dest="bench", required=True, metavar="KIND", title="kinds")
    for kind in (
        _Kind(
            "offline", "WORKLOAD …", "measure workloads through the engine alone", _OFFLINE_EXAMPLES, _OFFLINE_MOST_USED
        ),
        _Kind(
            "serve", "[--url URL]", "measure load on any OpenAI-compatible server", _SERVE_EXAMPLES, _SERVE_MOST_USED
        ),
        _Kind("kernels", "[PART]", "measure attention kernels beside their baselines", _KERNELS_EXAMPLES),
        _Kind("report", "RUN.json …", "draw what others wrote with --json", _REPORT_EXAMPLES),
    ):
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
        add_flags, run = _COMMANDS[kind.name]
        add_flags(parser)
        parser.add_argument("--debug", action="store_true", help="show tracebacks")
        parser.set_defaults(run=_guarded(run))


def _add_offline(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "workloads",
        nargs="+",
        metavar="WORKLOAD",
        help="single, batch8, mixed64, mixed256, seed64, prefill, repeat, repeat16",
    )
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", type=text, help="folder in Hugging Face layout, or hub id")
    shapes = "random weights: qwen3-0.6b, llama-3.1-8b …"
    model.add_argument("--shape", type=text, metavar="NAME", help=shapes)
    add("--device", choices=("auto", "cuda", "mps", "cpu"), default="auto", metavar="DEV", help="auto, cuda, mps, cpu")
    add("--attention-backend", choices=BACKEND_NAMES, default="auto", metavar="NAME", help="as of quire serve")
    add("--quantization", choices=QUANTIZATION_NAMES, default="auto", metavar="NAME", help="as of quire serve")
    add("--max-model-len", type=integer(1, 2**24), metavar="N", help="context length (8192, or the model's)")
    add("--max-num-seqs", type=integer(1, 16_384), metavar="N", help="requests running at once")
    add("--max-num-batched-tokens", type=integer(1, 32_768), metavar="N", help="tokens computed per step")
    add("--kv-cache-memory", type=size, metavar="SIZE", help="memory of the KV cache, e.g. 4GiB")
    add("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto", metavar="TYPE", help="auto or fp8")
    add("--enforce-eager", action="store_true", help="no CUDA graphs")
    add("--depth", type=integer(1, 2), metavar="N", help="steps in flight")
    add_speculative_flags(parser)
    add("--runs", type=integer(1, 100), default=2, metavar="N", help="the best of so many is reported (2)")
    _add_results(parser)


def _add_serve(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--url", type=text, default="http://127.0.0.1:8000", help="host, or a base_url with its path (port 8000 here)")
    add("--model", type=text, help="model to ask for (the first of /v1/models)")
    add("--api-key", type=text, metavar="KEY", help="sent as a bearer token")
    add(
        "--endpoint", choices=("completions", "chat"), default="completions", metavar="NAME", help="completions or chat"
    )
    load = parser.add_mutually_exclusive_group()
    load.add_argument(
        "--concurrency",
        type=_concurrencies,
        default=[1],
        metavar="N,N,…",
        help="requests open at once; several: one run each (1)",
    )
    load.add_argument("--rate", type=_rate, default=0.0, metavar="R", help="Poisson arrivals per second instead")
    add("--num-requests", type=integer(1, 10**7), metavar="N", help="sent in each run (4 × N, at least 64)")
    add("--num-warmups", type=integer(0, 10**7), default=0, metavar="N", help="as many before, unmeasured (0)")
    add("--input-len", type=integer(1, 2**24), default=512, metavar="N", help="prompt tokens, words in text (512)")
    add("--output-len", type=integer(1, 2**24), default=128, metavar="N", help="tokens to ask for (128)")
    add(
        "--prompt-format",
        choices=("auto", "ids", "text"),
        default="auto",
        metavar="FORM",
        help="ids, text or auto: ids if taken",
    )
    add("--vocab-size", type=integer(1, 2**24), default=10_000, metavar="N", help="prompt ids are below it (10,000)")
    add("--no-ignore-eos", action="store_true", help="let answers end early")
    add("--goodput", type=_goodput, metavar="LIMITS", help="limits in ms, e.g. ttft:500,tpot:50,e2el:5000")
    add(
        "--processes", type=integer(1, 256), default=0, metavar="N", help="client processes (half the cores, at most 4)"
    )
    add("--timeout", type=deadline, default=600.0, metavar="S", help="of one request in seconds (600)")
    add("--seed", type=integer(0, 2**31), default=0, metavar="N", help="of prompts and arrivals (0)")
    _add_results(parser)


def _add_kernels(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("part", nargs="?", choices=("prefill", "decode"), metavar="PART", help="prefill or decode (both)")
    add("--lengths", type=_integers, metavar="N,N,…", help="prompt lengths of prefill (128 to 16384)")
    add("--batches", type=_integers, metavar="N,N,…", help="rows of decode (1,8,64,256)")
    add("--contexts", type=_integers, metavar="N,N,…", help="their tokens (128,1024,4096,16384)")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto", metavar="DEV", help="auto, cuda or cpu")
    _add_results(parser)


def _add_report(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "files",
        nargs="+",
        type=text,
        metavar="RUN.json",
        help="of one kind; the first is what others are compared with",
    )
    add("--html", type=_page, metavar="FILE", help="a page that needs no other file")
    add("--png", "--plot", type=_picture, dest="plot", metavar="FILE", help="a picture as .png or .svg")


def _add_results(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--html", type=_page, metavar="FILE", help="plots and figures as one page")
    add("--plot", type=_picture, metavar="FILE", help="a picture as .png or .svg")
    add("--json", type=text, metavar="FILE", help="write every figure here")
    add("--compare", type=text, metavar="OLD.json", help="show the change since an earlier --json")


def _offline(arguments: argparse.Namespace) -> int:
    from benchmarks.offline import run

    return run(arguments)


def _serve(arguments: argparse.Namespace) -> int:
    from benchmarks.serve import run

    return run(arguments)


def _kernels(arguments: argparse.Namespace) -> int:
    from benchmarks.attention import run

    return run(arguments)


def _report(arguments: argparse.Namespace) -> int:
    from benchmarks.report_cli import run

    return run(arguments)


_COMMANDS = {
    "offline": (_add_offline, _offline),
    "serve": (_add_serve, _serve),
    "kernels": (_add_kernels, _kernels),
    "report": (_add_report, _report),
}


def _guarded(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Turn a benchmark's own error into its sentence and exit code."""

    def guarded(arguments: argparse.Namespace) -> int:
        from benchmarks.report import BenchError

        try:
            return run(arguments)
        except BenchError as error:
            if arguments.debug:
                raise
            print(f"quire: error: {error}", file=sys.stderr)
            return error.exit_code

    return guarded


def _rate(value: str) -> float:
    try:
        return deadline(value)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{value!r} is not a number of requests per second above 0") from None


def _goodput(value: str) -> dict[str, float]:
    from benchmarks.latency import parse_goodput

    try:
        return parse_goodput(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _concurrencies(value: str) -> list[int]:
    numbers = [integer(1, 65_536)(part) for part in value.split(",")]
    if len(set(numbers)) < len(numbers):
        raise argparse.ArgumentTypeError(f"{value!r} names a number twice")
    if len(numbers) > _MAX_CONCURRENCIES:
        raise argparse.ArgumentTypeError(f"{value!r} has {len(numbers)} numbers, the limit is {_MAX_CONCURRENCIES}")
    return numbers


def _page(value: str) -> str:
    if not value.endswith((".html", ".htm")):
        raise argparse.ArgumentTypeError(f"{value!r} does not end with .html")
    return value


def _picture(value: str) -> str:
    if not value.endswith((".png", ".svg")):
        raise argparse.ArgumentTypeError(f"{value!r} does not end with .png or .svg")
    return value


def _integers(value: str) -> list[int]:
    return [integer(1, 2**20)(part) for part in value.split(",")]
