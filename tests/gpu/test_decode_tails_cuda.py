"""Tails of decode steps in CUDA graphs: the tokens of steps that are sampled kernel by kernel, for any plain rows."""

from pathlib import Path

import pytest
import torch

from engine.core.local_client import generate
from engine.device.decode_tails import DecodeTails
from engine.interface.protocol import SamplingParams
from engine.offline import OfflineEngine
from tests.gpu.test_late_graphs_cuda import load
from tests.support.tiny_llama import save_tiny_qwen3
from tests.unit.engine.test_real_model import mixed_params, prompts, tokens

pytestmark = pytest.mark.gpu

LENGTHS = (5, 17, 30, 61, 12, 40, 23, 35)
KINDS = {
    "greedy": [SamplingParams(max_tokens=20 + i, temperature=0.0) for i in range(8)],
    "drawn": [SamplingParams(max_tokens=20 + i, temperature=0.9, seed=i) for i in range(8)],
    "truncated": [
        SamplingParams(max_tokens=20 + i, temperature=0.9 * (i % 3 > 0), seed=i, top_k=20, top_p=0.8) for i in range(8)
    ],
    "of all kinds": mixed_params(8),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_qwen3(tmp_path_factory.mktemp("tiny-qwen3"))


def run(offline: OfflineEngine, params: list[SamplingParams]) -> list[list[int]]:
    return tokens(generate(offline.engine, offline.transport, prompts(*LENGTHS[: len(params)]), params))


@pytest.mark.parametrize("depth", [1, 2])
def test_tails_change_no_token(checkpoint: Path, depth: int) -> None:
    offline = load(checkpoint, depth=depth, leaves_rest=False)
    runner = offline.loaded.runner
    tails = runner._tails
    assert isinstance(tails, DecodeTails)
    for name, params in KINDS.items():
        runner._tails = None
        expected = [run(offline, params[:count]) for count in (1, 3, 8)]
        runner._tails = tails
        for _ in range(3):  # kernel by kernel, captured, replayed
            assert [run(offline, params[:count]) for count in (1, 3, 8)] == expected, name
    kinds = {has_truncation for (_, has_truncation), graph in tails._graphs.items() if graph is not None}
    assert kinds == {False, True}
    assert not tails._refused
    offline.loaded.close()


def test_a_tail_of_hidden_states_that_are_not_finite_gives_no_token(checkpoint: Path) -> None:
    offline = load(checkpoint, depth=2, leaves_rest=False)
    runner = offline.loaded.runner
    run(offline, KINDS["greedy"])
    tails, last_token = runner._tails, runner._state.last_token
    assert tails is not None
    sizes = [size for (size, _), graph in tails._graphs.items() if graph is not None]
    assert sizes
    for size in sizes:
        with torch.inference_mode():
            hidden, req_index = tails._decode.output(size)
            hidden.zero_()
            hidden[0] = torch.nan
            req_index.copy_(torch.arange(size.num_rows))
            last_token.fill_(7)
            host = tails.sample(size, size.num_rows, has_truncation=False)
            torch.cuda.synchronize()
            assert host.on_host[0] == -1
            assert (host.on_host[1 : size.num_rows] >= 0).all()
            assert last_token[0] == 0  # which the next step may embed
    offline.loaded.close()
