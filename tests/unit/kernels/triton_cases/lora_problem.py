"""Random adapters over random steps, shared by the interpreter's cases and the GPU tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.lora.reference import LoraWeights, gather_loras


@dataclass
class LoraProblem:
    """A linear layer's input and output of one step, its adapters, and whose tokens they are."""

    x: torch.Tensor
    out: torch.Tensor
    weights: LoraWeights
    lora_indices: torch.Tensor
    req_index: torch.Tensor
    token_rows: torch.Tensor | None
    loras: torch.Tensor

    def expected(self) -> torch.Tensor:
        """What add_lora makes of out, in float64, token by token."""
        out = self.out.double()
        for token, lora in enumerate(self.loras.tolist()):
            start = 0
            for part, size in enumerate(self.weights.part_sizes if lora else ()):
                a, b = self.weights.a[lora - 1, part].double(), self.weights.b[lora - 1, start : start + size].double()
                out[token, start : start + size] += b @ (a @ self.x[token].double())
                start += size
        return out


def make_problem(
    *,
    row_lens: list[int],
    row_loras: list[int],
    num_adapters: int,
    rank: int,
    k: int,
    part_sizes: tuple[int, ...],
    dtype: torch.dtype,
    device: str = "cpu",
    is_decode: bool = False,
) -> LoraProblem:
    """Rows of those lengths, whose requests have those adapters and lie anywhere in the state."""
    generator = torch.Generator(device).manual_seed(0)

    def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator, device=device) * scale).to(dtype)

    num_rows, num_tokens = len(row_lens), sum(row_lens)
    places = torch.randperm(num_rows + 5, generator=torch.Generator().manual_seed(1))[:num_rows].to(device)
    lora_indices = torch.full((num_rows + 5,), num_adapters, dtype=torch.int32, device=device)
    lora_indices[places] = torch.tensor(row_loras, dtype=torch.int32, device=device)
    token_rows = None
    if not is_decode:
        places = places.to(torch.int32)
        rows = torch.arange(num_rows, dtype=torch.int32)
        token_rows = rows.repeat_interleave(torch.tensor(row_lens)).to(device)
    loras = torch.zeros(num_tokens, dtype=torch.int32, device=device)
    gather_loras(lora_indices, places, token_rows, loras)
    num_parts = len(part_sizes)
    weights = LoraWeights(
        randn(num_adapters, num_parts, rank, k, scale=k**-0.5), randn(num_adapters, sum(part_sizes), rank), part_sizes
    )
    x, out = randn(num_tokens, k), randn(num_tokens, sum(part_sizes))
    return LoraProblem(x, out, weights, lora_indices, places, token_rows, loras)
