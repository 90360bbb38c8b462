"""Kernels are precompiled once per key, and whatever goes wrong in it costs only time."""

import threading
from pathlib import Path

import pytest
import torch

from engine.device.cuda_graph import mixed_shapes
from engine.device.step_times import StepTimes
from engine.grammar.compiler import CompilerLoader, GrammarCompiler
from engine.interface.config import EngineConfig
from engine.interface.errors import UnsupportedFeature
from engine.startup import precompile
from engine.startup.load import _decide
from server.config.model_source import DEMO_FOLDER

pytest.importorskip("triton")


class FakeCompilation:
    """Compiles nothing; `result` is what wait() tells."""

    result = True

    def __init__(self, kernels: list) -> None:
        self.kernels = kernels

    def wait(self, on_progress) -> bool:
        on_progress(1, 1)
        return self.result


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU")
    monkeypatch.setattr(precompile, "Compilation", FakeCompilation)


def test_the_same_is_rehearsed_once_and_another_again() -> None:
    served: list[str] = []
    for key in ("a", "a", "b"):
        compiling = precompile.precompile([lambda key=key: served.append(key)], keys=[key])
        if compiling is not None:
            compiling.wait(lambda done, total: None)
    assert served == ["a", "b"]


def test_a_takeover_knows_what_an_engine_with_room_for_more_requests_has_kept() -> None:
    """A standby keeps memory of the device, so a model with states may have room for fewer requests at once."""
    setup = _decide(EngineConfig(model=str(DEMO_FOLDER), device="cpu"), rank=0)
    first, other, takeover = (
        precompile.keys_of(setup, max_num_seqs=num_seqs, takes_over=takes_over)
        for num_seqs, takes_over in ((40, False), (38, False), (38, True))
    )
    times = StepTimes({32: 1.0, 64: 1.5}, 2.0)
    compiling = precompile.precompile([lambda: None], keys=first)
    assert compiling is not None
    compiling.wait(lambda done, total: None)
    precompile.keep_times(first, times)
    assert precompile.precompile([lambda: None], keys=takeover) is None
    assert precompile.known_times(takeover, is_settled=False) == times
    sizes = [{shape.num_tokens for shape in mixed_shapes(num_seqs, 2048)} for num_seqs in (40, 38, 7)]
    assert sizes[0] == sizes[1] == sizes[2]
    assert precompile.precompile([lambda: None], keys=other) is not None  # another start compiles all that it needs
    assert precompile.known_times(other, is_settled=False) is None


def test_an_engine_that_memory_does_not_limit_keeps_what_one_start_measured_once() -> None:
    setup = _decide(EngineConfig(model=str(DEMO_FOLDER), device="cpu"), rank=0)
    most = setup.limits.max_num_seqs
    limited, whole = (precompile.keys_of(setup, max_num_seqs=num_seqs, takes_over=False) for num_seqs in (38, most))
    compiling = precompile.precompile([lambda: None], keys=limited)
    assert compiling is not None
    compiling.wait(lambda done, total: None)
    assert precompile.precompile([lambda: None], keys=whole) is not None  # not what one with less memory compiled
    for is_settled in (False, True):
        precompile.keep_times(whole, StepTimes({32: 1.0}, 2.0))
        assert (precompile.known_times(whole, is_settled=True) is not None) == is_settled


def test_what_runs_in_threads_ends_before_processes_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    loading, may_end = threading.Event(), threading.Event()

    def load(folder: Path) -> GrammarCompiler:
        loading.set()
        may_end.wait(60)
        raise UnsupportedFeature("There is none.")

    monkeypatch.setattr(GrammarCompiler, "from_folder", load)
    loader = CompilerLoader(Path())
    loader.settle()  # nothing runs
    loader.start()
    loading.wait(60)
    thread = loader._thread
    assert thread is not None
    was_alive: list[bool] = []

    def compile_all(kernels: list) -> FakeCompilation:
        was_alive.append(thread.is_alive())
        return FakeCompilation(kernels)

    def settle() -> None:
        was_alive.append(thread.is_alive())
        may_end.set()
        loader.settle()

    monkeypatch.setattr(precompile, "Compilation", compile_all)
    assert precompile.precompile([lambda: None], keys=["a"], before_fork=settle) is not None
    assert was_alive == [True, False]
    loader.start()  # once
    assert loader._thread is thread


def test_it_is_repeated_if_not_all_kernels_were_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeCompilation, "result", False)
    served: list[int] = []
    for _ in range(2):
        compiling = precompile.precompile([lambda: served.append(1)], keys=["a"])
        assert compiling is not None
        compiling.wait(lambda done, total: None)
    assert len(served) == 2


def test_a_rehearsal_that_fails_is_told_in_one_line_and_the_start_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise RuntimeError("no memory\nmore words")

    assert precompile.precompile([fail], keys=["a"]) is None
    (message,) = caplog.messages
    assert message.endswith("RuntimeError: no memory")


def test_step_times_are_known_to_a_start_with_the_same_key_and_settled_once_two_are_near(tmp_path: Path) -> None:
    times = [
        StepTimes({32: seconds, 8192: 0.2}, launch_s) for seconds, launch_s in ((1.0, 2.0), (1.2, 2.0), (1.1, 5.0))
    ]
    for number, each in enumerate(times):
        precompile.keep_times(["a"], each)
        assert precompile.known_times(["a"], is_settled=False) == each
        assert precompile.known_times(["a"], is_settled=True) == (each if number == 2 else None)
    assert precompile.known_times(["b"], is_settled=False) is None
    precompile.keep_times(["a"], StepTimes({32: 1.1}, 2.0))  # of other sizes
    assert precompile.known_times(["a"], is_settled=True) is None
    (file,) = tmp_path.iterdir()
    file.write_bytes(b"{")
    assert precompile.known_times(["a"], is_settled=False) is None
