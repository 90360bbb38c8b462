"""StateRows: what layers with states read in each step, at fixed addresses. Imports torch.

It owns the ring of drafted inputs (models.context.DraftRing) and the tensors that say which rows write states. Pages of
live states are in DeviceState. Padding rows have the padding request's state, page 0, and seq_len 0: kernels skip them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.device.device_state import DeviceState
from kernels.inputs.reference import DecodeInputs, DraftInputs, MixedInputs, PackedInputs
from kernels.ops import gather_draft_inputs
from kernels.states import StateMetadata, StateView
from models.config.layer_state import LayerState
from models.context import DraftRing, StepStates


def ring_bytes(states: Sequence[LayerState | None], *, num_requests: int, num_drafts: int, dtype: torch.dtype) -> int:
    """Return the size of the ring for num_requests with num_drafts drafts each; 0 without drafts."""
    num_inputs = sum(state.num_inputs for state in states if state is not None)
    return (num_requests + 1) * _ring_size(num_drafts) * num_inputs * dtype.itemsize


def _ring_size(num_drafts: int) -> int:
    """Return the tokens of a row with drafts."""
    return num_drafts + 1 if num_drafts else 0


class StateRows:
    """Makes the StepStates of each step. The next step reuses its tensors."""

    def __init__(
        self,
        state: DeviceState,
        views: list[tuple[StateView, ...]],
        states: Sequence[LayerState | None],
        *,
        num_drafts: int,
        max_rows: int,
        dtype: torch.dtype,
    ) -> None:
        """views, states: by layer; of this rank. num_drafts: the most in a row; 0: no speculation, so no ring.

        max_rows: the most rows of a mixed step. dtype: of the model.
        """
        assert state.state_pages is not None, "no layer has a state"
        self._state = state
        self._pages = state.state_pages
        self._views = views
        self._ring_size = _ring_size(num_drafts)
        self._drafts: DraftInputs | None = None
        if not num_drafts:
            return
        num_requests, device = self._pages.shape[0], state.device
        self._drafts = DraftInputs.allocate(max_rows=max_rows, ring_size=self._ring_size, device=device)
        self._kept = [
            None
            if layer is None
            else torch.zeros(num_requests * self._ring_size, layer.num_inputs, dtype=dtype, device=device)
            for layer in states
        ]

    @property
    def has_ring(self) -> bool:
        """True if rows may have drafts."""
        return self._drafts is not None

    def of_decodes(self, req_index: torch.Tensor, inputs: DecodeInputs, query_start_loc: torch.Tensor) -> StepStates:
        """Return the states of rows of one token each, gathered in `inputs`: none has drafts, or follows a row with."""
        assert inputs.state_lens is not None
        num_rows = req_index.shape[0]
        rows = StateMetadata(
            query_start_loc=query_start_loc,
            seq_lens=inputs.state_lens[:num_rows],
            req_index=req_index,
            pages=self._pages,
            writes=None,
            max_query_len=1,
            num_decodes=num_rows,
        )
        return StepStates(self._views, rows, None)

    def of_mixed(
        self, packed: PackedInputs, inputs: MixedInputs, *, num_rows: int, max_query_len: int, max_prefills: int
    ) -> StepStates:
        """Return the states of a packed step, of which the first num_rows rows have tokens. Graph-safe."""
        drafts = self._drafts
        rows = StateMetadata(
            query_start_loc=packed.query_start_loc[: num_rows + 1],
            seq_lens=packed.seq_lens[:num_rows],
            req_index=packed.req_index[:num_rows],
            pages=self._pages,
            writes=None if drafts is None else drafts.writes[:num_rows],
            max_query_len=max_query_len,
            num_decodes=None,
            max_prefills=max_prefills,
        )
        if drafts is None:
            return StepStates(self._views, rows, None)
        gather_draft_inputs(
            self._state.ring_start,
            packed,
            ring_size=self._ring_size,
            padding_row=self._state.padding_row,
            out=drafts,
        )
        settling = StateMetadata(
            query_start_loc=drafts.settle_start_loc[: num_rows + 1],
            seq_lens=drafts.settle_lens[:num_rows],
            req_index=packed.req_index[:num_rows],
            pages=self._pages,
            writes=None,
            max_query_len=self._ring_size,
            num_decodes=None,
        )
        num_samples = packed.req_index.shape[0]
        ring = DraftRing(
            inputs=self._kept,
            source=drafts.source[: num_rows * self._ring_size],
            settling=settling,
            tokens=inputs.sample_tokens[:num_samples],
            target=drafts.target[:num_samples],
        )
        return StepStates(self._views, rows, ring)
