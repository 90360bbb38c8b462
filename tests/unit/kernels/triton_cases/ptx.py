"""Executes straight-line PTX of 32-bit integers: what the kernels' inline assembly may consist of."""

from __future__ import annotations

import re
from collections.abc import Mapping

_MASK = 0xFFFFFFFF


def run_ptx(code: str, inputs: Mapping[str, int], memory: Mapping[int, int]) -> int:
    """The value of $0 after the code. inputs: operands, special registers and addresses of names; memory: shared."""
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
    return values["$0"]


def _execute(name: str, s: list[int], memory: Mapping[int, int]) -> int:
    match re.sub(r"\.[bu]32$", "", name):
        case "mov":
            return s[0]
        case "add":
            return s[0] + s[1]
        case "shl":
            return s[0] << s[1]
        case "mad.lo":
            return s[0] * s[1] + s[2]
        case "ld.shared":
            return memory[s[0]]
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
