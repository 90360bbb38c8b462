"""A router in front of the servers of one host: vllm-router or nginx, as docs/how-to describes them, for measurements.

find_router() → RouterProgram → running_router(). A machine without internet gets vllm-router as its wheel, one file of
24 MB: unpacked, it runs with the standard library alone.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.report import BenchError, Report
from engine.interface.child_process import PROJECT_ROOT, die_with_parent

NONE = "none"
VLLM_ROUTER, NGINX = "vllm-router", "nginx"
HELP = (
    f"{VLLM_ROUTER} or {NGINX}, if it is installed; or the path of vllm-router's wheel, of a folder that it is unpacked"
    f" in, or of either program; {NONE}: the servers alone ({VLLM_ROUTER})"
)
_INSTALL = {
    VLLM_ROUTER: (
        "pip install vllm-router==0.1.17; or carry one file: pip download --no-deps --only-binary :all: --dest ."
        " vllm-router==0.1.17, and --router FILE.whl"
    ),
    NGINX: "apt-get install nginx",
}
_START_S, _STOP_S = 30.0, 5.0
_POLL_S = 0.02
# Its own launcher imports packages for modes that no measurement uses
_LAUNCH = """
import argparse
from vllm_router.router import Router
from vllm_router.router_args import RouterArgs
parser = argparse.ArgumentParser()
RouterArgs.add_cli_args(parser, use_router_prefix=False)
Router.from_args(RouterArgs.from_cli_args(parser.parse_args(), use_router_prefix=False)).start()
"""
NGINX_CONFIG = """
daemon off;
worker_processes {num_processes};
error_log {folder}/error.log;
pid {folder}/nginx.pid;
{user}
events {{ worker_connections 4096; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/quire.conf;
}}
"""
_UPSTREAM = re.compile(r"^ *server 127\.0\.0\.1:\d+( [^;\n]*)?;\n", re.MULTILINE)


@dataclass(frozen=True)
class RouterProgram:
    """A router of this machine. command: the program, before its flags; environment: added to this process's."""

    name: str
    version: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def policy(self) -> str:
        """How it chooses a server: as the pages on routers recommend for requests that share nothing."""
        return "round_robin" if self.name == VLLM_ROUTER else "least_conn"

    def facts(self) -> Report:
        """Return what a report says of it."""
        return {"name": self.name, "version": self.version, "policy": self.policy}


def find_router(word: str, folder: Path) -> RouterProgram | None:
    """Return the router of a name or path; None for "none". Raises BenchError, which says what to install.

    folder: an empty one, for the files of a wheel. They must outlive the router.
    """
    if word == NONE:
        return None
    if word in _INSTALL:
        beside = Path(sys.executable).parent / word
        found = str(beside) if beside.is_file() else shutil.which(word) or shutil.which(word, path="/usr/sbin")
        if found is None:
            raise BenchError(f"--router {word}: it is not installed ({_INSTALL[word]}). --router {NONE} goes without.")
        return _of_program(word, Path(found))
    path = Path(word).resolve()
    if path.suffix == ".whl" and path.is_file():
        _unpack(path, folder)
        return _of_folder(word, folder)
    if path.is_dir():
        return _of_folder(word, path)
    names = [name for name in _INSTALL if path.name.startswith(name)]
    if names and os.access(path, os.X_OK):
        return _of_program(names[0], path)
    words = f"choose {VLLM_ROUTER}, {NGINX}, {NONE}, or a path of the two: {_INSTALL[VLLM_ROUTER]}"
    raise BenchError(f"--router {word}: there is no such router ({words}).", exit_code=2)


@contextlib.contextmanager
def running_router(program: RouterProgram, *, port: int, servers: Sequence[int], folder: Path) -> Iterator[None]:
    """Run it on a port of loopback before servers on these ports, which are ready. Raises BenchError if it fails.

    folder: for its configuration and its log. Its process ends with the block, and with this process.
    """
    flags = _nginx_flags(port, servers, folder) if program.name == NGINX else _vllm_router_flags(port, servers)
    log = folder / "router.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*program.command, *flags],
            env={**os.environ, **program.environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            preexec_fn=die_with_parent,
        )
    try:
        _wait_until_ready(process, program.name, port, log)
        yield
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _of_program(name: str, path: Path) -> RouterProgram:
    if name == NGINX:
        said = subprocess.run([path, "-v"], capture_output=True, text=True, timeout=10, check=False).stderr
        version = said.strip().rpartition("/")[2]
    else:
        found = next(path.resolve().parent.parent.glob("lib/python*/site-packages/vllm_router-*.dist-info"), None)
        version = found.name.split("-")[1].removesuffix(".dist") if found else ""
    return RouterProgram(name, version or "unknown", (str(path),))


def _of_folder(word: str, folder: Path) -> RouterProgram:
    file = folder / "vllm_router/version.py"
    if not file.is_file() or not any(folder.glob("vllm_router_rs*.so")):
        raise BenchError(f"--router {word}: there is no vllm-router in it ({_INSTALL[VLLM_ROUTER]}).", exit_code=2)
    version = re.search(r'"([^"]+)"', file.read_text())
    command = (sys.executable, "-s", "-c", _LAUNCH)
    return RouterProgram(VLLM_ROUTER, version[1] if version else "unknown", command, {"PYTHONPATH": str(folder)})


def _unpack(wheel: Path, folder: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    except (zipfile.BadZipFile, OSError) as error:
        raise BenchError(f"--router {wheel.name}: it cannot be unpacked ({error}).") from error


def _vllm_router_flags(port: int, servers: Sequence[int]) -> list[str]:
    """Return the flags of docs/how-to/several-gpus.md, but with turns instead of a policy that looks for prefixes."""
    flags = ["--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin", "--log-level", "warning"]
    flags += ["--worker-urls", *(f"http://127.0.0.1:{server}" for server in servers)]
    flags += ["--worker-startup-check-interval", "1", "--worker-startup-timeout-secs", str(int(_START_S))]
    return [*flags, "--health-check-endpoint", "/ready", "--health-check-interval-secs", "2"]


def _nginx_flags(port: int, servers: Sequence[int], folder: Path) -> list[str]:
    """Write deploy/nginx/quire.conf for these ports, all else as published, and what surrounds it; return the flags."""
    site = (PROJECT_ROOT / "deploy/nginx/quire.conf").read_text().replace("listen 8080", f"listen 127.0.0.1:{port}")
    lines = iter(["".join(f"    server 127.0.0.1:{server} max_fails=1 fail_timeout=5s;\n" for server in servers)])
    (folder / "quire.conf").write_text(_UPSTREAM.sub(lambda _: next(lines, ""), site))
    user = f"user {folder.owner()};" if os.geteuid() == 0 else ""
    num_processes = min(len(servers), os.cpu_count() or 1)
    (folder / "nginx.conf").write_text(NGINX_CONFIG.format(folder=folder, user=user, num_processes=num_processes))
    return ["-c", str(folder / "nginx.conf"), "-p", str(folder)]


def _wait_until_ready(process: subprocess.Popen[bytes], name: str, port: int, log: Path) -> None:
    end_s = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < end_s:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5):  # nosec B310
                return
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            time.sleep(_POLL_S)
    how = f"was not ready within {_START_S:g} s" if process.poll() is None else f"ended with {process.returncode}"
    raise BenchError(f"{name} {how}: {log.read_text(errors='replace')[-500:].strip() or 'it said nothing'}")
