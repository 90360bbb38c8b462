"""--help of every command: one screen of 24 lines and 80 columns with an example, and --help-all with every flag."""

import re
from collections.abc import Iterator

import pytest

from server.cli import main

COMMANDS = re.compile(r"^(?:commands|kinds):\n((?:  .*\n)+)", re.MULTILINE)
FLAG = re.compile(r"^  (?:-\w, |-\w \S+, )?(--[a-z-]+)", re.MULTILINE)
PAGES = {
    "",
    "serve",
    "bench",
    "bench offline",
    "bench serve",
    "bench kernels",
    "bench report",
    "bench steps",
    "bench plan",
    "doctor",
    "batch",
}


@pytest.fixture(autouse=True)
def _narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(words)
    out, err = capsys.readouterr()
    assert (ended.value.code, err) == (0, ""), words
    return out


def pages(capsys: pytest.CaptureFixture[str], *words: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the help of a command and of all below it."""
    page = printed(capsys, *words, "--help")
    yield " ".join(words), page
    for table in COMMANDS.findall(page):
        for line in table.splitlines():
            yield from pages(capsys, *words, line.split()[0])


def test_every_page_fits_a_screen_and_has_an_example(capsys):
    names = set()
    for name, page in pages(capsys):
        lines = page.rstrip("\n").splitlines()
        assert len(lines) <= 24, page
        assert max(map(len, lines)) <= 80, page
        assert re.search(rf"examples?:\n  {' '.join(['quire', *name.split()])}\b", page), page
        names.add(name)
    assert names >= PAGES


@pytest.mark.parametrize("command", ["serve", "bench serve", "bench offline", "bench steps", "bench plan", "doctor"])
def test_a_short_page_says_where_the_other_flags_are(command, capsys):
    short = printed(capsys, *command.split(), "--help")
    promise = re.search(rf"^quire {command} --help-all shows all (\d+) flags\.$", short, re.MULTILINE)
    every = FLAG.findall(printed(capsys, *command.split(), "--help-all"))
    assert len(every) == len(set(every)) == int(promise[1])
    assert set(FLAG.findall(short)) < set(every)
    assert printed(capsys, *command.split(), "-h") == short


def test_an_unknown_flag_is_one_sentence_everywhere(capsys):
    for name in [name for name, _ in pages(capsys)]:
        with pytest.raises(SystemExit) as ended:
            main([*name.split(), "--no-such-flag"])
        out, err = capsys.readouterr()
        assert (ended.value.code, out, err.count("\n")) == (2, "", 1), name


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("serve --prot 1", "--prot is no flag of quire serve: --port is the nearest"),
        ("serve --max-model-length=5", "--max-model-length is no flag of quire serve: --max-model-len is the nearest"),
        ("serve --max-wating 4", "--max-wating is no flag of quire serve: --max-queued-requests is the nearest"),
        (
            "serve --no-prefix-cachng",
            "--no-prefix-cachng is no flag of quire serve: --no-prefix-caching is the nearest",
        ),
        (
            "serve --enable-prefix-cachin",
            "--enable-prefix-cachin is no flag of quire serve: --enable-prefix-caching, no flag here (it is always so"
            " here: leave it out), is the nearest",
        ),
        (
            "serve --swap-spase 4",
            "--swap-spase is no flag of quire serve: --swap-space, which is --kv-host-memory here, is the nearest",
        ),
        ("bench serve --concurency 4", "--concurency is no flag of quire bench serve: --concurrency is the nearest"),
        ("serve one two", "'two' is one argument too many"),
        ("completion bash --json", "--json is no flag of quire completion"),
    ],
)
def test_a_mistyped_flag_is_told_by_its_own_command_with_the_nearest(words, sentence, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    command = " ".join(words.split()[: 2 if words.startswith("bench") else 1])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"quire {command}: error: {sentence} (see quire {command} --help)\n"


def test_a_wide_terminal_is_used(capsys, monkeypatch):
    narrow = printed(capsys, "serve", "--help-all")
    monkeypatch.setenv("COLUMNS", "200")
    wide = printed(capsys, "serve", "--help-all")
    assert 80 < max(map(len, wide.splitlines())) <= 110
    assert wide.count("\n") < narrow.count("\n")
