"""A systemd of the test's own that runs deploy/systemd/quire.service, in namespaces and control groups of its own.

It sees no unit but ours, and stubs of the targets that every unit needs. /opt/quire is an environment of the system's
Python, which a service may read wherever this one is kept, with the packages of this Python and with these sources.
"""

import os
import signal
import site
import subprocess
import sys
import time
from pathlib import Path

from tests.support.daemon import ROOT, wait_for

PYTHON = Path("/usr/bin/python3")
_UNIT = ROOT / "deploy/systemd/quire.service"
_TARGETS = ("sysinit", "basic", "shutdown", "network-online", "umount", "multi-user")
_CONSOLE_SCRIPT = "#!/opt/quire/bin/python\nimport sys\nfrom server.cli import main\nsys.exit(main())\n"
_BOOT = """
set -e
mount --make-rprivate /
for path in /run /opt /var/cache /var/lib /var/log; do mount -t tmpfs -o mode=755 tmpfs $path; done
mkdir /opt/quire /opt/packages /opt/source
mount --bind {folder}/quire /opt/quire
mount --bind {packages} /opt/packages
mount --bind {root} /opt/source
{mounts}
exec /lib/systemd/systemd --system --unit=quire.service --log-target=console --show-status=no
"""


class OwnSystemd:
    """Life: started with a unit, a drop-in, and keys in /opt/quire/keys → asked with systemctl → killed."""

    def __init__(self, folder: Path, *, drop_in: str, keys: str) -> None:
        self._log = folder / "log"
        _make_environment(folder / "quire")
        self.keys = folder / "quire/keys"
        self.keys.write_text(keys)
        units = folder / "units"
        for name in ("quire.service", "quire@.service"):
            (units / f"{name}.d").mkdir(parents=True)
            (units / name).write_text(_UNIT.read_text())
            (units / f"{name}.d/test.conf").write_text(drop_in)
        for target in _TARGETS:
            (units / f"{target}.target").write_text("[Unit]\nDefaultDependencies=no\n")
        self._groups = _make_groups()
        enter = "".join(f"echo $$ > {group}/cgroup.procs\n" for group in self._groups.values())
        boot = _BOOT.format(folder=folder, packages=site.getsitepackages()[0], root=ROOT, mounts=_mounts(self._groups))
        (folder / "boot").write_text(boot)
        unshare = "exec unshare --mount --pid --ipc --uts --cgroup --fork --kill-child --mount-proc"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                ["sh", "-c", f"{enter}{unshare} sh {folder}/boot"],
                env={"PATH": os.environ["PATH"], "container": "docker", "SYSTEMD_UNIT_PATH": str(units)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def __enter__(self) -> "OwnSystemd":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            os.kill(self._first, signal.SIGKILL)  # and with it all in its namespace
        self._process.wait(10)
        for group in self._groups.values():
            for path in [*sorted(group.rglob("**/"), reverse=True), group]:
                _remove_group(path)

    def systemctl(self, *arguments: str) -> str:
        """Run systemctl and return what it prints."""
        command = ["nsenter", "--target", str(self._first), "--all", "systemctl", *arguments]
        done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60)
        return done.stdout.strip()

    def shows(self, **wanted: str) -> bool:
        """Tell if the unit's properties are these."""
        lines = self.systemctl("show", "quire", *(f"--property={name}" for name in wanted)).splitlines()
        return sorted(lines) == sorted(f"{name}={value}" for name, value in wanted.items())

    def wait_shows(self, *, timeout_s: float = 90.0, **wanted: str) -> None:
        """Wait until they are."""
        try:
            wait_for(lambda: self.shows(**wanted), timeout_s=timeout_s, what=f"{wanted}")
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{self.systemctl('status', 'quire')}\n{self._log.read_text()}") from None

    def pid_of(self, module: str) -> int:
        """Return the pid, as seen from outside, of the service's child that runs a module."""
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                is_it = module in path.read_text().split("\0")
                if is_it and os.readlink(path.parent / "ns/pid") == os.readlink(f"/proc/{self._first}/ns/pid"):
                    return int(path.parent.name)
            except (FileNotFoundError, ProcessLookupError):
                continue
        raise AssertionError(f"nothing runs {module}")

    @property
    def _first(self) -> int:
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        wait_for(children.read_text, timeout_s=10, what="systemd")
        return int(children.read_text().split()[0])


def _make_environment(folder: Path) -> None:
    subprocess.run([PYTHON, "-m", "venv", "--without-pip", folder], check=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    (packages / "quire.pth").write_text("/opt/source\n/opt/packages\n")
    (folder / "bin/quire").write_text(_CONSOLE_SCRIPT)
    (folder / "bin/quire").chmod(0o755)
    for path in (folder, *folder.parents):
        if path.stat().st_uid == os.geteuid() and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o055)


def _make_groups() -> dict[str, Path]:
    """Make an empty control group below ours in each hierarchy that systemd needs; return them by hierarchy."""
    groups = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, hierarchy, path = line.split(":", 2)
        mounted = Path("/sys/fs/cgroup", hierarchy.removeprefix("name="))
        is_wanted = hierarchy in ("name=systemd", "devices", "pids") or (mounted / "cgroup.controllers").exists()
        if is_wanted:
            group = Path(f"{mounted}{path}".rstrip("/")) / f"quire-test-{os.getpid()}"
            group.mkdir()
            groups[hierarchy] = group
    return groups


def _mounts(groups: dict[str, Path]) -> str:
    """Return the commands that show these groups, as roots, in place of all others."""
    if "" in groups:
        return "mount -t cgroup2 cgroup2 /sys/fs/cgroup"
    lines = ["mount -t tmpfs tmpfs /sys/fs/cgroup"]
    for hierarchy in groups:
        path = f"/sys/fs/cgroup/{hierarchy.removeprefix('name=')}"
        options = f"none,{hierarchy}" if "=" in hierarchy else hierarchy
        lines.append(f"mkdir {path}; mount -t cgroup -o {options} cgroup {path}")
    return "\n".join(lines)


def _remove_group(path: Path) -> None:
    for _ in range(50):  # what was killed leaves a little later
        try:
            path.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.1)
    print(f"{path} could not be removed", file=sys.stderr)
