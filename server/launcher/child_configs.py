"""What the launcher tells each child, from its own configuration. Imports engine.interface.config and
server.launcher.processes."""

import msgspec

from engine.interface.config import EngineConfig, EngineProcessConfig, LaunchConfig, ServerConfig
from server.config.serve_config import WorkerConfig


def engine_process_config(
    config: LaunchConfig, engine: EngineConfig, *, engine_socket: str, control_socket: str
) -> EngineProcessConfig:
    """Return what the engine process is told."""
    return EngineProcessConfig(
        engine=engine,
        engine_socket=engine_socket,
        control_socket=control_socket,
        log_level=config.log_level,
        log_format=child_log_format(config),
        debug=config.debug,
    )


def worker_config(
    config: LaunchConfig, server: ServerConfig, *, index: int, listen_fd: int, engine_socket: str, control_socket: str
) -> WorkerConfig:
    """Return what HTTP worker `index` is told."""
    return WorkerConfig(
        server=msgspec.structs.replace(
            server, engine_socket=engine_socket, control_socket=control_socket, worker_index=index
        ),
        listen_fd=listen_fd,
        tls_cert=config.tls_cert,
        tls_key=config.tls_key,
        log_level=config.log_level,
        log_format=child_log_format(config),
        debug=config.debug,
    )


def child_log_format(config: LaunchConfig) -> str:
    """Return json or text: bars are the launcher's alone."""
    return "json" if config.log_format == "json" else "text"
