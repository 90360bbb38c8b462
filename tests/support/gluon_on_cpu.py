"""Runs Gluon kernels on the CPU, program by program: tiles are tensors, layouts are nothing, PTX is executed.

What layouts and the compiler make of a kernel is not tested so; the arithmetic of indices, masks and sums is.
"""

from __future__ import annotations

import itertools
import re
import types
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

_MASK = 0xFFFFFFFF
_DTYPES = {
    name: getattr(torch, name) for name in ("int16", "int32", "int64", "float16", "bfloat16", "float32")
}  # fmt: skip


class Tile:
    """A tensor with the operators of Gluon's: integers wrap, and a bitcast keeps the bits."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    shape = property(lambda self: list(self.tensor.shape))
    dtype = property(lambda self: self.tensor.dtype)
    type = property(lambda self: SimpleNamespace(layout=None))

    def to(self, dtype: torch.dtype | Addressed, bitcast: bool = False) -> Tile | Pointer:
        if isinstance(dtype, Addressed):
            return dtype.pointers[int(self)]
        return Tile(self.tensor.view(dtype) if bitcast else self.tensor.to(dtype))

    def reshape(self, shape: list[int]) -> Tile:
        return Tile(self.tensor.reshape(shape))

    def __getitem__(self, places: Any) -> Tile:
        return Tile(self.tensor[places])

    def permute(self, order: list[int]) -> Tile:
        return Tile(self.tensor.permute(order))

    def broadcast_to(self, shape: list[int]) -> Tile:
        return Tile(self.tensor.broadcast_to(shape))

    def __bool__(self) -> bool:
        return bool(self.tensor)

    def __int__(self) -> int:
        return int(self.tensor)

    def __index__(self) -> int:
        return int(self.tensor)


class Pointer:
    """A place in a tensor's memory, or a tile of places."""

    def __init__(self, memory: torch.Tensor, offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset

    dtype = property(lambda self: SimpleNamespace(element_ty=self.memory.dtype))
    type = property(lambda self: SimpleNamespace(layout=None))
    shape = property(lambda self: self.offset.shape)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, _tile(self.offset) + offset)

    def __getitem__(self, places: Any) -> Pointer:
        return Pointer(self.memory, _tile(self.offset)[places])


class Addressed:
    """The type of a pointer that a kernel makes of a number: the address of one of the tensors."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.pointers = {tensor.data_ptr(): _pointer(tensor) for tensor in tensors}


class Shared:
    """Shared memory, or a part of it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def store(self, values: Tile) -> None:
        self.tensor.copy_(values.tensor)

    def slice(self, start: int, length: int) -> Shared:
        return Shared(self.tensor[start : start + length])

    def index(self, place: int) -> Shared:
        return Shared(self.tensor[place])

    def load(self, layout: None) -> Tile:
        return Tile(self.tensor.clone())


_ASYNC_COPY = SimpleNamespace(
    async_copy_global_to_shared=lambda shared, pointer: shared.store(_load(pointer)),
    commit_group=lambda: None,
    wait_group=lambda num_outstanding: None,
)


def _pointer(tensor: torch.Tensor) -> Pointer:
    """Return the place of a tensor's first value among all of its memory."""
    size = tensor.untyped_storage().nbytes() // tensor.itemsize
    return Pointer(tensor.as_strided((size,), (1,), 0), tensor.storage_offset())


def _tile(value: Any) -> Tile:
    return value if isinstance(value, Tile) else Tile(torch.as_tensor(value))


def _operator(name: str) -> Callable[[Tile, Any], Tile]:
    def apply(self: Tile, other: Any) -> Tile:
        return Tile(getattr(self.tensor, name)(other.tensor if isinstance(other, Tile) else other))

    return apply


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "rshift", "lshift", "and", "or", "eq", "lt", "gt",
              "ge", "le", "ne", "radd", "rsub", "rmul", "rtruediv", "xor"):  # fmt: skip
    setattr(Tile, f"__{_name}__", _operator(f"__{_name}__"))
Tile.__neg__ = lambda self: Tile(-self.tensor)


def _load(pointer: Pointer, mask: Any = None, other: Any = 0, **_: object) -> Tile:
    offset = _tile(pointer.offset).tensor.long()
    is_here = torch.ones_like(offset, dtype=torch.bool)
    if mask is not None:
        offset, is_here = torch.broadcast_tensors(offset, _tile(mask).tensor)
    if bool(is_here.any()):
        assert 0 <= int(offset[is_here].min()) <= int(offset[is_here].max()) < pointer.memory.numel()
    values = pointer.memory.view(-1)[torch.where(is_here, offset, 0)]
    return Tile(torch.where(is_here, values, torch.tensor(other, dtype=values.dtype)))


def _store(pointer: Pointer, value: Tile, mask: Tile | None = None, **_: object) -> None:
    offset, values = torch.broadcast_tensors(_tile(pointer.offset).tensor.long(), _tile(value).tensor)
    is_here = torch.ones_like(offset, dtype=torch.bool) if mask is None else mask.tensor.broadcast_to(offset.shape)
    pointer.memory.view(-1)[offset[is_here]] = values[is_here].to(pointer.memory.dtype)


def _atomic_add(pointer: Pointer, value: int, sem: str) -> Tile:
    old = _load(pointer)
    _store(pointer, old + value)
    return old


def _inline_asm(
    code: str, constraints: str, operands: list[Tile], *, dtype: Any, is_pure: bool, pack: int
) -> Tile | list[Tile]:
    """Two neighbours at once: an int16 operand fills one register with both, an int32 one has two."""
    if code.startswith("movmatrix"):
        return _transpose(code, constraints, operands[0], pack)
    if isinstance(dtype, tuple):
        return _to_halves(code, constraints, operands[0], len(dtype), pack)
    assert pack == 2
    assert f"fma.rn.{'bf16' if dtype == torch.bfloat16 else 'f16'}x2 $0" in code
    registers = ["$0"]
    values = {}
    for operand in operands:
        pairs = operand.tensor.contiguous().unflatten(-1, (-1, 2)).long()
        if operand.dtype == torch.int16:
            values[f"${len(registers)}"] = (pairs[..., 0] & 0xFFFF) | (pairs[..., 1] & 0xFFFF) << 16
            registers.append("")
            continue
        for index in range(2):
            values[f"${len(registers)}"] = pairs[..., index] & _MASK
            registers.append("")
    assert constraints == ",".join(["=r", *["r"] * (len(registers) - 1)])
    (result,) = run_ptx(code, values)
    halves = torch.stack((result & 0xFFFF, result >> 16), -1).flatten(-2)
    return Tile(halves.to(torch.uint16).view(dtype))


def _transpose(code: str, constraints: str, tile: Tile, pack: int) -> Tile:
    """Each 8 x 8 numbers of the last two dimensions, whose neighbours in a register are of the last one."""
    assert (code, constraints, pack) == ("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", 2)
    squares = tile.tensor.unflatten(-1, (-1, 8)).unflatten(-3, (-1, 8))
    return Tile(squares.transpose(-3, -1).flatten(-4, -3).flatten(-2))


def _to_halves(code: str, constraints: str, words: Tile, count: int, pack: int) -> list[Tile]:
    """A float16 of each byte of a word. pack=2: registers have two rows, of the last dimension but one, each."""
    outputs = [f"${index}" for index in range(count)]
    assert constraints == ",".join([*["=h" if pack == 1 else "=r"] * count, *["r"] * pack])
    rows = words.tensor.unflatten(-2, (-1, pack)).long() & _MASK
    values = {f"${count + index}": rows[..., index, :] for index in range(pack)}
    results = run_ptx(code, values, outputs=outputs)
    halves = [torch.stack([result >> 16 * index & 0xFFFF for index in range(pack)], -2) for result in results]
    return [Tile(half.flatten(-3, -2).to(torch.uint16).view(torch.float16)) for half in halves]


def run_ptx(code: str, inputs: dict[str, torch.Tensor], *, outputs: Iterable[str] = ("$0",)) -> list[torch.Tensor]:
    """Execute straight-line PTX on tensors of 32 bits; see ptx.py for single numbers."""
    values: dict[str, Any] = dict(inputs)

    def value(operand: str) -> Any:
        return values[operand] if operand in values else int(operand, 0) & _MASK

    for statement in code.strip().removeprefix("{").removesuffix("}").split(";"):
        name, _, rest = statement.strip().partition(" ")
        if not name or name == ".reg":
            continue
        target, *sources = re.findall(r"\{[^}]*\}|[^,\s]+", rest)
        s = [value(operand) for operand in sources]
        if target.startswith("{"):
            low, high = target.strip("{}").replace(",", " ").split()
            values[low], values[high] = s[0] & 0xFFFF, s[0] >> 16
            continue
        match name:
            case "mov.b32":
                result = s[0]
            case "shl.b32":
                result = s[0] << s[1]
            case "shr.u32":
                result = s[0] >> s[1]
            case "and.b32":
                result = s[0] & s[1]
            case "or.b32":
                result = s[0] | s[1]
            case "xor.b32":
                result = s[0] ^ s[1]
            case "prmt.b32":
                both = [each >> 8 * byte & 0xFF for each in s[:2] for byte in range(4)]
                result = sum(both[s[2] >> 4 * byte & 7] << 8 * byte for byte in range(4))
            case "cvt.rn.f16x2.e4m3x2":
                numbers = (_float16_of_e4m3(s[0] >> shift & 0xFF) for shift in (0, 8))
                result = next(numbers) | next(numbers) << 16
            case "sub.f16x2":
                result = _multiply_add(s[1], 0xBC00BC00, s[0], dtype=torch.float16)
            case "lop3.b32" if s[3] == 0xEA:
                result = (s[0] & s[1]) | s[2]
            case "fma.rn.bf16x2":
                result = _multiply_add(*s, dtype=torch.bfloat16)
            case "fma.rn.f16x2":
                result = _multiply_add(*s, dtype=torch.float16)
            case _:
                raise ValueError(statement)
        values[target] = result & _MASK
    return [values[output] for output in outputs]


def _float16_of_e4m3(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float16).view(torch.uint16).long()


def _multiply_add(*operands: Any, dtype: torch.dtype) -> torch.Tensor:
    shape = next(each.shape for each in operands if isinstance(each, torch.Tensor))
    halves = []
    for shift in (0, 16):
        a, b, c = (
            (torch.as_tensor(each).broadcast_to(shape) >> shift & 0xFFFF).to(torch.uint16).view(dtype).double()
            for each in operands
        )
        halves.append((a * b + c).to(dtype).view(torch.uint16).long())
    return halves[0] | halves[1] << 16


def _multiply_matrices(a: Tile, b: Tile, sums: Tile) -> Tile:
    return Tile(sums.tensor + a.tensor.float() @ b.tensor.float())


def _pairwise(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[Any, Any], Any]:
    def apply(a: Any, b: Any) -> Any:
        if not isinstance(a, Tile) and not isinstance(b, Tile):
            return int(function(torch.as_tensor(a), torch.as_tensor(b)))
        like = (a if isinstance(a, Tile) else b).tensor
        x, y = (each.tensor if isinstance(each, Tile) else torch.tensor(each, dtype=like.dtype) for each in (a, b))
        return Tile(function(x, y))

    return apply


def _where(condition: Tile, a: Any, b: Any) -> Tile:
    dtype = next((each.dtype for each in (a, b) if isinstance(each, Tile)), torch.float32)
    a, b = (each.tensor if isinstance(each, Tile) else torch.tensor(each, dtype=dtype) for each in (a, b))
    return Tile(torch.where(_tile(condition).tensor, a, b))


def _language(places: list[int], grid: tuple[int, ...], num_warps: int, addressed: Addressed) -> SimpleNamespace:
    nothing = dict.fromkeys(
        ("SliceLayout", "DotOperandLayout", "BlockedLayout", "SwizzledSharedLayout"), lambda *_, **__: None
    )
    return SimpleNamespace(
        **_DTYPES, **nothing,
        program_id=lambda axis: Tile(torch.tensor(places[axis], dtype=torch.int32)),
        num_programs=lambda axis: grid[axis],
        num_warps=lambda: num_warps,
        arange=lambda start, end, layout: Tile(torch.arange(start, end, dtype=torch.int32)),
        zeros=lambda shape, dtype, layout: Tile(torch.zeros(shape, dtype=dtype)),
        full=lambda shape, value, dtype, layout: Tile(torch.full(shape, value, dtype=dtype)),
        join=lambda a, b: Tile(torch.stack((a.tensor, b.tensor), -1)),
        zeros_like=lambda tile: Tile(torch.zeros_like(tile.tensor)),
        expand_dims=lambda tile, axis: (
            Pointer(tile.memory, Tile(tile.offset.tensor.unsqueeze(axis)))
            if isinstance(tile, Pointer) else Tile(tile.tensor.unsqueeze(axis))
        ),
        convert_layout=lambda value, layout, assert_trivial=False: value,
        sum=lambda tile, axis: Tile(tile.tensor.sum(axis)),
        max=lambda tile, axis: Tile(tile.tensor.amax(axis)), min=lambda tile, axis: Tile(tile.tensor.amin(axis)),
        exp=lambda tile: Tile(tile.tensor.exp()), exp2=lambda tile: Tile(tile.tensor.exp2()),
        log2=lambda tile: Tile(tile.tensor.log2()), rsqrt=lambda tile: Tile(tile.tensor.rsqrt()),
        cdiv=lambda a, b: (a + (b - 1)) // b,
        multiple_of=lambda value, multiple: value,
        reshape=lambda tile, shape: tile.reshape(shape),
        broadcast=lambda tile, pointers: (Tile(tile.tensor.broadcast_to(pointers.shape)), pointers),
        allocate_shared_memory=lambda dtype, shape, layout: Shared(torch.zeros(shape, dtype=dtype)),
        where=_where, minimum=_pairwise(torch.minimum), maximum=_pairwise(torch.maximum),
        load=_load, store=_store, atomic_add=_atomic_add, inline_asm_elementwise=_inline_asm,
        static_range=range, thread_barrier=lambda: None, pointer_type=lambda dtype: addressed,
    )  # fmt: skip


class KernelOnCpu:
    """Launches a kernel of a module as Gluon does: kernel[grid](...). addressed: tensors that it has as addresses.

    is_backwards: the last program runs first.
    """

    def __init__(
        self, kernel: JITFunction, modules: Iterable[types.ModuleType], addressed: Iterable[torch.Tensor] = (),
        *, is_backwards: bool = False,
    ) -> None:  # fmt: skip
        self._kernel, self._modules, self._addressed = kernel, list(modules), Addressed(addressed)
        self._step = -1 if is_backwards else 1

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(
            *arguments: Any, num_warps: int, launch_pdl: bool = False, maxnreg: int | None = None, **constants: Any
        ) -> None:
            values = [_pointer(each) if isinstance(each, torch.Tensor) else each for each in arguments]
            places = list(grid)
            function = _functions(self._modules, _language(places, grid, num_warps, self._addressed))[self._kernel]
            axes = [range(size)[:: self._step] for size in reversed(grid)]
            for behind in itertools.product(*axes):  # the first axis varies fastest
                places[:] = reversed(behind)
                function(*values, **constants)

        return launch


def _functions(modules: Iterable[types.ModuleType], language: SimpleNamespace) -> dict[JITFunction, Callable]:
    """Return the functions behind the kernels of the modules, with another language."""
    found: dict[JITFunction, Callable] = {}
    scopes = []
    for module in modules:
        scope = dict(vars(module)) | {"gl": language, "mma_v2": _multiply_matrices}
        scope["async_copy"] = _ASYNC_COPY
        scope["grid_dependency"] = lambda instruction: None
        scopes.append(scope)
        for name, known in list(scope.items()):
            value = known._kernel if isinstance(known, KernelOnCpu) else known
            if isinstance(value, triton.language.constexpr):
                scope[name] = value.value
            elif isinstance(value, JITFunction) and value.fn.__module__ == module.__name__:
                found[value] = types.FunctionType(value.fn.__code__, scope, name, value.fn.__defaults__)
    for scope in scopes:
        for name, value in list(scope.items()):
            if isinstance(value, JITFunction) and value in found:
                scope[name] = found[value]
    return found
