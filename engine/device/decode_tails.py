"""DecodeTails: CUDA graphs of what follows a decode step's layers: logits, and sampling of plain rows. Imports torch.

Kernel by kernel a tail costs the host a third of a millisecond, as long as the layers of a small model's few rows take.
A tail reads the hidden states that the decode graph of its size left, and leaves tokens at fixed addresses. Rows that
are adjusted, masked, or want log-probabilities are sampled kernel by kernel instead (engine/device/sampler.py).

Life of a tail: its first step runs it kernel by kernel, which loads its kernels; the second one captures it; from then
on it is replayed. So a start captures none, and a step waits for one capture, of a few kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.core.step import StepHandle, StepResult, TokenMasks
from engine.device.cuda_graph import DecodeGraphs, DecodeSize
from engine.device.graph_device import Graph
from engine.device.sampler import Sampler
from engine.interface.errors import first_line

logger = logging.getLogger(__name__)

# hidden [B, hidden_size], req_index [B] int64, has_truncation, out: [B] int64, the tokens. No sync
RunTail = Callable[[torch.Tensor, torch.Tensor, bool, torch.Tensor], None]

_MOST_ROWS = 64  # longer steps hide the host's time, and logits of more rows take memory


@dataclass(frozen=True)
class HostTokens:
    """Where the tokens of steps arrive on the host. Two alternate: a step is read before the next but one samples."""

    tensor: torch.Tensor  # [most rows] int64, pinned
    on_host: np.ndarray  # the same
    done: torch.cuda.Event | None  # None: there is nothing to wait for

    @classmethod
    def allocate(cls, max_rows: int, device: torch.device) -> HostTokens:
        """Allocate for steps of up to max_rows rows."""
        is_cuda = device.type == "cuda"
        tensor = torch.empty(max_rows, dtype=torch.int64, pin_memory=is_cuda)
        return cls(tensor, tensor.numpy(), torch.cuda.Event() if is_cuda else None)


class DecodeTails:
    """The tails behind the graphs of decode steps, one for each size and kind of sampling, each made when needed."""

    def __init__(self, run_tail: RunTail, decode: DecodeGraphs, *, device: torch.device) -> None:
        """decode: whose graphs leave the hidden states."""
        self._run_tail = run_tail
        self._decode = decode
        self._token_ids = torch.empty(_MOST_ROWS, dtype=torch.int64, device=device)
        self._host = [HostTokens.allocate(_MOST_ROWS, device) for _ in range(2)]
        self._turn = 0
        # By number of rows: where the device has their tokens, and both places on the host
        self._views: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}
        self._graphs: dict[tuple[DecodeSize, bool], Graph | None] = {}  # None: it has run once, or cannot be captured
        self._refused: set[tuple[DecodeSize, bool]] = set()

    @staticmethod
    def takes(size: DecodeSize) -> bool:
        """Return whether steps of this size have tails."""
        return size.num_rows <= _MOST_ROWS

    def hidden(self, size: DecodeSize) -> torch.Tensor:
        """Return the hidden states [B, hidden_size] of the step of `size` that was replayed last."""
        return self._decode.output(size)[0]

    def sample(self, size: DecodeSize, num_rows: int, *, has_truncation: bool) -> HostTokens:
        """Launch the tail behind the step of `size` that was replayed last, and the copy of its first num_rows tokens.

        Does not block. has_truncation: see kernels.sampling.triton_draw.sample. The result's tokens are there when it
        is done, and valid until the next call but one.
        """
        key = (size, has_truncation)
        graph = self._graphs.get(key) or self._prepare(key)
        if graph is not None:
            graph.replay()
        if num_rows not in self._views:
            places = [host.tensor[:num_rows] for host in self._host]
            self._views[num_rows] = self._token_ids[:num_rows], places
        token_ids, places = self._views[num_rows]
        self._turn ^= 1
        places[self._turn].copy_(token_ids, non_blocking=True)
        host = self._host[self._turn]
        if host.done is not None:
            host.done.record()
        return host

    def _prepare(self, key: tuple[DecodeSize, bool]) -> Graph | None:
        """Return a tail's new graph; None: it has been run kernel by kernel."""
        if key in self._graphs and key not in self._refused:
            try:
                self._graphs[key], _ = self._decode.device.capture(lambda: self._run(*key))
                return self._graphs[key]
            except RuntimeError as error:
                self._refused.add(key)
                logger.warning("tail not captured size=%s reason=%r", key, first_line(error))
        self._run(*key)
        self._graphs[key] = None
        return None

    def _run(self, size: DecodeSize, has_truncation: bool) -> torch.Tensor:
        hidden, req_index = self._decode.output(size)
        out = self._token_ids[: size.num_rows]
        self._run_tail(hidden, req_index, has_truncation, out)
        return out


@dataclass(eq=False)
class DecodeStep:
    """The StepHandle of a decode step whose layers were a graph: its tail is launched when it is sampled."""

    step_id: int
    host_req_index: np.ndarray  # [R] int32
    size: DecodeSize
    tails: DecodeTails
    sampler: Sampler
    # Makes the same step of hidden [R, hidden_size], to be sampled kernel by kernel
    as_kernels: Callable[[torch.Tensor], StepHandle]
    _tokens: HostTokens | None = None
    _other: StepHandle | None = field(default=None, repr=False)

    def sample(self, masks: TokenMasks | None = None) -> None:
        """See StepHandle.sample."""
        num_rows = len(self.host_req_index)
        with torch.inference_mode():
            has_masks = masks is not None and bool(masks.req_indices)
            has_truncation = None if has_masks else self.sampler.truncates_plain(self.host_req_index)
            if has_truncation is None:
                self._other = self.as_kernels(self.tails.hidden(self.size)[:num_rows])
                self._other.sample(masks)
            else:
                self._tokens = self.tails.sample(self.size, num_rows, has_truncation=has_truncation)

    def is_done(self) -> bool:
        """See StepHandle.is_done."""
        if self._other is not None:
            return self._other.is_done()
        return self._tokens is None or self._tokens.done is None or self._tokens.done.query()

    def wait(self) -> StepResult:
        """See StepHandle.wait."""
        if self._other is not None:
            return self._other.wait()
        assert self._tokens is not None, "sample() comes first"
        if self._tokens.done is not None:
            self._tokens.done.synchronize()
        return StepResult(self.step_id, self._tokens.on_host[: len(self.host_req_index)].tolist())
