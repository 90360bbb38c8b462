"""Kernels are precompiled once per key, and whatever goes wrong in it costs only time."""

from pathlib import Path

import pytest
import torch

from engine.device.step_times import StepTimes
from engine.startup import precompile

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
        compiling = precompile.precompile([lambda key=key: served.append(key)], key=key)
        if compiling is not None:
            compiling.wait(lambda done, total: None)
    assert served == ["a", "b"]


def test_it_is_repeated_if_not_all_kernels_were_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeCompilation, "result", False)
    served: list[int] = []
    for _ in range(2):
        compiling = precompile.precompile([lambda: served.append(1)], key="a")
        assert compiling is not None
        compiling.wait(lambda done, total: None)
    assert len(served) == 2


def test_a_rehearsal_that_fails_is_told_in_one_line_and_the_start_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise RuntimeError("no memory\nmore words")

    assert precompile.precompile([fail], key="a") is None
    (message,) = caplog.messages
    assert message.endswith("RuntimeError: no memory")


def test_step_times_are_known_to_a_start_with_the_same_key_and_settled_once_two_are_near(tmp_path: Path) -> None:
    times = [
        StepTimes({32: seconds, 8192: 0.2}, launch_s) for seconds, launch_s in ((1.0, 2.0), (1.2, 2.0), (1.1, 5.0))
    ]
    for number, each in enumerate(times):
        precompile.keep_times("a", each)
        assert precompile.known_times("a", is_settled=False) == each
        assert precompile.known_times("a", is_settled=True) == (each if number == 2 else None)
    assert precompile.known_times("b", is_settled=False) is None
    precompile.keep_times("a", StepTimes({32: 1.1}, 2.0))  # of other sizes
    assert precompile.known_times("a", is_settled=True) is None
    (file,) = tmp_path.iterdir()
    file.write_bytes(b"{")
    assert precompile.known_times("a", is_settled=False) is None
