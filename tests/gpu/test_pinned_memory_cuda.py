"""Host memory that is pinned after the start, on CUDA: by a thread, piece by piece, also beside captures and steps."""

import pytest
import torch

from engine.device import pinned_memory
from engine.device.host_pages import HostPages
from engine.device.memory import zeros
from engine.device.pinned_memory import PinnedMemory, pin, unpin
from engine.interface.config import EngineConfig
from engine.offline import OfflineEngine
from tests.support.tiny_llama import VOCAB_SIZE, save_tiny_llama
from tests.unit.engine.test_host_memory import talk

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")  # without an index, as --device gives it


@pytest.fixture
def small_pieces(monkeypatch):
    """Pieces of two pages of the system, of which one is pinned at once."""
    monkeypatch.setattr(pinned_memory, "PIECE_BYTES", 2 * 4096)
    monkeypatch.setattr(pinned_memory, "FIRST_BYTES", 2 * 4096)


def test_rows_that_are_ready_are_pinned_and_end_unpinned(small_pieces):
    """By the driver's word: it refuses to pin what is pinned, and to unpin what is not."""
    memory = zeros((9, 4096), torch.uint8, torch.device("cpu"))
    pinned = PinnedMemory(memory, CUDA)
    assert pinned.num_ready == 2
    pinned.pin_rest()
    pinned.await_all()
    assert pinned.num_ready == 9
    for first in range(0, 9, 2):
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(memory[first].data_ptr()))
        pin(memory[first : first + 2])
    pinned.close()
    for first in range(0, 9, 2):
        pin(memory[first : first + 2])
        unpin(memory[first : first + 2])


def test_memory_is_pinned_while_a_graph_is_captured(small_pieces):
    memory = zeros((2000, 4096), torch.uint8, torch.device("cpu"))
    pinned, graph, numbers = PinnedMemory(memory, CUDA), torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda")
    stream = torch.cuda.Stream()
    numbers.add_(1.0)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        pinned.pin_rest()
        for _ in range(1000):
            numbers.add_(1.0)
        pinned.await_all()
        graph.capture_end()
    assert pinned.num_ready == 2000
    graph.replay()
    torch.cuda.synchronize()
    assert numbers.tolist() == [1001.0] * 8
    pinned.close()


def test_conversations_come_back_from_slots_that_were_pinned_after_the_start(tmp_path, small_pieces, monkeypatch):
    """In float32, so that tokens do not depend on the shape of a step."""
    monkeypatch.setattr(HostPages, "measure_page_s", lambda *_: 0.0)  # so tiny a model computes faster than it copies
    settings = {"max_num_batched_tokens": 48, "max_num_seqs": 2, "max_model_len": 160, "dtype": "float32"}
    config = {"model": str(save_tiny_llama(tmp_path)), "device": "cuda"} | settings
    plain = OfflineEngine.load(EngineConfig(**config, enable_prefix_caching=False))
    expected, page_bytes = talk(plain, VOCAB_SIZE), plain.loaded.plan.bytes_per_page
    plain.loaded.close()
    config |= {"kv_cache_memory_bytes": 16 * page_bytes, "kv_host_memory_bytes": 400 * page_bytes}
    offline = OfflineEngine.load(EngineConfig(**config), leaves_rest=True)
    tier = offline.engine.scheduler.kv.tiers.host
    assert 0 < tier.index.num_ready < tier.index.num_slots == 400
    offline.loaded.pin_host_memory()
    assert talk(offline, VOCAB_SIZE) == expected
    offline.engine.scheduler.check()
    offline.loaded.runner.host_pages.pins.await_all()
    assert talk(offline, VOCAB_SIZE) == expected
    assert tier.index.num_ready == 400
    assert tier.num_found_tokens > 0
    offline.loaded.close()
