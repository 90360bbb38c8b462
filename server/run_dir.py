"""The launcher's private directory: the sockets between its processes, and what each child is told. Never torch."""

import shutil
import tempfile
from pathlib import Path

import msgspec


class RunDir:
    """A directory of mode 0700. Life: made → children's configurations written → remove."""

    def __init__(self) -> None:
        parent = tempfile.gettempdir()  # short: the path of a unix socket may have about 100 bytes
        parent = parent if len(parent) < 64 else "/tmp"  # mkdtemp makes a new one in it  # nosec B108
        self.path = Path(tempfile.mkdtemp(prefix="quire-", dir=parent))

    def write(self, name: str, config: msgspec.Struct) -> Path:
        """Write one child's configuration and return its path."""
        path = self.path / name
        path.write_bytes(msgspec.json.encode(config))
        return path

    def remove(self) -> None:
        """Remove the directory and all in it."""
        shutil.rmtree(self.path, ignore_errors=True)
