"""Random problems for penalties and bitmasks, shared by the interpreter's cases and the GPU tests."""

from __future__ import annotations

import torch


def penalty_problem(
    vocab_size: int, *, device: str, num_rows: int = 5
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Logits, rows of them, the requests of these rows, and the state of nine requests."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(num_rows + 1, vocab_size, generator=generator) * 5
    counts = torch.randint(-3, 4, (9, vocab_size), generator=generator).clamp(min=0).int()
    state = {
        "output_counts": counts,
        "in_prompt": torch.rand(9, vocab_size, generator=generator) < 0.3,
        "presence": torch.rand(9, generator=generator) * 4 - 2,
        "frequency": torch.rand(9, generator=generator) * 4 - 2,
        "repetition": torch.rand(9, generator=generator) + 0.5,
    }
    rows = torch.randperm(num_rows + 1, generator=generator)[:num_rows]
    req_index = torch.randperm(9, generator=generator)[:num_rows]
    moved = {name: tensor.to(device) for name, tensor in state.items()}
    return logits.to(device), rows.to(device), req_index.to(device), moved


def bitmask_problem(vocab_size: int, *, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, rows of them, and a random mask for each of these rows."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(4, vocab_size, generator=generator)
    words = torch.randint(-(2**31), 2**31, (3, -(-vocab_size // 32)), generator=generator).to(torch.int32)
    return logits.to(device), torch.tensor([3, 0, 1], device=device), words.to(device)
