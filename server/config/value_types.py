"""Parsers of flag values: text in, checked value out. Imports argparse; engine.interface.config when needed.

A wrong value raises argparse.ArgumentTypeError with one sentence that names value and limit; argparse adds the
flag. resolve_loras() checks the names and folders of --lora; the engine, which reads an adapter, checks that it
fits the model. Never torch, so that `quire --help` is instant.
"""

import argparse
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from engine.interface.errors import StartupError

if TYPE_CHECKING:
    from engine.interface.config import KvEventsConfig, LoraSource

BACKEND_NAMES = ("auto", "triton", "flash-attn", "torch")
# As models/quantization/schemes.py knows them: what an unquantized checkpoint can become on load, or one is already
MODEL_IMPLS = ("auto", "quire", "transformers")
QUANTIZATION_NAMES = (
    "auto",
    "none",
    "fp8",
    "w8a8",
    "int4",
    "bitsandbytes-nf4",
    "bitsandbytes-int8",
    "awq",
    "gptq",
    "auto-round",
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
_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
DTYPES = ("auto", "bfloat16", "float16", "float32")
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3", "int8")  # the two of fp8 are one
AnyParser = TypeVar("AnyParser", bound=argparse.ArgumentParser)  # commands are added to the subparsers of any


class UsageError(StartupError):
    """A flag, an argument or a file that one of them names is wrong."""

    def __init__(self, message: str) -> None:
        super().__init__(message, exit_code=2)


class ValueType:
    """A parser of values for argparse, with its limits in words for docs/reference/flags.md."""

    def __init__(self, parse: Callable[[str], Any], limits: str) -> None:
        self.parse = parse
        self.limits = limits

    def __call__(self, text: str) -> Any:
        """Return the value. Raises argparse.ArgumentTypeError."""
        return self.parse(text)


def limited(limits: str) -> Callable[[Callable[[str], Any]], ValueType]:
    """Make a ValueType of a parser."""
    return lambda parse: ValueType(parse, limits)


def integer(minimum: int, maximum: int) -> ValueType:
    """Return a parser of whole numbers from `minimum` to `maximum`."""

    @limited(f"{minimum:,} to {maximum:,}")
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if not minimum <= value <= maximum:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {minimum:,} to {maximum:,}")
        return value

    return parse


@limited("auto, or 1 to 64")
def workers(text: str) -> int:
    """Parse a number of HTTP processes. auto: half the cores, at most 8; the rest is for the engine and its clients."""
    return max(1, min(8, (os.cpu_count() or 1) // 2)) if text == "auto" else integer(1, 64)(text)


@limited("1 or 2")
def depth_overlaps(text: str) -> bool:
    """Parse the steps in flight of --depth; tell if they overlap."""
    return integer(1, 2)(text) == 2


@limited("above 0, up to 1")
def share(text: str) -> float:
    """Parse a number above 0 and up to 1."""
    value = _finite(text)
    if value is None or not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share above 0 and up to 1")
    return value


@limited("0 to 1")
def share_or_none(text: str) -> float:
    """Parse a number from 0 to 1."""
    value = _finite(text)
    if value is None or not 0.0 <= value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share from 0 to 1")
    return value


@limited("0 to 86,400 s")
def seconds(text: str) -> float:
    """Parse a time in seconds, with or without an s, up to a day."""
    value = _finite(text.removesuffix("s"))
    if value is None or not 0.0 <= value <= 86_400.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 to 86,400")
    return value


@limited("above 0, up to 86,400 s")
def deadline(text: str) -> float:
    """Parse a time in seconds above 0: one of 0 would be over before it began."""
    value = seconds(text)
    if value == 0.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0, up to 86,400")
    return value


@limited("1 byte to 1024TiB")
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


@limited("auto, off, or 1 byte to 1024TiB")
def size_or_word(text: str) -> "int | Literal['auto', 'off']":
    """Parse a size in bytes, or auto, or off."""
    match text.strip().lower():
        case "auto":
            return "auto"
        case "off":
            return "off"
    return size(text)


@limited("a JSON object of vLLM's fields, and event_format: array or map")
def kv_events(text: str) -> "KvEventsConfig | None":
    """Parse settings of events of the prefix cache; None: they are not published."""
    import msgspec

    from engine.interface.config import KvEventsConfig

    try:
        config = msgspec.json.decode(text, type=KvEventsConfig)
    except (msgspec.MsgspecError, UnicodeError) as error:
        fields = ", ".join(KvEventsConfig.__struct_fields__)
        reason = str(error).replace("Object contains", "it has an").replace("`", "'")
        problem = f"{text!r} is no such JSON object: {reason}; its fields are {fields}"
        raise argparse.ArgumentTypeError(problem) from error
    return config if config.enable_kv_cache_events and config.publisher == "zmq" else None


def gibibytes(text: str) -> int:
    """Parse a size in GiB, or one with a unit."""
    return size(f"{text}GiB" if text.strip().replace(".", "", 1).isdigit() else text)


@limited("not empty")
def text(text: str) -> str:
    """Parse any text that is not blank."""
    if not text.strip():
        raise argparse.ArgumentTypeError("must not be empty")
    return text


@limited("true, yes, on, 1, or false, no, off, 0")
def boolean(text: str) -> bool:
    """Parse the value of a switch in a file or a variable."""
    value = _BOOLEANS.get(text.strip().lower())
    if value is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not true or false")
    return value


@limited("NAME=FOLDER")
def named_folder(text: str) -> tuple[str, str]:
    """Parse NAME=FOLDER. Raises argparse.ArgumentTypeError, to which argparse adds the flag's name."""
    name, _, folder = (part.strip() for part in text.partition("="))
    if not name or not folder:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FOLDER, such as sql=./sql-adapter")
    return name, folder


def readable_file(flag: str, name: str, *, is_text: bool = False) -> str:
    """Return the absolute path of a file that a flag names. Raises UsageError if it cannot be read."""
    path = Path(name).expanduser()
    try:
        content = path.read_bytes()
        if is_text:
            content.decode()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UsageError(f"{flag} {path} cannot be read: {reason}.") from error
    return str(path.resolve())


def resolve_loras(loras: Sequence[tuple[str, str]], *, served_model_names: Sequence[str]) -> "list[LoraSource]":
    """Return the adapters, given as name and folder, with absolute folders.

    Raises StartupError for a name that is taken, and where there is no folder.
    """
    from engine.interface.config import LoraSource

    resolved: list[LoraSource] = []
    for name, folder in loras:
        if name in served_model_names:
            raise UsageError(f"--lora {name}: this is the name of the model itself.")
        if name in (other.name for other in resolved):
            raise UsageError(f"--lora {name} is given twice; each needs a name.")
        try:
            path = Path(folder).expanduser()
            is_folder, is_file = path.is_dir(), path.is_file()
        except (OSError, RuntimeError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise UsageError(f"--lora {name}: {folder[:200]!r}: {reason}.") from error
        if not is_folder:
            what = "is a file, not a folder" if is_file else "does not exist"
            raise UsageError(f"--lora {name}: {folder[:200]} {what}.")
        resolved.append(LoraSource(name, str(path.resolve())))
    return resolved


def _finite(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
