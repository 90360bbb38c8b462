# ruff: noqa: ANN001, ANN201  (Triton reads annotations as types: kernel arguments carry none)
"""Values that programs of one kernel hand to each other: words of a number and the epoch it belongs to.

A word has 8 bytes, which a GPU stores and loads whole: a fp32 number below, an int32 epoch above. Who reads a word
loads it until its epoch is the wanted one, so there is neither a barrier, nor a fence, nor a counter to set back, and a
value arrives after one store and one load. NCCL's protocol for small messages does the same.
Each use of a word needs another epoch, and nobody may write it before all have read its last one.
"""

from __future__ import annotations

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl

_ALONE = 8
_MOST_TURNS = 1 << 24  # loads of one word: about ten seconds


def _waiting_loads(words: int) -> str:
    """Return PTX that loads words until all have the epoch, each no longer than it is late.

    An address of 0 is skipped and gives 0. Of many words the first one is waited for alone.

    Words that do not come, which is a bug, end the process with a device fault after seconds.
    """
    places, epoch = range(words), f"${2 * words}"
    lines = [f".reg .pred p<{words}>;", ".reg .pred late, lost;", f".reg .b32 found<{words}>;", ".reg .b32 turns;"]
    for i in places:
        lines += [f"setp.ne.b64 p{i}, ${words + i}, 0;", f"mov.b32 ${i}, 0;", f"mov.b32 found{i}, {epoch};"]
    count = f"add.u32 turns, turns, 1; setp.gt.u32 lost, turns, {_MOST_TURNS}; @lost trap;"
    load = [f"@p{i} ld.relaxed.gpu.global.v2.b32 {{${i}, found{i}}}, [${words + i}];" for i in places]
    check = [f"setp.ne.b32 p{i}, found{i}, {epoch};" for i in places]
    lines.append("mov.b32 turns, 0;")
    if words > _ALONE:  # all words of all programs again and again are more than L2 can supply
        lines.append(f"FIRST: {load[0]} {check[0]} {count} @p0 bra FIRST;")
    lines += ["AGAIN:", *load, *check, "mov.pred late, p0;", *(f"or.pred late, late, p{i};" for i in places[1:])]
    lines.append(f"{count} @late bra AGAIN;")
    return "{ " + " ".join(lines) + " }"


def _operands(words: int, epochs: int) -> str:
    return ",".join(["=&r"] * words + ["l"] * words + ["r"] * epochs)


_LOADS_4, _OPERANDS_4 = gl.constexpr(_waiting_loads(4)), gl.constexpr(_operands(4, 4))
_LOADS_16, _OPERANDS_16 = gl.constexpr(_waiting_loads(16)), gl.constexpr(_operands(16, 16))
_LOADS_32, _OPERANDS_32 = gl.constexpr(_waiting_loads(32)), gl.constexpr(_operands(32, 32))
_PAIRS_4, _OPERANDS_OF_PAIRS_4 = gl.constexpr(_waiting_loads(8)), gl.constexpr(_operands(8, 4))
_PAIRS_16, _OPERANDS_OF_PAIRS_16 = gl.constexpr(_waiting_loads(32)), gl.constexpr(_operands(32, 16))


@jit
def post(pointers, values, epoch) -> None:
    """Store fp32 values as words of this epoch. pointers: int64, of values' shape; epoch: int32."""
    low = values.to(gl.int32, bitcast=True).to(gl.int64) & 0xFFFFFFFF
    # Written through: ptxas makes of it what it makes of st.relaxed.sys (kernels/all_reduce/triton.py)
    gl.store(pointers, (epoch.to(gl.int64) << 32) | low, cache_modifier=".wt")


@jit
def receive(pointers, mask, epoch, PACK: gl.constexpr, WAITS: gl.constexpr):
    """Load words, waiting for this epoch; return fp32, 0 where masked.

    PACK: 4, 16 or 32 words of a thread, of which it has at least so many, are waited for together.

    Without WAITS the words must be there: a launch of one phase.
    """
    if WAITS:
        addresses = gl.where(mask, pointers.to(gl.uint64, bitcast=True), 0)
        if PACK == 4:
            bits = gl.inline_asm_elementwise(
                _LOADS_4, _OPERANDS_4, [addresses, epoch], dtype=gl.int32, is_pure=False, pack=4
            )
        elif PACK == 16:
            bits = gl.inline_asm_elementwise(
                _LOADS_16, _OPERANDS_16, [addresses, epoch], dtype=gl.int32, is_pure=False, pack=16
            )
        else:
            bits = gl.inline_asm_elementwise(
                _LOADS_32, _OPERANDS_32, [addresses, epoch], dtype=gl.int32, is_pure=False, pack=32
            )
    else:
        bits = gl.load(pointers, mask=mask, other=0).to(gl.int32)
    return bits.to(gl.float32, bitcast=True)


@jit
def receive_pairs(pointers, others, mask, epoch, PACK: gl.constexpr, WAITS: gl.constexpr):
    """Load the words of two tensors of pointers as receive does, waiting for both at once. PACK: of each."""
    if WAITS:
        addresses = gl.where(mask, pointers.to(gl.uint64, bitcast=True), 0)
        other_addresses = gl.where(mask, others.to(gl.uint64, bitcast=True), 0)
        if PACK == 4:
            bits, other_bits = gl.inline_asm_elementwise(
                _PAIRS_4, _OPERANDS_OF_PAIRS_4, [addresses, other_addresses, epoch],
                dtype=(gl.int32, gl.int32), is_pure=False, pack=4,
            )  # fmt: skip
        else:
            bits, other_bits = gl.inline_asm_elementwise(
                _PAIRS_16, _OPERANDS_OF_PAIRS_16, [addresses, other_addresses, epoch],
                dtype=(gl.int32, gl.int32), is_pure=False, pack=16,
            )  # fmt: skip
    else:
        bits = gl.load(pointers, mask=mask, other=0).to(gl.int32)
        other_bits = gl.load(others, mask=mask, other=0).to(gl.int32)
    return bits.to(gl.float32, bitcast=True), other_bits.to(gl.float32, bitcast=True)


@jit
def prefetch_bytes(pointer, num_bytes) -> None:
    """Ask L2 for a range by one instruction of one thread. pointer: 16-byte aligned; num_bytes: a multiple of 16."""
    gl.inline_asm_elementwise(
        "{ .reg .pred first; .reg .b32 thread; mov.u32 thread, %tid.x; setp.eq.u32 first, thread, 0;"
        " @first cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r", [pointer.to(gl.uint64, bitcast=True), num_bytes], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@jit
def prefetch_lines(pointers, others) -> None:
    """Ask L2 for the line of each pointer of two tensors."""
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; prefetch.global.L2 [$2]; mov.u32 $0, 0;", "=r,l,l",
        [pointers.to(gl.uint64, bitcast=True), others.to(gl.uint64, bitcast=True)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@jit
def fresh_zero():
    """Return 0 that the compiler does not know: what is computed from it stays in a loop, and takes no registers."""
    zero = gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    return gl.multiple_of(zero, 4096)
