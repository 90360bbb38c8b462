"""The flags of `quire bench`. Imports argparse; `benchmarks` is imported when one of its commands runs, and only here.

Exit codes: 0 done, 1 the measurement failed in part or whole, 2 wrong usage, 3 a model that cannot be loaded.
"""

import argparse
import sys
from collections.abc import Callable

from server.flags import BACKEND_NAMES, KV_CACHE_DTYPES, QUANTIZATION_NAMES, deadline, integer, size, text
from server.plan_flags import add_plan_flags, add_steps_flags
from server.speculative_flags import add_speculative_flags

Formatter = type[argparse.HelpFormatter]

_EXAMPLES = """\
examples:
  quire bench offline single batch8 --model ./my-model    the engine alone, without HTTP
  quire bench serve --concurrency 64 --num-requests 512   a server under load, the latencies its clients see
  quire bench kernels --plot kernels.png                  attention beside the common ways to compute it
"""
_OFFLINE_EXAMPLES = """\
workloads: single, batch8, mixed64, mixed256, seed64, prefill, repeat, repeat16
examples:
  quire bench offline single                              a stand-in of Qwen3-0.6B on CUDA, else the demo model
  quire bench offline mixed256 prefill --shape llama-3.1-8b --json new.json --compare old.json
"""
_SERVE_EXAMPLES = """\
examples:
  quire bench serve --concurrency 64 --num-requests 512
  quire bench serve --url https://host/v1 --api-key KEY --rate 8 --goodput ttft:500,tpot:50 --plot latency.svg
TTFT: sent to first token; TPOT: time per token after it; ITL: between chunks; E2EL: the whole request.
"""
_KERNELS_EXAMPLES = """\
examples:
  quire bench kernels --json kernels.json --plot kernels.png
  quire bench kernels decode --batches 1,64 --contexts 1024,4096
Without CUDA: small sizes, in what runs there.
"""
_STEPS_EXAMPLES = """\
examples:
  quire bench steps --model ./my-model --json steps.json
  quire bench plan --steps steps.json --rate 40 --goodput ttft:500,tpot:50 --replicas auto
"""
_PLAN_EXAMPLES = """\
examples:
  quire bench plan --steps steps.json --rate 40 --input-len 100-900 --goodput ttft:500,tpot:50 --replicas auto
  quire bench plan --steps steps.json --concurrency 64 --replicas 2 --max-num-seqs 128
  quire bench plan --steps steps.json --against serve.json
"""


def add_bench(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", formatter: Formatter) -> None:
    """Add `bench` and its commands."""
    bench = commands.add_parser(
        "bench",
        help="measure the engine, a server or the kernels",
        description="Measure the engine, a server or the kernels.",
        epilog=_EXAMPLES,
        formatter_class=formatter,
        allow_abbrev=False,
    )
    kinds = bench.add_subparsers(dest="bench", required=True, metavar="KIND")
    for name, usage, summary, examples, add_flags, run in (
        ("offline", "WORKLOAD …", "workloads through the engine alone", _OFFLINE_EXAMPLES, _add_offline, _offline),
        ("serve", "[--url URL]", "load on any OpenAI-compatible server", _SERVE_EXAMPLES, _add_serve, _serve),
        ("kernels", "[PART]", "attention kernels beside their baselines", _KERNELS_EXAMPLES, _add_kernels, _kernels),
        ("steps", "[--model MODEL]", "how long steps take, for plan", _STEPS_EXAMPLES, _add_steps, _steps),
        ("plan", "--steps FILE", "a fleet's throughput and latencies, simulated", _PLAN_EXAMPLES, _add_plan, _plan),
    ):
        parser = kinds.add_parser(
            name,
            help=summary,
            description=f"Measure {summary}.",
            usage=f"quire bench {name} {usage} [flags]",
            epilog=examples,
            formatter_class=formatter,
            allow_abbrev=False,
        )
        add_flags(parser)
        parser.add_argument("--json", type=text, metavar="FILE", help="write every figure here")
        if name not in ("steps", "plan"):
            parser.add_argument(
                "--compare", type=text, metavar="OLD.json", help="show the change since an earlier --json"
            )
        parser.add_argument("--debug", action="store_true", help="show tracebacks")
        parser.set_defaults(run=_guarded(run))


def _add_offline(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("workloads", nargs="+", metavar="WORKLOAD", help="one or more of the workloads below")
    add("--runs", type=integer(1, 100), default=2, metavar="N", help="the best of so many is reported (2)")
    _add_engine(parser)


def _add_engine(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", type=text, help="folder in Hugging Face layout, or hub id")
    shapes = "random weights: qwen3-0.6b, llama-3.1-8b[-awq] or qwen3-30b-a3b"
    model.add_argument("--shape", type=text, metavar="NAME", help=shapes)
    add("--device", choices=("auto", "cuda", "mps", "cpu"), default="auto", metavar="DEV", help="auto, cuda, mps, cpu")
    add("--attention-backend", choices=BACKEND_NAMES, default="auto", metavar="NAME", help="as of quire serve")
    add("--quantization", choices=QUANTIZATION_NAMES, default="auto", metavar="NAME", help="as of quire serve")
    add("--max-model-len", type=integer(1, 2**24), metavar="N", help="context length (8192, or what the model reaches)")
    add("--max-num-seqs", type=integer(1, 16_384), metavar="N", help="requests running at once")
    add("--max-num-batched-tokens", type=integer(1, 32_768), metavar="N", help="tokens computed per step")
    add("--kv-cache-memory", type=size, metavar="SIZE", help="memory of the KV cache, e.g. 4GiB")
    add("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto", metavar="TYPE", help="auto or fp8")
    add("--enforce-eager", action="store_true", help="no CUDA graphs")
    add("--depth", type=integer(1, 2), metavar="N", help="steps in flight")
    add_speculative_flags(parser)


def _add_steps(parser: argparse.ArgumentParser) -> None:
    add_steps_flags(parser)
    _add_engine(parser)


def _add_plan(parser: argparse.ArgumentParser) -> None:
    add_plan_flags(parser)
    parser.add_argument("--goodput", type=_goodput, metavar="LIMITS", help="limits in ms, e.g. ttft:500,tpot:50")


def _add_serve(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--url", type=text, default="http://127.0.0.1:8000", help="host, or a base_url with its path (port 8000 here)")
    add("--model", type=text, help="model to ask for (the first of /v1/models)")
    add("--api-key", type=text, metavar="KEY", help="sent as a bearer token")
    add(
        "--endpoint", choices=("completions", "chat"), default="completions", metavar="NAME", help="completions or chat"
    )
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--concurrency", type=integer(1, 65_536), default=1, metavar="N", help="closed loop of N (1)")
    load.add_argument("--rate", type=_rate, default=0.0, metavar="R", help="Poisson arrivals per second instead")
    add("--num-requests", type=integer(1, 10**7), default=64, metavar="N", help="how many to send (64)")
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
    add("--plot", type=_picture, metavar="FILE", help="latency curves as .png or .svg")


def _add_kernels(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("part", nargs="?", choices=("prefill", "decode"), metavar="PART", help="prefill or decode (both)")
    add("--lengths", type=_integers, metavar="N,N,…", help="prompt lengths of prefill (128 to 16384)")
    add("--batches", type=_integers, metavar="N,N,…", help="rows of decode (1,8,64,256)")
    add("--contexts", type=_integers, metavar="N,N,…", help="their tokens (128,1024,4096,16384)")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto", metavar="DEV", help="auto, cuda or cpu")
    add("--plot", type=_picture, metavar="FILE", help="a picture as .png or .svg")


def _offline(arguments: argparse.Namespace) -> int:
    from benchmarks.offline import run

    return run(arguments)


def _serve(arguments: argparse.Namespace) -> int:
    from benchmarks.serve import run

    return run(arguments)


def _kernels(arguments: argparse.Namespace) -> int:
    from benchmarks.attention import run

    return run(arguments)


def _steps(arguments: argparse.Namespace) -> int:
    from benchmarks.steps import run

    return run(arguments)


def _plan(arguments: argparse.Namespace) -> int:
    from benchmarks.plan import run

    return run(arguments)


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


def _picture(value: str) -> str:
    if not value.endswith((".png", ".svg")):
        raise argparse.ArgumentTypeError(f"{value!r} does not end with .png or .svg")
    return value


def _integers(value: str) -> list[int]:
    return [integer(1, 2**20)(part) for part in value.split(",")]
