"""API keys: read by the launcher; all other processes have their SHA-256 hashes only. Standard library and
engine.interface.errors.

Life of a key: flag, file or environment → read_key_hashes (launcher) → ServerConfig.api_key_hashes → KeyRing
(worker), which finds the key of a request → cache_salt_of, so that requests of two keys never share cached
prefixes. SIGHUP reads the file again (server/launcher/control_server.py).
"""

import hmac
from collections.abc import Callable, MutableMapping, Sequence
from hashlib import sha256
from pathlib import Path

from server.config.value_types import UsageError

ENVIRONMENT_NAME = "QUIRE_API_KEY"
_MAX_KEY_CHARS = 512


def read_key_hashes(keys: Sequence[str], *, file: str | None, environment: MutableMapping[str, str]) -> list[str]:
    """Return the distinct hashes of all keys given; none given: []. Raises StartupError, which never quotes a key.

    The variable is taken out of `environment`, so that no child process inherits it.
    """
    from_file = [] if file is None else read_file_hashes(file)
    sources = [("--api-key", list(keys))]
    value = environment.pop(ENVIRONMENT_NAME, "").strip()
    if value:
        sources.append((ENVIRONMENT_NAME, [key.strip() for key in value.split(",")]))
    given = [value for source, found in sources for value in _hashes(found, source)]
    return list(dict.fromkeys([*given, *from_file]))


def read_file_hashes(file: str) -> list[str]:
    """Return the hashes of a file's keys, at least one. Raises StartupError, which never quotes a key."""
    return list(dict.fromkeys(_hashes(_read_file(file), f"--api-key-file {file}")))


class KeyRing:
    """The hashes of the valid keys. newer: returns the hashes after a reload, and none before the first."""

    def __init__(self, hashes: Sequence[str], *, newer: Callable[[], Sequence[str]] = tuple) -> None:
        self._first = hashes
        self._newer = newer

    def find(self, key: str) -> str | None:
        """Return the hash of a key that is known, else None. Takes the same time wherever and however it differs."""
        presented, found = _hash(key), False
        for known in self._newer() or self._first:
            found |= hmac.compare_digest(known.encode(), presented.encode())
        return presented if found else None


def cache_salt_of(key_hash: str, salt: str) -> str:
    """Return the engine's salt for a client's own one: requests of different keys never share a cached prefix.

    key_hash: "" if the daemon has no keys. The result reveals neither the key nor its hash.
    """
    return sha256(f"{key_hash}\n{salt}".encode("utf-8", "surrogatepass")).hexdigest() if key_hash else salt


def _hashes(keys: Sequence[str], source: str) -> list[str]:
    for key in keys:
        _check(key, source)
    return [_hash(key) for key in keys]


def _hash(key: str) -> str:
    return sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def _read_file(name: str) -> list[str]:
    """Return the keys of a file: one per line, without empty lines and lines that begin with #."""
    path = Path(name).expanduser()
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UsageError(f"--api-key-file {path} cannot be read: {reason}.") from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise UsageError(f"--api-key-file {path} has no key in it.")
    return keys


def _check(key: str, source: str) -> None:
    """Raise StartupError for a key that no HTTP header can carry, since no client could send it."""
    if not key:
        raise UsageError(f"{source} has an empty key.")
    if len(key) > _MAX_KEY_CHARS:
        raise UsageError(f"{source} has a key of {len(key)} characters, the limit is {_MAX_KEY_CHARS}.")
    if not all("!" <= char <= "~" for char in key):
        raise UsageError(f"{source} has a key with a space or a character that is not printable ASCII.")
