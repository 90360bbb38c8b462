"""The flags of prefill engines on other hosts: where they are, where they listen, certificates. Never torch.

Both sides of a connection prove by a certificate that they belong together: TLS 1.3, with authorities of their own
(server/launcher/host_links.py). Imports argparse, server.config; ssl and engine.interface.config when needed.
"""

import argparse
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from server.config.host_names import is_loopback
from server.config.value_types import UsageError, limited, readable_file, text

if TYPE_CHECKING:
    import ssl

    from engine.interface.config import HostLinksConfig, PrefillHost

MOST_ENGINES = 16  # of each role, and of each host
_MOST_HOSTS = 16
_ADDRESS = re.compile(r"(?:\[([0-9A-Fa-f:.%]+)\]|([^\s:/@,\[\]]+)):([0-9]{1,5})")
_FILES = ("cert", "key", "ca")


@limited("HOST:PORT, with a port of 1 to 65,535")
def host_and_port(text: str) -> "PrefillHost":
    """Parse HOST:PORT, or [IPv6]:PORT."""
    from engine.interface.config import PrefillHost

    match = _ADDRESS.fullmatch(text.strip())
    if match is None or not 1 <= int(match[3]) <= 65_535:
        raise argparse.ArgumentTypeError(f"{text[:200]!r} is not HOST:PORT with a port from 1 to 65,535")
    return PrefillHost(match[1] or match[2], int(match[3]))


@limited(f"[Np@]HOST:PORT, separated by commas; 1 to {_MOST_HOSTS} hosts, N from 1 to {MOST_ENGINES}")
def prefill_hosts(text: str) -> "list[PrefillHost]":
    """Parse addresses of prefill hosts; 2p@HOST:PORT has two engines."""
    import msgspec

    hosts: list[PrefillHost] = []
    for part in text.split(","):
        count, at, address = part.strip().rpartition("@")
        match = re.fullmatch(r"([0-9]{1,3})p", count.lower()) if at else None
        num_engines = int(match[1]) if match is not None else int(not at)
        if not 1 <= num_engines <= MOST_ENGINES:
            raise argparse.ArgumentTypeError(
                f"{part[:200]!r} is not HOST:PORT, or Np@HOST:PORT with N from 1 to {MOST_ENGINES} engines"
            )
        host = msgspec.structs.replace(host_and_port(address), num_engines=num_engines)
        if host.address in (other.address for other in hosts):
            raise argparse.ArgumentTypeError(f"{host.address} is there twice: 2p@{host.address} has two engines")
        hosts.append(host)
    if len(hosts) > _MOST_HOSTS:
        raise argparse.ArgumentTypeError(f"there are {len(hosts)} hosts; the limit is {_MOST_HOSTS}")
    return hosts


def add_host_link_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags."""
    add = group.add_argument
    add(
        "--disaggregate-listen",
        type=host_and_port,
        metavar="HOST:PORT",
        help="address at which servers of other hosts use the prefill engines of this one (none)",
    )
    add(
        "--prefill-hosts",
        type=prefill_hosts,
        metavar="HOSTS",
        help="--disaggregate-listen of other hosts whose prefill engines are used: HOST:PORT,2p@HOST:PORT (none)",
    )
    add(
        "--disaggregate-cert",
        type=text,
        metavar="FILE",
        help="this host's certificate in PEM, shown to other hosts (none)",
    )
    add(
        "--disaggregate-key",
        type=text,
        metavar="FILE",
        help="its private key in PEM; others must not read the file (none)",
    )
    add(
        "--disaggregate-ca", type=text, metavar="FILE", help="certificates in PEM that sign those of other hosts (none)"
    )


def host_links_of(arguments: argparse.Namespace) -> "HostLinksConfig | None":
    """Return how this host is connected to others, after a trial load of the files; None: it is not.

    Raises UsageError for flags that do not go together, and for files that cannot be used.
    """
    listen, hosts = arguments.disaggregate_listen, arguments.prefill_hosts
    files = {f"--disaggregate-{name}": getattr(arguments, f"disaggregate_{name}") for name in _FILES}
    given = [f"{flag} {file}" for flag, file in files.items() if file is not None]
    if listen is None and hosts is None:
        if given:
            raise UsageError(
                f"{given[0]} is for other hosts, and there is no --disaggregate-listen or --prefill-hosts."
            )
        return None
    cause = f"--disaggregate-listen {listen.address}" if listen is not None else f"--prefill-hosts {shown(hosts)}"
    if listen is not None and listen.address in (host.address for host in hosts or []):
        raise UsageError(f"--prefill-hosts {listen.address} is this server itself (--disaggregate-listen).")
    missing = [flag for flag, file in files.items() if file is None]
    if missing:
        raise UsageError(f"{cause} needs {missing[0]} FILE as well: both hosts show a certificate before they talk.")
    _check_private("--disaggregate-key", arguments.disaggregate_key)
    from engine.interface.config import HostLinksConfig

    cert, key, ca = (readable_file(flag, file) for flag, file in files.items())
    config = HostLinksConfig(cert=cert, key=key, ca=ca, listen=listen)
    try:
        tls_context(config, is_server=True)
    except (OSError, ValueError) as error:
        flag = "--disaggregate-ca" if _loads_chain(config) else "--disaggregate-cert and --disaggregate-key"
        reason = getattr(error, "reason", None) or "not PEM files that fit together"
        raise UsageError(
            f"{flag} {ca if flag.endswith('ca') else f'{cert}, {key}'} cannot be used:"
            f" {reason.replace('_', ' ').lower()}."
        ) from error
    return config


def check_transport(arguments: argparse.Namespace) -> str:
    """Return how blocks are copied between hosts. Raises UsageError for a way that does not cross hosts."""
    if arguments.kv_transport != "shared-memory":
        return "nixl"
    addresses = [
        *([arguments.disaggregate_listen] if arguments.disaggregate_listen else []),
        *(arguments.prefill_hosts or []),
    ]
    far = [host.address for host in addresses if not is_loopback(host.host)]
    if far:
        raise UsageError(
            f"--kv-transport shared-memory does not reach {far[0]}: memory is shared within one host. Use nixl."
        )
    return "shared-memory"


def shown(hosts: "list[PrefillHost]") -> str:
    """Return addresses as --prefill-hosts takes them."""
    return ",".join((f"{host.num_engines}p@" if host.num_engines > 1 else "") + host.address for host in hosts)


def tls_context(config: "HostLinksConfig", *, is_server: bool) -> "ssl.SSLContext":
    """Return what a connection is made with: TLS 1.3, and no peer without a certificate of one of our authorities.

    Reads the files. Raises OSError (ssl.SSLError is one) or ValueError.
    """
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    if is_server:
        context.num_tickets = 0  # or a later connection could begin without a certificate
    context.load_cert_chain(config.cert, config.key, password=lambda: "")
    context.load_verify_locations(config.ca)
    return context


def _loads_chain(config: "HostLinksConfig") -> bool:
    import ssl

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.cert, config.key, password=lambda: "")
    except (OSError, ValueError):
        return False
    return True


def _check_private(flag: str, name: str) -> None:
    """Raise UsageError if every user of this host can read a key, or write it."""
    path = Path(name).expanduser()
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except (OSError, ValueError):
        return  # readable_file() has the sentence
    if mode & 0o007:
        raise UsageError(f"{flag} {path} has mode {mode:04o}, so that all users can use it: chmod 600 {path}.")
