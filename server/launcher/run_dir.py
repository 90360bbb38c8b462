"""RunDir: the launcher's private directory, with the sockets between its processes and the children's configurations.

The process holds a lock in it for its whole life; the next start removes directories whose lock is free, which killed
processes leave. Never torch.
"""

import contextlib
import fcntl
import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path

import msgspec

from engine.interface.errors import StartupError

logger = logging.getLogger(__name__)

_PREFIX = "quire-"
_LOCK = "lock"
_URL = "url"  # deploy/docker/healthcheck.py looks for it
_ADDRESS = "address"  # of the port that it has, for a daemon that is to take it over
_TAKEOVER_SOCKET = "takeover.sock"


class RunDir:
    """A directory of mode 0700. Life: made → children's configurations written → remove."""

    def __init__(self) -> None:
        """Make it, and remove those of killed processes. Raises StartupError."""
        parent = _parent()
        try:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            self._lock: int | None = _take_lock(self.path)
        except OSError as error:
            raise StartupError(f"No directory for sockets can be made in {parent}: {_hint(error)}") from error
        _remove_leftovers(Path(parent))

    @property
    def takeover_socket(self) -> Path:
        """The socket at which the next daemon asks for the port."""
        return self.path / _TAKEOVER_SOCKET

    def write(self, name: str, config: msgspec.Struct) -> Path:
        """Write one child's configuration and return its path. Raises StartupError."""
        return self._write(name, msgspec.json.encode(config))

    def tell_url(self, url: str) -> None:
        """Write the server's URL, where health checks of this user find it. Raises StartupError."""
        self._write(_URL, url.encode())

    def tell_address(self, address: str) -> None:
        """Write the address of the port that this daemon has, for find_takeover_sockets. Raises StartupError."""
        self._write(_ADDRESS, address.encode())

    def forget_address(self) -> None:
        """Another daemon has the port: this one is not found any more."""
        for path in (self.path / _ADDRESS, self.takeover_socket):
            path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the directory and its contents. Further calls have no effect."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None

    def _write(self, name: str, content: bytes) -> Path:
        path = self.path / name
        try:
            path.write_bytes(content)
        except OSError as error:
            raise StartupError(f"{path} cannot be written: {_hint(error)}") from error
        return path


def find_takeover_sockets() -> dict[Path, str]:
    """Return the takeover sockets of this user's daemons with the same TMPDIR, and their addresses.

    A socket may be that of a daemon that was killed: then nobody listens.
    """
    found: dict[Path, str] = {}
    for folder in sorted(Path(_parent()).glob(f"{_PREFIX}*")):
        with contextlib.suppress(OSError, UnicodeDecodeError):  # not ours, not one of these, or gone by now
            status = folder.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
                found[folder / _TAKEOVER_SOCKET] = (folder / _ADDRESS).read_text(encoding="utf-8")
    return found


def _parent() -> str:
    parent = tempfile.gettempdir()  # short: the path of a unix socket may have about 100 bytes
    return parent if len(parent) < 64 else "/tmp"  # mkdtemp makes a new one in it  # nosec B108


def _take_lock(folder: Path) -> int:
    """Return the descriptor that holds the lock. The file gets its name after it is locked, never before."""
    lock = os.open(folder / f"{_LOCK}.new", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(OSError):  # a file system without locks: what is left there stays
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(folder / f"{_LOCK}.new", folder / _LOCK)
    return lock


def _remove_leftovers(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # not ours, not one of these, held by a living process, or gone by now
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
                logger.info("removed the run directory of a killed daemon path=%s", folder)
            finally:
                os.close(lock)


def _hint(error: OSError) -> str:
    return f"{error.strerror}. TMPDIR names another place."
