"""LayerState: the tensors that one recurrent layer keeps of a request, whatever its length. Constant for the process."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


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

    @property
    def tensors(self) -> tuple[StateTensor, ...]:
        """The tensors in the order in which they lie in the pool."""
        return (self.conv,) if self.recurrent is None else (self.conv, self.recurrent)

    @property
    def num_bytes(self) -> int:
        """The bytes of one request."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    def share_of_rank(self, tp_size: int) -> LayerState:
        """Return what one of tp_size ranks keeps."""
        recurrent = None if self.recurrent is None else self.recurrent.share_of_rank(tp_size)
        return LayerState(self.conv.share_of_rank(tp_size), recurrent)
