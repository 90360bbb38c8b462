"""The flags of all `quire bench` commands: offline, serve, kernels, report, steps and plan. Imports argparse."""

import argparse
import re

from server.config.serve_flags import add_overlap_flag, add_speculative_flags, add_tensor_parallel_flags
from server.config.setting import add_alias
from server.config.value_types import (
    BACKEND_NAMES,
    DTYPES,
    KV_CACHE_DTYPES,
    QUANTIZATION_NAMES,
    deadline,
    integer,
    share,
    size,
    text,
)

_MAX_CONCURRENCIES = 32  # of one run
_MOST_TOKENS = 2**24


def add_offline_flags(parser: argparse.ArgumentParser) -> None:
    """Add those of `quire bench offline`."""
    add = parser.add_argument
    add(
        "workloads",
        nargs="+",
        metavar="WORKLOAD",
        help="single, batch8, mixed64, mixed128, mixed256, seed64, prefill, long, longctx, repeat, repeat16, shared,"
        " agent; for a CPU alone, prompt512, eight",
    )
    add_engine_flags(parser)
    add("--no-row-groups", action="store_true", help="read a shared prefix once for each row")
    add("--runs", type=integer(1, 100), default=2, metavar="N", help="runs, of which the best is reported (2)")
    _add_results(parser)


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of measurements without a server."""
    add = parser.add_argument
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", type=text, help="folder in Hugging Face layout, or hub id")
    shapes = "random weights: qwen3-0.6b, llama-3.1-8b …"
    model.add_argument("--shape", type=text, metavar="NAME", help=shapes)
    add("--device", choices=("auto", "cuda", "mps", "cpu"), default="auto", metavar="DEV", help="auto, cuda, mps, cpu")
    add_tensor_parallel_flags(parser, help="GPUs over which the model is split (1)")
    add("--attention-backend", choices=BACKEND_NAMES, default="auto", metavar="NAME", help="as of quire serve")
    add("--dtype", choices=DTYPES, default="auto", metavar="TYPE", help="as of quire serve")
    add("--quantization", choices=QUANTIZATION_NAMES, default="auto", metavar="NAME", help="as of quire serve")
    add("--max-model-len", type=integer(1, 2**24), metavar="N", help="context length (8192 or as needed, if it can)")
    add("--max-num-seqs", type=integer(1, 16_384), metavar="N", help="requests running at once")
    add("--max-num-batched-tokens", type=integer(1, 32_768), metavar="N", help="tokens computed per step")
    add("--kv-cache-memory", type=size, metavar="SIZE", help="memory of the KV cache, e.g. 4GiB")
    add("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto", metavar="TYPE", help="auto, fp8 or int8")
    add("--enforce-eager", action="store_true", help="no CUDA graphs")
    add_overlap_flag(parser)
    add_speculative_flags(parser)


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    """Add those of `quire bench serve`, but for --goodput."""
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
        metavar="N,N,…",
        help="requests open at once; several: one run each (1)",
    )
    load.add_argument("--rate", type=rate, default=0.0, metavar="R", help="Poisson arrivals per second instead")
    add("--workload", type=text, metavar="NAME", help="one of bench offline: long, longctx, agent …")
    add("--num-requests", type=integer(1, 10**7), metavar="N", help="requests in each run (4 × N, at least 64)")
    add("--num-warmups", type=integer(0, 10**7), default=0, metavar="N", help="unmeasured requests before each run (0)")
    add("--input-len", type=integer(1, 2**24), metavar="N", help="prompt tokens, words in text (512)")
    add("--output-len", type=integer(1, 2**24), metavar="N", help="tokens to ask for (128)")
    add(
        "--prompt-format",
        choices=("auto", "ids", "text"),
        default="auto",
        metavar="FORM",
        help="ids, text or auto: ids if taken",
    )
    add("--vocab-size", type=integer(1, 2**24), default=10_000, metavar="N", help="prompt ids are below it (10,000)")
    add("--no-ignore-eos", action="store_true", help="let answers end early")
    add(
        "--processes", type=integer(1, 256), default=0, metavar="N", help="client processes (half the cores, at most 4)"
    )
    add("--timeout", type=deadline, default=600.0, metavar="S", help="time limit of one request in seconds (600)")
    add("--seed", type=integer(0, 2**31), default=0, metavar="N", help="seed of prompts and arrivals (0)")
    _add_results(parser)


def add_kernels_flags(parser: argparse.ArgumentParser) -> None:
    """Add those of `quire bench kernels`."""
    add = parser.add_argument
    add("part", nargs="?", choices=("prefill", "decode"), metavar="PART", help="prefill or decode (both)")
    add("--lengths", type=_integers, metavar="N,N,…", help="prompt lengths of prefill (128 to 16384)")
    add("--batches", type=_integers, metavar="N,N,…", help="rows of decode (1,8,64,256)")
    add("--contexts", type=_integers, metavar="N,N,…", help="context lengths of decode (128,1024,4096,16384)")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto", metavar="DEV", help="auto, cuda or cpu")
    _add_results(parser)


def add_report_flags(parser: argparse.ArgumentParser) -> None:
    """Add those of `quire bench report`."""
    add = parser.add_argument
    add(
        "files",
        nargs="+",
        type=text,
        metavar="RUN.json",
        help="reports of one kind; the others are compared with the first",
    )
    add("--html", type=_page, metavar="FILE", help="write one self-contained HTML page")
    add("--png", "--plot", type=_picture, dest="plot", metavar="FILE", help="a picture as .png or .svg")


def rate(value: str) -> float:
    """Parse a number of requests per second."""
    return _above_zero(value, "a number of requests per second above 0")


def add_steps_flags(parser: argparse.ArgumentParser) -> None:
    """Add those of steps."""
    add_engine_flags(parser)
    add = parser.add_argument
    add(
        "--context",
        type=integer(1, _MOST_TOKENS),
        default=512,
        metavar="N",
        help="context length of decoding rows (512)",
    )
    add("--num-steps", type=integer(3, 10_000), default=20, metavar="N", help="steps timed for each point (20)")
    add("--max-seconds", type=deadline, default=180.0, metavar="S", help="skip measurements beyond this time (180)")
    _add_json(parser)


def add_plan_flags(parser: argparse.ArgumentParser) -> None:
    """Add those of plan, but for --goodput."""
    _add_plan_load(parser)
    _add_plan_fleet(parser)
    _add_json(parser)


def _add_plan_load(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--steps", type=text, required=True, metavar="FILE", help="output of quire bench steps --json")
    add("--against", type=text, metavar="FILE", help="report of quire bench serve: simulate its load and compare")
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--rate", type=rate, default=0.0, metavar="R", help="Poisson arrivals per second, of the fleet")
    load.add_argument("--concurrency", type=integer(1, 65_536), default=1, metavar="N", help="or a closed loop (1)")
    add("--num-requests", type=integer(1, 10**6), default=2000, metavar="N", help="number of requests (2000)")
    add(
        "--input-len",
        type=lengths,
        default=(512, 512),
        metavar="N[-M]",
        help="prompt tokens, uniform from N to M (512)",
    )
    add("--output-len", type=lengths, default=(128, 128), metavar="N[-M]", help="tokens of an answer (128)")
    add(
        "--shared-prefix",
        type=integer(0, _MOST_TOKENS),
        default=0,
        metavar="N",
        help="tokens of a prefix that all prompts share",
    )
    add("--seed", type=integer(0, 2**31), default=0, metavar="N", help="seed of lengths and arrivals (0)")


def _add_plan_fleet(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--replicas",
        type=_replicas,
        default=1,
        metavar="N",
        help="replicas, or auto: the fewest that meet --goodput (1)",
    )
    add("--share", type=share, default=0.99, metavar="F", help="fraction of requests that must meet --goodput (0.99)")
    add(
        "--policy",
        choices=("least-requests", "round-robin"),
        default="least-requests",
        metavar="NAME",
        help="router's policy: least-requests or round-robin",
    )
    add(
        "--overhead-ms",
        type=_milliseconds,
        default=2.0,
        metavar="MS",
        help="milliseconds of HTTP and router per request (2)",
    )
    add(
        "--max-num-seqs",
        type=integer(1, 16_384),
        metavar="N",
        help="instead of the measured value: requests running at once",
    )
    add("--max-num-batched-tokens", type=integer(1, 32_768), metavar="N", help="instead: tokens per step")
    decode_step_tokens = add(
        "--max-decode-step-tokens", type=integer(1, 32_768), metavar="N", help="instead: while requests decode"
    )
    add_alias(parser, "--max-num-mixed-tokens", decode_step_tokens)
    add("--kv-tokens", type=integer(16, 2**40), metavar="N", help="instead: tokens in the KV cache")
    add("--price", type=_price, metavar="P", help="price of a replica per hour: adds the price of a million tokens")


def lengths(value: str) -> tuple[int, int]:
    """Parse a number of tokens, or a range of them."""
    match = re.fullmatch(r"(\d{1,8})(?:-(\d{1,8}))?", value)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high <= _MOST_TOKENS:
        raise argparse.ArgumentTypeError(
            f"{value!r} is not a number of tokens from 1 to {_MOST_TOKENS:,}, or two: 100-900"
        )
    return low, high


def _add_results(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--html", type=_page, metavar="FILE", help="plots and figures as one page")
    add("--plot", type=_picture, metavar="FILE", help="a picture as .png or .svg")
    add("--json", type=text, metavar="FILE", help="write every figure here")
    add("--compare", type=text, metavar="OLD.json", help="show the change since an earlier --json")


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


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=text, metavar="FILE", help="write every figure here")


def _replicas(value: str) -> int:
    return 0 if value == "auto" else integer(1, 4096)(value)


def _price(value: str) -> float:
    return _above_zero(value, "a price above 0, up to 86,400")


def _above_zero(value: str, meaning: str) -> float:
    try:
        return deadline(value)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{value!r} is not {meaning}") from None


def _milliseconds(value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 60_000:
        raise argparse.ArgumentTypeError(f"{value!r} is not a number of milliseconds from 0 to 60,000")
    return number
