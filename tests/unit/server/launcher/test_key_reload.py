"""Reading the key file again: what changes, what stays when it is broken, and who is told."""

import asyncio
import logging
from pathlib import Path

import pytest

from engine.interface.config import LaunchConfig
from engine.interface.control import Stage, State
from engine.interface.metrics import Metrics
from engine.interface.tenant import Tenant
from server.config.api_keys import KeyRing, file_notices, read_file_hashes, read_key_hashes
from server.http.launcher_link import LauncherLink
from server.launcher.control_server import ControlServer, KeyReloader
from server.launcher.metrics_registry import MetricsRegistry


class Reloaded:
    """A reloader over a file, with what it handed on."""

    def __init__(self, folder: Path, text: str) -> None:
        self.file = folder / "keys"
        self.file.write_text(text)
        self.given = read_key_hashes(["of-the-flag"], file=None, environment={})
        self.sent: list[list[str]] = []
        self.roles: list[dict[str, list[str]]] = []
        self.tenants: list[dict[str, Tenant]] = []
        config = LaunchConfig(api_key_file=str(self.file), given_key_hashes=self.given)
        self.reloader = KeyReloader(config, [*self.given, *read_file_hashes(str(self.file))], self.keep)

    def keep(self, hashes: list[str], roles: dict[str, list[str]], tenants: dict[str, Tenant]) -> None:
        self.sent.append(hashes)
        self.roles.append(roles)
        self.tenants.append(tenants)


def test_keys_of_the_file_change_and_the_others_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    reloaded = Reloaded(tmp_path, "one\ntwo\n")
    reloaded.file.write_text("two\nthree\n")
    asyncio.run(reloaded.reloader.reload())
    ring = KeyRing([], newer=lambda: reloaded.sent[-1])
    assert all(ring.find(key) for key in ("of-the-flag", "two", "three"))
    assert ring.find("one") is None
    assert "keys=3 added=1 removed=1" in caplog.text
    assert "three" not in caplog.text


# rule: Security: A key of the file may have roles: inference, metrics, admin, priority
def test_roles_of_the_file_change_too(tmp_path: Path) -> None:
    reloaded = Reloaded(tmp_path, "one\n")
    reloaded.file.write_text("one metrics\n")
    asyncio.run(reloaded.reloader.reload())
    ring = KeyRing([], newer=lambda: reloaded.sent[-1], newer_roles=lambda: reloaded.roles[-1])
    assert ring.roles_of(ring.find("one") or "") == ["metrics"]
    assert ring.roles_of(ring.find("of-the-flag") or "") == ["inference", "metrics", "admin"]


def test_names_and_limits_of_the_file_change_too(tmp_path: Path) -> None:
    reloaded = Reloaded(tmp_path, "one name=team weight=2\n")
    reloaded.file.write_text("one name=team weight=3\n")
    asyncio.run(reloaded.reloader.reload())
    ring = KeyRing([], newer=lambda: reloaded.sent[-1], newer_tenants=lambda: reloaded.tenants[-1])
    assert ring.tenant_of(ring.find("one") or "") == Tenant(name="team", weight=3)
    assert ring.tenant_of(ring.find("of-the-flag") or "") == Tenant()


# rule: Security: SIGHUP reads the key file again, in every worker; a broken file changes nothing; streams go on
@pytest.mark.parametrize("content", [None, b"# none\n", b"a key\n", b"\xff\n"])
def test_a_broken_file_keeps_the_old_keys_and_says_so_in_one_line(
    content: bytes | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reloaded = Reloaded(tmp_path, "one\n")
    reloaded.file.unlink() if content is None else reloaded.file.write_bytes(content)
    asyncio.run(reloaded.reloader.reload())
    assert reloaded.sent == []
    (record,) = caplog.records
    assert "api keys not reloaded, the old ones stay valid: --api-key-file" in record.message
    reloaded.file.write_text("one\nfour\n")
    asyncio.run(reloaded.reloader.reload())
    assert len(reloaded.sent[-1]) == 3


def test_without_a_file_it_does_nothing(caplog: pytest.LogCaptureFixture) -> None:
    asyncio.run(KeyReloader(LaunchConfig(), ["a"], lambda hashes, roles: pytest.fail("told")).reload())
    assert "SIGHUP has no effect without --api-key-file" in caplog.text


def test_a_worker_that_comes_later_has_the_new_keys_before_it_serves(tmp_path: Path) -> None:
    async def run() -> None:
        control = ControlServer(
            registry=MetricsRegistry(model_name="tiny", version="1"), on_message=lambda hello, message: None
        )
        path = str(tmp_path / "control.sock")
        await control.start(path)
        control.set_keys(["new"])
        worker = LauncherLink(path, worker_index=0, metrics=Metrics(), on_cancel=lambda request_id, *, key_hash: False)
        await worker.start()
        assert (worker.key_hashes, worker.state) == (["new"], State(Stage("imports"), False))
        control.set_keys(["newer"])
        while worker.key_hashes != ["newer"]:
            await asyncio.sleep(0.005)
        await worker.aclose()
        await control.aclose()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_file_that_all_may_read_is_a_warning_at_each_reload(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reloaded = Reloaded(tmp_path, "one\n")
    for mode, said in ((0o600, False), (0o640, False), (0o644, True), (0o604, True)):
        reloaded.file.chmod(mode)
        assert bool(file_notices(str(reloaded.file))) == said
        caplog.clear()
        asyncio.run(reloaded.reloader.reload())
        assert (f"chmod o-r {reloaded.file}" in caplog.text) == said
    assert file_notices(None) == file_notices(str(tmp_path / "none")) == []
