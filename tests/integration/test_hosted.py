"""Our app in somebody else's server: the daemon behind it is real, and goes with its host."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from engine.interface.errors import StartupError
from server.hosted.app import HostedApp
from tests.integration.conftest import needs_proc
from tests.support.daemon import ROOT, wait_for

FLAGS = ["--max-model-len=512", "--kv-cache-memory=64MiB"]
pytestmark = needs_proc


@pytest.fixture(autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run directories of this test; one thread suits the tiny model."""
    path = tmp_path_factory.mktemp("run")
    monkeypatch.setattr("tempfile.tempdir", str(path))
    monkeypatch.setenv("TMPDIR", str(path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return path


def client_of(app: object) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://host", timeout=60)  # type: ignore[arg-type]


def running(module: str, *, under: Path) -> list[int]:
    """Return the pids of the processes of a module whose configuration lies in a folder."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = entry.read_text().split("\0")
            if module in words and any(word.startswith(str(under)) for word in words):
                pids.append(int(entry.parent.name))
    return pids


async def until(condition: Callable[[], object], what: str) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.05)
    assert condition(), what


def test_an_app_serves_as_it_would_alone_and_leaves_nothing(folder: Path) -> None:
    async def life() -> None:
        hosted = HostedApp(["--served-model-name=here", *FLAGS])
        assert hosted.fault
        app = await hosted.start()
        assert not hosted.fault
        async with client_of(app) as client:
            body = {"model": "here", "prompt": "A quire", "max_tokens": 7, "ignore_eos": True}
            answer = (await client.post("/v1/completions", json=body)).json()
            assert answer["usage"]["completion_tokens"] == 7
            assert (await client.get("/ready")).status_code == 200
        page = (await hosted.metrics_page()).decode()
        assert 'quire_generation_tokens_total{model_name="here"} 7.0' in page
        await hosted.aclose()
        assert hosted.fault

    asyncio.run(life())
    assert not running("engine.process", under=folder)
    assert not list(folder.iterdir())


def test_an_engine_that_dies_is_a_fault_until_the_next_one_serves(folder: Path) -> None:
    async def life() -> None:
        hosted = HostedApp(FLAGS)
        async with client_of(await hosted.start()) as client:
            os.kill(running("engine.process", under=folder)[0], signal.SIGKILL)
            await until(lambda: hosted.fault, "the fault")
            assert hosted.fault in ("the engine has died", "the connection to its engine is lost")  # whichever is first
            assert hosted.is_alive  # another one comes
            assert (await client.get("/ready")).status_code == 503
            await until(lambda: not hosted.fault, "the next engine")
            reply = await client.post("/v1/completions", json={"prompt": "A quire", "max_tokens": 3})
            assert reply.status_code == 200
        os.kill(running("server.hosted.daemon", under=folder)[0], signal.SIGKILL)
        await until(lambda: "SIGKILL" in hosted.fault, "the launcher's end")
        assert not hosted.is_alive
        await hosted.aclose()

    asyncio.run(life())
    wait_for(lambda: not running("engine.process", under=folder), timeout_s=60, what="the engine's end")


def test_sighup_of_the_daemon_reads_the_keys_again(folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("old\n")

    async def status(client: httpx.AsyncClient, key: str) -> int:
        return (await client.get("/v1/models", headers={"authorization": f"Bearer {key}"})).status_code

    async def life() -> None:
        hosted = HostedApp(["--api-key=given", f"--api-key-file={keys}", *FLAGS])
        async with client_of(await hosted.start()) as client:
            assert [await status(client, key) for key in ("given", "old", "new")] == [200, 200, 401]
            keys.write_text("new\n")
            os.kill(running("server.hosted.daemon", under=folder)[0], signal.SIGHUP)
            async with asyncio.timeout(30):
                while await status(client, "new") != 200:
                    await asyncio.sleep(0.05)
            assert [await status(client, key) for key in ("given", "old")] == [200, 401]
        await hosted.aclose()

    asyncio.run(life())
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["./no-such-model"], "MODEL './no-such-model' is no folder"),
        (["--max-model-len=900000"], "--max-model-len 900000"),
    ],
)
def test_what_cannot_start_says_why_and_leaves_nothing(folder: Path, flags: list[str], reason: str) -> None:
    with pytest.raises(StartupError) as caught:
        asyncio.run(HostedApp(flags).start())
    assert reason in caught.value.message
    assert not list(folder.iterdir())


def test_a_flag_of_the_port_is_refused_before_anything_starts() -> None:
    with pytest.raises(StartupError, match="--port"):
        HostedApp(["--port=80"])


def test_the_daemon_goes_with_a_host_that_is_killed(folder: Path) -> None:
    code = f"""
import asyncio
from server.hosted.app import HostedApp
async def host():
    await HostedApp({FLAGS!r}).start()
    print("started", flush=True)
    await asyncio.sleep(600)
asyncio.run(host())
"""
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE) as host:
        assert host.stdout is not None
        assert host.stdout.readline() == b"started\n"
        assert running("engine.process", under=folder)
        host.kill()
    wait_for(lambda: not running("engine.process", under=folder), timeout_s=60, what="the engine's end")
    wait_for(lambda: not list(folder.iterdir()), timeout_s=60, what="the run directory's end")
