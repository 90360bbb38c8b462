"""The `quire` command: reads flags, checks every value, hands frozen configurations to the launcher.

Imports argparse only, so that `quire --help` is instant; a subcommand imports what it needs.
Exit codes: 0 done, 2 wrong usage, 3 the start failed.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from engine.errors import StartupError
from server.batch_cli import add_batch
from server.bench_cli import add_bench
from server.chat_cli import add_chat
from server.completion_cli import add_completion
from server.doctor_cli import add_doctor
from server.flags import seconds, workers
from server.http_flags import add_access_flags, add_address_flags, add_request_flags, address_of, tls_of
from server.model_flags import add_memory_flags, add_model_flags
from server.observability_flags import add_log_flags, add_metrics_flags
from server.speculative_flags import add_speculative_flags
from server.top_cli import add_top

if TYPE_CHECKING:
    from engine.config import LaunchConfig

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
    add_request_flags(group)
    add("--drain-timeout", type=seconds, default=25.0, metavar="S", help="how long SIGTERM waits for streams (25)")


def _serve(arguments: argparse.Namespace) -> int:
    """Bind the port, find the model, launch. The port comes first: a taken one must not cost a download."""
    from server.launch import launch
    from server.listener import bind
    from server.serve_config import check_flags, find_model

    checked = check_flags(arguments)
    launch_config = _launch_config(arguments)
    listeners = bind(launch_config)
    engine_config, server_config = find_model(arguments, checked)
    return launch(launch_config, engine_config, server_config, listeners)


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
