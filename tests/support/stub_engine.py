"""An engine process without an engine, for the launcher's tests: says hello and ends as its mode tells.

The mode is the file `mode` beside the model: crash (ends before hello), fail (says why, exit code 2), flaky (ready,
then ends, every time), hang (loads for ever, hears nothing), relapse (ready, then ends; the next one hangs), doom
(ready, then ends; none comes back), stay (ready, and lives).
"""

import os
import socket
import sys
import time
from pathlib import Path

import msgspec

from engine.interface.config import EngineProcessConfig
from engine.interface.control import EngineFailed, EngineInfo, Hello, Stage
from engine.interface.transport import encode_frame


def main() -> int:
    """Play one life of an engine process."""
    config = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=EngineProcessConfig)
    mode = (Path(config.engine.model) / "mode").read_text()
    if mode == "crash":
        return 7
    with socket.socket(socket.AF_UNIX) as control:
        control.connect(config.control_socket)
        control.sendall(encode_frame(Hello("engine", 0, os.getpid())))
        control.sendall(encode_frame(Stage("weights", 1, 4, unit="bytes")))
        if mode == "fail":
            control.sendall(encode_frame(EngineFailed("The moon is in the wrong phase.", 2)))
            return 2
        if mode == "hang":
            time.sleep(600)
        if mode == "relapse":
            (Path(config.engine.model) / "mode").write_text("hang")
        if mode == "doom":
            (Path(config.engine.model) / "mode").write_text("crash")
        control.sendall(encode_frame(EngineInfo({"Device": "none"})) + encode_frame(Stage("ready")))
        time.sleep(600 if mode == "stay" else 0.2)
    return 1


if __name__ == "__main__":
    sys.exit(main())
