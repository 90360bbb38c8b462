"""The images' health check finds the server however it was told where to listen; docker exec runs it as this does."""

import subprocess
import sys
from pathlib import Path

import pytest
import trustme

from tests.integration.conftest import needs_proc
from tests.support.daemon import ROOT, Daemon

pytestmark = needs_proc
CHECK = [sys.executable, str(ROOT / "deploy/docker/healthcheck.py")]


@pytest.fixture
def tmpdir_variable(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A TMPDIR of this test's own, so that no other server is found."""
    return {"TMPDIR": str(tmp_path_factory.mktemp("t"))}


def check(variables: dict[str, str], *addresses: str) -> tuple[int, str]:
    """Run it; return its exit code and what it said."""
    done = subprocess.run([*CHECK, *addresses], env=variables, stdout=subprocess.PIPE, text=True, timeout=60)
    return done.returncode, done.stdout


@pytest.mark.parametrize("how", ["variable", "flag", "file", "unix socket", "TLS", "TLS on a unix socket"])
@pytest.mark.table(most=1)
def test_it_follows_what_the_server_listens_on(how: str, tmp_path: Path, tmpdir_variable: dict[str, str]) -> None:
    flags, variables, expected = _configured(how, tmp_path)
    with Daemon("--device", "cpu", *flags, folder=tmp_path, env={**tmpdir_variable, **variables}) as daemon:
        daemon.wait_ready()
        code, said = check(tmpdir_variable)
        assert (code, said.partition(" ")[0].partition(":")[0]) == (0, expected), said
        assert '"ready"' in said
        address = said.partition(" ")[0]
        assert check({}, address)[0] == 0
    code, said = check(tmpdir_variable, address)
    assert code == 1
    assert "does not answer" in said


def _configured(how: str, folder: Path) -> tuple[list[str], dict[str, str], str]:
    """Flags, variables and the kind of address of one way to say where to listen."""
    issued = trustme.CA().issue_cert("localhost")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    issued.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    tls = ["--tls-cert", str(folder / "cert.pem"), "--tls-key", str(folder / "key.pem")]
    unix = ["--uds", str(folder / "q.sock")]
    (folder / "quire.yaml").write_text("host: 127.0.0.2\nroot-path: /llm\n")
    return {
        "variable": ([], {"QUIRE_HOST": "127.0.0.3"}, "http"),
        "flag": (["--host", "::1"], {}, "http"),
        "file": (["--config", str(folder / "quire.yaml")], {}, "http"),
        "unix socket": (unix, {}, "unix"),
        "TLS": (tls, {}, "https"),
        "TLS on a unix socket": ([*unix, *tls], {}, "unix+tls"),
    }[how]


@pytest.mark.full
def test_a_server_that_loads_is_not_healthy_yet_and_none_is_said_to_be_none(
    tmp_path: Path, tmpdir_variable: dict[str, str]
) -> None:
    code, said = check(tmpdir_variable)
    assert (code, said.partition(":")[0]) == (1, "no server has said where it listens")
    with Daemon("--device", "cpu", folder=tmp_path, env=tmpdir_variable) as daemon:
        address = daemon.base_url
        code, said = check({}, address)
        assert code == 1, said
        daemon.wait_ready()
        assert check(tmpdir_variable)[0] == 0
