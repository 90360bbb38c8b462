"""The YAML settings file: read_settings_file() parses one, show_config() prints one for --show-config. Imports PyYAML.

Reading returns keys and texts with their line numbers; the flags parse the values. YAML is composed into nodes and no
object is constructed, so `no`, `1e3` and `12:30` stay the text that was written, and tags have no effect.
show_config() prints every setting with its value and source.
"""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from engine.interface.errors import StartupError
from server.config.known_flags import about_setting
from server.config.setting import DEFAULT, FileValue, Setting
from server.config.value_types import UsageError

_MAX_BYTES = 1 << 20
_STANDARD = "tag:yaml.org,2002:"
_PLAIN = ("str", "int", "float", "bool", "timestamp", "value")  # tags that text without one gets
_PLAIN_SCALAR = re.compile(r"(?!null$|Null$|NULL$)[A-Za-z0-9./][\w./=@~+-]*", re.ASCII)
_MAX_COLUMN = 48


def read_settings_file(name: str, settings: Sequence[Setting]) -> dict[str, FileValue]:
    """Return the values by key; null is none. Raises StartupError that names file and line."""
    path = Path(name).expanduser()
    root = _compose(path)
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise _error(path, root, "a file of settings has lines such as port: 8000")
    by_key = {setting.key: setting for setting in settings}
    lines: dict[str, int] = {}
    values: dict[str, FileValue] = {}
    for key_node, node in root.value:
        key = key_node.value if isinstance(key_node, yaml.ScalarNode) else "a key that is no name"
        if key in lines:
            raise _error(path, key_node, f"{key} is given twice, also in line {lines[key]}")
        lines[key] = key_node.start_mark.line + 1
        if key not in by_key:
            near = about_setting(key, {setting.key: setting.key for setting in settings if not setting.is_alias})
            raise _error(path, key_node, f"{key} is no setting of this server{near}")
        if by_key[key].is_secret:
            raise _error(
                path, key_node, f"{key} is a secret: write the keys in a file of their own, named by {key}-file"
            )
        if node.tag != f"{_STANDARD}null":
            nodes = _items(path, key, node, is_list=by_key[key].is_list)
            values[key] = FileValue(
                _place(path, key_node),
                [_text(path, key, item) for item in nodes],
                [_place(path, item) for item in nodes],
            )
    return values


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


def _compose(path: Path) -> yaml.Node | None:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise UsageError(f"--config {path} has more than {_MAX_BYTES} bytes.")
        return yaml.compose(content.decode("utf-8-sig"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise UsageError(f"--config {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--config {path} cannot be read: not UTF-8 text.") from error
    except RecursionError as error:
        raise UsageError(f"--config {path} is nested too deeply.") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f":{mark.line + 1}" if mark is not None else ""
        raise UsageError(f"{path}{line}: this is no YAML: {error.problem}.") from error
    except yaml.YAMLError as error:
        reason = str(error).split("\n", 1)[0]
        raise UsageError(f"{path}: this is no YAML: {reason}.") from error


def _items(path: Path, key: str, node: yaml.Node, *, is_list: bool) -> list[yaml.Node]:
    if isinstance(node, yaml.SequenceNode):
        if not is_list:
            raise _error(path, node, f"{key} takes one value, not a list")
        return node.value
    return [node]


def _text(path: Path, key: str, node: yaml.Node) -> str:
    if not isinstance(node, yaml.ScalarNode) or node.tag == f"{_STANDARD}null":
        raise _error(path, node, f"{key} takes plain values, of which this is none")
    if node.tag.removeprefix(_STANDARD) not in _PLAIN:
        raise _error(path, node, f"{key} has the tag {node.tag}, and tags mean nothing here")
    if not node.value.isprintable():
        raise _error(path, node, f"{key} has a character that cannot be printed")
    return node.value


def _place(path: Path, node: yaml.Node) -> str:
    return f"{path}:{node.start_mark.line + 1}"


def _error(path: Path, node: yaml.Node, reason: str) -> StartupError:
    return UsageError(f"{_place(path, node)}: {reason}.")


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
    """Hide user and password of a URL."""
    if "://" not in value or "@" not in value:
        return value
    try:
        parts = urlsplit(value)
    except ValueError:
        return "***"
    return parts._replace(netloc=f"***@{parts.netloc.rpartition('@')[2]}").geturl()
