"""`quire chat` as people use it: in a real terminal and in pipes, against the demo model and a scripted server."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemon import ROOT, Daemon, wait_for
from tests.support.scripted_server import Reply, scripted_server
from tests.support.terminal import CTRL_C, CTRL_D, Terminal

NOT_SERVED = "The server has scripted, not 'other'. Another model needs another server: /exit, then quire chat MODEL."


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state")}


def leave(terminal: Terminal) -> None:
    """Press Ctrl-D at the prompt, and see the end."""
    terminal.expect("> ")
    terminal.send(CTRL_D)
    assert terminal.wait() == 0


def pipe(text: str, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "server", "chat", *arguments]
    return subprocess.run(
        command, cwd=ROOT, input=text, capture_output=True, text=True, timeout=120, env={**os.environ, **(env or {})}
    )


def stream(*deltas: dict, usage: dict | None = None, finish: str = "stop") -> bytes:
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    if usage:
        chunks.append({"choices": [], "usage": usage})
    events = "".join(f": ping\n\ndata: {json.dumps(chunk, ensure_ascii=False)}\n\n" for chunk in chunks)
    return (events + "data: [DONE]\n\n").encode()


def test_a_pipe_gets_one_answer_in_plain_text(daemon: Daemon):
    result = pipe("What is the capital of France?", "--url", daemon.base_url, "--temperature", "0")
    assert result.returncode == 0
    assert "Paris" in result.stdout
    assert result.stdout.endswith("\n")
    assert "\x1b" not in result.stdout
    assert result.stderr == ""


def test_several_turns_in_a_terminal_with_figures_and_commands(daemon: Daemon, env, tmp_path: Path):
    saved = tmp_path / "chat.json"
    with Terminal("chat", "--url", daemon.base_url, "--temperature", "0", env=env) as terminal:
        terminal.expect(r"quire-demo on http.*/help")
        terminal.expect("> ")
        terminal.line("What is the capital of France?")
        terminal.expect("Paris")
        terminal.expect(r"\d+ tokens · TTFT [\d,]+ ms · [\d.,]+ tok/s · \d+ of \d+ prompt tokens cached")
        terminal.line("And of Italy?")
        terminal.expect(r"tok/s · (\d+) of \d+ prompt tokens cached")
        terminal.line("/stats")
        terminal.expect(r"answers +2 \(messages kept: 4\)")
        terminal.line(f"/save {saved}")
        terminal.expect(r"4 messages are in")
        terminal.line("/retry")
        terminal.expect("tok/s")
        terminal.line("/clear")
        terminal.expect("All messages are deleted")
        terminal.line("/retry")
        terminal.expect("There is no question to ask again")
        terminal.line(f"/load {saved}")
        terminal.expect("4 messages of")
        terminal.line("/system Be brief.")
        terminal.expect("It applies from the next answer on")
        terminal.line("/set temperature 3")
        terminal.expect("temperature is a number from 0 to 2, not '3'")
        terminal.line("/set top_k 5")
        terminal.expect("top_k = 5")
        terminal.line("/frobnicate")
        terminal.expect("There is no command /frobnicate: /help lists them")
        terminal.line("/help")
        terminal.expect("/exit +leave")
        terminal.line("/exit")
        assert terminal.wait() == 0
    chat = json.loads(saved.read_text())
    assert [message["role"] for message in chat["messages"]] == ["user", "assistant"] * 2
    assert chat["messages"][0]["content"] == "What is the capital of France?"
    history = tmp_path / "state" / "quire" / "chat_history"
    assert "And of Italy?" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0


def test_ctrl_c_stops_the_answer_and_keeps_the_chat_and_ctrl_d_leaves(daemon: Daemon, env):
    aborted = "quire_http_disconnects_total"
    before = daemon.metrics()[aborted]
    with Terminal("chat", "--url", daemon.base_url, env=env) as terminal:
        terminal.expect("> ")
        terminal.line("/set repetition_penalty 1")
        terminal.line("Tell me a long story about numbers. " * 5)
        terminal.expect("waiting")
        terminal.send(CTRL_C)
        terminal.expect("stopped|tok/s")
        terminal.expect("> ")
        terminal.press(CTRL_C, "Ctrl-D leaves")
        terminal.line("Hi")
        terminal.expect("tok/s")
        leave(terminal)
        assert "Traceback" not in terminal.text
    assert daemon.metrics()[aborted] >= before


def test_a_stopped_answer_ends_its_request_and_stays_in_the_chat(env):
    gone = threading.Event()

    def script(path, body):
        if body is None:
            return Reply(404)
        if len(body["messages"]) == 1:
            return Reply(200, _endless(gone))
        return Reply(200, stream({"content": "second"}))

    with scripted_server(script) as server, Terminal("chat", "--url", server.url, env=env) as terminal:
        terminal.expect("> ")
        terminal.line("first?")
        terminal.expect("word word")
        terminal.send(CTRL_C)
        terminal.expect("stopped")
        wait_for(gone.is_set, timeout_s=60, what="the end of the connection")
        terminal.line("and then?")
        terminal.expect("second")
        leave(terminal)
        roles = [message["role"] for message in server.asked[-1]["messages"]]
        assert roles == ["user", "assistant", "user"]
        assert "word word" in server.asked[-1]["messages"][1]["content"]


def test_ctrl_c_leaves_no_line_twice_and_notes_wrap_at_words(env):
    gone = threading.Event()

    def script(path, body):
        return Reply(404) if body is None else Reply(200, _endless(gone))

    env |= {"COLUMNS": "40"}  # which the environment of the tests may set otherwise
    with scripted_server(script) as server, Terminal("chat", "--url", server.url, env=env, columns=40) as terminal:
        terminal.expect("> ")
        terminal.line("/model other")
        terminal.expect("The server has scripted, not 'other'")
        terminal.line("first?")
        terminal.expect("word word")
        terminal.send("typed ahead" + CTRL_C)
        terminal.expect("stopped")
        terminal.expect("> ")
        answer = terminal.text.rpartition("first?")[2]
        assert "^C" not in answer  # shown where a redraw is to begin, it would leave a line behind
        shown = "\n".join(line.rstrip() for line in terminal.text.splitlines())
        assert "\n".join(textwrap.wrap(NOT_SERVED, 40)) in shown


def _endless(gone: threading.Event) -> Iterator[bytes]:
    try:
        while True:
            yield b'data: {"choices":[{"index":0,"delta":{"content":"word "},"finish_reason":null}]}\n\n'
            time.sleep(0.02)
    finally:
        gone.set()


def test_markdown_is_drawn_thoughts_are_dimmed_and_controls_do_nothing(env):
    thought, text = {"reasoning_content": "let me see"}, {"content": "# Title\n\nSome **bold** \x1b[2Jtext\u2028end.\n"}
    usage = {"prompt_tokens": 1200, "completion_tokens": 40, "prompt_tokens_details": {"cached_tokens": 1024}}
    reply = Reply(200, stream(thought, text, usage=usage, finish="length"))
    with (
        scripted_server(lambda path, body: Reply(404) if body is None else reply) as server,
        Terminal("chat", "--url", server.url, env=env) as terminal,
    ):
        terminal.expect("> ")
        terminal.line("go")
        terminal.expect("let me see")
        terminal.expect(r"40 tokens · .*1,024 of 1,200 prompt tokens")
        terminal.expect("the limit of tokens")
        assert b"\x1b[2;3mlet me see" in terminal.raw
        assert "**bold**" not in terminal.text
        assert b"\x1b[2J" not in terminal.raw
        terminal.line("/set thinking hidden")
        terminal.expect("thinking = hidden")
        begin = len(terminal.text)
        terminal.line("/set markdown off")
        terminal.line("go on")
        terminal.expect(r"\*\*bold\*\*")
        terminal.expect("tokens")
        assert "let me see" not in terminal.text[begin:]
        terminal.line('"""')
        terminal.line("one")
        terminal.line('two"""')
        terminal.expect("bold")
        terminal.expect("tokens")
        terminal.line("/exit")
        assert terminal.wait() == 0
    assert server.asked[-1]["messages"][-1]["content"] == "one\ntwo"
    assert "thinking" not in server.asked[-1]


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (Reply(400, {"error": {"message": "messages is too long."}}), "messages is too long."),
        (Reply(502, b"<html>bad gateway</html>"), "HTTP 502: <html>bad gateway</html>"),
        (Reply(200, b'data: {"error": {"message": "the engine died"}}\n\ndata: [DONE]\n\n'), "the engine died"),
        (Reply(200, b'data: {"choices": [{"delta": {"content": "Half"}}]}\n\n'), "closed the connection in mid-answer"),
        (Reply(200, b"data: {oops\n\n"), "sent what is no chunk"),
        (Reply(0), "was lost"),
    ],
)
def test_a_failed_answer_is_one_sentence_and_the_chat_goes_on(env, reply, words):
    with scripted_server(lambda path, body: Reply(404) if body is None else reply) as server:
        result = pipe("hi", "--url", server.url)
        assert result.returncode == 1
        assert words in result.stderr
        assert len(result.stderr.splitlines()) == 1
        with Terminal("chat", "--url", server.url, env=env, columns=200) as terminal:
            terminal.expect("> ")
            terminal.line("hi")
            terminal.expect(words.replace("(", r"\("))
            terminal.line("/stats")
            terminal.expect("no answer yet")
            leave(terminal)
            assert "Traceback" not in terminal.text


def test_a_pipe_without_a_question_and_a_server_that_is_not_there(tmp_path: Path):
    empty = pipe("  \n", "--url", "127.0.0.1:1")
    assert (empty.returncode, empty.stderr) == (2, "quire: error: There is nothing to ask: standard input is empty.\n")
    nobody = pipe("hi", "--url", "127.0.0.1:1")
    assert nobody.returncode == 3
    assert nobody.stderr.startswith("quire: error: No server with OpenAI's API answers at http://127.0.0.1:1:")


def test_a_model_that_the_server_does_not_have_and_a_key_that_it_wants(env):
    with scripted_server(lambda *_: Reply(404)) as server:
        result = pipe("hi", "other", "--url", server.url)
        assert (result.returncode, f"{server.url} serves scripted, not other." in result.stderr) == (2, True)
    with scripted_server(lambda *_: Reply(401, {"error": {"message": "no"}})) as server:
        result = pipe("hi", "--url", server.url)
        assert (result.returncode, "needs an API key" in result.stderr) == (2, True)


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path):
    gone = threading.Event()
    reply = lambda path, body: Reply(404) if body is None else Reply(200, _endless(gone))  # noqa: E731
    with scripted_server(reply) as server:
        command = f"echo hi | {sys.executable} -m server chat --url {server.url} | head -c 4"
        result = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert (result.stdout, result.stderr) == ("word", "")
        wait_for(gone.is_set, timeout_s=60, what="the end of the connection")


def test_a_server_of_its_own_is_started_told_in_a_line_and_stopped(env, tmp_path: Path):
    model = str(ROOT / "models" / "demo" / "checkpoint")
    others = {"QUIRE_UDS": "/nowhere/quire.sock", "QUIRE_STRICT": "true"}  # for a server that is meant for others
    with Terminal("chat", model, "--temperature", "0", env={**env, **others, "TMPDIR": str(tmp_path)}) as terminal:
        terminal.expect(r"Started .*checkpoint on http://127.0.0.1:\d+ in [\d.]+ s", timeout_s=90)
        terminal.expect("> ")
        terminal.line("What is the capital of France?")
        terminal.expect("Paris")
        terminal.expect("tok/s")
        servers = _children(terminal.process.pid)
        assert len(servers) == 1
        leave(terminal)
    assert not Path(f"/proc/{servers[0]}").exists()
    assert list(tmp_path.glob("quire-*")) == []


@pytest.mark.full
def test_a_closed_terminal_leaves_nothing_behind(env, tmp_path: Path):
    model = str(ROOT / "models" / "demo" / "checkpoint")
    with Terminal("chat", model, env={**env, "TMPDIR": str(tmp_path)}) as terminal:
        terminal.expect("Started", timeout_s=90)
        terminal.expect("> ")
        server = _children(terminal.process.pid)[0]

        def hang_up() -> bool:  # again: a signal just before it waits for keys is seen with the next one
            terminal.process.send_signal(signal.SIGHUP)
            return terminal.process.poll() is not None

        wait_for(hang_up, timeout_s=60, what="its end")
        assert terminal.process.returncode == 128 + signal.SIGHUP
    assert not Path(f"/proc/{server}").exists()
    assert list(tmp_path.glob("quire-*")) == []


@pytest.mark.full
def test_a_killed_chat_takes_its_server_along(env, tmp_path: Path):
    model = str(ROOT / "models" / "demo" / "checkpoint")
    with Terminal("chat", model, env={**env, "TMPDIR": str(tmp_path)}) as terminal:
        terminal.expect("Started", timeout_s=90)
        server = _children(terminal.process.pid)[0]
        os.kill(terminal.process.pid, signal.SIGKILL)
        terminal.process.wait(60)
        wait_for(lambda: not Path(f"/proc/{server}").exists() or _is_zombie(server), timeout_s=60, what="its end")


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
