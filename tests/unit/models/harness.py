"""Tiny random checkpoints, the reference logits for them, and a paged pool to run rows of a model over."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers

from kernels.attention.base import AttentionMetadata
from kernels.attention.torch_ref import TorchAttention
from models.config import ModelConfig
from models.context import ForwardContext
from models.parallel import TensorParallel
from models.registry import build
from models.weights import Weights

CPU = torch.device("cpu")
SINGLE = TensorParallel()


def save_checkpoint(folder: Path, config: transformers.PreTrainedConfig, *, max_shard_size: str = "1GB") -> None:
    """Save a model whose every parameter matters: wide weights, norms that are not ones, biases that are not zero."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.2)
    model.save_pretrained(folder, max_shard_size=max_shard_size)


def reference_logits(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """[len(token_ids), vocab_size], as transformers computes them."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        return model.eval()(torch.tensor([token_ids])).logits[0]


def load(folder: Path, tp: TensorParallel = SINGLE, *, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Build our model from the folder."""
    return build(ModelConfig.from_folder(folder), Weights.from_folder(folder, device=CPU, dtype=dtype), tp)


@dataclass
class Row:
    """One request: tokens that came so far and the blocks it was given."""

    num_computed_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)


class PagedRunner:
    """Runs steps of ragged rows over a small pool whose blocks are handed out in shuffled order."""

    def __init__(self, model: torch.nn.Module, config: ModelConfig, *, tp_size: int = 1, block_size: int = 4) -> None:
        self.model = model
        self.block_size = block_size
        num_blocks = 64
        shape = (num_blocks, block_size, config.num_kv_heads_per_rank(tp_size), config.head_dim)
        # What lies in unwritten slots must never show
        self.kv_caches = [(torch.full(shape, 50.0), torch.full(shape, 50.0)) for _ in range(config.num_layers)]
        shuffled = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1)).tolist()
        self.free_block_ids = shuffled
        self.rows: list[Row] = []

    def add_row(self) -> int:
        """Admit a request; returns its index."""
        self.rows.append(Row())
        return len(self.rows) - 1

    def step(self, chunks: list[tuple[int, list[int]]]) -> list[torch.Tensor]:
        """Compute (row index, its next tokens) each; single tokens must come first. Returns each chunk's logits."""
        metadata, positions = self._plan(chunks)
        ctx = ForwardContext(positions, metadata, TorchAttention(), self.kv_caches)
        input_ids = torch.tensor([token_id for _, token_ids in chunks for token_id in token_ids])
        with torch.inference_mode():
            logits = self.model.compute_logits(self.model.forward(input_ids, ctx))
        return list(logits.split([len(token_ids) for _, token_ids in chunks]))

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
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            block_table=torch.tensor(
                [table + [0] * (max_blocks - len(table)) for table in tables], dtype=torch.int32
            ),
            slot_mapping=torch.tensor(slots),
            max_query_len=max(lengths),
            max_seq_len=max(seq_lens),
            num_decodes=next((i for i, length in enumerate(lengths) if length > 1), len(lengths)),
        )
        return metadata, torch.tensor(positions)
