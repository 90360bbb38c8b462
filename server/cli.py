"""The `quire` command: parses the flags and runs the subcommand.

`quire serve` checks every value and passes frozen configurations to the launcher.
Imports argparse only, so that `quire --help` is instant; each subcommand imports its own modules when it runs.
Exit codes: 0 done, 2 wrong usage, 3 the start failed, 141 the reader of standard output has closed it (`| head`).
As process 1 of a container the command handles SIGTERM itself, because the kernel gives process 1 no default action.
"""

import argparse
import os
import select
import signal
import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from engine.interface.errors import StartupError
from server.commands.batch.flags import add_batch
from server.commands.bench.run import add_bench
from server.commands.chat.flags import add_chat
from server.commands.completion import add_completion
from server.commands.doctor.flags import add_doctor
from server.commands.models import add_models
from server.commands.top.flags import add_top
from server.commands.usage import add_usage
from server.config.access_flags import add_access_flags, add_exposure_flags
from server.config.help_format import HelpFormatter, add_short_help
from server.config.host_links import host_links_of
from server.config.known_words import about_command, about_first_flag
from server.config.serve_flags import (
    add_address_flags,
    add_log_flags,
    add_memory_flags,
    add_metrics_flags,
    add_model_flags,
    add_request_flags,
    add_speculative_flags,
    address_of,
    tls_of,
)
from server.config.settings import SettingsParser, places_of
from server.config.value_types import UsageError, seconds, text, workers

if TYPE_CHECKING:
    from engine.interface.config import LaunchConfig

EXIT_START_FAILED = 3
EXIT_OUTPUT_GONE = 128 + 13  # as if by SIGPIPE
_SEEN_KEY = "--api-key: other users of this machine can see the key in ps; use --api-key-file or QUIRE_API_KEY"
_ROOT_EXAMPLES = """\
examples:
  quire serve [MODEL]                  a hub id or a folder, else the demo model
  quire chat                           talk to it; or: echo Hi | quire chat
  quire batch in.jsonl -o out.jsonl    answer an OpenAI batch file
  quire top                            watch requests, KV cache and latencies
"""
_EXAMPLES = """\
examples:
  quire serve ./my-model --port 8080
  quire serve Qwen/Qwen3-0.6B --max-model-len 8192
"""
_MOST_USED = {
    "model": ("model", "--served-model-name", "--device"),
    "memory and batching": ("--max-model-len", "--max-num-seqs", "--gpu-memory-utilization"),
    "http, access, configuration": ("--host", "--port", "--api-key-file", "--config"),
}


def handle_pid1_sigterm() -> None:
    """Make SIGTERM end process 1 too: the kernel ignores signals for process 1 that have no handler.

    Without it a container could not be stopped while it downloads a model. The launcher replaces the handler.
    """
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, _end)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one `quire` command and return its exit code."""
    handle_pid1_sigterm()
    parser = _parser()
    _check_command(parser, sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(argv)
    try:
        code = arguments.run(arguments)
        if sys.stdout is not None:  # a daemon's may be closed
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if isinstance(error, BrokenPipeError) and sys.stdout is not None and _is_output_gone():
            return EXIT_OUTPUT_GONE
        if arguments.debug:
            raise
        if isinstance(error, StartupError):
            print(f"quire: error: {error.message}{places_of(error.message, arguments)}", file=sys.stderr)
            return error.exit_code
        print(f"quire: internal error: {type(error).__name__}: {error} (--debug shows more)", file=sys.stderr)
        return EXIT_START_FAILED


def serve_parser(environment: Mapping[str, str]) -> SettingsParser:
    """Return the parser of `quire serve` alone, whose settings are the model of docs/reference/flags.md."""
    return _add_serve(SettingsParser(prog="quire").add_subparsers(), environment)


def _check_command(parser: SettingsParser, argv: Sequence[str]) -> None:
    """End with a sentence that says what to type instead, if the first word is no command, or a flag of one."""
    commands = next(action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    if not argv or argv[0] in commands:
        return
    if not argv[0].startswith("-"):
        parser.error(about_command(argv[0], argv[1:], commands))
    flag, _, value = argv[0].partition("=")
    if flag in parser._option_string_actions or flag == "--":
        return
    if flag in commands["serve"]._option_string_actions:
        parser.error(f"{flag} is a flag of serve, and the command comes first: quire serve {flag} …")
    sentence = about_first_flag(flag, value or next(iter(argv[1:]), ""))
    parser.error(sentence or f"{flag} is no flag of quire, and a command comes first, e.g. quire serve")


def _end(number: int, _: FrameType | None) -> None:
    os._exit(128 + number)


def _is_output_gone() -> bool:
    """Return True if standard output is a pipe without a reader, and discard the output that is still buffered."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    is_gone = bool(poll.poll(0))
    if is_gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return is_gone


def _parser() -> SettingsParser:
    parser = SettingsParser(
        prog="quire",
        description="An OpenAI-compatible server for large language models.",
        epilog=_ROOT_EXAMPLES,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    _add_serve(commands, os.environ)
    add_chat(commands)
    add_bench(commands, HelpFormatter)
    add_doctor(commands, HelpFormatter)
    add_models(commands)
    add_batch(commands)
    add_top(commands)
    add_usage(commands)
    add_completion(commands, _parser)
    return parser


def _add_serve(
    commands: "argparse._SubParsersAction[SettingsParser]", environment: Mapping[str, str]
) -> SettingsParser:
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        description="Serve a model with an OpenAI-compatible API.",
        usage="quire serve [MODEL] [flags]",
        epilog=_EXAMPLES,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    add_short_help(parser, _MOST_USED)
    parser.set_defaults(run=lambda arguments: _serve(arguments, parser))
    add_model_flags(parser.add_argument_group("model"))
    add_memory_flags(parser.add_argument_group("memory and batching (default: from the model and the free memory)"))
    add_speculative_flags(parser.add_argument_group("speculation (default: one token per request and step)"))
    http = parser.add_argument_group("http")
    add_address_flags(http)
    _add_http_flags(http)
    access = parser.add_argument_group("access")
    add_access_flags(access)
    add_exposure_flags(access)
    add_metrics_flags(parser.add_argument_group("metrics and traces"))
    add_log_flags(parser.add_argument_group("log"))
    _add_config_flags(parser.add_argument_group("configuration (command line > environment > file > default)"))
    parser.take_settings(environment)
    return parser


def _add_config_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--config", type=text, metavar="FILE", help="YAML file, e.g. port: 8000 (QUIRE_CONFIG)")
    add("--show-config", action="store_true", help="print every setting with its source, and exit")


def _add_http_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--http-workers", type=workers, default="auto", metavar="N", help="HTTP worker processes (auto: by cores)")
    add_request_flags(group)
    add(
        "--takeover",
        action="store_true",
        help="load, then take the port over from the daemon that runs there, which ends after its open requests",
    )
    add(
        "--takeover-form",
        choices=("auto", "beside", "instead"),
        metavar="FORM",
        default="auto",
        help="of --takeover: load beside the running daemon's model, instead of it (its requests wait), or auto:"
        " by the memory",
    )
    add(
        "--drain-timeout",
        type=seconds,
        default=25.0,
        metavar="S",
        help="seconds that open requests have after SIGTERM (25)",
    )


def _serve(arguments: argparse.Namespace, parser: SettingsParser) -> int:
    """Bind the port, find the model, launch. The port comes first, so that a port in use costs no download."""
    if arguments.show_config:
        from server.config.settings_file import show_config

        print(show_config(parser.settings, arguments, environment=os.environ))
        return 0
    from server.config.fit_check import ask_of_flags
    from server.config.serve_config import check_flags, find_model
    from server.launcher.launch import launch
    from server.launcher.listener import allowed_hosts_of, bind
    from server.launcher.takeover import request_takeover
    from server.launcher.takeover_form import choose_form

    checked = check_flags(arguments)
    launch_config = _launch_config(arguments, checked.given_key_hashes)
    allowed_hosts = None
    if not checked.api_key_hashes:
        allowed_hosts = allowed_hosts_of(
            launch_config, arguments.allowed_host, allow_anonymous=arguments.allow_anonymous
        )
    if arguments.takeover and (listen := arguments.disaggregate_listen) is not None:
        raise UsageError(
            f"--takeover hands over the HTTP port, and --disaggregate-listen {listen.address} is a port of its own:"
            " stop the running daemon first. Other hosts compute their prompts meanwhile."
        )
    takeover = request_takeover(launch_config) if arguments.takeover else None
    listeners = bind(launch_config) if takeover is None else takeover.listeners
    try:
        engine_config, server_config = find_model(arguments, checked, allowed_hosts=allowed_hosts)
        if takeover is not None:
            takeover.form = choose_form(
                arguments.takeover_form,
                ask_of_flags(arguments, folder=engine_config.model),
                running=takeover.offer.engine,
                engine=engine_config,
                server=server_config,
            )
        return launch(launch_config, engine_config, server_config, listeners, takeover=takeover)
    except StartupError as error:
        if takeover is None or takeover.is_done:
            raise
        raise StartupError(f"{error.message} {takeover.untouched}", exit_code=error.exit_code) from error


def _launch_config(arguments: argparse.Namespace, given_key_hashes: list[str]) -> "LaunchConfig":
    from engine.interface.config import LaunchConfig
    from server.config.api_keys import file_notices

    address, tls = address_of(arguments), tls_of(arguments)
    return LaunchConfig(
        host=address.host,
        port=address.port,
        uds=address.uds,
        tls_cert=None if tls is None else tls.cert,
        tls_key=None if tls is None else tls.key,
        http_workers=arguments.http_workers,
        drain_timeout_s=arguments.drain_timeout,
        log_format=arguments.log_format,
        log_level=arguments.log_level,
        debug=arguments.debug,
        metrics_compat=arguments.metrics_compat,
        has_standby=arguments.standby,
        stall_timeout_s=arguments.stall_timeout,
        api_key_file=arguments.api_key_file,
        given_key_hashes=given_key_hashes,
        notices=[*([_SEEN_KEY] if arguments.api_key else []), *file_notices(arguments.api_key_file)],
        host_links=host_links_of(arguments),
    )


class _Version(argparse.Action):
    """The flag --version, which reads the version only when it is given."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from server.config.version import package_version

        print(f"quire {package_version()}")
        parser.exit(0)
