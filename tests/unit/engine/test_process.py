"""The engine's process, a real one whose engine is made to fail: it tells the launcher, and it ends."""

import socket
import subprocess
import sys

import pytest

from engine.interface.control import EngineFailed, Hello, Stage, ToLauncher
from engine.interface.transport import FrameDecoder

SCRIPT = """
import sys, threading
from types import SimpleNamespace
from engine.interface.config import EngineConfig
from engine.process import EngineProcess, EngineProcessConfig

class Panic(BaseException):
    pass

def fail():
    raise {error}("a bad word\\nand more")

threading.Thread(target=threading.Event().wait).start()  # as a broken device would: waits for ever at the end
config = EngineProcessConfig(engine=EngineConfig(model=""), engine_socket="", control_socket=sys.argv[1])
process = EngineProcess(config)
process._load = lambda: SimpleNamespace(run_once=fail)
process.run()
"""


@pytest.mark.parametrize("error", ["RuntimeError", "Panic"])
def test_a_fault_while_serving_ends_the_process_whatever_its_kind(tmp_path, error):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "control"))
        listener.listen()
        command = [sys.executable, "-c", SCRIPT.replace("{error}", error), str(tmp_path / "control")]
        process = subprocess.Popen(command, stderr=subprocess.PIPE)
        try:
            listener.settimeout(30)
            connection = listener.accept()[0]
            assert process.wait(30) == 1
            told = FrameDecoder(Hello | Stage | EngineFailed).feed(connection.recv(1 << 18))
            connection.close()
            assert told[-1] == EngineFailed(f"{error} while serving: a bad word.", 1)
        finally:
            process.kill()
            process.communicate()


LOST_SCRIPT = """
import sys, threading
from engine.interface.config import EngineConfig
from engine.interface.control import Stage
from engine.process import EngineProcess, EngineProcessConfig
from engine.interface.transport import encode_frame

config = EngineProcessConfig(engine=EngineConfig(model=""), engine_socket="", control_socket=sys.argv[1])
process = EngineProcess(config)
process._control.sock.send(encode_frame(Stage("weights"))[:-1])
threading.Thread(target=process._on_rank_lost, args=("Rank 1 ended with exit code 5.", 3)).start()
threading.Event().wait()  # as for a step that never ends
"""


def test_a_lost_rank_is_told_in_the_middle_of_another_message(tmp_path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "control"))
        listener.listen()
        process = subprocess.Popen([sys.executable, "-c", LOST_SCRIPT, str(tmp_path / "control")])
        try:
            listener.settimeout(30)
            first, second = listener.accept()[0], listener.accept()[0]
            assert process.wait(30) == 3
            with first, second:
                hello, failed = FrameDecoder(Hello | EngineFailed).feed(second.recv(1 << 18))
            assert (hello.role, hello.pid) == ("engine", process.pid)
            assert failed == EngineFailed("Rank 1 ended with exit code 5.", 3)
        finally:
            process.kill()
            process.wait()


LEFT_SCRIPT = """
import sys
from types import SimpleNamespace
from engine.interface.config import EngineConfig
from engine.process import EngineProcess, EngineProcessConfig

config = EngineProcessConfig(engine=EngineConfig(model=""), engine_socket="", control_socket=sys.argv[1])
process = EngineProcess(config)
scheduler = SimpleNamespace(
    running=[], waiting=[], committed_step_id=1, kv=SimpleNamespace(tiers=SimpleNamespace(is_lending=False))
)
process._engine = SimpleNamespace(scheduler=scheduler, is_idle=True, record_state=lambda: None)
process._leave_at_s, process._next_delta_s = 0.0, float("inf")
process._metrics.count("steps_total", 3)
process._tick(1.0)
assert process._is_stopping
"""


def test_an_engine_that_leaves_tells_what_it_counted_last(tmp_path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "control"))
        listener.listen()
        command = [sys.executable, "-c", LEFT_SCRIPT, str(tmp_path / "control")]
        process = subprocess.Popen(command, stderr=subprocess.PIPE)
        try:
            listener.settimeout(30)
            connection = listener.accept()[0]
            assert process.wait(30) == 0, process.stderr.read()
            told = FrameDecoder(ToLauncher).feed(connection.recv(1 << 18))
            connection.close()
            assert list(told[-1].counters.values()) == [3]
        finally:
            process.kill()
            process.communicate()


def test_the_process_imports_nothing_large_before_its_head_start():
    large = ["numpy", "torch", "transformers", "tokenizers", "engine.core", "engine.tensor_parallel", "multiprocessing"]
    code = f"import sys, engine.process; print([name for name in {large!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr
