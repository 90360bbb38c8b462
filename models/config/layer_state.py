"""LayerState: the tensors that one recurrent layer keeps of a request, whatever its length."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

# Limits of kernels: a program reads all taps of a convolution (published ones are 3 to 7); and a scan of prompts has
# tiles of whole rows of a state in shared memory (published ones are 96 to 256)
MAX_CONV_WIDTH = 64
MAX_ROW_SIZE = 256


@dataclass(frozen=True)
class StateTensor:
    """A tensor [num_rows, row_size] float32, whose rows are those of its parts.

    parts: (rows of a unit, units) of each: units are heads or groups, which ranks share.
    """

    parts: tuple[tuple[int, int], ...]
    row_size: int

    @property
    def num_rows(self) -> int:
        """The rows of all parts."""
        return sum(rows * units for rows, units in self.parts)

    @property
    def num_bytes(self) -> int:
        """The bytes of one request."""
        return self.num_rows * self.row_size * 4

    def share_of_rank(self, tp_size: int) -> StateTensor:
        """Return what one of tp_size ranks keeps: its units, or one replicated unit where ranks outnumber them."""
        return dataclasses.replace(self, parts=tuple((rows, max(units // tp_size, 1)) for rows, units in self.parts))


@dataclass(frozen=True)
class LayerState:
    """The state of one layer."""

    conv: StateTensor  # [channels, width - 1]: the last inputs of the causal convolution
    recurrent: StateTensor | None = None  # None: a layer that is a convolution alone
    gates: StateTensor | None = None  # row_size 1: what a token gives the recurrence beside the convolution's inputs

    @property
    def tensors(self) -> tuple[StateTensor, ...]:
        """The tensors in the order in which they lie in the pool."""
        return (self.conv,) if self.recurrent is None else (self.conv, self.recurrent)

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """The (num_rows, row_size) of its tensors."""
        return [(tensor.num_rows, tensor.row_size) for tensor in self.tensors]

    @property
    def num_inputs(self) -> int:
        """The values by which a token advances the state: the convolution's inputs, then the gates."""
        return self.conv.num_rows + (0 if self.gates is None else self.gates.num_rows)

    @property
    def num_bytes(self) -> int:
        """The bytes of one request."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    def share_of_rank(self, tp_size: int) -> LayerState:
        """Return what one of tp_size ranks keeps."""
        others = (None if tensor is None else tensor.share_of_rank(tp_size) for tensor in (self.recurrent, self.gates))
        return LayerState(self.conv.share_of_rank(tp_size), *others)
