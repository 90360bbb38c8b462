"""`quire completion`: prints a shell script that completes commands, flags and files. Imports argparse; shtab when
run.
"""

import argparse
from collections.abc import Callable

from server.config.value_types import AnyParser

_SHELLS = ("bash", "zsh", "fish")
_EXAMPLES = """\
examples:
  quire completion bash > ~/.local/share/bash-completion/completions/quire
  quire completion zsh > ~/.zsh/completions/_quire      a folder in fpath
  quire completion fish > ~/.config/fish/completions/quire.fish
"""
# what a value is, by the name that --help gives it
_FILES = ("FILE", "IN.jsonl", "OLD.json", "RUN.json", "PATH")
_FOLDERS = ("MODEL",)


def add_completion(
    commands: "argparse._SubParsersAction[AnyParser]", make_parser: Callable[[], argparse.ArgumentParser]
) -> None:
    """Add `completion`. make_parser: makes the parser of the whole command."""
    parser = commands.add_parser(
        "completion",
        help="print the script that lets a shell complete quire",
        description="Print the script that lets a shell complete quire.",
        usage="quire completion SHELL",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=lambda arguments: _run(arguments, make_parser()))
    parser.add_argument("shell", choices=_SHELLS, metavar="SHELL", help="bash, zsh or fish")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")


def _run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    import shtab

    _name_files(parser)
    print(_without_advice(shtab.complete(parser, arguments.shell)), end="")
    return 0


def _without_advice(script: str) -> str:
    """Return a script without shtab's comment on where to put it, which differs from this command's --help."""
    first, rest = script.partition("\n")[::2]
    kept = f"{first}\n\n" if first.startswith("#compdef") else ""
    lines = (rest if kept else script).splitlines(keepends=True)
    start = next(i for i, line in enumerate(lines) if line.strip() and not line.startswith("#"))
    while start > 0 and lines[start - 1].strip():  # comments right above the first line of code are about it
        start -= 1
    return kept + "".join(lines[start:]).rstrip("\n") + "\n"


def _name_files(parser: argparse.ArgumentParser) -> None:
    """Tell shtab which values are files and folders, in this parser and those of its commands."""
    import shtab

    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _name_files(command)
        elif action.metavar in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]  # shtab's own attribute, unknown to argparse
        elif action.metavar in _FOLDERS or "--model" in action.option_strings:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
