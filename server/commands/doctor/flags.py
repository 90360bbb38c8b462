"""The flags of `quire doctor`. Imports argparse; the checks are imported when the command runs.

Exit codes: 0 the model can be served, 2 it cannot, or wrong usage.
"""

import argparse
from typing import TYPE_CHECKING

from server.config.help_format import add_short_help
from server.config.serve_flags import add_tensor_parallel_flags
from server.config.value_types import (
    DTYPES,
    KV_CACHE_DTYPES,
    MODEL_IMPLS,
    QUANTIZATION_NAMES,
    AnyParser,
    UsageError,
    gibibytes,
    integer,
    share,
    size,
    text,
)

if TYPE_CHECKING:
    from engine.interface.fit_report import Ask

# whose values the file of --tune has, if they were given
_TUNED_FLAGS = (
    "device",
    "dtype",
    "kv-cache-dtype",
    "quantization",
    "model-impl",
    "pooling",
    "gpu-memory-utilization",
    "max-model-len",
    "max-num-seqs",
    "max-num-batched-tokens",
    "max-decode-step-tokens",
    "block-size",
    "kv-cache-memory",
)
_EXAMPLES = """\
examples:
  quire doctor                                  what this machine has
  quire doctor ./my-model                       whether it can be served here
  quire doctor Qwen/Qwen3-8B --gpu-memory 24GiB on a GPU that is not here
"""
_MOST_USED = {
    "model": ("model", "--quantization", "--kv-cache-dtype"),
    "memory": ("--gpu-memory", "--gpu-memory-utilization", "--max-model-len"),
    "output": ("--tune", "--json"),
}


def add_doctor(commands: "argparse._SubParsersAction[AnyParser]", formatter: type[argparse.HelpFormatter]) -> None:
    """Add `doctor`."""
    parser = commands.add_parser(
        "doctor",
        help="check if a model can be served here, and how much fits",
        description="Say whether a model can be served, and what fits. Fetches no weights.",
        usage="quire doctor [MODEL] [flags]",
        epilog=_EXAMPLES,
        formatter_class=formatter,
        allow_abbrev=False,
        add_help=False,
    )
    add_short_help(parser, _MOST_USED)
    parser.set_defaults(run=_doctor)
    add = parser.add_argument
    add("model", nargs="?", type=text, metavar="MODEL", help="folder in Hugging Face layout, or hub id")
    add("--revision", type=text, metavar="REV", help="branch, tag or commit of the hub id")
    add("--gpu-memory", type=gibibytes, metavar="SIZE", help="of another GPU, e.g. 24GiB (this machine's)")
    add("--gpu-memory-utilization", type=share, default=0.9, metavar="F", help="fraction of GPU memory to use (0.9)")
    add("--max-model-len", type=integer(1, 2**24), metavar="N", help="context length in tokens")
    add("--max-num-seqs", type=integer(1, 16_384), metavar="N", help="requests running at once")
    add("--max-num-batched-tokens", type=integer(1, 32_768), metavar="N", help="tokens computed per step")
    add("--max-decode-step-tokens", type=integer(1, 32_768), metavar="N", help="the same while requests decode")
    add("--block-size", type=integer(1, 1024), metavar="N", help="tokens per KV block (16)")
    add("--kv-cache-memory", type=size, metavar="SIZE", help="memory of the KV cache, e.g. 4GiB")
    add_tensor_parallel_flags(parser, help="GPUs over which the model is split (1)")
    choices = {"--device": ("auto", "cuda", "mps", "cpu"), "--dtype": DTYPES}
    for flag, names in choices.items():
        add(flag, choices=names, default="auto", metavar=flag[2:5].upper(), help=", ".join(names))
    add("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto", metavar="KIND", help=", ".join(KV_CACHE_DTYPES))
    add("--quantization", choices=QUANTIZATION_NAMES, default="auto", metavar="NAME", help="as of quire serve")
    add("--model-impl", choices=MODEL_IMPLS, default="auto", metavar="NAME", help="as of quire serve")
    add("--pooling", choices=("auto", "last", "mean"), default="auto", metavar="KIND", help="as of quire serve")
    add("--host", type=text, default="127.0.0.1", help="address of the port that is checked (127.0.0.1)")
    add("--port", type=integer(0, 65_535), default=8000, metavar="N", help="port that is checked (8000)")
    add("--tune", action="store_true", help="measure for two minutes, write the best settings")
    add("--output", type=text, default="quire.yaml", metavar="FILE", help="file that --tune writes (quire.yaml)")
    add("--json", action="store_true", help="print everything as JSON")
    add("--debug", action="store_true", help="show tracebacks")


def _doctor(arguments: argparse.Namespace) -> int:
    import sys

    import msgspec

    from engine.interface.config import LaunchConfig
    from server.commands.doctor.report import to_json, to_text
    from server.commands.doctor.run import Question, look
    from server.config.fit_check import ask_of_flags

    if arguments.tune:
        _check_tune(arguments)
    ask = msgspec.structs.replace(ask_of_flags(arguments), gpu_memory=arguments.gpu_memory)
    address = LaunchConfig(host=arguments.host, port=arguments.port)
    report = look(Question(arguments.model, arguments.revision, arguments.pooling, ask, address))
    print(to_json(report) if arguments.json else to_text(report, is_terminal=sys.stdout.isatty()))
    if arguments.tune and report.can_be_served:
        print(_tuned(arguments, ask))
    return 0 if report.can_be_served else 2


def _check_tune(arguments: argparse.Namespace) -> None:
    """Raise UsageError for what cannot be measured here."""
    if arguments.gpu_memory is not None:
        raise UsageError("--tune measures this machine, and --gpu-memory is for another one: give one of them.")
    if arguments.tensor_parallel_size > 1:
        raise UsageError(
            f"--tune measures one GPU, and --tensor-parallel-size is {arguments.tensor_parallel_size}: "
            "quire bench steps measures several."
        )
    if arguments.json:
        raise UsageError("--tune writes YAML, and --json is for the report alone: give one of them.")


def _tuned(arguments: argparse.Namespace, ask: "Ask") -> str:
    """Measure the model and write the file."""
    from pathlib import Path

    from engine.interface.config import EngineConfig
    from server.commands.doctor.tune import tune
    from server.config.model_source import resolve_model

    found = resolve_model(arguments.model, revision=arguments.revision)
    config = EngineConfig(
        model=str(found.folder),
        device=ask.device,
        dtype=ask.dtype,
        kv_cache_dtype=ask.kv_cache_dtype,
        quantization=ask.quantization,
        model_impl=ask.model_impl,
        gpu_memory_utilization=ask.gpu_memory_utilization,
        max_model_len=ask.max_model_len,
        max_num_seqs=ask.max_num_seqs,
        max_num_batched_tokens=ask.max_num_batched_tokens,
        max_decode_step_tokens=ask.max_decode_step_tokens,
        block_size=ask.block_size,
        kv_cache_memory_bytes=ask.kv_cache_memory_bytes,
    )
    given: dict[str, str] = {} if arguments.revision is None else {"revision": arguments.revision}
    for name in _TUNED_FLAGS:
        if (value := vars(arguments)[name.replace("-", "_")]) not in (None, "auto", 0.9):
            given[name] = str(value)
    # a hub id is kept: the daemon finds it in the cache
    named = arguments.model if found.name == arguments.model else str(found.folder)
    return tune(config, None if arguments.model is None else named, given, path=Path(arguments.output).expanduser())
