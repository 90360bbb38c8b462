"""The files that a plain decode step executes: few enough that a reader can follow a token through all of them."""

import sys
from pathlib import Path
from types import FrameType

import pytest

from engine.interface.config import EngineConfig
from engine.interface.protocol import AddRequest, SamplingParams, StepEvents, pack_token_ids
from engine.offline import OfflineEngine

ROOT = Path(__file__).parents[3]
PRODUCT = ("server", "engine", "models", "kernels")
MAX_FILES = 37  # 25 are aimed at; turns, forecast, suspects, late blocks, budgets, gathered pages have their own files
NUM_STEPS = 40  # more than a block has tokens, so blocks are allocated; none is published before it is looked for


@pytest.fixture
def offline() -> OfflineEngine:
    """The demo model, with one greedy request that decodes."""
    offline = OfflineEngine.load(EngineConfig(model=str(ROOT / "models/demo/checkpoint"), device="cpu"))
    params = SamplingParams(max_tokens=1000, temperature=0.0)
    offline.transport.inbox.append(
        (0, AddRequest("a", pack_token_ids(range(3, 20)), params, arrival_s=offline.engine.clock()))
    )
    for _ in range(24):  # the first block of its answer is full
        offline.engine.run_once()
    return offline


def test_a_plain_decode_step_executes_code_in_few_files(offline: OfflineEngine) -> None:
    called: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            called.add(frame.f_code.co_filename)

    offline.transport.outbox.clear()
    previous = sys.getprofile()
    sys.setprofile(note)
    try:
        for _ in range(NUM_STEPS):
            offline.engine.run_once()
    finally:
        sys.setprofile(previous)
    assert sum(isinstance(message, StepEvents) for message in offline.transport.outbox) == NUM_STEPS
    paths = [Path(name).relative_to(ROOT) for name in called if Path(name).is_relative_to(ROOT)]
    files = sorted(path.as_posix() for path in paths if path.parts[0] in PRODUCT)
    assert {"engine/core/scheduler.py", "engine/device/sampler.py", "models/layers/causal_lm.py"} < set(files)
    assert len(files) <= MAX_FILES, "\n".join(files)
