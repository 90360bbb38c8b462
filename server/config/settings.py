"""SettingsParser: fills the flags of `quire serve` from command line, environment and YAML file. Imports argparse.

The parser's own flags are the only table of settings; docs/reference/flags.md is generated from it
(tests/configuration_page.py). Command line > environment > file > default. Values from all places are parsed by the
same function, so errors read the same and name the source. Life: flags are added → take_settings → parse_args.
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from engine.interface.errors import StartupError
from server.config.known_flags import about_choice, about_flag, about_setting, is_negative, similar_flags
from server.config.setting import COMMAND_LINE, DEFAULT, VARIABLE_PREFIX, FlagAlias, Setting, nearest
from server.config.value_types import UsageError, boolean

if TYPE_CHECKING:
    from server.config.setting import FileValue

CONFIG_VARIABLE = "QUIRE_CONFIG"
_EXIT_USAGE = 2
_OF_THE_RUN = ("help", "help_all", "config", "show_config")  # flags that are no settings
# What Kubernetes and Docker links add for a service whose name begins with quire: QUIRE_PORT=tcp://10.0.0.1:8000, …
_LINK = re.compile(r"(_SERVICE_HOST|_SERVICE_PORT(_\w+)?|_PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)$")
_LINK_URL = re.compile(r"(tcp|udp|sctp)://")


class SettingsParser(argparse.ArgumentParser):
    """An ArgumentParser that reports errors in one sentence and takes values from environment and file as well.

    settings: of take_settings, else none; aliases: their old names. A parsed namespace then has `origins` too: by dest,
    where its value is from.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.settings: list[Setting] = []
        self.aliases: list[Setting] = []
        self._environment: Mapping[str, str] = {}
        self._place = ""  # of the value that is being parsed, if it is not the command line's

    def take_settings(self, environment: Mapping[str, str]) -> None:
        """Make every flag added so far a setting."""
        self._environment = environment
        for group in self._action_groups:
            for action in group._group_actions:
                if action.dest not in _OF_THE_RUN:
                    names = self.aliases if isinstance(action, FlagAlias) else self.settings
                    names.append(Setting(action, action.default, group.title or ""))
        for action in [setting.action for setting in (*self.settings, *self.aliases)]:
            action.default = argparse.SUPPRESS  # so that a namespace has what was given, and no more
            if action.nargs == 0 and not isinstance(action, argparse.BooleanOptionalAction):
                # its opposite, for what a file or a variable has switched on
                name = action.option_strings[0].removeprefix("--")
                opposite = name.removeprefix("no-") if name.startswith("no-") else f"no-{name}"
                self.add_argument(
                    f"--{opposite}",
                    dest=action.dest,
                    action="store_false",
                    default=argparse.SUPPRESS,
                    help=argparse.SUPPRESS,
                )

    def parse_known_args(  # type: ignore[override]  # overloaded there for other namespaces, of which none comes here
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """See ArgumentParser; nothing is left over."""
        if self.settings and not self._place and args is not None:
            self._check_words(args)
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:  # said here and not by the outermost parser, which knows neither the command nor its flags
            flag = next((word for word in unknown if word.startswith("-")), "").partition("=")[0]
            if not flag:
                self.error(f"{unknown[0]!r} is one argument too many")
            self.error(f"{flag} is no flag of {self.prog}{self._nearest_flag(flag)}")
        if self.settings:
            try:
                self._fill(found)
            except StartupError as error:
                self.error(error.message.removesuffix("."))
        return found, unknown

    def _check_words(self, args: Sequence[str]) -> None:
        """End with a sentence at the first flag of another server: argparse would take -hf for -h with a value."""
        for word in args:
            if word == "--":
                return
            if word.startswith("-"):
                sentence = about_flag(word.partition("=")[0], self._option_string_actions)
                if sentence is not None:
                    self.error(sentence)

    def _nearest_flag(self, flag: str) -> str:
        """Return the flag that may have been meant, as the end of a sentence; for an old name its current one."""
        if flag in ("--model", "-m") and any(action.dest == "model" for action in self._get_positional_actions()):
            return f": MODEL is an argument, as in {self.prog} MODEL"
        current = {name.lstrip("-"): name for name in self._option_string_actions}
        for alias in self.aliases:
            setting = next(setting for setting in self.settings if setting.action.dest == alias.action.dest)
            names = [name.lstrip("-") for name in alias.action.option_strings]
            current |= dict.fromkeys(names, setting.action.option_strings[0])
        typed = flag.lstrip("-")
        # never the opposite of what was meant
        current = {name: shown for name, shown in current.items() if is_negative(name) == is_negative(typed)}
        others = similar_flags(typed, current) if self.settings and not self._place else {}
        return nearest(typed, current | others)

    def error(self, message: str) -> NoReturn:
        """Print one sentence and exit."""
        message = re.sub(r"^argument ", "", message) + about_choice(message)
        message = message.replace("the following arguments are required: COMMAND", "a command is needed, e.g. serve")
        if self._place:
            message = f"{self._place}: {message.partition(': ')[2]}"
        self.exit(_EXIT_USAGE, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def _fill(self, found: argparse.Namespace) -> None:
        """Add the values of environment and file, and the defaults. Overruled values are checked as well."""
        by_variable = self._of_environment()
        path = found.config or self._environment.get(CONFIG_VARIABLE, "").strip()
        by_key: dict[str, FileValue] = {}
        if path:
            from server.config.settings_file import read_settings_file

            by_key = read_settings_file(path, [*self.settings, *self.aliases])
        found.origins = {}
        for setting in self.settings:
            dest, origin, value = setting.action.dest, DEFAULT, setting.default
            if isinstance(value, str) and callable(setting.action.type):
                value = setting.action.type(value)
            names = [setting, *(alias for alias in self.aliases if alias.action.dest == dest)]
            if (name := _only({name.key: name for name in names if name.key in by_key})) is not None:
                in_file = by_key[name.key]
                origin = in_file.place
                value = self._parse(name, in_file.texts, [f"{place}: {name.key}" for place in in_file.places])
            if (name := _only({name.variable: name for name in names if name.variable in by_variable})) is not None:
                text = by_variable[name.variable]
                texts = [part.strip() for part in text.split(",")] if name.is_list else [text]
                origin = name.variable
                value = self._parse(name, texts, [name.variable] * len(texts))
            if dest in found:
                origin = COMMAND_LINE
            else:
                setattr(found, dest, list(value) if isinstance(value, list) else value)
            found.origins[dest] = origin

    def _of_environment(self) -> dict[str, str]:
        """Return the variables that have a value. Raises StartupError for an unknown one."""
        known = {setting.variable: setting for setting in (*self.settings, *self.aliases)}
        said = {}
        for name, value in self._environment.items():
            is_ours = name.startswith(VARIABLE_PREFIX) and name != CONFIG_VARIABLE
            if not is_ours or _LINK.search(name) or (name.endswith("_PORT") and _LINK_URL.match(value)):
                continue
            if name not in known:
                shown = {setting.key: setting.variable for setting in self.settings} | {"config": CONFIG_VARIABLE}
                near = about_setting(name.removeprefix(VARIABLE_PREFIX), shown)
                raise UsageError(f"{name} is no setting of this server{near}.")
            if value.strip() and not known[name].is_secret:  # an empty one is what `X: ${X:-}` gives
                said[name] = value
        return said

    def _parse(self, setting: Setting, texts: Sequence[str], places: Sequence[str]) -> Any:
        """Parse texts as the flag would. Ends with the flag's sentence, in which the flag is the place."""
        values: list[Any] = []
        for text, self._place in zip(texts, places, strict=True):
            if setting.is_switch:
                try:
                    return boolean(text)
                except argparse.ArgumentTypeError as error:
                    self.error(f"argument {setting.flag}: {error}")
            arguments = [f"{setting.flag}={text}"] if setting.action.option_strings else ["--", text]
            found, _ = super().parse_known_args(arguments)
            value = vars(found)[setting.action.dest]
            values += value if setting.is_list else [value]
        self._place = ""
        return values if setting.is_list else values[0]


def _only(found: Mapping[str, Setting]) -> Setting | None:
    """Return the one name that a value was given under. Raises StartupError if the new name and an old one are."""
    if len(found) > 1:
        new, old = list(found)[:2]
        raise UsageError(f"{old} is the old name of {new}: give one of them.")
    return next(iter(found.values()), None)


def places_of(message: str, arguments: argparse.Namespace) -> str:
    """Return the end of an error that names flags: the sources of those that are not from the command line."""
    origins = vars(arguments).get("origins", {})
    places = {}
    for name in re.findall(r"(?<![\w-])--([a-z][a-z-]*)", message):
        origin = origins.get(name.replace("-", "_"), DEFAULT)
        if origin not in (DEFAULT, COMMAND_LINE):
            places[f"--{name}"] = origin
    return f" ({', '.join(f'{flag} is from {origin}' for flag, origin in places.items())})" if places else ""
