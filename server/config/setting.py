"""Setting: one flag of `quire serve` with its variable and its key in the settings file; FlagAlias: its old name.

Imports argparse.
"""

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from server.config.value_types import ValueType

COMMAND_LINE = "command line"
DEFAULT = "default"
VARIABLE_PREFIX = "QUIRE_"
SECRET_DESTS = ("api_key",)  # never in the file, and read from the environment by server/config/api_keys.py


class FlagAlias(argparse.Action):
    """The old name of a flag. It works wherever the flag does, and --help does not show it."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Set the value that the new name would set."""
        setattr(namespace, self.dest, True if self.nargs == 0 else values)


def add_alias(
    container: argparse._ActionsContainer,
    old_flag: str,
    action: argparse.Action,
    *,
    parse: Callable[[str], Any] | None = None,
) -> None:
    """Add the old name of a flag. parse: for an old flag with other values: returns the value of the new one."""
    container.add_argument(
        old_flag,
        action=FlagAlias,
        dest=action.dest,
        nargs=action.nargs if parse is None else None,
        type=parse or action.type or str,
        metavar="N" if parse is not None else action.metavar,
        default=argparse.SUPPRESS,
        help=argparse.SUPPRESS,
    )


class FileValue(NamedTuple):
    """The value of one key in the settings file. places: file:line of each text."""

    place: str
    texts: list[str]
    places: list[str]


class Setting(NamedTuple):
    """One flag with its names in the environment and in the file."""

    action: argparse.Action
    default: Any
    group: str

    @property
    def flag(self) -> str:
        """The flag, or MODEL."""
        return self.action.option_strings[0] if self.action.option_strings else str(self.action.metavar)

    @property
    def key(self) -> str:
        """The key in the file."""
        return self.flag.removeprefix("--") if self.action.option_strings else self.action.dest

    @property
    def variable(self) -> str:
        """The variable of the environment."""
        return VARIABLE_PREFIX + self.key.replace("-", "_").upper()

    @property
    def is_alias(self) -> bool:
        """Whether it is the old name of another setting."""
        return isinstance(self.action, FlagAlias)

    @property
    def is_switch(self) -> bool:
        """Whether its value is true or false."""
        return self.action.nargs == 0

    @property
    def is_list(self) -> bool:
        """Whether it may be given several times."""
        return isinstance(self.action, argparse._AppendAction)

    @property
    def is_secret(self) -> bool:
        """Whether its value is never shown."""
        return self.action.dest in SECRET_DESTS

    @property
    def limits(self) -> str:
        """The values that it accepts, in words."""
        if self.is_switch:
            return "true or false"
        if self.action.choices is not None:
            return ", ".join(map(str, self.action.choices))
        return self.action.type.limits if isinstance(self.action.type, ValueType) else ""

    @property
    def meaning(self) -> str:
        """Its help text, without the default."""
        return re.sub(r" \([^()]*\)$", "", self.action.help or "")

    @property
    def default_words(self) -> str:
        """The default in words, also of a value that is decided later."""
        if self.is_switch and self.default is not None:
            return "false"
        if self.default not in (None, "", []):
            return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)
        of_flag, of_group = re.search(r"\(([^()]*)\)$", self.action.help or ""), re.search(r"\((.*)\)$", self.group)
        found = of_flag or of_group
        return found[1].removeprefix("default: ") if found else "none"


def nearest(name: str, known: Sequence[str] | Mapping[str, str], *, similarity: float = 0.75) -> str:
    """Return which known name may have been meant, as the end of a sentence; empty where none is near enough.

    Of a mapping the keys are compared, and the value of the nearest key is returned. The default of similarity is met
    by a letter more, less or exchanged.
    """
    import difflib

    for found in difflib.get_close_matches(name, known, n=3, cutoff=similarity):
        if _has_words_of(found, name):
            return f": {known[found] if isinstance(known, Mapping) else found} is the nearest"
    return ""


def _has_words_of(name: str, typed: str) -> bool:
    """Return whether each word that was typed is like one of a name: --dp-size is no slip of --tp-size."""
    import difflib

    words = re.split("[-_]", name.strip("-"))
    return all(
        any(
            one.startswith(word) or word.startswith(one) or difflib.SequenceMatcher(None, word, one).ratio() > 0.6
            for one in words
        )
        for word in re.split("[-_]", typed.strip("-"))
    )
