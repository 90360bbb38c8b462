"""Ragged attention problems in which groups of rows begin with the same blocks, for the interpreter and the GPU."""

from __future__ import annotations

import dataclasses

import torch

from kernels.attention.base import AttentionMetadata, SharedRows

Group = tuple[list[int], int]  # rows, and the tokens whose blocks they share


def share_blocks(
    k_cache: torch.Tensor, v_cache: torch.Tensor, metadata: AttentionMetadata, groups: list[Group]
) -> AttentionMetadata:
    """Give the rows of each group the first one's leading blocks, and the metadata that says so.

    The blocks that the others had hold NaN from then on. Requests are numbered from the end, to differ from rows.
    """
    block_size, device = k_cache.shape[1], metadata.block_table.device
    num_rows = metadata.seq_lens.shape[0]
    req_index = torch.arange(num_rows, device=device).flip(0)
    shares = torch.zeros(num_rows + 1, 2, dtype=torch.int32, device=device)
    for number, (rows, tokens) in enumerate(groups, 1):
        columns = tokens // block_size
        assert columns * block_size == tokens
        for row in rows[1:]:
            lost = metadata.block_table[row, :columns].long()
            for cache in (k_cache, v_cache):
                cache[lost] = float("nan")
            metadata.block_table[row, :columns] = metadata.block_table[rows[0], :columns]
        shares[req_index[rows]] = torch.tensor([number, tokens], dtype=torch.int32, device=device)
    return dataclasses.replace(metadata, shared=SharedRows(req_index, shares, max_groups=max(len(groups), 4)))
