"""Executes straight-line PTX of 32-bit integers and pairs of 16-bit floats, as kernels have it inline."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

_MASK = 0xFFFFFFFF


def run_ptx(code: str, inputs: Mapping[str, int], memory: Mapping[int, int], *, output: str = "$0") -> int:
    """The value of the output after the code.

    inputs: operands, special registers and addresses of names; memory: shared.
    """
    values = dict(inputs)

    def value(operand: str) -> int:
        return values[operand] if operand in values else int(operand, 0) & _MASK

    for statement in code.strip().removeprefix("{").removesuffix("}").split(";"):
        name, _, rest = statement.strip().partition(" ")
        operands = [operand.strip(" []") for operand in rest.split(",")]
        if not name or name == ".reg":
            continue
        target, sources = operands[0], [value(operand) for operand in operands[1:]]
        values[target] = _execute(name, sources, memory) & _MASK
    return values[output]


def _execute(name: str, s: list[int], memory: Mapping[int, int]) -> int:
    match re.sub(r"\.[bu]32$", "", name):
        case "mov":
            return s[0]
        case "add":
            return s[0] + s[1]
        case "shl":
            return s[0] << s[1]
        case "shr":
            return s[0] >> s[1]
        case "and":
            return s[0] & s[1]
        case "or":
            return s[0] | s[1]
        case "xor":
            return s[0] ^ s[1]
        case "lop3" if s[3] == 0xCA:
            return (s[0] & s[1]) | (~s[0] & s[2])
        case "lop3" if s[3] == 0xEA:
            return (s[0] & s[1]) | s[2]
        case "mad.lo":
            return s[0] * s[1] + s[2]
        case "ld.shared":
            return memory[s[0]]
        case "mul.rn.bf16x2":
            return _multiply_pairs(s[0], s[1], torch.bfloat16)
        case "mul.rn.f16x2":
            return _multiply_pairs(s[0], s[1], torch.float16)
        case "sub.rn.f16x2":
            return _multiply_pairs(s[0], 0x3C003C00, torch.float16, s[1] ^ 0x80008000)
        case "fma.rn.bf16x2":
            return _multiply_pairs(s[0], s[1], torch.bfloat16, s[2])
        case "fma.rn.f16x2":
            return _multiply_pairs(s[0], s[1], torch.float16, s[2])
        case "prmt":
            return _permute(s[0], s[1], s[2])
    raise ValueError(name)


def _permute(a: int, b: int, selector: int) -> int:
    source = (a | b << 32).to_bytes(8, "little")
    result = []
    for index in range(4):
        choice = selector >> (4 * index) & 15
        byte = source[choice & 7]
        result.append((0xFF if byte & 0x80 else 0) if choice & 8 else byte)
    return int.from_bytes(bytes(result), "little")


def _multiply_pairs(a: int, b: int, dtype: torch.dtype, added: int | None = None) -> int:
    # In float64, which has all products, and numbers below the normal ones
    x, y, z = (torch.tensor([value or 0], dtype=torch.uint32).view(dtype).double() for value in (a, b, added))
    return int((x * y if added is None else x * y + z).to(dtype).view(torch.int32))  # -0 + 0 is 0
