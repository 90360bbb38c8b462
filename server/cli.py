"""The `quire` command: reads flags, checks every value, hands frozen configurations to the launcher.

Imports argparse only, so that `quire --help` is instant; a subcommand imports what it needs.
Exit codes: 0 done, 2 wrong usage, 3 the start failed.
"""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from engine.errors import StartupError
from server.batch_cli import add_batch
from server.bench_cli import add_bench
from server.chat_cli import add_chat
from server.completion_cli import add_completion
from server.doctor_cli import add_doctor
from server.first_process import end_as_first_process
from server.flags import deadline, seconds, workers
from server.http_flags import add_access_flags, add_address_flags, address_of, tls_of
from server.loras import resolve_loras
from server.model_flags import add_memory_flags, add_model_flags
from server.observability_flags import add_log_flags, add_metrics_flags, traces_endpoint
from server.speculative_flags import add_speculative_flags, speculative_of
from server.top_cli import add_top

if TYPE_CHECKING:
    from engine.config import EngineConfig, LaunchConfig, LoraSource

EXIT_USAGE = 2
EXIT_START_FAILED = 3

_ROOT_EXAMPLES = """\
examples:
  quire serve [MODEL]                  a hub id or a folder, else the demo model
  quire chat                           talk to it; or: echo Hi | quire chat
  quire batch in.jsonl -o out.jsonl    answer an OpenAI batch file
  quire top                            watch requests, KV cache and latencies
"""
_EXAMPLES = """\
examples:
  quire serve                                       the built-in demo model, on http://127.0.0.1:8000
  quire serve ./my-model --port 8080                a folder in Hugging Face layout
  quire serve Qwen/Qwen3-0.6B --max-model-len 8192  a hub id
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one `quire` command and return its exit code."""
    end_as_first_process()
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if arguments.debug:
            raise
        if isinstance(error, StartupError):
            print(f"quire: error: {error.message}", file=sys.stderr)
            return error.exit_code
        print(f"quire: internal error: {type(error).__name__}: {error} (--debug shows more)", file=sys.stderr)
        return EXIT_START_FAILED


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="quire",
        description="An OpenAI-compatible server for large language models.",
        epilog=_ROOT_EXAMPLES,
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_serve(commands)
    add_chat(commands)
    add_bench(commands, _HelpFormatter)
    add_doctor(commands, _HelpFormatter)
    add_batch(commands)
    add_top(commands)
    add_completion(commands, _parser)
    return parser


def _add_serve(commands: "argparse._SubParsersAction[_Parser]") -> None:
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        description="Serve a model with an OpenAI-compatible API.",
        usage="quire serve [MODEL] [flags]",
        epilog=_EXAMPLES,
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=_serve)
    add_model_flags(parser.add_argument_group("model"))
    add_memory_flags(parser.add_argument_group("memory and batching (default: from the model and the free memory)"))
    add_speculative_flags(parser.add_argument_group("speculation (default: one token per request and step)"))
    http = parser.add_argument_group("http")
    add_address_flags(http)
    _add_http_flags(http)
    add_access_flags(parser.add_argument_group("access"))
    add_metrics_flags(parser.add_argument_group("metrics and traces"))
    add_log_flags(parser.add_argument_group("log"))


def _add_http_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--http-workers", type=workers, default=workers("auto"), metavar="N", help="HTTP processes (auto: by cores)")
    add("--strict", action="store_true", help="refuse unknown request fields instead of reporting them")
    add("--request-timeout", type=deadline, metavar="S", help="deadline of every request in seconds (none)")
    add("--drain-timeout", type=seconds, default=25.0, metavar="S", help="how long SIGTERM waits for streams (25)")


def _serve(arguments: argparse.Namespace) -> int:
    """Bind the port, find the model, launch. The port comes first: a taken one must not cost a download."""
    from engine.config import ServerConfig
    from server.api_keys import read_key_hashes
    from server.embedding_model import load_embedding_model
    from server.launch import launch
    from server.listener import bind
    from server.resolve import check_kernels_package, resolve_model

    _check_together(arguments)
    chat_template = None
    if arguments.chat_template is not None:
        chat_template = _readable_file("--chat-template", arguments.chat_template)
    endpoint = traces_endpoint(arguments.otlp_traces_endpoint)
    key_hashes = read_key_hashes(arguments.api_key, file=arguments.api_key_file, environment=os.environ)
    check_kernels_package()
    launch_config = _launch_config(arguments)
    listeners = bind(launch_config)
    model = resolve_model(arguments.model, revision=arguments.revision, load_format=arguments.load_format)
    load_embedding_model(model.folder, pooling=arguments.pooling)  # what it refuses must not cost a load
    names = arguments.served_model_name or [model.name]
    loras = resolve_loras(arguments.lora, served_model_names=names)
    server_config = ServerConfig(
        model=str(model.folder),
        served_model_names=names,
        lora_names=[source.name for source in loras],
        chat_template=chat_template,
        pooling=arguments.pooling,
        strict=arguments.strict,
        request_timeout_s=arguments.request_timeout,
        api_key_hashes=key_hashes,
        cors_origins=arguments.cors_origin,
        root_path=arguments.root_path,
        otlp_traces_endpoint=endpoint,
    )
    return launch(launch_config, _engine_config(arguments, str(model.folder), loras), server_config, listeners)


def _check_together(arguments: argparse.Namespace) -> None:
    """Check what one flag alone cannot tell."""
    speculative_of(arguments)
    budget, rows = arguments.max_num_batched_tokens, arguments.max_num_seqs
    if budget is not None and rows is not None and budget < rows:
        raise StartupError(
            f"--max-num-batched-tokens {budget} must be at least --max-num-seqs {rows}, one token per running request.",
            exit_code=EXIT_USAGE,
        )
    if arguments.revision is not None and arguments.model is None:
        raise StartupError(f"--revision {arguments.revision} needs a hub id as MODEL.", exit_code=EXIT_USAGE)


def _launch_config(arguments: argparse.Namespace) -> "LaunchConfig":
    from engine.config import LaunchConfig

    address, tls = address_of(arguments), tls_of(arguments)
    return LaunchConfig(
        host=address.host,
        port=address.port,
        uds=address.uds,
        tls_cert=tls.cert,
        tls_key=tls.key,
        http_workers=arguments.http_workers,
        drain_timeout_s=arguments.drain_timeout,
        log_format=arguments.log_format,
        log_level=arguments.log_level,
        debug=arguments.debug,
        metrics_compat=arguments.metrics_compat,
    )


def _engine_config(arguments: argparse.Namespace, folder: str, loras: "list[LoraSource]") -> "EngineConfig":
    from engine.config import EngineConfig

    return EngineConfig(
        model=folder,
        load_format=arguments.load_format,
        device=arguments.device,
        dtype=arguments.dtype,
        quantization=arguments.quantization,
        loras=loras,
        attention_backend=arguments.attention_backend,
        max_model_len=arguments.max_model_len,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        max_num_mixed_tokens=arguments.max_num_mixed_tokens,
        block_size=arguments.block_size,
        kv_cache_memory_bytes=arguments.kv_cache_memory,
        kv_cache_dtype=arguments.kv_cache_dtype,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
        enable_prefix_caching=not arguments.no_prefix_caching,
        enforce_eager=arguments.enforce_eager,
        depth=arguments.depth,
        max_waiting=arguments.max_waiting,
        max_queued_tokens=arguments.max_queued_tokens,
        speculative=speculative_of(arguments),
    )


def _readable_file(flag: str, name: str) -> str:
    """Return the absolute path of a text file named by a flag."""
    path = Path(name).expanduser()
    try:
        path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise StartupError(f"{flag} {path} cannot be read: {reason}.", exit_code=EXIT_USAGE) from error
    return str(path.resolve())


class _Parser(argparse.ArgumentParser):
    """Reports a wrong flag in one sentence, without the usage text."""

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument ", "", message)
        message = message.replace("the following arguments are required: COMMAND", "a command is needed, e.g. serve")
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """One line per flag."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=110)


class _Version(argparse.Action):
    """--version; looks the version up only when asked."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from server.version import package_version

        print(f"quire {package_version()}")
        parser.exit(0)
