"""API keys: read by the launcher; all other processes have their SHA-256 hashes only. Standard library and
engine.interface.

A line of the key file is KEY [ROLE,ROLE…] [FIELD=VALUE…]; the fields are in server/config/key_limits.py.

Life of a key: flag, file or environment → read_key_hashes (launcher) → ServerConfig.api_key_hashes → KeyRing
(worker), which finds the key of a request and its roles → cache_salt_of, so that requests of two keys never share
cached prefixes. SIGHUP reads the file again (server/launcher/control_server.py).
"""

import hmac
import shlex
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from hashlib import sha256
from pathlib import Path
from stat import S_IROTH
from typing import NamedTuple

from engine.interface.tenant import Tenant
from server.config.key_limits import check_names, is_field, parse_tenant
from server.config.value_types import UsageError

ENVIRONMENT_NAME = "QUIRE_API_KEY"
ROLES = ("inference", "metrics", "admin", "priority")
DEFAULT_ROLES = ("inference", "metrics", "admin")  # of a key without roles in the file, or that is in no file
_MAX_KEY_CHARS = 512
_UNNAMED_TENANT = Tenant()


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
    return list(read_file_roles(file))


class FileKeys(NamedTuple):
    """The keys of a file by their hashes."""

    roles: dict[str, list[str]]
    tenants: dict[str, Tenant]  # of keys with a name


def read_file_roles(file: str) -> dict[str, list[str]]:
    """Return the roles of each key of a file by its hash, as read_file_hashes() does."""
    return read_file_keys(file).roles


def read_file_keys(file: str) -> FileKeys:
    """Return the roles and tenants of a file's keys, at least one. Raises StartupError, which never quotes a key."""
    roles: dict[str, list[str]] = {}
    tenants: dict[str, Tenant] = {}
    for number, line in _read_file(file):
        key, *words = line.split()
        place = f"--api-key-file {file}: line {number}"
        names = ",".join(word for word in words if not is_field(word)).split(",")
        found = [role for role in names if role] or list(DEFAULT_ROLES)
        if not set(found) <= set(ROLES):  # not quoted: it may be a part of the key
            raise UsageError(f"{place} has more than a key, and not only roles, which are {', '.join(ROLES)}.")
        (key_hash,) = _hashes([key], f"--api-key-file {file}")
        roles[key_hash] = list(dict.fromkeys([*roles.get(key_hash, []), *found]))
        tenant = parse_tenant(filter(is_field, words), place)
        if tenant.name and tenants.setdefault(key_hash, tenant) != tenant:
            raise UsageError(f"{place} has other fields than an earlier line has for the same key.")
    check_names(tenants, f"--api-key-file {file}")
    return FileKeys(roles, tenants)


def file_notices(file: str | None) -> list[str]:
    """Return a sentence if all users of the machine may read the keys; nothing of a file that is not there."""
    path = None if file is None else Path(file).expanduser()
    try:
        if path is None or not path.stat().st_mode & S_IROTH:
            return []
    except OSError:
        return []
    return [f"--api-key-file {path}: other users of this machine can read the keys; chmod o-r {shlex.quote(str(path))}"]


def merge_roles(given: Sequence[str], in_file: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return the roles of all keys by hash: those given elsewhere than in the file have the default roles at least."""
    merged = {key_hash: list(DEFAULT_ROLES) for key_hash in given}
    for key_hash, roles in in_file.items():
        merged[key_hash] = list(dict.fromkeys([*merged.get(key_hash, []), *roles]))
    return merged


class KeyRing:
    """The hashes of the valid keys, their roles, by default DEFAULT_ROLES, and their tenants.

    newer, newer_roles, newer_tenants: return hashes, roles and tenants after a reload, and none before the first.
    """

    def __init__(
        self,
        hashes: Sequence[str],
        *,
        roles: Mapping[str, Sequence[str]] | None = None,
        newer: Callable[[], Sequence[str]] = tuple,
        newer_roles: Callable[[], Mapping[str, Sequence[str]]] = dict,
        tenants: Mapping[str, Tenant] | None = None,
        newer_tenants: Callable[[], Mapping[str, Tenant]] = dict,
    ) -> None:
        self._first = hashes
        self._first_roles = roles or {}
        self._newer = newer
        self._newer_roles = newer_roles
        self._first_tenants = tenants or {}
        self._newer_tenants = newer_tenants

    def roles_of(self, key_hash: str) -> Sequence[str]:
        """Return the roles of a key that find() returned."""
        roles = self._newer_roles() if self._newer() else self._first_roles
        return roles.get(key_hash, DEFAULT_ROLES)

    def tenant_of(self, key_hash: str) -> Tenant:
        """Return the tenant of a key that find() returned; one without a name if the file has none for it."""
        tenants = self._newer_tenants() if self._newer() else self._first_tenants
        return tenants.get(key_hash, _UNNAMED_TENANT)

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


def _read_file(name: str) -> list[tuple[int, str]]:
    """Return the numbered lines of a file, one key each, without empty lines and lines that begin with #."""
    path = Path(name).expanduser()
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UsageError(f"--api-key-file {path} cannot be read: {reason}.") from error
    keys = [(number, line) for number, line in enumerate(lines, 1) if line and not line.startswith("#")]
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
