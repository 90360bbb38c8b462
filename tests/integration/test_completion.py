"""`quire completion`: the scripts, sourced by real shells."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.daemon import ROOT

ASK = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
$(complete -p quire | sed 's/.*-F \\([^ ]*\\).*/\\1/')
printf '%s\\n' "${COMPREPLY[@]}"
"""


def script(shell: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "server", "completion", shell]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
    path = folder / f"quire.{shell}"
    path.write_text(result.stdout)
    return path


@pytest.fixture(scope="module")
def bash_script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return script("bash", tmp_path_factory.mktemp("bash"))


def completed(path: Path, *words: str) -> list[str]:
    """Return what bash offers for the last word."""
    command = ["bash", "--norc", "-c", ASK, "ask", str(path), "quire", *words]
    result = subprocess.run(command, cwd=path.parent, capture_output=True, text=True, timeout=60)
    assert "not found" not in result.stderr
    return result.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["ch"], ["chat"]),
        (["b"], ["bench", "batch"]),
        (["bench", ""], ["offline", "serve", "kernels", "report", "steps", "plan"]),
        (["serve", "--device", ""], ["auto", "cuda", "mps", "cpu"]),
        (["batch", "--conc"], ["--concurrency"]),
        (["chat", "--thinking", "h"], ["hidden"]),
        (["completion", ""], ["bash", "zsh", "fish"]),
        (["top", "--concurrency", "--conc"], []),
    ],
)
def test_bash_completes_commands_flags_and_choices(bash_script, words, offered):
    assert completed(bash_script, *words) == offered


def test_bash_completes_files_where_a_file_is_meant(bash_script):
    (bash_script.parent / "requests.jsonl").touch()
    (bash_script.parent / "model-folder").mkdir()
    assert completed(bash_script, "batch", "req") == ["requests.jsonl"]
    assert completed(bash_script, "batch", "x", "-o", "req") == ["requests.jsonl"]
    assert completed(bash_script, "chat", "mod") == ["model-folder"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_can_read_their_script(shell, tmp_path):
    path = script(shell, tmp_path)
    assert "concurrency" in path.read_text()
    if (program := shutil.which(shell)) is None:
        pytest.skip(f"{shell} is not installed")
    assert subprocess.run([program, "-n", str(path)], capture_output=True, text=True, timeout=60).stderr == ""


@pytest.mark.parametrize("command", ["serve", "bench serve", "bench offline", "doctor"])
def test_flags_beyond_the_short_help_are_completed_too(bash_script, command):
    arguments = [sys.executable, "-m", "server", *command.split(), "--help-all"]
    page = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=60).stdout
    names = re.findall(r"^  ((?:--?[a-z-]+, )*--[a-z-]+)", page, re.MULTILINE)
    flags = set(re.findall(r"--[a-z-]+", " ".join(names)))
    assert len(flags) > 15
    assert flags == {word for word in completed(bash_script, *command.split(), "--") if word.startswith("--")}


def test_an_unknown_shell_is_wrong_usage():
    command = [sys.executable, "-m", "server", "completion", "tcl"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (result.returncode, len(result.stderr.splitlines())) == (2, 1)
