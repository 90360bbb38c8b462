"""gated_linear: a product of 16 bits and the gate behind it; where one kernel for both pays, and its tile sizes.

The kernel for Hopper is kernels/linear/gluon_dense.py. A gate by itself reads both products and writes one of that
size, which takes as long as about 350 more inputs of the product would.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from kernels.elementwise.reference import gelu_tanh_and_mul, silu_and_mul

PART = 128  # outputs of gate, and of up, in a tile
ROWS = 64  # of a warpgroup
# The kernel's rate where its tiles fill the device, against cuBLAS's: an estimate, from the shapes of its tiles
RATE = 0.97
_GATE_INPUTS = 350  # at 700 TFLOP/s and 3 TB/s
_LEAST_ROWS = 1024  # of x; fewer fill too few tiles, whatever their number


@dataclass(frozen=True)
class DenseConfig:
    """Tile size and pipeline depth of one program."""

    consumers: int = 3  # warpgroups of 64 rows: 2 or 3
    num_stages: int = 3  # of 64 inputs, in shared memory
    group: int = 11  # tiles of rows that run side by side: a quarter of those of 8,192 rows
    is_ahead: bool = True  # a warpgroup starts a step before its last one is done
    is_joint: bool = False  # gate and up are one product of 256 columns; only with 2 consumers


def gated_linear(x: torch.Tensor, w: torch.Tensor, *, is_gelu: bool) -> torch.Tensor:
    """Return silu(x @ gate.T) * (x @ up.T), or with the approximate GELU.

    x: [T, K]; w: [2 * I, K], the rows of gate, then those of up; returns [T, I].
    """
    gate_up = functional.linear(x, w)
    return gelu_tanh_and_mul(gate_up) if is_gelu else silu_and_mul(gate_up)


def fill(*, num_rows: int, n: int, num_sms: int) -> float:
    """Return the share of the device's time that tiles of the default size fill with rows and outputs that exist."""
    height, width = DenseConfig().consumers * ROWS, 2 * PART
    tiles = -(-num_rows // height) * -(-n // width)
    turns = -(-tiles // num_sms)
    return num_rows * n / (turns * num_sms * height * width)


def pays(*, num_rows: int, n: int, k: int, num_sms: int) -> bool:
    """Return True if one kernel is expected to be faster than cuBLAS and the gate. n: outputs of gate and up."""
    has_rows = num_rows >= _LEAST_ROWS
    return has_rows and fill(num_rows=num_rows, n=n, num_sms=num_sms) * RATE * (1 + _GATE_INPUTS / k) > 1
