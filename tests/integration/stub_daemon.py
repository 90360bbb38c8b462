"""`python -m tests.integration.stub_daemon FOLDER serve --port 0`: the real launcher and worker around stub_engine."""

import sys

from engine.config import EngineConfig, LaunchConfig, ServerConfig
from engine.errors import StartupError
from server.launch import launch
from server.listener import bind


def main() -> int:
    """Launch with the stub instead of engine.process."""
    folder = sys.argv[1]
    config = LaunchConfig(port=0, drain_timeout_s=1.0)
    try:
        return launch(
            config,
            EngineConfig(model=folder),
            ServerConfig(model=folder, served_model_names=["stub"]),
            bind(config),
            engine_module="tests.integration.stub_engine",
        )
    except StartupError as error:
        print(f"quire: error: {error.message}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
