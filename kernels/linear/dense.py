"""DenseConfig: the tiles of one kernel for the 16-bit product of many rows and the gate behind it. pays(): if it wins.

The kernel for Hopper is kernels/linear/gluon_dense.py, its specification gated_linear of kernels/linear/late_norm.py. A
gate by itself reads both products and writes one of that size.
"""

from __future__ import annotations

from dataclasses import dataclass

PART = 128  # outputs of gate, and of up, in a tile
HEIGHT = 192  # rows of a tile
LEAST_ROWS = 1536  # of x: the fewest with which the kernel was timed and won; with 1,024 it lost
# Of the kernel where its tiles fill the device, against cuBLAS, and what the gate takes by itself, in inputs of the
# product: with these, an H100 did in 21 of 22 cases what is estimated, or more (benchmarks/notes.md)
RATE = 1.045
_GATE_INPUTS = 240
_LEAST_INPUTS = 1024  # fewer were not timed, and have no more of a gain than these
_LEAST_TURNS = 2  # tiles of a multiprocessor; one alone, with nothing to hide its begin and end, was not timed


@dataclass(frozen=True)
class DenseConfig:
    """Pipeline depth and order of the tiles."""

    num_stages: int = 3  # of 64 inputs, in shared memory: 2 or 3
    group: int = 11  # tiles of rows that run side by side: a quarter of those of 8,192 rows


def fill(*, num_rows: int, n: int, num_sms: int) -> float:
    """Return the share of the device's time that the tiles fill with rows and outputs that exist."""
    return num_rows * n / (_turns(num_rows, n, num_sms) * num_sms * HEIGHT * 2 * PART)


def pays(*, num_rows: int, n: int, k: int, num_sms: int) -> bool:
    """Return True if one kernel is expected to be faster than cuBLAS and the gate. n: outputs of gate and up."""
    if num_rows < LEAST_ROWS or _turns(num_rows, n, num_sms) < _LEAST_TURNS:
        return False
    share = fill(num_rows=num_rows, n=n, num_sms=num_sms)
    return share * RATE * (1 + _GATE_INPUTS / max(k, _LEAST_INPUTS)) > 1


def _turns(num_rows: int, n: int, num_sms: int) -> int:
    """Return how many tiles the busiest multiprocessor computes."""
    tiles = -(-num_rows // HEIGHT) * -(-n // (2 * PART))
    return -(-tiles // num_sms)
