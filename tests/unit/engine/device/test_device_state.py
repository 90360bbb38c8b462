"""The state of rows on the device: reserved when the engine starts, filled without a wait for the device."""

from array import array
from typing import Any

import numpy as np
import pytest
import torch

from engine.core.step import RequestInit
from engine.device.device_state import DeviceState, Staging
from engine.interface.protocol import SamplingParams

CPU = torch.device("cpu")


def make_state(*, has_counts: bool = True) -> DeviceState:
    staging = Staging(CPU, num_bytes=1 << 10)
    return DeviceState(num_rows=3, max_blocks=16, vocab_size=50, device=CPU, staging=staging, has_counts=has_counts)


def penalized(prompt: list[int], output: list[int], req_index: int = 1) -> RequestInit:
    params = SamplingParams(max_tokens=9, frequency_penalty=1.0)
    return RequestInit(req_index, params, len(prompt), token_ids=prompt + output)


def test_the_counts_of_penalties_are_reserved_at_the_start():
    """Made by the first request that needs them, they would take memory that other programs may have taken since."""
    state = make_state()
    counts, in_prompt = state.output_counts, state.in_prompt
    assert counts.shape == in_prompt.shape == (4, 50)
    state.init_sampling([penalized([1, 2, 2], [7, 7, 8])])
    assert state.output_counts.data_ptr() == counts.data_ptr()
    assert counts[1].nonzero().flatten().tolist() == [7, 8]
    assert counts[1, 7] == 2
    assert in_prompt[1].nonzero().flatten().tolist() == [1, 2]
    state.init_sampling([penalized([3], [])])
    assert counts.sum() == 0
    assert in_prompt.nonzero().tolist() == [[1, 3]]


def test_a_device_that_samples_nothing_has_no_counts():
    state = make_state(has_counts=False)
    state.init_sampling([penalized([1], [2])])
    assert state.output_counts is None
    assert state.in_prompt is None


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Return what is allocated as pinned memory, which is none here."""
    buffers: list[torch.Tensor] = []
    empty = torch.empty

    def record(*args: Any, pin_memory: bool, **options: Any) -> torch.Tensor:
        assert pin_memory
        buffers.append(empty(*args, **options))
        return buffers[-1]

    monkeypatch.setattr(torch, "empty", record)
    return buffers


@pytest.mark.parametrize("num_values", [4, 1000])
def test_values_of_any_size_pass_through_pinned_memory(pinned: list[torch.Tensor], num_values: int) -> None:
    """The tokens of a long prompt with penalties do not fit the buffer; a pageable copy would wait for all steps."""
    staging = Staging(torch.device("cuda"), num_bytes=256)
    values = np.arange(num_values)
    staged = staging._stage(values)
    assert staged.tolist() == values.tolist()
    spans = [range(buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes) for buffer in pinned]
    assert any(staged.data_ptr() in span for span in spans)


def test_values_of_a_step_lie_side_by_side_in_pinned_memory_in_their_form(pinned: list[torch.Tensor]) -> None:
    staging = Staging(torch.device("cuda"), num_bytes=256)
    values = [
        np.arange(3, dtype=np.int32),
        np.arange(6).reshape(2, 3),
        np.array([[0.5, 1.5]], np.float32),
        np.array([True, False]),
        np.frombuffer(array("i", [7, 8]), np.int32),
    ]
    for _ in range(2):
        staging.begin_step()
        staged = [staging._stage(one) for one in values]
        assert [one.tolist() for one in staged] == [one.tolist() for one in values]
        assert [one.numpy().dtype for one in staged] == [one.dtype for one in values]
        places = [one.data_ptr() for one in staged]
        assert places == [places[0] + offset for offset in (0, 16, 64, 80, 96)]
    assert len(pinned) == 2
