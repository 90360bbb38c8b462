"""LoRA adapters on a linear layer (Hu et al. 2021, arXiv:2106.09685, §4.1), many in one batch: the torch specification.

Adapters are numbered from 1; number 0 is the model without an adapter: nothing is added.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_PARTS = 3  # of one layer: the Triton twin takes no more


@dataclass(frozen=True)
class LoraWeights:
    """All adapters of one linear layer, whose outputs are P concatenated matrices; ranks are padded with zeros to R.

    P is at most MAX_PARTS.
    """

    # [num_adapters, P, R, in]
    a: torch.Tensor
    # [num_adapters, out, R]: of all P matrices, times the adapter's scale
    b: torch.Tensor
    part_sizes: tuple[int, ...]  # outputs of each matrix; their sum is `out`


def gather_loras(
    lora_indices: torch.Tensor, req_index: torch.Tensor, token_rows: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Fill the first T entries of out with each token's adapter.

    lora_indices: [rows] int32, by req_index; req_index: [R] integers; token_rows: [T] int32, the row of each token
    (None: one token a row); out: [max_tokens] int32.
    """
    requests = req_index if token_rows is None else req_index[token_rows]
    out[: requests.shape[0]] = lora_indices[requests]


def add_lora(out: torch.Tensor, x: torch.Tensor, weights: LoraWeights, loras: torch.Tensor) -> None:
    """Add b[n] @ (a[n] @ x[t]) to out[t], for the adapter n of each token that has one.

    x: [T, in]; out: [T, out], of the same dtype; loras: [T] int32. Syncs on a GPU; the Triton twin does not.
    """
    for index in range(weights.a.shape[0]):
        tokens = (loras == index + 1).nonzero().squeeze(1)
        if tokens.shape[0] == 0:
            continue
        shrunk = torch.einsum("ti,pri->tpr", x[tokens], weights.a[index])
        parts = weights.b[index].split(weights.part_sizes)
        out[tokens] += torch.cat([shrunk[:, part] @ b.T for part, b in enumerate(parts)], dim=1)
