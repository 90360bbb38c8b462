"""Engines of two ranks exchange blocks: key heads that are split or shared, windows, states; ranks that are killed."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from engine.interface.config import EngineConfig, PeerConfig
from engine.interface.protocol import AddRequest, HandOver, SamplingParams, pack_token_ids
from engine.offline import OfflineEngine
from engine.peers.shared_memory import HAS_MEMFD
from tests.support.checkpoints import make_config
from tests.support.reference import save_checkpoint
from tests.unit.engine.kv_peer_process import MARK
from tests.unit.engine.test_kv_peers import MIB, PARAMS, prompts

pytestmark = [pytest.mark.skipif(not HAS_MEMFD, reason="needs memfd_create"), pytest.mark.full]
NIXL = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="no NIXL")
FAMILIES = ["llama3.1", "tinyllama", "qwen2_windows", "qwen3_next_dense"]  # "tinyllama": one key head for both ranks
VOCAB_SIZE, LENGTHS = 97, (50, 41, 33)


class Engine:
    """An engine in a process of its own."""

    def __init__(self, config: EngineConfig) -> None:
        command = [sys.executable, "-m", "tests.unit.engine.kv_peer_process", msgspec.json.encode(config).decode()]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ready(self) -> list[int]:
        """Wait until it serves; return the processes of its other ranks."""
        return self._next()[0]

    def ask(self, request: AddRequest) -> list[int]:
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(request).decode() + "\n")
        self.process.stdin.flush()
        return self._next()

    def end(self) -> dict[str, int]:
        """End it and return its counts."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        counts = self._next()
        assert self.process.wait(60) == 0
        return counts

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def _next(self):  # type: ignore[no-untyped-def]
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):  # NIXL prints, too
                return json.loads(line.removeprefix(MARK))
        raise AssertionError("the engine has ended")


def config_of(folder: Path, **changes: object) -> EngineConfig:
    settings = {"block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 4, "max_model_len": 64} | changes
    return EngineConfig(model=str(folder), device="cpu", **settings)


@pytest.fixture
def pair_of(tmp_path: Path) -> Iterator[Callable[..., tuple[Engine, Engine]]]:
    made: list[Engine] = []

    def make(folder: Path, *, transport: str = "shared-memory", ranks: tuple[int, int] = (2, 2)) -> tuple[Engine, ...]:
        for role, num_ranks in zip(("prefill", "decode"), ranks, strict=True):
            peer = PeerConfig(
                role=role,  # type: ignore[arg-type]
                index=0,
                num_prefill=1,
                num_decode=1,
                prefill_sockets=[str(tmp_path / "peer.sock")],
                transport=transport,  # type: ignore[arg-type]
            )
            sizes = {"kv_host_memory_bytes": 8 * MIB, "kv_cache_memory_bytes": 4 * MIB}
            made.append(Engine(config_of(folder, peer=peer, tensor_parallel_size=num_ranks, **sizes)))
        return made[-2], made[-1]

    yield make
    for engine in made:
        engine.close()


def answer(prefill: Engine, decode: Engine, name: str, prompt: list[int], params: SamplingParams) -> list[int]:
    packed, single = pack_token_ids(prompt), msgspec.structs.replace(params, max_tokens=1)
    made = prefill.ask(AddRequest(name, packed, single, 0.0, hand_over=HandOver(0, is_prefill=True)))
    rest = AddRequest(name, packed, params, 0.0, output=pack_token_ids(made), hand_over=HandOver(0))
    return made + decode.ask(rest)


def checkpoint(folder: Path, family: str) -> Path:
    save_checkpoint(folder, make_config(family))
    return folder


def expected_of(folder: Path) -> list[list[int]]:
    alone = OfflineEngine.load(config_of(folder, enable_prefix_caching=False, kv_cache_memory_bytes=4 * MIB))
    return [result.token_ids for result in alone.generate(prompts(VOCAB_SIZE, LENGTHS), list(PARAMS))]


@pytest.mark.parametrize("transport", ["shared-memory", pytest.param("nixl", marks=NIXL)])
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_of_two_ranks_on_each_side_are_those_of_one_engine(
    family: str, transport: str, pair_of: Callable[..., tuple[Engine, Engine]], tmp_path: Path
) -> None:
    folder = checkpoint(tmp_path / "model", family)
    prefill, decode = pair_of(folder, transport=transport)
    expected = expected_of(folder)
    assert [len(engine.ready()) for engine in (prefill, decode)] == [1, 1]
    for i, (prompt, params) in enumerate(zip(prompts(VOCAB_SIZE, LENGTHS), PARAMS, strict=True)):
        assert answer(prefill, decode, str(i), prompt, params) == expected[i]
    arrived = decode.end()
    assert arrived["complete"] == len(PARAMS), arrived
    assert arrived["taken"] > 6
    assert arrived.get("failed", 0) == 0
    assert arrived["bytes"] > 0
    offered = prefill.end()
    assert offered["open"] == 0
    assert offered["offered"] >= arrived["taken"]


def test_a_rank_of_the_prefill_engine_that_is_killed_costs_a_computation_alone(
    pair_of: Callable[..., tuple[Engine, Engine]], tmp_path: Path
) -> None:
    folder = checkpoint(tmp_path / "model", "llama3.1")
    prefill, decode = pair_of(folder)
    expected = expected_of(folder)
    asked = prompts(VOCAB_SIZE, LENGTHS)
    decode.ready()
    (rank,) = prefill.ready()
    assert answer(prefill, decode, "0", asked[0], PARAMS[0]) == expected[0]
    os.kill(rank, signal.SIGKILL)
    assert prefill.process.wait(60) != 0, "the engine ends with its rank"
    rest = AddRequest(
        "1", pack_token_ids(asked[1]), PARAMS[1], 0.0, output=pack_token_ids(expected[1][:1]), hand_over=HandOver(0)
    )
    assert expected[1][:1] + decode.ask(rest) == expected[1]
    counts = decode.end()
    assert (counts["complete"], counts["lost"]) == (1, 1)


def test_engines_of_unequal_numbers_of_ranks_compute_alone(
    pair_of: Callable[..., tuple[Engine, Engine]], tmp_path: Path
) -> None:
    folder = checkpoint(tmp_path / "model", "llama3.1")
    prefill, decode = pair_of(folder, ranks=(2, 1))
    expected = expected_of(folder)
    for engine in (prefill, decode):
        engine.ready()
    assert answer(prefill, decode, "0", prompts(VOCAB_SIZE, LENGTHS)[0], PARAMS[0]) == expected[0]
    counts = decode.end()
    assert counts["lost"] == 1
    assert counts["peers"] == []
