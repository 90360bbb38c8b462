"""Memory of a model with states: how many requests fit, what is said if they do not, and what the doctor tells."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from engine.device.kv_cache import plan_kv_cache
from engine.device.memory import format_size
from engine.device.page_plan import plan_pages
from engine.interface.config import EngineConfig, SpeculativeConfig
from engine.interface.errors import StartupError
from engine.interface.fit_report import Ask, ModelReport
from engine.interface.units import GIB
from engine.offline import OfflineEngine
from engine.startup import fit
from models.config.model_config import ModelConfig
from server.commands.doctor.report import _kv_text
from tests.support.checkpoints import make_config
from tests.support.hybrid_model import LAYERS, hybrid_config, load_hybrid, served

FOLDER = Path(__file__).parent
DELTA = LAYERS["delta rule"]


def pool(num_pages: int, **changes: object) -> OfflineEngine:
    """An engine whose pool has so many pages beside that of padding."""
    page = load_hybrid(*DELTA).loaded.plan.bytes_per_page
    return load_hybrid(*DELTA, **{"kv_cache_memory_bytes": (num_pages + 1) * page, "max_num_seqs": None} | changes)


def refusal(num_pages: int, **changes: object) -> str:
    with pytest.raises(StartupError) as info:
        pool(num_pages, **changes)
    return info.value.message


@pytest.fixture(scope="module")
def sizes() -> tuple[int, int]:
    """Pages of a state, and of a short prompt."""
    pages = load_hybrid(*DELTA).loaded.plan.pages
    assert pages.state is not None
    return pages.state_pages, pages.num_pages(pages.state.save_tokens) - pages.state_pages


def test_the_requests_at_once_are_lowered_to_those_whose_states_fit(
    sizes: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    state, prompt = sizes
    with caplog.at_level(logging.WARNING):
        offline = pool(7 * (state + prompt) + prompt)
    assert offline.loaded.plan.max_num_seqs == offline.loaded.scheduler_config.max_num_seqs == 7
    (line,) = [message for message in caplog.messages if "requests at once" in message]
    assert "max_num_seqs=7 default=64" in line
    assert format_size(offline.loaded.plan.state_bytes) in line
    assert "of state per request" in offline.loaded.facts["KV cache"]
    offline.self_test()


def test_more_requests_than_fit_are_refused_with_the_number_that_does(sizes: tuple[int, int]) -> None:
    state, prompt = sizes
    num_pages = 7 * (state + prompt) + prompt
    message = refusal(num_pages, max_num_seqs=8)
    assert message.startswith("--max-num-seqs 8 needs ")
    assert "7 fit into the KV cache" in message
    assert "use --max-num-seqs 7" in message
    assert pool(num_pages, max_num_seqs=7).loaded.plan.max_num_seqs == 7


def test_less_than_one_state_is_refused_with_its_size(sizes: tuple[int, int]) -> None:
    state, _ = sizes
    message = refusal(state)
    assert "are the state of one request" in message
    assert "use a larger --kv-cache-memory" in message


def test_a_request_alone_has_its_state_and_the_rest_of_the_pool(sizes: tuple[int, int]) -> None:
    state, _ = sizes
    offline = pool(state + 20)
    block = offline.loaded.plan.pages.groups[0].block_tokens
    assert offline.loaded.plan.max_model_len == 20 * block
    assert offline.engine.scheduler.max_num_tokens == 20 * block
    assert offline.loaded.plan.num_requests(20 * block) == 1
    assert f"--max-model-len {20 * block}" in refusal(state + 20, max_model_len=20 * block + 1)


def test_a_pool_is_as_large_as_its_requests_can_use_with_a_saved_state_each() -> None:
    pages = load_hybrid(*DELTA).loaded.plan.pages
    for is_caching in (False, True):
        config = EngineConfig(model="", enable_prefix_caching=is_caching)
        plan = plan_kv_cache(config, pages, longest=320, max_num_seqs=3, free_bytes=GIB)
        assert plan.num_pages == 1 + 3 * (pages.num_pages(320) + is_caching * pages.state_pages)


def test_the_ring_of_drafts_is_counted() -> None:
    setups = []
    for speculative in (None, SpeculativeConfig(num_tokens=3)):
        config = EngineConfig(model=str(FOLDER), device="cpu", speculative=speculative, max_num_seqs=5)
        with served(hybrid_config(*DELTA)):
            setups.append(fit_setup(config))
    num_inputs = sum(state.num_inputs for state in setups[0].model_config.states if state is not None)
    assert setups[1].step_bytes - setups[0].step_bytes == 6 * 4 * num_inputs * 4


def fit_setup(config: EngineConfig):
    from engine.startup.load import _decide

    return _decide(config, rank=0)


def look(config: ModelConfig, monkeypatch: pytest.MonkeyPatch, **options: object) -> ModelReport:
    monkeypatch.setattr(fit, "read_config", lambda *_: config)
    report = fit.examine(Ask(folder=str(FOLDER), **options)).model
    assert report is not None
    return report


def test_the_doctor_tells_the_state_of_a_request_beside_the_bytes_of_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    report = look(hybrid_config(*DELTA), monkeypatch, gpu_memory=8 * GIB, dtype="float32")
    assert report.problem is None
    full, state = report.kv_layers
    assert (full.kind, full.num_layers, full.bytes_per_token) == ("full", 1, 2 * 2 * 16 * 4)
    assert (state.kind, state.num_layers, state.bytes_per_token, state.window) == ("state", 3, 0, None)
    assert report.room is not None
    plan = load_hybrid(*DELTA, block_size=16).loaded.plan
    assert state.bytes_per_request == plan.state_bytes
    text = _kv_text(report)
    assert text == f"256 bytes per token in 1 layers; {format_size(plan.state_bytes)} per request in 3 with states"


def test_the_doctor_lowers_the_requests_at_once_as_the_engine_does(monkeypatch: pytest.MonkeyPatch) -> None:
    large = hybrid_config(*DELTA * 400)
    pages = plan_pages(large.caches, states=large.states, block_size=16, dtype=torch.float32)
    room = look(large, monkeypatch, gpu_memory=13 * GIB, dtype="float32", kv_cache_memory_bytes=GIB).room
    assert room is not None
    assert room.max_num_seqs < 128
    assert room.num_requests[min(room.num_requests)] <= room.max_num_seqs
    each = pages.num_pages(64)
    assert room.max_num_seqs == (room.kv_cache // pages.page_bytes - 1) // each


def test_a_rank_plans_its_share_of_states() -> None:
    config = hybrid_config(*DELTA)
    share = config.share_of_rank(2)
    whole = plan_pages(config.caches, states=config.states, block_size=16, dtype=torch.float32)
    half = plan_pages(share.caches, states=share.states, block_size=16, dtype=torch.float32)
    assert half.state is not None
    assert whole.state is not None
    assert half.state.num_bytes * 2 == whole.state.num_bytes


def test_a_model_without_any_attention_is_refused(tmp_path: Path) -> None:
    config = make_config("lfm2")
    config.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    convolutions = ["conv"] * len(raw["layer_types"])
    for changes in ({"layer_types": convolutions, "full_attn_idxs": []}, {"layer_types": None, "full_attn_idxs": []}):
        (tmp_path / "config.json").write_text(json.dumps(raw | {"architectures": ["Lfm2ForCausalLM"]} | changes))
        with pytest.raises(StartupError, match=r"none of its . layers has attention"):
            OfflineEngine.load(EngineConfig(model=str(tmp_path), device="cpu", load_format="dummy"))
