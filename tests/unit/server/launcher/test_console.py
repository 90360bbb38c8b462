"""What is shown while the daemon starts: log lines without a terminal, bars and a panel on one."""

import dataclasses
import errno
import io
import json
import logging
import shlex

import pytest

from engine.interface.child_process import describe_exit
from engine.interface.control import Stage
from engine.interface.logs import configure_logging
from server.launcher.console import LogConsole, Summary, TerminalConsole, make_console
from server.launcher.processes import Backoff

SUMMARY = Summary(
    model_name="it's [bold]mine",
    url="http://127.0.0.1:8000",
    facts={"Model": "Llama, 12 layers", "KV cache": "65,536 tokens = 16 requests × 4,096"},
    num_keys=0,
    elapsed_s=2.94,
)
STAGES = [
    Stage("config"),
    Stage("weights", 0, 2 * 2**30, unit="bytes", detail="Llama on cpu"),
    Stage("weights", 2**30, 2 * 2**30, unit="bytes", detail="Llama on cpu"),
    Stage("weights", 2 * 2**30, 2 * 2**30, unit="bytes", detail="Llama on cpu"),
    Stage("graphs", 1, 3, unit="graphs"),
    Stage("self_test"),
    Stage("ready"),
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Return a stream that says to be a terminal, of 100 columns, where colours are unwanted."""
    for name, value in {"TERM": "xterm", "NO_COLOR": "1", "COLUMNS": "100"}.items():
        monkeypatch.setenv(name, value)
    return Terminal()


@pytest.mark.parametrize("num_shown", [0, 3, len(STAGES)])
def test_a_terminal_whose_window_is_closed_ends_nothing(terminal: Terminal, num_shown: int) -> None:
    console = make_console("auto", terminal)
    assert isinstance(console, TerminalConsole)
    for index, stage in enumerate(STAGES):
        if index == num_shown:
            terminal.write = terminal.flush = _refuse  # type: ignore[method-assign]
        console.stage(stage)
    terminal.write = terminal.flush = _refuse  # type: ignore[method-assign]
    console.ready(SUMMARY)
    console.stop()


def _refuse(*_: object) -> int:
    raise OSError(errno.EIO, "Input/output error")


def test_without_a_terminal_each_stage_is_one_line_and_another_when_done(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    console = make_console("auto", io.StringIO())
    assert isinstance(console, LogConsole)
    for stage in STAGES:
        console.stage(stage)
    console.ready(SUMMARY)
    console.stop()
    stages = [message for message in caplog.messages if message.startswith("stage ")]
    assert [message.split()[1] for message in stages] == [
        "name=config",
        "name=weights",
        "name=weights",
        "name=graphs",
        "name=self_test",
    ]
    assert 'kv_cache="65,536 tokens = 16 requests × 4,096"' in caplog.messages
    assert caplog.messages[-1] == "Ready in 2.9 s url=http://127.0.0.1:8000"


def test_a_terminal_gets_bars_and_one_panel(terminal: Terminal) -> None:
    console = make_console("auto", terminal)
    assert isinstance(console, TerminalConsole)
    for stage in STAGES:
        console.stage(stage)
    console.ready(SUMMARY)
    shown = terminal.getvalue()
    assert "65,536 tokens = 16 requests × 4,096" in shown
    assert "it's [bold]mine (Llama, 12 layers)" in shown
    assert " in 2.9 s. Try it:" in shown
    assert SUMMARY.next_command() in shown.replace("\n", "")
    assert "\x1b[3" not in shown  # no colour when NO_COLOR is set


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_log_format_asked_for_needs_no_terminal(terminal: Terminal, log_format: str) -> None:
    assert isinstance(make_console(log_format, terminal), LogConsole)


def test_a_start_that_ends_early_leaves_the_terminal_clean(terminal: Terminal) -> None:
    console = make_console("auto", terminal)
    console.stage(STAGES[1])
    console.stop()
    console.stop()
    assert terminal.getvalue().index("\x1b[?25l") < terminal.getvalue().index("\x1b[?25h")  # the cursor is back


def test_the_command_to_type_next_survives_the_shell() -> None:
    words = shlex.split(SUMMARY.next_command())
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
    assert json.loads(words[-1])["model"] == "it's [bold]mine"


def test_the_command_to_type_next_takes_a_socket_and_a_key() -> None:
    summary = dataclasses.replace(SUMMARY, url="unix:/run/my quire.sock", num_keys=2)
    words = shlex.split(summary.next_command())
    assert words[:4] == ["curl", "--unix-socket", "/run/my quire.sock", "http://localhost/v1/chat/completions"]
    assert words[4:6] == ["-H", "authorization: Bearer $QUIRE_API_KEY"]
    assert summary.rows()["API"] == "unix:/run/my quire.sock"
    assert summary.rows()["Auth"] == "API key (2 known)"
    assert SUMMARY.rows()["Auth"] == "none, so every client that reaches this address may use it"


def test_log_lines_are_text_or_json_with_the_process_named(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        configure_logging(level="info", log_format="text", process="worker-1")
        logging.getLogger("a.b").info("request done out=%d", 3)
        configure_logging(level="warning", log_format="json", process="engine")
        logging.getLogger("a.b").info("hidden")
        logging.getLogger("a.b").error('quote " and\nline')
    finally:
        root.handlers[:], root.level = handlers, level
    text, line = capsys.readouterr().err.splitlines()
    assert text.endswith("INFO    worker-1  request done out=3")
    record = json.loads(line)
    assert record["message"] == 'quote " and\nline'
    assert (record["process"], record["level"], record["logger"]) == ("engine", "error", "a.b")


def test_restarts_wait_longer_each_time_and_start_over_after_a_minute_of_health() -> None:
    backoff = Backoff()
    assert [backoff.next(healthy_s=1.0) for _ in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert backoff.next(healthy_s=61.0) == 0.5
    assert backoff.next(healthy_s=1.0) == 1.0


def test_an_http_worker_that_keeps_dying_is_restarted_after_2_s_at_most() -> None:
    backoff = Backoff(Backoff.WORKER_LAST_S)
    assert [backoff.next(healthy_s=1.0) for _ in range(5)] == [0.5, 1, 2, 2, 2]
    assert backoff.num_ended == 5
    assert (backoff.next(healthy_s=60.0), backoff.num_ended) == (0.5, 1)


def test_an_exit_is_told_in_words() -> None:
    assert describe_exit(3) == "ended with exit code 3"
    assert describe_exit(-9) == "was killed by SIGKILL (out of memory?)"
    assert describe_exit(-11) == "was killed by SIGSEGV"
