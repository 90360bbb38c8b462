"""Examples of the documentation: commands that the program takes, and imports that exist."""

import ast
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.cli import _parser

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_COMMAND = re.compile(r"(?m)^(?:[A-Z_]+=\S+ |git diff \| |echo .* \| )*(?:\.venv/bin/)?(quire [^#|&>\n]*)")


def blocks(language: str) -> Iterator[tuple[Path, str]]:
    """Yield each block of code of one language with its page."""
    for page in PAGES:
        for code in re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            yield page, code


def test_every_quire_command_is_one_that_the_program_takes(capsys: pytest.CaptureFixture[str]) -> None:
    faults, count = [], 0
    for page, code in blocks("sh"):
        for command in _COMMAND.findall(code.replace("\\\n", " ")):
            if "…" in command:
                continue
            count += 1
            try:
                _parser().parse_args(shlex.split(command)[1:])
            except SystemExit:
                faults.append(f"{page.relative_to(ROOT)}: {command}: {capsys.readouterr().err.splitlines()[-1]}")
    assert count > 30
    assert not faults, "\n" + "\n".join(faults)


def test_every_import_of_ours_in_an_example_exists() -> None:
    names = [
        (page, node.module, alias.name)
        for page, code in blocks("python")
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.ImportFrom)
        and node.module
        and node.module.split(".")[0] in ("engine", "server", "quire")
        for alias in node.names
    ]
    assert names
    for page, module, name in names:
        assert hasattr(importlib.import_module(module), name), (page.name, module, name)
