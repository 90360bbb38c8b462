"""Makes the tables of docs/reference/flags.md from the flags: make configuration-page; --check only compares."""

import argparse
import sys
from pathlib import Path

from server.cli import serve_parser
from server.config.setting import Setting

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "flags.md"
_START, _END = "<!-- settings -->", "<!-- end of settings -->"
_TITLES = {"http": "HTTP"}
_HEAD = ["| flag | variable | YAML key | default | meaning | limits |", "|---|---|---|---|---|---|"]


def page() -> str:
    """Return what docs/reference/flags.md should be."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    start, end = lines.index(_START), lines.index(_END)
    parser = serve_parser({})
    lines[start + 1 : end] = _tables(parser.settings, parser.aliases)
    return "\n".join(lines) + "\n"


def _tables(settings: list[Setting], aliases: list[Setting]) -> list[str]:
    groups: dict[str, list[Setting]] = {}
    for setting in settings:
        groups.setdefault(setting.group.partition(" (")[0], []).append(setting)
    lines: list[str] = []
    for title, members in groups.items():
        lines += [
            "",
            f"### {_TITLES.get(title) or title.capitalize()}",
            "",
            *_HEAD,
            *(_row(setting, aliases) for setting in members),
        ]
    return [*lines, ""]


def _row(setting: Setting, aliases: list[Setting]) -> str:
    key = "refused: use `api-key-file`" if setting.is_secret else f"`{setting.key}`"
    metavar = "" if setting.is_switch or setting.flag == setting.action.metavar else f" {_metavar(setting.action)}"
    old = ", ".join(f"`{alias.flag}`" for alias in aliases if alias.action.dest == setting.action.dest)
    flags = setting.action.option_strings or [setting.flag]
    cells = [
        ", ".join(f"`{flag}{metavar}`" for flag in flags),
        f"`{setting.variable}`",
        key,
        setting.default_words,
        f"{setting.meaning}; alias: {old}" if old else setting.meaning,
        setting.limits,
    ]
    return f"| {' | '.join((cell or '–').replace('|', chr(92) + '|') for cell in cells)} |"


def _metavar(action: argparse.Action) -> str:
    return str(action.metavar or action.dest.upper())


def main() -> int:
    """Write the page; with --check return 1 if it is stale."""
    text = page()
    if sys.argv[1:] == ["--check"]:
        if text == PAGE.read_text(encoding="utf-8"):
            return 0
        print(f"{PAGE} is stale: run make configuration-page", file=sys.stderr)
        return 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
