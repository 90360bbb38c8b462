"""Fields: a parsed config.json, or an object inside it, whose values are checked when they are read."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from models.errors import ModelError

MAX_COUNT = 2**31 - 1


@dataclass(frozen=True)
class Fields:
    """Typed reads by name. Each raises ModelError with the file, the field and the value.

    null counts as missing, but for flags: a class of transformers asks `if value`, for which null is false.
    """

    raw: Mapping[str, Any]
    where: str  # names the file in errors
    seen: set[str] = field(default_factory=set, compare=False, repr=False)  # names that were read or passed over
    names: Mapping[str, str] = field(default_factory=dict)  # usual name → the file's, where it differs

    def get(self, name: str) -> Any:
        """Return the unchecked value, None if it is missing."""
        self.seen.add(self.name_of(name))
        return self.raw.get(self.name_of(name))

    def name_of(self, name: str) -> str:
        """Return the file's name of a field."""
        return self.names.get(name, name)

    def pass_over(self, *names: str) -> None:
        """Count fields as read that have no effect, because of what other fields say."""
        self.seen.update(map(self.name_of, names))

    def count(self, name: str, *, default: int | None = None, most: int = MAX_COUNT) -> int:
        """Read a positive integer."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ModelError(f"{self.where}: {self.name_of(name)} must be a positive integer, found {value!r}")
        if value > most:
            raise ModelError(f"{self.where}: {self.name_of(name)} {value} is larger than {most}")
        return value

    def number(self, name: str, *, default: float | None = None) -> float:
        """Read a number that is not negative."""
        value = self._value(name, default)
        if not _is_number(value) or value < 0:
            raise ModelError(f"{self.where}: {self.name_of(name)} must be a non-negative number, found {value!r}")
        return float(value)

    def positive(self, name: str, *, default: float | None = None) -> float:
        """Read a number above 0."""
        value = self._value(name, default)
        if not _is_number(value) or value <= 0:
            raise ModelError(f"{self.where}: {self.name_of(name)} must be a positive number, found {value!r}")
        return float(value)

    def positives(self, name: str, *, length: int) -> tuple[float, ...]:
        """Read a list of `length` numbers above 0."""
        values = self._value(name, None)
        if not isinstance(values, list) or not all(_is_number(value) and value > 0 for value in values):
            raise ModelError(f"{self.where}: {self.name_of(name)} must be a list of positive numbers, found {values!r}")
        if len(values) != length:
            raise ModelError(
                f"{self.where}: {self.name_of(name)} has {len(values)} entries, but {length} pairs are rotated"
            )
        return tuple(float(value) for value in values)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Read true or false."""
        value = self._value(name, default and self.name_of(name) not in self.raw)
        if not isinstance(value, bool):
            raise ModelError(f"{self.where}: {self.name_of(name)} must be true or false, found {value!r}")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Read a token id or a list of token ids; () if it is missing."""
        value = self.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in ids):
            raise ModelError(
                f"{self.where}: {self.name_of(name)} must be a token id or a list of them, found {value!r}"
            )
        return tuple(ids)

    def section(self, name: str) -> Fields:
        """Return the object under `name`, empty if it is missing."""
        value = self.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise ModelError(f"{self.where}: {self.name_of(name)} must be an object, found {value!r}")
        return Fields(value or {}, self.where)

    def _value(self, name: str, default: Any) -> Any:
        value = self.get(name)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"{self.where}: {self.name_of(name)} is missing")
        return value


def _is_number(value: Any) -> bool:
    """Return True for a finite number; Python's JSON parser accepts NaN and Infinity."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
