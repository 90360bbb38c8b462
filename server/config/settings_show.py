"""`quire serve --show-config`: every setting, its value and where that is from, as a YAML file of settings."""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from server.config.setting import DEFAULT, Setting

_PLAIN_SCALAR = re.compile(r"(?!null$|Null$|NULL$)[A-Za-z0-9./][\w./=@~+-]*", re.ASCII)
_MAX_COLUMN = 48


def show_config(settings: Sequence[Setting], arguments: argparse.Namespace, *, environment: Mapping[str, str]) -> str:
    """Return the file's text. Secrets are counted, never shown."""
    lines = ["# what quire serve would use, and where it is from"]
    for setting in settings:
        value, origin = vars(arguments)[setting.action.dest], arguments.origins[setting.action.dest]
        if setting.is_secret:
            from_variable = [key for key in environment.get(setting.variable, "").split(",") if key.strip()]
            counts = ((len(value), origin), (len(from_variable), setting.variable))
            text = ", ".join(f"{number} from {place}" for number, place in counts if number)
            lines.append(f"# {setting.key}: {text or 'none'}; never shown")
            continue
        if origin == DEFAULT and value is None:
            origin = f"{DEFAULT}: {setting.default_words}"
        lines.append(f"{f'{setting.key}: {_yaml(value)}':<{_MAX_COLUMN}}  # {origin}")
    return "\n".join(lines)


def _yaml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_yaml, value))}]"
    if isinstance(value, tuple):
        return _yaml("=".join(value))
    if isinstance(value, str):
        value = _without_password(value)
        return value if _PLAIN_SCALAR.fullmatch(value) else json.dumps(value, ensure_ascii=False)
    return json.dumps(value)  # a number, true, false, null


def _without_password(value: str) -> str:
    """Hide what a URL has before its host."""
    if "://" not in value or "@" not in value:
        return value
    try:
        parts = urlsplit(value)
    except ValueError:
        return "***"
    return parts._replace(netloc=f"***@{parts.netloc.rpartition('@')[2]}").geturl()
