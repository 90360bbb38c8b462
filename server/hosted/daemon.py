"""The daemon without HTTP workers: launcher and engine behind an app that another server serves
(server/hosted/app.py).

    python -m server.hosted.daemon HOST_DIR HOST_PID [flags]
It writes app.json into HOST_DIR, the ServerConfig of the host's app, before it accepts the app's connection, or
failure.json if it cannot start. The host removes the folder; if the host was killed, this process removes it.
Life: flags → model → launch, without HTTP workers → SIGTERM, which the host's death sends as well.
"""

import argparse
import asyncio
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from engine.interface.child_process import die_with
from engine.interface.config import LaunchConfig
from engine.interface.control import EngineFailed
from engine.interface.errors import StartupError
from engine.interface.logs import configure_logging
from server.config.access_flags import add_access_flags
from server.config.host_links import host_links_of
from server.config.serve_config import check_flags, find_model
from server.config.serve_flags import (
    add_log_flags,
    add_memory_flags,
    add_metrics_flags,
    add_model_flags,
    add_request_flags,
    add_speculative_flags,
)
from server.config.value_types import UsageError
from server.launcher.launcher import Launcher
from server.launcher.run_dir import RunDir

APP_FILE = "app.json"
FAILURE_FILE = "failure.json"


def parse_flags(flags: Sequence[str]) -> argparse.Namespace:
    """Parse MODEL and flags as `quire serve` takes them, less those of a port. Raises StartupError."""
    parser = _Parser(usage=argparse.SUPPRESS, add_help=False, allow_abbrev=False)
    add_model_flags(parser.add_argument_group())
    add_memory_flags(parser.add_argument_group())
    add_speculative_flags(parser.add_argument_group())
    add_request_flags(parser.add_argument_group())
    add_access_flags(parser.add_argument_group())
    add_metrics_flags(parser.add_argument_group())
    add_log_flags(parser.add_argument_group())
    return parser.parse_args(list(flags))


def main() -> int:
    """Entry point of `python -m server.hosted.daemon`."""
    folder, host_pid, *flags = sys.argv[1:]
    die_with(int(host_pid))
    host_dir, run_dir = Path(folder), RunDir()
    try:
        return _run(flags, run_dir, host_dir)
    except StartupError as error:
        (host_dir / FAILURE_FILE).write_bytes(msgspec.json.encode(EngineFailed(error.message, error.exit_code)))
        return error.exit_code
    finally:
        run_dir.remove()
        if os.getppid() != int(host_pid):
            shutil.rmtree(host_dir, ignore_errors=True)


def _run(flags: Sequence[str], run_dir: RunDir, host_dir: Path) -> int:
    arguments = parse_flags(flags)
    log_format = "json" if arguments.log_format == "json" else "text"
    configure_logging(level=arguments.log_level, log_format=log_format, process="launcher")
    checked = check_flags(arguments)
    launch_config = LaunchConfig(
        http_workers=0,
        log_format=log_format,
        log_level=arguments.log_level,
        debug=arguments.debug,
        metrics_compat=arguments.metrics_compat,
        has_standby=arguments.standby,
        stall_timeout_s=arguments.stall_timeout,
        api_key_file=arguments.api_key_file,
        given_key_hashes=checked.given_key_hashes,
        host_links=host_links_of(arguments),
    )
    engine_config, server_config = find_model(arguments, checked)
    launcher = Launcher(launch_config, engine_config, server_config, [], run_dir)
    (host_dir / APP_FILE).write_bytes(msgspec.json.encode(launcher.app_config))
    return asyncio.run(launcher.run())


class _Parser(argparse.ArgumentParser):
    """Raises instead of writing to the terminal."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message.removeprefix('argument ')}.")


if __name__ == "__main__":
    sys.exit(main())
