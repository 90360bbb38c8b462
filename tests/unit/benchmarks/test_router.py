"""benchmarks.router: what --router finds, its configuration and its end; benchmarks.replicas behind a real nginx."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks import router
from benchmarks.report import BenchError
from tests.support.daemon import ROOT, is_alive

# Stands for a router: answers /v1/models on its --port, and writes its pid
SERVING = """#!{python}
import http.server, os, pathlib, signal, sys
signal.signal(signal.SIGTERM, {action})
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
pathlib.Path({pid!r}).write_text(str(os.getpid()))
print("listens", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Answer).serve_forever()
"""


def program(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def found(word: str, folder: Path) -> router.RouterProgram:
    result = router.find_router(word, folder)
    assert result is not None
    return result


def test_none_is_no_router(tmp_path: Path) -> None:
    assert router.find_router("none", tmp_path) is None


def test_one_that_is_not_installed_is_refused_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(BenchError, match=r"pip install vllm-router==.*pip download .*--router none"):
        router.find_router("vllm-router", tmp_path)
    with pytest.raises(BenchError, match="apt-get install nginx"):
        router.find_router("nginx", tmp_path)


def test_the_version_that_is_named_is_the_pinned_one() -> None:
    pinned = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if "vllm-router" in line)
    with pytest.raises(BenchError, match=pinned):
        router.find_router("/no/such/file", Path())


def test_a_wheel_is_unpacked_and_runs_without_its_dependencies(tmp_path: Path) -> None:
    wheel = tmp_path / "vllm_router-9.8.7-cp38-abi3-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm_router/version.py", '__version__ = "9.8.7"')
        archive.writestr("vllm_router_rs.abi3.so", "")
    folder = tmp_path / "unpacked"
    folder.mkdir()
    for word in (str(wheel), str(folder)):  # then the folder itself
        result = found(word, folder)
        assert result.facts() == {"name": "vllm-router", "version": "9.8.7", "policy": "round_robin"}
        assert result.environment == {"PYTHONPATH": str(folder)}


@pytest.mark.parametrize("content", [b"no zip", None])
def test_a_file_that_is_no_wheel_of_it_is_refused(tmp_path: Path, content: bytes | None) -> None:
    wheel = tmp_path / "other-1.0-py3-none-any.whl"
    if content is None:
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("other.py", "")
    else:
        wheel.write_bytes(content)
    folder = tmp_path / "unpacked"
    folder.mkdir()
    with pytest.raises(BenchError, match=r"other.*\.whl"):
        router.find_router(str(wheel), folder)


def test_nginx_gets_all_servers_and_else_what_deploy_says(tmp_path: Path) -> None:
    path = program(tmp_path / "nginx", "#!/bin/sh\necho 'nginx version: nginx/1.2.3' >&2\n")
    assert found(path, tmp_path).facts() == {"name": "nginx", "version": "1.2.3", "policy": "least_conn"}
    router._nginx_flags(8009, [8001, 8002, 8003, 8004], tmp_path)
    ours = (tmp_path / "quire.conf").read_text()
    theirs = (ROOT / "deploy/nginx/quire.conf").read_text()
    assert [line.split()[1] for line in ours.splitlines() if line.startswith("    server ")] == [
        f"127.0.0.1:{port}" for port in (8001, 8002, 8003, 8004)
    ]
    kept = [[line for line in text.splitlines() if "127.0.0.1" not in line] for text in (ours, theirs)]
    assert kept[0] == [line for line in kept[1] if "listen" not in line]


@pytest.mark.parametrize("action", ["signal.SIG_DFL", "signal.SIG_IGN"])
def test_its_process_ends_with_the_block_even_if_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    monkeypatch.setattr(router, "_STOP_S", 0.3)
    text = SERVING.format(python=sys.executable, action=action, pid=str(tmp_path / "pid"))
    result = found(program(tmp_path / "vllm-router", text), tmp_path)
    with (
        pytest.raises(ZeroDivisionError),
        router.running_router(result, port=free_port(), servers=[1], folder=tmp_path),
    ):
        _ = 1 / 0
    assert not is_alive(int((tmp_path / "pid").read_text()))


def test_one_that_ends_or_never_answers_is_named_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router, "_START_S", 0.5)
    ends = found(program(tmp_path / "vllm-router", "#!/bin/sh\necho out of ports; exit 3\n"), tmp_path)
    with (
        pytest.raises(BenchError, match="vllm-router ended with 3: out of ports"),
        router.running_router(ends, port=free_port(), servers=[1], folder=tmp_path),
    ):
        pass
    waits = found(program(tmp_path / "vllm-router", "#!/bin/sh\nexec sleep 60\n"), tmp_path)
    with (
        pytest.raises(BenchError, match=r"vllm-router was not ready within 0\.5 s: it said nothing"),
        router.running_router(waits, port=free_port(), servers=[1], folder=tmp_path),
    ):
        pass


@pytest.mark.full
@pytest.mark.skipif(not os.access("/usr/sbin/nginx", os.X_OK), reason="nginx is not installed")
def test_replicas_are_loaded_alone_together_and_behind_nginx(tmp_path: Path) -> None:
    flags = ["--device", "cpu", "--dtype", "float32", "--kv-cache-memory", "64MiB", "--http-workers", "1"]
    load = ["--concurrency", "2", "--rounds", "2", "--input-len", "8", "--output-len", "4", "--processes", "1"]
    port = free_port()  # and two more, which are as free as a rule
    command = [sys.executable, "-m", "benchmarks.replicas", "--shape", "tiny", "--replicas", "2", "--port", str(port)]
    command += [*flags, *load, "--router", "nginx", "--json", str(tmp_path / "out.json")]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        _, errors = process.communicate(timeout=90)
    finally:
        process.send_signal(signal.SIGTERM)
    assert process.returncode == 0, errors
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["router"]["name"] == "nginx"
    assert sum(report["router"]["requests_by_server"]) == 8 + 32
    assert min(report["router"]["requests_by_server"]) > 0
    for name, count in (("one", 4), ("all", 8), ("calm", 32), ("all routed", 8), ("calm routed", 32)):
        assert (report[name]["num_completed"], report[name]["num_failed"]) == (count, 0)
        assert report[name]["median_ttft_ms"] > 0
