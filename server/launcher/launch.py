"""launch(): runs a daemon in this process until it is stopped. Never torch.

Imports engine.interface and server.launcher.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Sequence

from engine.interface.config import EngineConfig, LaunchConfig, ServerConfig
from engine.interface.logs import configure_logging
from server.launcher.launcher import ENGINE_MODULE, Launcher
from server.launcher.listener import owned_socket_file, probe_url
from server.launcher.processes import child_log_format, raise_file_limit
from server.launcher.run_dir import RunDir
from server.launcher.systemd import Notifier
from server.launcher.takeover import Takeover

logger = logging.getLogger(__name__)


def launch(
    config: LaunchConfig,
    engine_config: EngineConfig,
    server_config: ServerConfig,
    listeners: Sequence[socket.socket],
    *,
    engine_module: str = ENGINE_MODULE,
    takeover: Takeover | None = None,
) -> int:
    """Run the daemon on `listeners` until it is stopped; return the exit code. Blocks.

    takeover: if another daemon has them, which is to hand them over.
    """
    configure_logging(level=config.log_level, log_format=child_log_format(config), process="launcher")
    raise_file_limit()
    for notice in config.notices:
        logger.warning("%s", notice)
    run_dir = RunDir()
    notifier = Notifier.from_environment(os.environ)
    launcher: Launcher | None = None
    try:
        with owned_socket_file(
            config, is_owned=lambda: takeover is None if launcher is None else launcher.port.is_owned
        ):
            run_dir.tell_url(probe_url(config, listeners[0]))
            launcher = Launcher(
                config,
                engine_config,
                server_config,
                listeners,
                run_dir,
                engine_module=engine_module,
                notifier=notifier,
                takeover=takeover,
            )
            return asyncio.run(launcher.run())
    finally:
        notifier.close()
        run_dir.remove()
