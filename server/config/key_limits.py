"""The fields of a key in the key file: name, weight and limits, as field=value behind the key's roles.

docs/reference/key-file.md has the table of FIELDS. Standard library, msgspec and engine.interface.tenant.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from engine.interface.tenant import UNNAMED, Tenant
from server.config.value_types import UsageError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_RESERVED = (UNNAMED, "others")  # of the ledger
MAX_NAMES = 1000  # of a file: each is a label's value in the metrics


class Field(NamedTuple):
    """A number in the key file, with its bounds. meaning: for the table of the reference."""

    name: str
    is_whole: bool
    low: float
    high: float
    meaning: str


FIELDS = {
    field.name: field
    for field in (
        Field("weight", False, 0.01, 100, "share of the tokens while others wait too, relative to theirs; 1"),
        Field("requests_per_minute", True, 1, 10**9, "HTTP requests that are accepted in a minute"),
        Field("tokens_per_minute", True, 1, 10**12, "prompt tokens accepted and tokens generated in a minute"),
        Field("tokens_at_once", True, 1, 10**12, "prompt and `max_tokens` of all requests that wait or run"),
        Field("kv_share", False, 0.001, 1, "part of the KV cache that running requests may come to hold; 1"),
        Field("priority_ceiling", True, -(2**31), 2**31 - 1, "the smallest `priority`, the earliest; no ceiling"),
        Field("grammar_seconds", False, 0.001, 86_400, "processor time in a minute to test-compile grammars"),
    )
}  # fmt: skip


def is_field(word: str) -> bool:
    """Return whether a word of the key file is a field, and no role."""
    return "=" in word


def parse_tenant(words: Iterable[str], place: str) -> Tenant:
    """Return the tenant of a key's fields. place: file and line, for errors. Raises UsageError.

    Fields that are unknown are not quoted: they may be a part of the key.
    """
    values: dict[str, str | float] = {}
    for word in words:
        name, _, text = word.partition("=")
        if name != "name" and name not in FIELDS:
            raise UsageError(f"{place} has a field that is none of name, {', '.join(FIELDS)}.")
        if name in values:
            raise UsageError(f"{place} has {name} twice.")
        values[name] = _name(text, place) if name == "name" else _number(text, FIELDS[name], place)
    if values and "name" not in values:
        raise UsageError(f"{place} has {', '.join(values)} and no name: limits are those of a name.")
    return msgspec.convert(values, Tenant)


def check_names(tenants: Mapping[str, Tenant], file: str) -> None:
    """Check that a name has the same limits wherever it stands, and that there are not too many. Raises UsageError."""
    by_name: dict[str, Tenant] = {}
    for tenant in tenants.values():
        if tenant.name and by_name.setdefault(tenant.name, tenant) != tenant:
            raise UsageError(f"{file}: keys with the name {tenant.name} have different weights or limits.")
    if len(by_name) > MAX_NAMES:
        raise UsageError(f"{file} has {len(by_name)} names, the limit is {MAX_NAMES}.")


def _name(text: str, place: str) -> str:
    if not _NAME.fullmatch(text) or text in _RESERVED:
        raise UsageError(
            f"{place}: name is {text[:80]!r}; it must have 1 to 64 letters, digits, '.', '_' or '-', begin with a"
            f" letter or digit, and not be {' or '.join(_RESERVED)}."
        )
    return text


def _number(text: str, field: Field, place: str) -> float:
    try:
        value = int(text) if field.is_whole else float(text)
    except ValueError:
        value = math.nan
    if not field.low <= value <= field.high:
        kind = "a whole number" if field.is_whole else "a number"
        raise UsageError(
            f"{place}: {field.name} is {text[:80]!r}; it must be {kind} from {field.low:.15g} to {field.high:.15g}."
        )
    return value
