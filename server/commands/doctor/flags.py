"""The flags of `quire doctor`. Imports argparse; the checks are imported when the command runs.

Exit codes: 0 the model can be served, 2 it cannot, or wrong usage.
"""

import argparse

from server.config.help_format import add_short_help
from server.config.serve_flags import add_tensor_parallel_flags, is_expert_parallel
from server.config.value_types import (
    DTYPES,
    KV_CACHE_DTYPES,
    MODEL_IMPLS,
    QUANTIZATION_NAMES,
    AnyParser,
    gibibytes,
    integer,
    share,
    text,
)

_EXAMPLES = """\
examples:
  quire doctor                                  what this machine has
  quire doctor ./my-model                       whether it can be served here
  quire doctor Qwen/Qwen3-8B --gpu-memory 24    on a GPU that is not here
"""
_MOST_USED = {
    "model": ("model", "--quantization", "--kv-cache-dtype"),
    "memory": ("--gpu-memory", "--gpu-memory-utilization", "--max-model-len", "--tensor-parallel-size"),
    "output": ("--json",),
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
    add("--gpu-memory", type=gibibytes, metavar="GIB", help="plan for a GPU of this size instead of this machine's")
    add("--gpu-memory-utilization", type=share, default=0.9, metavar="F", help="fraction of GPU memory to use (0.9)")
    add("--max-model-len", type=integer(1, 2**24), metavar="N", help="context length in tokens")
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
    add("--json", action="store_true", help="print everything as JSON")
    add("--debug", action="store_true", help="show tracebacks")


def _doctor(arguments: argparse.Namespace) -> int:
    import sys

    from engine.interface.config import LaunchConfig
    from engine.interface.fit_report import Ask
    from server.commands.doctor.report import to_json, to_text
    from server.commands.doctor.run import Question, look

    ask = Ask(
        dtype=arguments.dtype,
        kv_cache_dtype=arguments.kv_cache_dtype,
        quantization=arguments.quantization,
        model_impl=arguments.model_impl,
        device=arguments.device,
        gpu_memory=arguments.gpu_memory,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
        max_model_len=arguments.max_model_len,
        num_gpus=arguments.tensor_parallel_size,
        is_expert_parallel=is_expert_parallel(arguments),
    )
    address = LaunchConfig(host=arguments.host, port=arguments.port)
    report = look(Question(arguments.model, arguments.revision, arguments.pooling, ask, address))
    print(to_json(report) if arguments.json else to_text(report, is_terminal=sys.stdout.isatty()))
    return 0 if report.can_be_served else 2
