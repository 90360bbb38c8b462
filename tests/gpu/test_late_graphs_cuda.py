"""Graphs captured between the steps of a serving engine: the tokens of an engine that captured all at the start."""

import logging
from pathlib import Path

import pytest
import torch

from engine.core.engine import Engine
from engine.core.local_client import LocalTransport, generate
from engine.interface.config import EngineConfig
from engine.interface.metrics import Metrics
from engine.interface.protocol import AddRequest, RequestFailed, SamplingParams, StepEvents, pack_token_ids
from engine.offline import OfflineEngine
from tests.support.tiny_llama import save_tiny_qwen3
from tests.unit.engine.test_real_model import prompts, tokens

pytestmark = pytest.mark.gpu

LENGTHS = (5, 17, 30, 61, 12, 40, 23, 35)
PARAMS = [SamplingParams(max_tokens=24, temperature=0.7 * (i % 2), seed=i) for i in range(len(LENGTHS))]


@pytest.fixture(autouse=True)
def pauses_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.device.graph_captures._LEAST_S", 0.0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_qwen3(tmp_path_factory.mktemp("tiny-qwen3"))


def load(checkpoint: Path, *, depth: int, leaves_rest: bool) -> OfflineEngine:
    torch.backends.cuda.matmul.allow_tf32 = False
    config = EngineConfig(
        model=str(checkpoint),
        device="cuda",
        dtype="float32",
        block_size=16,
        overlap_depth=depth,
        max_num_seqs=64,
        max_num_batched_tokens=512,
        kv_cache_memory_bytes=64 * 1024**2,
    )
    return OfflineEngine.load(config, leaves_rest=leaves_rest)


def stream(engine: Engine, transport: LocalTransport, first_id: int) -> list[list[int]]:
    """Send one request after the other, a few turns apart, so that some arrive while the engine is idle."""
    token_ids: dict[str, list[int]] = {}
    todo = list(enumerate(zip(prompts(*LENGTHS), PARAMS, strict=True)))
    turn = 0
    while todo or transport.inbox or not engine.is_idle:
        if todo and turn % 30 == 0:  # the request before has often ended
            index, (prompt, params) = todo.pop(0)
            request_id = str(first_id + index)
            token_ids[request_id] = []
            transport.inbox.append((0, AddRequest(request_id, pack_token_ids(prompt), params, arrival_s=0.0)))
        turn += 1
        engine.run_once(0.0)
        while transport.outbox:
            message = transport.outbox.popleft()
            assert not isinstance(message, RequestFailed)
            if isinstance(message, StepEvents):
                start = 0
                for request_id, count in zip(message.request_ids, message.num_tokens, strict=True):
                    token_ids[request_id] += message.token_ids[start : start + count]
                    start += count
    return list(token_ids.values())


@pytest.mark.parametrize("depth", [1, 2])
def test_late_captures_change_no_token(checkpoint: Path, depth: int, caplog: pytest.LogCaptureFixture) -> None:
    whole = load(checkpoint, depth=depth, leaves_rest=False)
    assert whole.loaded.captures is not None
    assert whole.loaded.captures.num_left == 0
    expected = tokens(generate(whole.engine, whole.transport, prompts(*LENGTHS), PARAMS))
    whole.loaded.close()

    offline = load(checkpoint, depth=depth, leaves_rest=True)
    captures = offline.loaded.captures
    assert captures is not None
    num_left = captures.num_left
    assert num_left > 10
    offline.self_test()
    assert captures.num_left == num_left  # only a loop that is told to captures them
    transport = LocalTransport()
    engine = offline.loaded.engine(transport, Metrics(), captures_graphs=True)
    with caplog.at_level(logging.INFO):
        assert stream(engine, transport, 0) == expected
        assert captures.num_left < num_left
        for _ in range(num_left + 2):
            engine.run_once(0.0)
    assert captures.num_left == 0
    assert f"late graphs captured={num_left} failed=0" in caplog.text
    assert stream(engine, transport, 100) == expected
    assert tokens(generate(engine, transport, prompts(*LENGTHS), PARAMS)) == expected


def test_a_late_capture_writes_nothing_into_the_pool(checkpoint: Path) -> None:
    offline = load(checkpoint, depth=2, leaves_rest=True)
    captures = offline.loaded.captures
    assert captures is not None
    generate(offline.engine, offline.transport, prompts(*LENGTHS), PARAMS)
    torch.cuda.synchronize()
    rows = offline.loaded.runner._kv_pool.rows
    before = rows.clone()
    while captures.capture_next():
        pass
    torch.cuda.synchronize()
    assert torch.equal(rows.view(torch.int32), before.view(torch.int32))


@pytest.mark.parametrize("depth", [1, 2])
def test_captures_that_pause_before_each_layer_change_no_token(checkpoint: Path, depth: int) -> None:
    offline = load(checkpoint, depth=depth, leaves_rest=True)
    captures = offline.loaded.captures
    assert captures is not None
    expected = tokens(generate(offline.engine, offline.transport, prompts(*LENGTHS), PARAMS))
    num_left, num_turns = captures.num_left, 0
    while captures.capture_next(lambda: True):
        num_turns += 1
        if num_turns % 5 == 0:  # steps between the pieces, their tails captured among them
            assert tokens(generate(offline.engine, offline.transport, prompts(*LENGTHS), PARAMS)) == expected
    assert captures.num_left == 0
    assert num_turns == num_left * (1 + offline.loaded.model_config.num_layers) - 1
    assert tokens(generate(offline.engine, offline.transport, prompts(*LENGTHS), PARAMS)) == expected
    offline.loaded.close()


def test_a_paused_capture_may_be_left(checkpoint: Path) -> None:
    offline = load(checkpoint, depth=2, leaves_rest=True)
    captures = offline.loaded.captures
    assert captures is not None
    expected = tokens(generate(offline.engine, offline.transport, prompts(*LENGTHS), PARAMS))
    assert captures.capture_next(lambda: True)
    torch.cuda.empty_cache()
    assert tokens(generate(offline.engine, offline.transport, prompts(*LENGTHS), PARAMS)) == expected
    captures.close()
    assert tokens(generate(offline.engine, offline.transport, prompts(*LENGTHS), PARAMS)) == expected
    torch.cuda.synchronize()
    offline.loaded.close()
