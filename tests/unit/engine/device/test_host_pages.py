"""Pages go to slots of host memory and come back as they were."""

import pytest
import torch

from engine.core.step import StepPlan
from engine.device import host_pages
from engine.device.device_state import Staging
from engine.device.host_pages import HostPages
from engine.device.kv_cache import KVPool
from engine.interface.errors import StartupError

ROWS = [(6, torch.bfloat16), (7, torch.float8_e4m3fn), (5, torch.float32)]  # numbers in a row of a lane
NUM_PAGES, NUM_LANES = 9, 3


def make_pool(device, row=6, dtype=torch.bfloat16):
    return KVPool(torch.randn(NUM_LANES, NUM_PAGES, row).to(dtype).to(device), [])


def step(host, staging, to_host=(), from_host=()):
    plan = StepPlan(0, [], copies_to_host=list(to_host), copies_from_host=list(from_host))
    host.begin(plan, staging)
    host.join()


@pytest.mark.parametrize(("row", "dtype"), ROWS)
def test_pages_come_back_as_they_were(row, dtype, monkeypatch):
    check_round_trip(torch.device("cpu"), row, dtype, 2, monkeypatch)


def check_round_trip(device, row, dtype, num_at_once, monkeypatch):
    """Copy pages out, overwrite all, and copy them back in."""
    pool = make_pool(device, row, dtype)
    page_bytes = NUM_LANES * row * dtype.itemsize
    monkeypatch.setattr(host_pages, "BUFFER_BYTES", num_at_once * page_bytes)
    host, staging = HostPages(pool, num_slots=6, device=device), Staging(device, num_bytes=1024)
    assert host.page_bytes == page_bytes
    before = pool.rows.view(torch.uint8).clone()
    step(host, staging, [(1, 4), (2, 5), (3, 0), (4, 1), (8, 2)])
    pool.rows.view(torch.uint8).zero_()
    step(host, staging, [(5, 3)], [(4, 6), (5, 7), (1, 2), (2, 1)])
    after = pool.rows.view(torch.uint8)
    for page, source in ((6, 1), (7, 2), (2, 4), (1, 8)):
        assert torch.equal(after[:, page], before[:, source])
    assert not after[:, [0, 3, 4, 5, 8]].any()
    step(host, staging, from_host=[(3, 4), (0, 8)])
    assert not after[:, 4].any()
    assert torch.equal(after[:, 8], before[:, 3])


def test_the_time_of_a_page_is_measured_and_spoils_page_0_alone():
    check_measurement(torch.device("cpu"))


def check_measurement(device):
    """Measure a copy beside pages with numbers."""
    pool = make_pool(device)
    before = pool.rows[:, 1:].clone()
    host = HostPages(pool, num_slots=4, device=device)
    assert host.measure_page_s(Staging(device, num_bytes=1024)) > 0
    assert torch.equal(pool.rows[:, 1:], before)


def test_memory_that_cannot_be_had_is_refused_by_name():
    with pytest.raises(StartupError, match="cannot be allocated: use a smaller --kv-host-memory"):
        HostPages(make_pool("cpu"), num_slots=1 << 50, device=torch.device("cpu"))
