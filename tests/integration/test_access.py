"""Keys, TLS, a unix socket and a path prefix on real daemons, through the clients that meet them."""

import os
import signal
import socket
import ssl
import stat
import subprocess
import sys
from pathlib import Path

import httpx
import openai
import pytest
import trustme

from tests.integration.conftest import needs_proc
from tests.support.daemon import ROOT, Daemon, wait_for

BODY = {"prompt": "A quire", "max_tokens": 3, "temperature": 0, "ignore_eos": True}
KEY = "sk-in-the-file"


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def tls_files(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Write a certificate for this machine and its key."""
    folder = tmp_path_factory.mktemp("tls")
    issued = authority.issue_cert("127.0.0.1", "localhost")
    (folder / "cert.pem").write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(folder / "key.pem")
    return folder / "cert.pem", folder / "key.pem"


@pytest.fixture(scope="module")
def secure(tls_files: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory):
    """A daemon with everything at once: keys from file and environment, TLS, a prefix, an origin."""
    folder = tmp_path_factory.mktemp("secure")
    (folder / "keys").write_text(f"{KEY}\n")
    flags = ["--device", "cpu", "--http-workers", "2", "--api-key-file", str(folder / "keys"), "--root-path", "/llm"]
    flags += ["--tls-cert", str(tls_files[0]), "--tls-key", str(tls_files[1]), "--cors-origin", "https://chat.test"]
    with Daemon(*flags, folder=folder, env={"QUIRE_API_KEY": "sk-in-the-environment"}) as daemon:
        yield daemon.wait_ready()


@pytest.fixture
def trust(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


def test_the_openai_client_gets_in_over_https_with_its_key_alone(secure: Daemon, trust: ssl.SSLContext) -> None:
    assert secure.base_url.startswith("https://127.0.0.1:")
    with httpx.Client(verify=trust) as http:
        for prefix in ("", "/llm"):
            for key in (KEY, "sk-in-the-environment"):
                client = openai.OpenAI(base_url=f"{secure.base_url}{prefix}/v1", api_key=key, http_client=http)
                stream = client.completions.create(
                    model="quire-demo", prompt="A quire", max_tokens=3, stream=True, extra_body={"ignore_eos": True}
                )
                assert [c.choices[0].finish_reason for c in stream if c.choices][-1] == "length"
        stranger = openai.OpenAI(base_url=f"{secure.base_url}/v1", api_key="sk-guess", http_client=http, max_retries=0)
        with pytest.raises(openai.AuthenticationError) as caught:
            stranger.models.list()
        assert caught.value.code == "invalid_api_key"
        assert http.get(secure.base_url + "/ready").status_code == 200
        assert http.get(secure.base_url + "/metrics").status_code == 401


def test_what_is_not_http_gets_its_400_over_tls_too(secure: Daemon, trust: ssl.SSLContext) -> None:
    host, port = secure.base_url.removeprefix("https://").split(":")
    with (
        socket.create_connection((host, int(port)), timeout=60) as plain,
        trust.wrap_socket(plain, server_hostname=host) as sock,
    ):
        sock.sendall(b"NONSENSE\r\n\r\n")
        assert sock.recv(100).startswith(b"HTTP/1.1 400 ")
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://{host}:{port}/health")  # plain HTTP on a TLS port
    assert httpx.get(f"{secure.base_url}/health", verify=trust).status_code == 200
    assert "Traceback" not in secure.log


def served_certificate(url: str) -> bytes:
    """Return the certificate of a new connection, whoever signed it."""
    host, port = url.removeprefix("https://").split(":")
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection((host, int(port)), timeout=60) as plain, context.wrap_socket(plain) as connection:
        return connection.getpeercert(binary_form=True) or b""


# rule: Security: SIGHUP reads the TLS certificate again, in every worker; broken files change nothing
@pytest.mark.full
def test_sighup_reads_the_certificate_again_and_connections_go_on(authority: trustme.CA, tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"

    def renew() -> None:
        issued = authority.issue_cert("127.0.0.1")
        cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(key)

    renew()
    flags = ["--device", "cpu", "--http-workers", "2", "--tls-cert", str(cert), "--tls-key", str(key)]
    with Daemon(*flags, folder=tmp_path) as daemon:
        daemon.wait_ready()
        url = daemon.base_url
        old = served_certificate(url)
        with httpx.Client(verify=False) as http:  # keeps its connection
            assert http.get(url + "/health").status_code == 200
            renew()
            daemon.process.send_signal(signal.SIGHUP)
            wait_for(lambda: all(served_certificate(url) != old for _ in range(12)), timeout_s=60, what="the new one")
            assert http.get(url + "/health").status_code == 200
            assert len({served_certificate(url) for _ in range(12)}) == 1
        new = served_certificate(url)
        key.write_text("broken")
        daemon.process.send_signal(signal.SIGHUP)
        wait_for(lambda: "tls certificate not reloaded, the old one stays" in daemon.log, timeout_s=60, what="log line")
        assert {served_certificate(url) for _ in range(6)} == {new}
        assert "tls certificate reloaded" in daemon.log


# rule: Security: No key and no text in logs and errors
@needs_proc
def test_no_key_is_in_any_childs_arguments_environment_files_or_the_log(secure: Daemon) -> None:
    children = secure.children()
    assert len(children) == 3
    for pid in children:
        for name in ("cmdline", "environ"):
            content = Path(f"/proc/{pid}/{name}").read_bytes()
            assert b"sk-in-the" not in content
    command = Path(f"/proc/{secure.child('server.http.worker')}/cmdline").read_text().split("\0")
    for path in Path(command[3]).parent.glob("*.json"):
        assert "sk-in-the" not in path.read_text()
    assert "sk-in-the" not in secure.log
    assert "API key (2 known)" in secure.log


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tls-cert", "CERT"], "--tls-cert needs --tls-key"),
        (["--tls-key", "KEY"], "--tls-key needs --tls-cert"),
        (["--tls-cert", "CERT", "--tls-key", "/no/such"], "--tls-key /no/such cannot be read"),
        (["--tls-cert", "KEY", "--tls-key", "CERT"], "cannot be used"),
        (["--tls-cert", "CERT", "--tls-key", "OTHER"], "key values mismatch"),
        (["--uds", "x.sock", "--port", "80"], "--port 80 exclude each other"),
        (["--uds", "x.sock", "--host", "::1"], "--host ::1 exclude each other"),
        (["--uds", "/" + "x" * 120], "the limit is 107"),
        (["--uds", "CERT"], "is a file that is no socket"),
        (["--uds", "/no/such/folder/x.sock"], "cannot be bound: No such file or directory"),
        (["--cors-origin", "https://a.test/path"], "--cors-origin: 'https://a.test/path' is not an origin"),
        (["--root-path", "llm/"], "--root-path: 'llm/' is not a path"),
    ],
)
@pytest.mark.table(most=4)
def test_flags_that_cannot_work_are_named_at_the_start(
    authority: trustme.CA, tls_files: tuple[Path, Path], tmp_path: Path, flags: list[str], words: str
) -> None:
    authority.issue_cert("other.test").private_key_pem.write_to_path(tmp_path / "other.pem")
    files = {"CERT": str(tls_files[0]), "KEY": str(tls_files[1]), "OTHER": str(tmp_path / "other.pem")}
    command = [sys.executable, "-m", "server", "serve", *(files.get(flag, flag) for flag in flags)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert done.returncode in (2, 3)
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert tls_files[0].exists()


@pytest.fixture
def socket_path(tmp_path: Path) -> Path:
    return tmp_path / "q.sock"


def complete(path: Path) -> httpx.Response:
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://quire", timeout=60) as http:
        return http.post("/v1/completions", json=BODY)


@pytest.mark.full
def test_several_workers_serve_one_unix_socket_that_goes_with_the_daemon(tmp_path: Path, socket_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(socket_path))  # left by a daemon that was killed: nobody listens
    flags = ["--device", "cpu", "--http-workers", "2", "--uds", str(socket_path)]
    with Daemon(*flags, folder=tmp_path) as daemon:
        daemon.wait_ready()
        assert daemon.base_url == f"unix:{socket_path}"
        assert stat.S_IMODE(os.stat(socket_path).st_mode) == 0o660
        transport = httpx.HTTPTransport(uds=str(socket_path))
        with openai.OpenAI(
            base_url="http://quire/v1", api_key="none", http_client=httpx.Client(transport=transport)
        ) as client:
            assert [model.id for model in client.models.list()] == ["quire-demo"]
        for _ in range(4):
            assert complete(socket_path).status_code == 200
        refused = subprocess.run(
            [sys.executable, "-m", "server", "serve", "--uds", str(socket_path)],
            cwd=ROOT, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert refused.returncode == 3
        assert f"--uds {socket_path} is in use" in refused.stderr
        assert complete(socket_path).status_code == 200
    wait_for(lambda: daemon.process.poll() is not None, timeout_s=60, what="the end")
    assert not socket_path.exists()
