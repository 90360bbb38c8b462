"""Host memory on CUDA: pinned slots, copies on a stream of their own, and the engine over both."""

import pytest
import torch

from engine.core.step import StepPlan
from engine.device.device_state import Staging
from engine.device.host_pages import HostPages
from engine.interface.config import EngineConfig
from engine.offline import OfflineEngine
from tests.support.tiny_llama import VOCAB_SIZE, save_tiny_llama
from tests.unit.engine.device.test_host_pages import ROWS, check_measurement, check_round_trip, make_pool, step
from tests.unit.engine.test_host_memory import talk

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.mark.parametrize(("row", "dtype"), ROWS)
@pytest.mark.parametrize("num_at_once", [1, 2, 100])
def test_pages_come_back_as_they_were(row, dtype, num_at_once, monkeypatch):
    check_round_trip(CUDA, row, dtype, num_at_once, monkeypatch)


def test_the_time_of_a_page_is_measured():
    check_measurement(CUDA)


def test_what_follows_a_step_waits_for_its_copies_and_its_copies_for_what_came_before():
    pool, staging = make_pool(CUDA), Staging(CUDA, num_bytes=1024)
    host = HostPages(pool, num_slots=4, device=CUDA)
    torch.cuda._sleep(50_000_000)
    pool.rows[:, 1] = 3.0
    step(host, staging, [(1, 0)])
    pool.rows[:, 1] = 4.0
    host.begin(StepPlan(0, [], copies_from_host=[(0, 5)]), staging)
    torch.cuda._sleep(50_000_000)
    host.join()
    assert bool((pool.rows[:, 5] == 3.0).all())
    assert bool((pool.rows[:, 1] == 4.0).all())


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_turns_of_evicted_conversations_are_found_in_host_memory(tmp_path, enforce_eager, monkeypatch):
    """In float32, so that tokens do not depend on the shape of a step."""
    monkeypatch.setattr(HostPages, "measure_page_s", lambda *_: 0.0)  # so tiny a model computes faster than it copies
    settings = {"max_num_batched_tokens": 48, "max_num_seqs": 2, "max_model_len": 160, "dtype": "float32"}
    config = {"model": str(save_tiny_llama(tmp_path)), "device": "cuda", "enforce_eager": enforce_eager} | settings
    plain = OfflineEngine.load(EngineConfig(**config, enable_prefix_caching=False))
    expected, page_bytes = talk(plain, VOCAB_SIZE), plain.loaded.plan.bytes_per_page
    plain.loaded.close()
    config |= {"kv_cache_memory_bytes": 16 * page_bytes, "kv_host_memory_bytes": 100 * page_bytes}
    offline = OfflineEngine.load(EngineConfig(**config))
    assert talk(offline, VOCAB_SIZE) == expected
    tier = offline.engine.scheduler.kv.tiers.host
    assert tier is not None
    assert tier.num_found_tokens > 0
    offline.loaded.close()
