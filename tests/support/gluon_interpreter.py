"""Runs Gluon kernels for Hopper on the CPU, as far as torch can say what they compute: what is not about time.

A program's partitions are threads; barriers, TMA boxes and the order in which products finish are as the hardware has
them, so a wrong phase is a deadlock, and a stage that is given back too early is overwritten. Layouts of registers and
swizzles are not looked at. A product reads its operands when it is waited for, not before.

interpret(module, "_kernel", monkeypatch) replaces a kernel of a module by one that runs here.
"""

from __future__ import annotations

import inspect
import itertools
import threading
import time
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

_TIMEOUT_S = 60.0  # of one program: longer is a deadlock
_PAUSE_S = 0.003  # in which a waiting partition begins


class Pointer:
    """A pointer, or a tensor of pointers, into a tensor's storage. Counts elements."""

    def __init__(self, memory: torch.Tensor, places: Any = 0) -> None:
        self.memory, self.places = memory, places

    @property
    def dtype(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(element_ty=self.memory.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.places + offset)

    def __getitem__(self, key: Any) -> Pointer:
        return Pointer(self.memory, self.places[key])


class Descriptor:
    """A TMA descriptor of a matrix."""

    def __init__(self, host: Any) -> None:
        self.base, self.block_shape, self.layout = host.base, list(host.block_shape), host.layout
        self.dtype = host.base.dtype


class Tile:
    """Shared memory: rows of more than 64 halves lie in panels of 64, as swizzles have them."""

    def __init__(self, memory: torch.Tensor, *, has_panels: bool = False, is_turned: bool = False) -> None:
        self.memory, self.has_panels, self.is_turned = memory, has_panels, is_turned
        self.dtype = memory.dtype

    @property
    def shape(self) -> list[int]:
        sizes = list(self.memory.shape)
        if not self.has_panels:
            return sizes
        *front, panels, rows, columns = sizes
        return [*front, rows, panels * columns]

    def index(self, place: Any) -> Tile:
        return Tile(self.memory[int(place)], has_panels=self.has_panels)

    def slice(self, start: Any, length: int) -> Tile:
        assert not self.has_panels
        return Tile(self.memory[int(start) : int(start) + length])

    def permute(self, order: Sequence[int]) -> Tile:
        assert tuple(order) == (1, 0)
        return Tile(self.memory, has_panels=self.has_panels, is_turned=True)

    def _reinterpret(self, dtype: torch.dtype, shape: Sequence[int], layout: object) -> Tile:
        memory = self.memory.view(dtype)
        if len(shape) >= 2 and shape[-1] > 64 and dtype.itemsize == 2:
            return Tile(memory.view(*shape[:-2], shape[-1] // 64, shape[-2], 64), has_panels=True)
        return Tile(memory.view(*shape))

    def load(self, layout: object = None) -> torch.Tensor:
        values = torch.cat(list(self.memory), 1) if self.has_panels else self.memory.clone()
        return values.T.clone() if self.is_turned else values

    def store(self, values: torch.Tensor) -> None:
        assert not self.has_panels
        assert values.dtype == self.dtype
        self.memory.copy_(values.T if self.is_turned else values)


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all expected bytes have come."""

    def __init__(self) -> None:
        self.count, self.phase, self.arrived, self.expected, self.changed = 0, 0, 0, 0, threading.Condition()

    def change(self, *, arrivals: int = 0, num_bytes: int = 0) -> None:
        with self.changed:
            self.arrived += arrivals
            self.expected += num_bytes
            assert self.arrived <= self.count
            if self.arrived == self.count and self.expected == 0:
                self.phase, self.arrived = self.phase + 1, 0
                self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            is_over = self.changed.wait_for(lambda: self.phase % 2 != int(parity), _TIMEOUT_S)
        assert is_over, "deadlock: a barrier's phase does not end"


class Barriers:
    """Barriers in shared memory."""

    def __init__(self, barriers: list[Barrier]) -> None:
        self.barriers = barriers

    def index(self, place: Any) -> Barrier:
        return self.barriers[int(place)]


class Product:
    """A product that may not be finished."""

    def __init__(self, left: Any, right: Tile, added: Any) -> None:
        self.left, self.right, self.added = left, right, added
        self.value: torch.Tensor | None = None

    def finish(self) -> None:
        left = self.left.load() if isinstance(self.left, Tile) else self.left
        right = self.right.load()
        assert left.dtype == right.dtype
        self.value = left.float() @ right.float() + (0.0 if self.added is None else self.added)


class _Local(threading.local):
    program: tuple[int, ...] = ()
    products: list[Product] = []  # noqa: RUF012  (each thread gets its own before its first product)


_local = _Local()


def _places(pointer: Pointer, *others: Any) -> list[torch.Tensor]:
    return list(torch.broadcast_tensors(torch.as_tensor(pointer.places), *map(torch.as_tensor, others)))


def _load(pointer: Pointer, mask: Any = True, other: float = 0) -> torch.Tensor:
    places, wanted = _places(pointer, mask)
    values = pointer.memory[torch.where(wanted, places, 0).long()]
    return torch.where(wanted, values, torch.tensor(other, dtype=values.dtype))


def _store(pointer: Pointer, values: torch.Tensor, mask: Any = True) -> None:
    values = torch.as_tensor(values, dtype=pointer.memory.dtype)
    places, wanted, values = _places(pointer, mask, values)
    pointer.memory[places[wanted].long()] = values[wanted]


def _multiply(left: Any, right: Tile, added: Any, *, use_acc: bool = True, is_async: bool) -> Product:
    assert is_async
    _local.products.append(Product(left, right, added if use_acc else None))
    return _local.products[-1]


def _multiply_block(left: torch.Tensor, right: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    assert left.dtype == right.dtype
    return left.float() @ right.float() + added


def _wait_products(num_left: int, deps: list[Any]) -> Any:
    unfinished = _local.products
    while len(unfinished) > num_left:
        unfinished.pop(0).finish()
    assert all(dep.value is not None for dep in deps if isinstance(dep, Product)), "a product is read too early"
    values = [dep.value if isinstance(dep, Product) else dep for dep in deps]
    return values[0] if len(values) == 1 else tuple(values)


def _box(desc: Descriptor, coordinates: Sequence[Any]) -> tuple[slice, slice]:
    starts = [int(x) for x in coordinates]
    assert starts[0] >= 0 <= starts[1]
    row, column = (slice(start, start + size) for start, size in zip(starts, desc.block_shape, strict=True))
    return row, column


def _load_box(desc: Descriptor, coordinates: Sequence[Any], barrier: Barrier, tile: Tile) -> None:
    values = desc.base[_box(desc, coordinates)]
    tile.memory.zero_()
    tile.memory.view(desc.block_shape)[: values.shape[0], : values.shape[1]] = values
    barrier.change(num_bytes=-tile.memory.nbytes)


def _store_box(desc: Descriptor, coordinates: Sequence[Any], tile: Tile) -> None:
    target = desc.base[_box(desc, coordinates)]
    target.copy_(tile.memory[: target.shape[0], : target.shape[1]])


def _allocate(dtype: torch.dtype, shape: Sequence[int], layout: object) -> Tile | Barriers:
    if dtype == torch.int64:
        return Barriers([Barrier() for _ in range(shape[0])])
    return Tile(torch.full([int(size) for size in shape], torch.nan, dtype=dtype))


def _specialise(partitions: Sequence[tuple[Callable[..., None], tuple[Any, ...]]], *_: object) -> None:
    program = _local.program

    def run(partition: int) -> None:
        _local.program, _local.products = program, []
        function, arguments = partitions[partition]
        function(*arguments)
        assert not _local.products, "a product is never waited for"

    run_at_once(run, len(partitions))


def run_at_once(run: Callable[[int], None], count: int) -> None:
    """Call run(0) to run(count - 1), each in a thread; when all have ended, raise the first error, if any."""
    errors: list[BaseException] = []

    def catch(number: int) -> None:
        try:
            run(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=catch, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _arrive(barrier: Barrier) -> None:
    """Let whoever waited go on first: what this thread still reads of that stage is then overwritten."""
    barrier.change(arrivals=1)
    time.sleep(_PAUSE_S)


_LANGUAGE = types.SimpleNamespace(
    **{name: getattr(torch, name) for name in ("int32", "int64", "float16", "float32", "bfloat16")},
    **{name: getattr(torch, name) for name in ("exp2", "log2", "rsqrt")},
    constexpr=lambda value: value,
    **{name: lambda *_, **__: None for name in ("NVMMADistributedLayout", "SliceLayout", "DotOperandLayout",
                                               "BlockedLayout", "SwizzledSharedLayout", "NVMMASharedLayout")},
    program_id=lambda axis: torch.tensor(_local.program[axis], dtype=torch.int32),
    allocate_shared_memory=_allocate,
    arange=lambda start, end, layout=None: torch.arange(start, end, dtype=torch.int32),
    full=lambda shape, value, dtype, layout=None: torch.full([int(size) for size in shape], value, dtype=dtype),
    load=_load,
    store=_store,
    where=torch.where,
    sum=lambda x, axis: x.sum(axis, dtype=x.dtype),
    max=lambda x, axis: x.amax(axis),
    maximum=lambda a, b, **_: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)),
    minimum=lambda a, b, **_: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)),
    cdiv=lambda a, b: -(-a // b),
    associative_scan=lambda x, axis, add: x.cumsum(axis, dtype=x.dtype),
    convert_layout=lambda x, layout, **_: x,
    permute=lambda x, order: x.permute(*order),
    join=lambda a, b: torch.stack((a, b), -1),
    num_warps=lambda: 4,
    static_range=range,
    thread_barrier=lambda: None,
    warp_specialize=_specialise,
)  # fmt: skip
_REPLACED: dict[str, Any] = {
    "gl": _LANGUAGE,
    "tl": _LANGUAGE,
    "hopper": types.SimpleNamespace(
        warpgroup_mma=_multiply, warpgroup_mma_wait=_wait_products, fence_async_shared=lambda: None
    ),
    "mbarrier": types.SimpleNamespace(
        MBarrierLayout=lambda: None,
        init=lambda barrier, count: setattr(barrier, "count", count),
        wait=lambda barrier, phase: barrier.wait(phase),
        arrive=_arrive,
        expect=lambda barrier, num_bytes: barrier.change(arrivals=1, num_bytes=num_bytes),
        invalidate=lambda barrier: None,
    ),
    "tma": types.SimpleNamespace(
        async_copy_global_to_shared=_load_box, async_copy_shared_to_global=_store_box, store_wait=lambda pendings: None
    ),
    "grid_dependency": lambda instruction: None,
    "mma_v2": _multiply_block,
}


def _translate(function: Any, known: dict[int, Callable[..., Any]]) -> Callable[..., Any]:
    """Return a jitted function's own code with torch in the place of Triton's languages, and what it calls likewise."""
    code = function.fn
    if id(code) not in known:
        names: dict[str, Any] = {"__builtins__": __builtins__}
        known[id(code)] = translated = types.FunctionType(code.__code__, names, code.__name__, code.__defaults__)
        for name, value in code.__globals__.items():
            if name in _REPLACED:
                names[name] = _REPLACED[name]
            elif name in code.__code__.co_names:
                is_function = hasattr(value, "fn") and callable(value)
                names[name] = _translate(value, known) if is_function else getattr(value, "value", value)
        return translated
    return known[id(code)]


class _Kernel:
    def __init__(self, kernel: Any) -> None:
        self.run = _translate(kernel, {})
        self.parameters = list(inspect.signature(kernel.fn).parameters)

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        def launch(*arguments: Any, **named: Any) -> None:
            values = dict(zip(self.parameters, arguments, strict=False))
            values |= {name: value for name, value in named.items() if name in self.parameters}
            values = {name: self._pass(value) for name, value in values.items()}
            for program in itertools.product(*(range(size) for size in reversed(grid))):
                _local.program, _local.products = tuple(reversed(program)), []
                self.run(**values)

        return launch

    @staticmethod
    def _pass(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return Pointer(torch.as_strided(value, (value.untyped_storage().nbytes() // value.itemsize,), (1,), 0),
                           value.storage_offset())  # fmt: skip
        return Descriptor(value) if hasattr(value, "block_shape") else value


def interpret(module: types.ModuleType, name: str, monkeypatch: Any) -> None:
    """Let a module's kernel run here until the test is over."""
    monkeypatch.setattr(module, name, _Kernel(getattr(module, name)))
