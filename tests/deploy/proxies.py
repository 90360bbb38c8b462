"""nginx and haproxy with the configurations of deploy/, on free ports and in folders of their own."""

import socket
import subprocess
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.router import NGINX_CONFIG
from tests.deploy.conftest import need
from tests.support.daemon import ROOT, Daemon, wait_for


def nginx(folder: Path, port: int, replicas: Sequence[str]) -> list[str]:
    """Write nginx's configuration; return the command that runs it."""
    site = (ROOT / "deploy/nginx/quire.conf").read_text()
    (folder / "quire.conf").write_text(_moved(site, "listen 8080", f"listen 127.0.0.1:{port}", replicas))
    user = f"user {folder.owner()};"
    (folder / "nginx.conf").write_text(NGINX_CONFIG.format(folder=folder, user=user, num_processes=1))
    return [need("nginx", package="nginx"), "-c", str(folder / "nginx.conf"), "-p", str(folder)]


def haproxy(folder: Path, port: int, replicas: Sequence[str]) -> list[str]:
    """Write haproxy's configuration; return the command that runs it."""
    config = (ROOT / "deploy/haproxy/haproxy.cfg").read_text()
    (folder / "haproxy.cfg").write_text(_moved(config, "bind :8080", f"bind 127.0.0.1:{port}", replicas))
    return [need("haproxy", package="haproxy"), "-db", "-f", str(folder / "haproxy.cfg")]


PROXIES: dict[str, Callable[[Path, int, Sequence[str]], list[str]]] = {"nginx": nginx, "haproxy": haproxy}


@contextmanager
def running(name: str, folder: Path, replicas: Sequence[Daemon]):
    """Run a proxy before two replicas; give its URL."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = PROXIES[name](folder, port, [replica.base_url.removeprefix("http://") for replica in replicas])
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        wait_for(lambda: _listens(port) or process.poll() is not None, timeout_s=20, what=f"{name} listens")
        assert process.poll() is None, log.read_text()
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)


def _moved(text: str, old_listen: str, new_listen: str, replicas: Sequence[str]) -> str:
    """Return a configuration with this test's ports; all else stays as it is published."""
    changes = {old_listen: new_listen, "127.0.0.1:8000": replicas[0], "127.0.0.1:8001": replicas[1]}
    for old in changes:
        assert text.count(old) == 1, f"{old} is not in it once"
    for old, new in reversed(changes.items()):
        text = text.replace(old, new)
    return text


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0
