"""Help texts: --help with the most used flags on one screen, --help-all with all of them. Imports argparse.

add_short_help() adds both flags to a parser made with add_help=False. The short help lists the flags of its sections
and takes their help texts from the parser.
"""

import argparse
import shutil
from collections.abc import Mapping, Sequence
from typing import NoReturn

Sections = Mapping[str, Sequence[str]]  # heading → flags, or names of positional arguments
_MAX_WIDTH = 110


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Prints one line per flag if the terminal is wide enough, and one line per command."""

    def __init__(self, prog: str) -> None:
        width = min(_MAX_WIDTH, shutil.get_terminal_size().columns - 2)
        super().__init__(prog, max_help_position=34, width=width)

    def _format_action(self, action: argparse.Action) -> str:
        if isinstance(action, argparse._SubParsersAction):
            return "".join(map(super()._format_action, action._get_subactions()))
        return super()._format_action(action)


class _ShortHelp(argparse.Action):
    """The action of -h and --help for a command with more flags than a screen has lines."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, sections: Sections, help: str) -> None:  # noqa: A002 - argparse's name
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help=help)
        self._sections = sections

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        formatter = parser._get_formatter()
        formatter.add_usage(parser.usage, [], [])
        formatter.add_text(parser.description)
        actions = {name: action for action in parser._actions for name in action.option_strings or [action.dest]}
        for heading, names in self._sections.items():
            formatter.start_section(heading)
            formatter.add_arguments(actions[name] for name in names)
            formatter.end_section()
        formatter.add_text(parser.epilog)
        num_flags = sum(action.help != argparse.SUPPRESS for action in parser._actions if action.option_strings)
        print(f"{formatter.format_help()}{parser.prog} --help-all shows all {num_flags} flags.")
        parser.exit()


def add_short_help(parser: argparse.ArgumentParser, sections: Sections) -> None:
    """Add --help, which shows these flags alone, and --help-all. The parser has no --help yet."""
    parser.add_argument("-h", "--help", action=_ShortHelp, sections=sections, help="the most used flags")
    parser.add_argument("--help-all", action="help", help="all flags")
