"""DeviceState: the running requests' state on the device, by req_index; Staging: copies host values to the device.

Imports torch, engine.core.step, engine.device.memory and nothing else of the engine.
DeviceState: the host sends only changes: a row's parameters when a request starts, block ids when its table grows.
Tensors are allocated once, so CUDA graphs can read them. The last row (index num_rows) is for padding.
Life of a row: init(), then init_sampling() → steps write last_token and num_computed → the next init() of the same
index overwrites the row.
Staging: on CUDA, values pass through pinned memory, so a copy is queued behind the steps in flight and the host does
not wait; a copy from pageable memory above 64 KiB waits for all of them. Two buffers alternate by step: with two steps
in flight, the older one has been read back, hence is complete, before its buffer is written again.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from engine.core.step import RequestInit, RequestShare
from engine.device.memory import zeros

_ALIGNMENT = 16  # bytes
_DTYPES: dict[np.dtype, torch.dtype] = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.bool_): torch.bool,
}


class _Pinned(NamedTuple):
    """A pinned buffer as values of one type, for numpy and for torch."""

    on_host: np.ndarray
    tensor: torch.Tensor


def _typed(buffer: torch.Tensor) -> dict[np.dtype, _Pinned]:
    """Return the views of a buffer by the type of their values: to make one for each copy takes as long as a copy."""
    return {known: _Pinned(buffer.view(dtype).numpy(), buffer.view(dtype)) for known, dtype in _DTYPES.items()}


class Staging:
    """Copies host values to one device, through two pinned buffers of num_bytes each. For one thread and one stream."""

    def __init__(self, device: torch.device, *, num_bytes: int) -> None:
        self._device = device
        self._turn = 0
        self._used = 0
        self._num_bytes = num_bytes // _ALIGNMENT * _ALIGNMENT
        self._buffers: list[dict[np.dtype, _Pinned]] = []  # by the type of values
        if device.type == "cuda":
            buffers = [torch.empty(self._num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
            self._buffers = [_typed(buffer) for buffer in buffers]

    def begin_step(self) -> None:
        """Switch to the other buffer, and so overwrite the values of the step before the previous one."""
        self._turn ^= 1
        self._used = 0

    def send(self, values: np.ndarray, out: torch.Tensor | None = None) -> torch.Tensor:
        """Copy values to the device, into `out` of their shape if given; return a tensor of their shape and dtype."""
        source = self._stage(values)
        if out is None:
            return source.to(self._device, non_blocking=True)
        return out.copy_(source, non_blocking=True)

    def send_large(self, values: np.ndarray) -> torch.Tensor:
        """Copy values, usually larger than the buffer, to the device and leave the buffer to others. Does not block."""
        return self._pin(values).to(self._device, non_blocking=True)

    def _pin(self, values: np.ndarray) -> torch.Tensor:
        source = torch.from_numpy(values)
        if self._device.type != "cuda":
            return source
        # torch's caching host allocator reuses a pinned block only after its copies are complete
        return torch.empty(source.shape, dtype=source.dtype, pin_memory=True).copy_(source)

    def _stage(self, values: np.ndarray) -> torch.Tensor:
        begin, pinned = self._used, self._buffers[self._turn].get(values.dtype) if self._buffers else None
        if pinned is None or begin + values.nbytes > self._num_bytes:
            return self._pin(values)
        self._used += -(-values.nbytes // _ALIGNMENT) * _ALIGNMENT
        first = begin // values.itemsize
        end = first + values.size
        pinned.on_host[first:end] = values if values.ndim == 1 else values.reshape(-1)
        staged = pinned.tensor[first:end]
        return staged if values.ndim == 1 else staged.view(values.shape)


class DeviceState:
    """The state of all running requests on one device, one row each. Not thread-safe: one step at a time writes it."""

    def __init__(
        self,
        *,
        num_rows: int,
        max_blocks: int,
        vocab_size: int,
        device: torch.device,
        staging: Staging,
        num_tables: int = 1,
        num_state_pages: int = 0,
        has_loras: bool = False,
        has_counts: bool = True,
    ) -> None:
        """num_tables: block tables of a request. num_state_pages: pages of a request's state; 0: it has none.

        has_counts: requests with penalties are sampled here.
        """
        rows = num_rows + 1
        self.device = device
        self.vocab_size = vocab_size
        self.staging = staging
        # [rows] int64: the newest token of each request
        self.last_token = torch.zeros(rows, dtype=torch.int64, device=device)
        # [rows] int64: tokens whose keys and values are in the pool; the position of a decode row's token
        self.num_computed = torch.zeros(rows, dtype=torch.int64, device=device)
        # [tables, rows, max_blocks rounded up] int32: block ids in order; stale entries are valid ids and never read
        self.block_tables = torch.zeros(num_tables, rows, -(-max_blocks // 16) * 16, dtype=torch.int32, device=device)
        # [rows, pages of a state] int32: the live state of each request; None: no layer has a state
        self.state_pages: torch.Tensor | None = None
        if num_state_pages:
            self.state_pages = torch.zeros(rows, num_state_pages, dtype=torch.int32, device=device)
        # [rows] int32: position of the first token in the ring of drafted inputs, -1: none is kept; used with states
        self.ring_start = torch.full((rows,), -1, dtype=torch.int32, device=device)
        # [rows, 2] int32: the number of each request's group, 0 for none, and the group's tokens
        self.shares = torch.zeros(rows, 2, dtype=torch.int32, device=device)
        self._with_shares: set[int] = set()  # rows that may have others than 0
        # [rows] float32 each, and int64
        self._floats = torch.zeros(6, rows, dtype=torch.float32, device=device)
        self.temperature, self.top_p, self.min_p, self.presence, self.frequency, self.repetition = self._floats
        self._integers = torch.zeros(2, rows, dtype=torch.int64, device=device)
        self.top_k, self.seeds = self._integers
        # [rows] int32: the adapter of each request, 0 for none; None: no adapters are loaded
        self.lora_indices = torch.zeros(rows, dtype=torch.int32, device=device) if has_loras else None
        # [rows, V] int32 and bool: how often a request generated each token, and whether its prompt contains it. Only
        # the rows of requests with penalties are valid. None: without has_counts
        self.output_counts = zeros((rows, vocab_size), torch.int32, device) if has_counts else None
        self.in_prompt = zeros((rows, vocab_size), torch.bool, device) if has_counts else None

    def init(self, inits: list[RequestInit]) -> None:
        """Fill what layers read of the rows of new requests."""
        indices = [init.req_index for init in inits]
        old_shares = [index for index in indices if index in self._with_shares]
        if not old_shares and self.state_pages is None and self.lora_indices is None:
            return
        rows = self.staging.send(np.array(indices))
        if old_shares:
            self.shares.index_fill_(0, rows, 0)  # assigning a number would copy it from pageable memory, and wait
            self._with_shares.difference_update(old_shares)
        if self.state_pages is not None:
            self.ring_start.index_fill_(0, rows, -1)
        if self.lora_indices is not None:
            adapters = np.array([init.lora_index for init in inits], dtype=np.int32)
            self.lora_indices[rows] = self.staging.send(adapters)

    def init_sampling(self, inits: list[RequestInit]) -> None:
        """Fill what the sampler reads of them. Their number does not change that of copies, except with penalties.

        Once their step's layers are launched: the device then computes meanwhile.
        """
        params = [init.params for init in inits]
        floats = [
            (p.temperature, p.top_p, p.min_p, p.presence_penalty, p.frequency_penalty, p.repetition_penalty)
            for p in params
        ]
        integers = [[init.req_index for init in inits], [p.top_k for p in params], [p.seed for p in params]]
        sent = self.staging.send(np.array(integers, dtype=np.int64))
        self._integers.index_copy_(1, sent[0], sent[1:])
        self._floats.index_copy_(1, sent[0], self.staging.send(np.array(floats, dtype=np.float32)).T)
        for init in inits:
            if init.params.has_penalties:
                self._init_counts(init)

    @property
    def padding_row(self) -> int:
        """The row that padding rows of a batch use."""
        return self.last_token.shape[0] - 1

    def write_columns(self, table: int, row: int, first: int, block_ids: list[int]) -> None:
        """Write block_tables[table, row, first + i] = block_ids[i]."""
        columns = self.block_tables[table, row, first : first + len(block_ids)]
        self.staging.send(np.array(block_ids, dtype=np.int32), out=columns)

    def write_blocks(self, tables: list[int], rows: list[int], columns: list[int], block_ids: list[int]) -> None:
        """Write block_tables[tables[i], rows[i], columns[i]] = block_ids[i]."""
        updates = self.staging.send(np.array([tables, rows, columns, block_ids]))
        self.block_tables[updates[0], updates[1], updates[2]] = updates[3].to(torch.int32)

    def write_shares(self, shares: list[RequestShare]) -> None:
        """Write the groups of requests."""
        self._with_shares.update(req_index for req_index, _, _ in shares)
        updates = self.staging.send(np.array(shares, dtype=np.int32))
        self.shares[updates[:, 0].long()] = updates[:, 1:]

    def write_state_pages(self, rows: list[int], pages: list[list[int]]) -> None:
        """Write the pages of the live states of requests."""
        assert self.state_pages is not None, "no layer has a state"
        updates = self.staging.send(np.array([[row, *own] for row, own in zip(rows, pages, strict=True)]))
        self.state_pages[updates[:, 0]] = updates[:, 1:].to(torch.int32)

    def _init_counts(self, init: RequestInit) -> None:
        if self.output_counts is None or self.in_prompt is None:
            return
        tokens = self.staging.send(np.array(init.token_ids, dtype=np.int64))
        prompt, output = tokens[: init.num_prompt_tokens], tokens[init.num_prompt_tokens :]
        self.in_prompt[init.req_index].zero_().index_fill_(0, prompt, True)
        counts = self.output_counts[init.req_index].zero_()
        counts.index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
