"""`python -m tests.support.stub_daemon FOLDER MODULE serve --port 0`: launcher and worker around that engine.

Behind the port may stand `--http-workers N`.
"""

import sys

from engine.interface.config import EngineConfig, LaunchConfig, ServerConfig
from engine.interface.errors import StartupError
from server.launcher.engine_health import LoadWatchdog
from server.launcher.launch import launch
from server.launcher.listener import bind


def main() -> int:
    """Launch with the module instead of engine.process."""
    folder, engine_module = sys.argv[1:3]
    LoadWatchdog.SILENCE_S = 1.0
    num_workers = int(sys.argv[-1]) if "--http-workers" in sys.argv else 1
    config = LaunchConfig(port=0, drain_timeout_s=1.0, http_workers=num_workers)
    try:
        return launch(
            config,
            EngineConfig(model=folder),
            ServerConfig(model=folder, served_model_names=["stub"]),
            bind(config),
            engine_module=engine_module,
        )
    except StartupError as error:
        print(f"quire: error: {error.message}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
