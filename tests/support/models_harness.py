"""A paged pool to run rows of a model over. Imports no transformers, so that a rank starts quickly."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from kernels.attention.base import AttentionMetadata
from kernels.attention.torch_ref import TorchAttention
from kernels.elementwise.reference import INT8, KVScales
from kernels.ops import LoraTokens
from kernels.states import StateMetadata, StateView, place_states, view_states
from models.build import build, check_headers
from models.config.model_config import ModelConfig
from models.context import ForwardContext, LayerKV, StepStates
from models.lora.linear import AdapterStack
from models.parallel import TensorParallel
from models.weights.weights import Weights

CPU = torch.device("cpu")
SINGLE = TensorParallel()


def load(
    folder: Path,
    tp: TensorParallel = SINGLE,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    adapters: AdapterStack | None = None,
) -> torch.nn.Module:
    """Build our model from the folder."""
    config = ModelConfig.from_folder(folder)
    model = build(config, Weights.from_folder(folder, device=device, dtype=dtype, adapters=adapters), tp)
    check_headers(config, folder, tp, dtype=dtype)  # what can be loaded passes this check, too
    return model


@dataclass
class Row:
    """One request: tokens that came so far and the blocks it was given."""

    num_computed_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    lora_index: int = 0


class PagedRunner:
    """Runs steps of ragged rows over a small pool whose blocks are handed out in shuffled order."""

    def __init__(
        self,
        model: torch.nn.Module,
        config: ModelConfig,
        *,
        tp_size: int = 1,
        block_size: int = 4,
        dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
        lora_tokens: LoraTokens | None = None,
    ) -> None:
        self.model = model
        self.lora_tokens = lora_tokens
        self.block_size = block_size
        self.device = device
        num_blocks = 64
        self.kv_caches: list[LayerKV | None] = []
        for cache in config.caches:
            if cache is None:
                self.kv_caches.append(None)
                continue
            if cache.shares is not None:
                self.kv_caches.append(self.kv_caches[cache.shares])
                continue
            shape = (num_blocks, block_size, cache.share_of_rank(tp_size).num_kv_heads)
            # What lies in unwritten slots must never show
            keys = torch.full((*shape, cache.head_dim), 50.0, device=device).to(dtype)
            values = torch.full((*shape, cache.v_head_dim), 50.0, device=device).to(dtype)
            scales = [torch.full(shape, torch.nan, device=device) for _ in range(2)] if dtype == INT8 else []
            if cache.values_in_keys:
                values = keys[..., : cache.v_head_dim]
            self.kv_caches.append(LayerKV(keys, values, token_scales=KVScales(*scales) if scales else None))
        self.state_views, self.state_pages = self._make_states(config, tp_size)
        self.free_block_ids = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1)).tolist()
        self.rows: list[Row] = []

    def add_row(self, lora_index: int = 0) -> int:
        """Admit a request, with an adapter if it is not 0; returns its index."""
        self.rows.append(Row(lora_index=lora_index))
        return len(self.rows) - 1

    def _make_states(self, config: ModelConfig, tp_size: int) -> tuple[list[tuple[StateView, ...]], torch.Tensor]:
        """Return the views of each layer's states, and the pages of 16 requests: shuffled, and NaN in all of them."""
        states = [None if state is None else state.share_of_rank(tp_size) for state in config.states]
        shapes = [[] if state is None else state.shapes for state in states]
        piece = 2 * max((row_size for tensors in shapes for _, row_size in tensors), default=1) + 1
        num_lanes, num_requests = 3, 16
        num_pages = -(-place_states(shapes, piece=piece)[1] // num_lanes)
        pool = torch.full((num_lanes, 1 + num_requests * num_pages, piece), torch.nan, device=self.device)
        pages = 1 + torch.randperm(num_requests * num_pages, generator=torch.Generator().manual_seed(2))
        return view_states(pool, shapes), pages.view(num_requests, num_pages).to(torch.int32).to(self.device)

    def _states(self, chunks: list[tuple[int, list[int]]], metadata: AttentionMetadata) -> StepStates | None:
        if not any(self.state_views):
            return None
        rows = StateMetadata(
            query_start_loc=metadata.query_start_loc,
            seq_lens=metadata.seq_lens,
            req_index=self._tensor([index for index, _ in chunks], torch.int32),
            pages=self.state_pages,
            writes=None,
            max_query_len=metadata.max_query_len,
            num_decodes=metadata.num_decodes,
        )
        return StepStates(self.state_views, rows, None)

    def step(self, chunks: list[tuple[int, list[int]]]) -> list[torch.Tensor]:
        """Compute (row index, its next tokens) each; single tokens must come first. Returns each chunk's logits."""
        metadata, positions = self._plan(chunks)
        ctx = ForwardContext(
            positions, [metadata], TorchAttention(), self.kv_caches, states=self._states(chunks, metadata)
        )
        input_ids = self._tensor([token_id for _, token_ids in chunks for token_id in token_ids], torch.int64)
        if self.lora_tokens is not None:
            lora_indices = self._tensor([row.lora_index for row in self.rows], torch.int32)
            token_rows = [place for place, (_, token_ids) in enumerate(chunks) for _ in token_ids]
            req_index = self._tensor([index for index, _ in chunks], torch.int32)
            self.lora_tokens.gather(lora_indices, req_index, self._tensor(token_rows, torch.int32))
        with torch.inference_mode():
            logits = self.model.compute_logits(self.model.forward(input_ids, ctx))
        return list(logits.cpu().split([len(token_ids) for _, token_ids in chunks]))

    def _plan(self, chunks: list[tuple[int, list[int]]]) -> tuple[AttentionMetadata, torch.Tensor]:
        starts, seq_lens, positions, slots = [0], [], [], []
        for index, token_ids in chunks:
            row = self.rows[index]
            for _ in token_ids:
                position = row.num_computed_tokens
                if position == len(row.block_ids) * self.block_size:
                    row.block_ids.append(self.free_block_ids.pop())
                slots.append(row.block_ids[position // self.block_size] * self.block_size + position % self.block_size)
                positions.append(position)
                row.num_computed_tokens += 1
            starts.append(starts[-1] + len(token_ids))
            seq_lens.append(row.num_computed_tokens)
        max_blocks = max(len(row.block_ids) for row in self.rows)
        tables = [self.rows[index].block_ids for index, _ in chunks]
        lengths = [len(token_ids) for _, token_ids in chunks]
        metadata = AttentionMetadata(
            query_start_loc=self._tensor(starts, torch.int32),
            seq_lens=self._tensor(seq_lens, torch.int32),
            block_table=self._tensor([table + [0] * (max_blocks - len(table)) for table in tables], torch.int32),
            slot_mapping=self._tensor(slots, torch.int64),
            max_query_len=max(lengths),
            max_seq_len=max(seq_lens),
            num_decodes=next((i for i, length in enumerate(lengths) if length > 1), len(lengths)),
        )
        return metadata, self._tensor(positions, torch.int64)

    def _tensor(self, values: list, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)
