"""Parsers of flag values: text in, checked value out, one sentence naming value and limit otherwise. Imports argparse.

Each raises argparse.ArgumentTypeError, to which argparse adds the name of the flag.
"""

import argparse
import math
import os
import re
from collections.abc import Callable

BACKEND_NAMES = ("auto", "triton", "flash-attn", "torch")
# As models/quantization/parse.py knows them: what an unquantized checkpoint can become on load, or one is already
QUANTIZATION_NAMES = (
    "auto",
    "none",
    "fp8",
    "bitsandbytes-nf4",
    "bitsandbytes-int8",
    "awq",
    "gptq",
    "compressed-tensors",
)
_SIZE_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3")  # the last two are one


def integer(minimum: int, maximum: int) -> Callable[[str], int]:
    """Return a parser of whole numbers from `minimum` to `maximum`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if not minimum <= value <= maximum:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {minimum:,} to {maximum:,}")
        return value

    return parse


def workers(text: str) -> int:
    """Parse a number of HTTP processes. auto: half the cores, at most 8; the rest is for the engine and its clients."""
    return max(1, min(8, (os.cpu_count() or 1) // 2)) if text == "auto" else integer(1, 64)(text)


def share(text: str) -> float:
    """Parse a number above 0 and up to 1."""
    value = _finite(text)
    if value is None or not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share above 0 and up to 1")
    return value


def seconds(text: str) -> float:
    """Parse a time in seconds, with or without an s, up to a day."""
    value = _finite(text.removesuffix("s"))
    if value is None or not 0.0 <= value <= 86_400.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 to 86,400")
    return value


def deadline(text: str) -> float:
    """Parse a time in seconds above 0: one of 0 would be over before it began."""
    value = seconds(text)
    if value == 0.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0, up to 86,400")
    return value


def size(text: str) -> int:
    """Parse a size in bytes; units are decimal (GB) or binary (GiB), in any case."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*([A-Za-z]*)", text.strip())
    unit = _SIZE_UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 4GiB or 512MB")
    num_bytes = int(float(match[1]) * unit)
    if not 1 <= num_bytes <= 2**50:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size from 1 byte to 1024TiB")
    return num_bytes


def gibibytes(text: str) -> int:
    """Parse a size in GiB, or one with a unit."""
    return size(f"{text}GiB" if text.strip().replace(".", "", 1).isdigit() else text)


def text(text: str) -> str:
    """Parse any text that is not blank."""
    if not text.strip():
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def _finite(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
