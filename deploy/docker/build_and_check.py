"""Build the cpu image without a container engine, run it as docker-compose.yml does, and send it a request.

`sudo python3 -m deploy.docker.build_and_check` in the repository's root, on Debian or Ubuntu with what PROGRAMS names.
Standard library only. buildah builds (isolation chroot, storage overlay or vfs) on a base that debootstrap makes in
place of the official Python image; runc runs it by deploy/docker/oci_bundle.py. All is made in one folder, and removed.
"""

import argparse
import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deploy.docker.oci_bundle import SECCOMP_PROFILE, write_bundle

ROOT = Path(__file__).resolve().parents[2]
_NO_KEY = {"QUIRE_ALLOW_ANONYMOUS": "true"}
PROGRAMS = {"buildah": "buildah", "debootstrap": "debootstrap", "runc": "runc"}
IMAGE, BASE = "localhost/quire:cpu", "localhost/quire-base:local"
START_TIMEOUT_S = 120.0
SPACE_GB = {"overlay": 6, "vfs": 30}  # vfs copies everything below a layer into it
DRAIN_S = 25.0  # --drain-timeout's default
QUESTION = {"model": "quire-demo", "messages": [{"role": "user", "content": "What is a quire?"}], "temperature": 0}
_ASK = """
import json, sys, urllib.request
headers = {"content-type": "application/json"}
request = urllib.request.Request("http://127.0.0.1:8000/v1/chat/completions", sys.argv[1].encode(), headers)
print(json.load(urllib.request.urlopen(request, timeout=30))["choices"][0]["message"]["content"])
"""
_LOOK = """
import os
status = dict(line.split(":", 1) for line in open("/proc/1/status"))
fields = {"uid": "Uid", "gid": "Gid", "capabilities": "CapBnd", "no_new_privs": "NoNewPrivs", "seccomp": "Seccomp"}
print(*(f"{label}={status[name].split()[0]}" for label, name in fields.items()))
assert os.statvfs("/").f_flag & os.ST_RDONLY, "the root is not read-only"
assert os.path.exists("/opt/quire/bin/quire") and open("/proc/1/cmdline").read().startswith("/opt/quire/bin/python")
"""
_INSIDE = "uid=10001 gid=10001 capabilities=0000000000000000 no_new_privs=1 seccomp="


class CheckFailed(Exception):
    """A failed check; the message is one sentence."""


def main() -> int:
    """Build, run, check, clean up; return the exit code."""
    arguments = _parser().parse_args()
    missing = sorted({package for program, package in PROGRAMS.items() if shutil.which(program) is None})
    if missing:
        print(f"{', '.join(missing)} missing: apt-get install {' '.join(missing)}", file=sys.stderr)
        return 2
    if os.geteuid() != 0:
        print("this mounts and changes users: run it as root", file=sys.stderr)
        return 2
    folder = Path(tempfile.mkdtemp(prefix="quire-image-", dir=arguments.work_dir))
    try:
        store = Store(folder, driver=arguments.storage_driver or _best_driver(folder))
        free_gb, needed_gb = shutil.disk_usage(folder).free / 1e9, SPACE_GB[store.driver]
        expect(
            free_gb > needed_gb, f"{store.driver} takes {needed_gb} GB, {free_gb:.0f} are free in {folder} (--work-dir)"
        )
        say(f"storage {store.driver} in {folder}")
        base = arguments.base_image or make_base(store, folder, suite=arguments.suite, mirror=arguments.mirror)
        build(store, base, arguments.buildah_flags)
        image = inspect(store)
        with started(store, folder, image, _NO_KEY) as container:
            check_running(container, image)
        with started(store, folder, image, {**_NO_KEY, "QUIRE_PORT": "9000"}) as container:
            wait_healthy(container, image, port=9000)
        return 0
    except CheckFailed as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"FAILED: {shlex.join(error.cmd)}\n{error.stdout or ''}", file=sys.stderr)
        return 1
    finally:
        if not arguments.keep:
            shutil.rmtree(folder)


class Store:
    """Runs buildah with its own storage."""

    def __init__(self, folder: Path, *, driver: str) -> None:
        self.driver = driver
        self._root = folder / "storage"
        self._flags = ["--root", str(self._root), "--runroot", str(folder / "run"), "--storage-driver", driver]

    def __call__(self, *arguments: str, is_shown: bool = False) -> str:
        """Run one buildah command and return what it prints. Raises CalledProcessError."""
        output = None if is_shown else subprocess.PIPE
        command = ["buildah", *self._flags, *arguments]
        done = subprocess.run(
            command, check=True, text=True, stdout=output, stderr=None if is_shown else subprocess.STDOUT
        )
        return (done.stdout or "").strip()

    def layers_mb(self) -> list[int]:
        """Return the sizes of the image's layers, the first at the bottom."""
        images = json.loads((self._root / f"{self.driver}-images/images.json").read_text())
        layers = {
            layer["id"]: layer for layer in json.loads((self._root / f"{self.driver}-layers/layers.json").read_text())
        }
        top: str | None = next(image["layer"] for image in images if IMAGE in image.get("names", []))
        sizes = []
        while top:
            sizes.append(round(layers[top].get("diff-size", 0) / 1e6))
            top = layers[top].get("parent")
        return sizes[::-1]


def make_base(store: Store, folder: Path, *, suite: str, mirror: str) -> str:
    """Make a Debian image with only Python, in place of python:3.x-slim; return its name."""
    rootfs = folder / "base"
    command = [
        "debootstrap",
        "--variant=minbase",
        "--include=python3,python3-venv,ca-certificates",
        suite,
        str(rootfs),
        mirror,
    ]
    subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    shutil.rmtree(rootfs / "var/cache/apt/archives")
    container = store("from", "scratch")
    store("add", container, str(rootfs), "/")
    store("commit", "--format", "docker", container, BASE)
    store("rm", container)
    shutil.rmtree(rootfs)
    say(f"base made by debootstrap ({suite})")
    return BASE


def build(store: Store, base: str, flags: list[str]) -> None:
    """Build the cpu target with a layer per instruction, as Docker does."""
    began_s = time.monotonic()
    store(
        *("build", "--isolation", "chroot", "--format", "docker", "--layers", "--target", "cpu", "--tag", IMAGE),
        *("--build-arg", f"PYTHON_IMAGE={base}", "--build-arg", "REVISION=checked", *flags, str(ROOT)),
        is_shown=True,
    )
    say(f"built in {time.monotonic() - began_s:.0f} s")


def inspect(store: Store) -> dict[str, Any]:
    """Check the image's metadata, print its layers; return its configuration."""
    docker = json.loads(store("inspect", "--type", "image", IMAGE))["Docker"]
    image = docker["config"]
    expect(image["User"] == "10001:10001", f"the image's user is {image['User']}")
    expect(image["Entrypoint"][:2] == ["/opt/quire/bin/quire", "serve"], f"the entrypoint is {image['Entrypoint']}")
    expect(image["StopSignal"] == "SIGTERM", f"the stop signal is {image.get('StopSignal')}")
    expect(image["Healthcheck"]["Test"][0] == "CMD", f"the health check is {image.get('Healthcheck')}")
    expect(image["Labels"]["org.opencontainers.image.revision"] == "checked", f"the labels are {image['Labels']}")
    layers = store.layers_mb()
    python, torch, packages, quire = layers[0], *layers[-3:]
    expect(quire < min(torch, packages) < 1500, f"Quire is not the small last layer of {layers} MB")
    say(f"image {sum(layers)} MB: Python {python}, torch {torch}, other packages {packages}, Quire {quire}")
    return image


class Container:
    """A running container of the image; its log goes to a file."""

    def __init__(self, folder: Path, name: str, process: "subprocess.Popen[bytes]") -> None:
        self.name = name
        self._runtime = ["runc", "--root", str(folder / "runc")]
        self.log = folder / "log"
        self.process = process

    def run(self, *command: str) -> str:
        """Run a command inside and return what it prints. Raises CalledProcessError."""
        command = (*self._runtime, "exec", self.name, *command)
        done = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        return done.stdout.strip()

    def passes(self, command: list[str]) -> bool:
        """Return True if a command inside exits with 0, as a health check must."""
        command = [*self._runtime, "exec", self.name, *command]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def end(self, signal: str) -> int:
        """Send a signal to process 1 and return the exit code. Raises TimeoutExpired."""
        subprocess.run([*self._runtime, "kill", self.name, signal], check=True)
        return self.process.wait(DRAIN_S + 10)

    def delete(self) -> None:
        """End it now, if it still runs."""
        if self.process.poll() is None:
            subprocess.run([*self._runtime, "delete", "--force", self.name], check=False)
            self.process.wait(30)


@contextlib.contextmanager
def started(
    store: Store, folder: Path, image: dict[str, Any], variables: dict[str, str] | None = None
) -> Iterator[Container]:
    """Run the image until the end of the block."""
    name, bundle, volume = f"quire-{os.getpid()}", folder / "bundle", folder / "volume"
    bundle.mkdir(exist_ok=True)
    volume.mkdir(exist_ok=True)
    os.chown(volume, 10001, 10001)
    folder.chmod(0o755)
    working = store("from", IMAGE)
    rootfs = Path(store("mount", working))
    variables = variables or {}
    write_bundle(bundle, rootfs=rootfs, image=image, arguments=[], volume=volume, variables=variables)
    with (folder / "log").open("wb") as log:
        command = ["runc", "--root", str(folder / "runc"), "run", "--bundle", str(bundle), name]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    container = Container(folder, name, process)
    try:
        yield container
    finally:
        container.delete()
        store("umount", working)
        store("rm", working)


def wait_healthy(container: Container, image: dict[str, Any], *, port: int) -> None:
    """Wait until the image's own health check passes; it must have used this port."""
    health, began_s = image["Healthcheck"]["Test"][1:], time.monotonic()
    while not container.passes(health):
        code, log = container.process.poll(), container.log.read_text()
        expect(code is None, f"it ended with {code}: {log}")
        expect(time.monotonic() - began_s < START_TIMEOUT_S, f"it was never healthy: {log}")
        time.sleep(0.5)
    said = container.run(*health)
    expect(f":{port} 200 " in said, f"the health check says {said}")
    say(f"healthy after {time.monotonic() - began_s:.1f} s: {said}")


def check_running(container: Container, image: dict[str, Any]) -> None:
    """Wait for the health check, inspect the process, send a request, stop the container."""
    wait_healthy(container, image, port=8000)
    found = container.run("/opt/quire/bin/python", "-c", _LOOK)
    expect(found == _INSIDE + ("2" if SECCOMP_PROFILE.exists() else "0"), f"inside it has {found}")
    say(f"inside: read-only root, {found}")
    answer = container.run("/opt/quire/bin/python", "-c", _ASK, json.dumps(QUESTION))
    expect("quire" in answer.lower(), f"the answer is {answer!r}")
    say(f"answered: {answer}")
    began_s = time.monotonic()
    code = container.end("SIGTERM")
    expect(code == 0, f"it ended with {code} after SIGTERM: {container.log.read_text()}")
    say(f"ended with 0, {time.monotonic() - began_s:.1f} s after SIGTERM")


def expect(condition: bool, otherwise: str) -> None:
    """Raise CheckFailed with `otherwise` unless the condition is true."""
    if not condition:
        raise CheckFailed(otherwise)


def say(line: str) -> None:
    """Print a line of progress."""
    print(f"== {line}", flush=True)


def _best_driver(folder: Path) -> str:
    """Return overlay where this user may mount one on this disk, else vfs, which copies every layer."""
    parts = {name: folder / f"try-{name}" for name in ("lowerdir", "upperdir", "workdir", "merged")}
    for path in parts.values():
        path.mkdir()
    options = ",".join(f"{name}={parts[name]}" for name in ("lowerdir", "upperdir", "workdir"))
    tried = subprocess.run(
        ["mount", "-t", "overlay", "overlay", "-o", options, str(parts["merged"])], capture_output=True
    )
    if tried.returncode == 0:
        subprocess.run(["umount", str(parts["merged"])], check=True)
    return "overlay" if tried.returncode == 0 else "vfs"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python3 -m deploy.docker.build_and_check", description=__doc__.partition("\n")[0]
    )
    add = parser.add_argument
    add("--base-image", metavar="NAME", help="build on this image instead of one made by debootstrap")
    add("--suite", default="bookworm", help="Debian's release for the base (bookworm)")
    add("--mirror", default="http://deb.debian.org/debian", metavar="URL", help="where debootstrap fetches it")
    add("--storage-driver", choices=("overlay", "vfs"), help="default: overlay where it can be mounted")
    add("--work-dir", metavar="DIR", help="where the folder is made (as temporary files are)")
    add("--keep", action="store_true", help="leave the folder")
    add("buildah_flags", nargs="*", metavar="-- FLAG", help="more flags for buildah build, e.g. -- --build-arg A=B")
    return parser


if __name__ == "__main__":
    sys.exit(main())
