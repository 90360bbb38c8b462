"""What warp-specialised Gluon kernels for Hopper do, on the CPU: a thread for each partition, real waits at barriers.

For gluon_on_cpu.py, which runs the rest. Copies end at once, so an order of threads that happens to be right hides a
missing wait; a wait that never ends fails the test.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support import gluon_on_cpu
from tests.support.gluon_on_cpu import KernelOnCpu, Tile

_TIMEOUT_S = 10.0


class Barrier:
    """An mbarrier that one arrival passes, once all bytes are there which that arrival expects."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._phase, self._bytes, self._has_arrived = 0, 0, False

    def arrive(self, *, expected: int = 0) -> None:
        """Arrive, and expect so many bytes in this phase."""
        with self._changed:
            assert not self._has_arrived, "two arrivals in one phase"
            self._bytes, self._has_arrived = self._bytes + expected, True
            self._pass()

    def receive(self, size: int) -> None:
        """Count bytes that have been copied."""
        with self._changed:
            assert self._has_arrived, "bytes that nothing expects"
            self._bytes -= size
            assert self._bytes >= 0
            self._pass()

    def wait(self, parity: int) -> None:
        """Wait for the end of the phase of this parity."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._phase & 1 != parity, _TIMEOUT_S), "a wait that does not end"

    def _pass(self) -> None:
        if self._has_arrived and self._bytes == 0:
            self._phase, self._has_arrived = self._phase + 1, False
            self._changed.notify_all()


class Row:
    """Shared memory or barriers in a row, of which one is taken by its place."""

    def __init__(self, items: Any, shape: list[int], dtype: Any = None) -> None:
        self._items, self.shape, self.dtype = items, shape, dtype

    def index(self, place: Any) -> Any:
        """Return one of them."""
        found = self._items[int(place)]
        return Row(found, self.shape[1:], self.dtype) if isinstance(found, torch.Tensor) else found

    def permute(self, order: tuple[int, ...]) -> Row:
        """Return a view with other axes."""
        return Row(self.tensor.permute(order), [self.shape[axis] for axis in order], self.dtype)

    @property
    def tensor(self) -> torch.Tensor:
        """All of the memory."""
        assert isinstance(self._items, torch.Tensor)
        return self._items


class Descriptor:
    """A TensorDescriptor of a matrix: boxes of it, with zeros beyond its ends."""

    layout = None

    def __init__(self, base: torch.Tensor, shape: list[int], strides: list[int], block_shape: list[int], *_: Any):
        assert shape == list(base.shape)
        assert strides[1] == 1
        self.base, self.block_shape, self.dtype = base, block_shape, base.dtype

    def copy(self, place: list[Any], barrier: Barrier, shared: Row) -> None:
        """Copy a box, and count its bytes."""
        (row, column), (height, width) = map(int, place), self.block_shape
        assert shared.shape == self.block_shape
        box = self.base[row : row + height, column : column + width].view(torch.uint8)
        bytes_of = shared.tensor.view(torch.uint8)
        bytes_of.zero_()
        bytes_of[: box.shape[0], : box.shape[1]] = box
        barrier.receive(height * width)


def _products(a: Row, b: Row, sums: Tile, use_acc: bool = True, is_async: bool = False) -> Tile:
    wide = torch.int64 if sums.dtype == torch.int32 else torch.float32
    products = (a.tensor.to(wide) @ b.tensor.to(wide)).to(sums.dtype)
    return Tile(sums.tensor + products if use_acc else products)


def _run_partitions(partitions: list[tuple[Callable[..., None], tuple[Any, ...]]], *_: Any) -> None:
    with ThreadPoolExecutor(len(partitions)) as threads:
        running = [threads.submit(function, *arguments) for function, arguments in partitions]
        ended, _ = wait(running, return_when=FIRST_EXCEPTION)
        for each in ended:
            each.result()


def _range(*ends: Any) -> Iterator[Tile]:
    return (Tile(torch.tensor(number, dtype=torch.int32)) for number in range(*map(int, ends)))


def put_on_cpu(monkeypatch: pytest.MonkeyPatch, module: ModuleType, kernel: str, *, is_backwards: bool) -> None:
    """Replace a kernel of a module, and what its kernels use of Hopper. is_backwards: see KernelOnCpu."""
    plain_language = gluon_on_cpu._language

    def language(*arguments: Any) -> SimpleNamespace:
        shared = {"allocate_shared_memory": lambda dtype, shape, _: Row(torch.zeros(shape, dtype=dtype), shape, dtype)}
        more = {"NVMMADistributedLayout": lambda *_: None, "int8": torch.int8, "warp_specialize": _run_partitions}
        return SimpleNamespace(**vars(plain_language(*arguments)) | shared | more)

    barriers = SimpleNamespace(
        wait=lambda barrier, parity: barrier.wait(int(parity)),
        arrive=lambda barrier: barrier.arrive(),
        expect=lambda barrier, size: barrier.arrive(expected=int(size)),
    )
    copies = SimpleNamespace(
        async_copy_global_to_shared=lambda source, place, barrier, shared: source.copy(place, barrier, shared)
    )
    wgmma = SimpleNamespace(warpgroup_mma=_products, warpgroup_mma_wait=lambda outstanding, deps: deps[0])
    on_cpu = ModuleType(module.__name__)  # Triton refuses to look at kernels whose own module has such functions
    vars(on_cpu).update(vars(module))
    vars(on_cpu).update(
        hopper=wgmma, mbarrier=barriers, tma=copies, range=_range,
        allocate_barriers=lambda number, arrivals: Row([Barrier() for _ in range(number)], [number]),
    )  # fmt: skip
    monkeypatch.setattr(gluon_on_cpu, "_language", language)
    monkeypatch.setattr(module, "TensorDescriptor", Descriptor)
    monkeypatch.setattr(module, kernel, KernelOnCpu(getattr(module, kernel), [on_cpu], is_backwards=is_backwards))
