"""Connections to prefill engines of other hosts: who may connect, what is carried, and what ends a connection."""

import asyncio
import contextlib
import os
import shutil
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import trustme

from engine.interface.config import EngineConfig, HostLinksConfig, PeerConfig, PrefillHost
from engine.interface.errors import StartupError
from engine.interface.transport import encode_frame
from server.config.host_links import tls_context
from server.launcher import host_links, prefill_listener
from server.launcher.engine_set import EngineSpec, peer_socket, remote_engines
from server.launcher.host_links import HostLinks
from server.launcher.host_wire import Declined, Dial, TlsFiles, read_message

SERVER = 512
WAIT_S = 5.0


def issue(folder: Path, authority: trustme.CA, *names: str) -> HostLinksConfig:
    """Return files of a certificate for `names`, by an authority that is also trusted."""
    folder.mkdir()
    issued = authority.issue_cert(*names)
    config = HostLinksConfig(cert=str(folder / "cert.pem"), key=str(folder / "key.pem"), ca=str(folder / "ca.pem"))
    issued.cert_chain_pems[0].write_to_path(config.cert)
    issued.private_key_pem.write_to_path(config.key)
    os.chmod(config.key, 0o600)
    authority.cert_pem.write_to_path(config.ca)
    return config


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> HostLinksConfig:
    return issue(tmp_path_factory.mktemp("ours") / "tls", trustme.CA(), "localhost", "127.0.0.1")


@pytest.fixture(scope="module")
def strange(tmp_path_factory: pytest.TempPathFactory) -> HostLinksConfig:
    return issue(tmp_path_factory.mktemp("strange") / "tls", trustme.CA(), "localhost", "127.0.0.1")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def framed(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


async def become(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)


@dataclass
class Hosts:
    """A prefill host, whose engine sends back what it gets with its socket's name before it, and a decode host."""

    folder: Path
    port: int
    lending: HostLinks
    dialing: HostLinks
    engine: EngineConfig  # of the decode host

    async def connect(self, *, is_peer: bool = False) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        remote = remote_engines(self.engine, self.folder / "decode")[0]
        return await asyncio.open_unix_connection(remote.peer_socket if is_peer else remote.socket)

    async def echo(self, text: bytes, *, is_peer: bool = False) -> bytes:
        reader, writer = await self.connect(is_peer=is_peer)
        writer.write(text)
        async with asyncio.timeout(WAIT_S):
            answer = await reader.readexactly(len(b"engine:") + len(text))
        writer.close()
        return answer


async def serve_echo(path: str, name: bytes) -> asyncio.Server:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            writer.write(name + b":")
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
            writer.close()

    return await asyncio.start_unix_server(echo, path)


@contextlib.asynccontextmanager
async def hosts(
    folder: Path,
    lends: HostLinksConfig,
    dials: HostLinksConfig,
    *,
    number: int = 0,
    server: int = 0,
    serves: bool = True,
) -> AsyncIterator[Hosts]:
    """number: of the engine that the decode host asks for. server: of the prefill host."""
    for name in ("prefill", "decode"):
        (folder / name).mkdir()
    port = free_port()
    address = PrefillHost("127.0.0.1", port, num_engines=number + 1)
    peer = PeerConfig(role="prefill", index=0, num_prefill=1, num_decode=0, first_decode=server)
    lent = EngineSpec(0, "prefill-0", EngineConfig(model="m", peer=peer), str(folder / "prefill" / "engine.sock"))
    lending = HostLinks(msgspec.structs.replace(lends, listen=address), [lent], folder / "prefill")
    away = PeerConfig(role="decode", index=0, num_prefill=0, num_decode=1, prefill_hosts=[address], first_decode=SERVER)
    engine = EngineConfig(model="m", peer=away)
    dialing = HostLinks(dials, [EngineSpec(0, "decode-0", engine, "unused")], folder / "decode")
    servers = []
    if serves:
        servers.append(await serve_echo(lent.socket, b"engine"))
        servers.append(await serve_echo(peer_socket(folder / "prefill", 0), b"peers:"))
    await lending.start()
    await dialing.start()
    try:
        yield Hosts(folder, port, lending, dialing, engine)
    finally:
        await dialing.aclose()
        await lending.aclose()
        for server_ in servers:
            server_.close()
        await asyncio.sleep(0)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await test()

    asyncio.run(bounded())


def test_bytes_go_both_ways_to_the_engine_and_to_its_peers(ours: HostLinksConfig, tmp_path: Path) -> None:
    async def test() -> None:
        async with hosts(tmp_path, ours, ours) as pair:
            large = os.urandom(3 << 20)
            assert await pair.echo(b"hello") == b"engine:hello"
            assert await pair.echo(b"hello", is_peer=True) == b"peers::hello"
            assert await pair.echo(large) == b"engine:" + large

    run(test)


def test_the_end_of_one_side_is_the_end_of_the_other(ours: HostLinksConfig, tmp_path: Path) -> None:
    async def test() -> None:
        async with hosts(tmp_path, ours, ours) as pair:
            reader, writer = await pair.connect()
            await reader.readexactly(7)
            await pair.lending.aclose()
            assert await reader.read() == b""
            writer.close()

    run(test)


@pytest.mark.parametrize("is_lender_strange", [True, False])
def test_a_certificate_of_another_authority_is_refused(
    is_lender_strange: bool,
    ours: HostLinksConfig,
    strange: HostLinksConfig,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    lends, dials = (strange, ours) if is_lender_strange else (ours, strange)

    async def test() -> None:
        async with hosts(tmp_path, lends, dials) as pair:
            reader, writer = await pair.connect()
            writer.write(b"prompt")
            await become(lambda: "prefill engine is not reached" in caplog.text)
            await become(lambda: "connection of another host failed" in caplog.text)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(reader.read(1), 0.2)
            writer.close()

    run(test)


def test_a_client_is_known_by_a_certificate_of_the_same_authority_alone(
    ours: HostLinksConfig, strange: HostLinksConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It trusts the host that it dials, and shows nothing, or a certificate of others."""

    async def test() -> None:
        async with hosts(tmp_path, ours, ours) as pair:
            bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            bare.load_verify_locations(ours.ca)
            other = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            other.load_verify_locations(ours.ca)
            other.load_cert_chain(strange.cert, strange.key)
            for context in (bare, other):
                reader, writer = await asyncio.open_connection("127.0.0.1", pair.port, ssl=context)
                writer.write(encode_frame(Dial("1", "", 1, 0, False)))
                with contextlib.suppress(OSError):
                    assert await reader.read() == b""
                writer.close()
            assert "connection of another host failed" in caplog.text

    run(test)


def test_the_name_in_the_certificate_must_be_that_of_the_host(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    authority = trustme.CA()
    elsewhere = issue(tmp_path / "elsewhere", authority, "prefill.example")

    async def test() -> None:
        async with hosts(tmp_path, elsewhere, elsewhere) as pair:
            _, writer = await pair.connect()
            await become(lambda: "certificate is refused: IP address mismatch" in caplog.text)
            writer.close()

    run(test)


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + b"\xff" * 600, os.urandom(4096)],
    ids=["http", "tls", "noise"],
)
def test_garbage_is_refused_and_others_are_served(garbage: bytes, ours: HostLinksConfig, tmp_path: Path) -> None:
    async def test() -> None:
        async with hosts(tmp_path, ours, ours) as pair:
            reader, writer = await asyncio.open_connection("127.0.0.1", pair.port)
            writer.write(garbage)
            with contextlib.suppress(OSError):
                await asyncio.wait_for(reader.read(), WAIT_S)
            writer.close()
            assert await pair.echo(b"on") == b"engine:on"

    run(test)


@pytest.mark.parametrize("is_known", [False, True])
def test_a_silent_connection_is_ended(
    is_known: bool, ours: HostLinksConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_listener, "GREETING_S", 0.3)

    async def test() -> None:
        async with hosts(tmp_path, ours, ours) as pair:
            context = tls_context(ours, is_server=False) if is_known else None
            reader, writer = await asyncio.open_connection("127.0.0.1", pair.port, ssl=context)
            with contextlib.suppress(OSError):
                assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
            writer.close()

    run(test)


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack("<I", 1 << 30),
        struct.pack("<I", 4097) + b"x" * 4097,
        encode_frame(Declined("no")),
        b"\x02\0\0\0\xc1\xc1",
        framed(b"\x82\xa4type\xa4Dial\xa4more" + b"\x91" * 3000 + b"\xc0"),
        framed(b"\x82\xa4type\xa4Dial\xa7version\xa1\xff"),
    ],
    ids=["long", "too long", "another", "malformed", "nested", "no text"],
)
def test_a_greeting_that_is_none_ends_the_connection(
    frame: bytes, ours: HostLinksConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with hosts(tmp_path, ours, ours) as pair:
            context = tls_context(ours, is_server=False)
            reader, writer = await asyncio.open_connection("127.0.0.1", pair.port, ssl=context)
            writer.write(frame)
            with contextlib.suppress(OSError):
                assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
            writer.close()
            assert "connection of another host failed" in caplog.text
            assert await pair.echo(b"on") == b"engine:on"

    run(test)


@pytest.mark.parametrize("is_server", [False, True])
def test_files_are_read_again_when_they_are_others(is_server: bool, ours: HostLinksConfig, tmp_path: Path) -> None:
    config = msgspec.structs.replace(ours, ca=str(tmp_path / "ca.pem"))
    shutil.copy(ours.ca, config.ca)
    files = TlsFiles(config, is_server=is_server)
    first = files.context()
    assert files.context() is first
    Path(config.ca).write_text("half of it")
    with pytest.raises(ssl.SSLError):
        files.context()
    trustme.CA().cert_pem.write_to_path(config.ca)
    following = files.context()
    assert following is not first
    assert following.get_ca_certs() != first.get_ca_certs()
    os.unlink(config.ca)
    with pytest.raises(FileNotFoundError):
        files.context()


def test_connections_are_bounded(
    ours: HostLinksConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(prefill_listener, "MOST_GREETING", 2)
    monkeypatch.setattr(prefill_listener, "MOST_JOINED", 2)

    async def test() -> None:
        async with hosts(tmp_path, ours, ours) as pair:
            burst = await asyncio.gather(*(asyncio.open_connection("127.0.0.1", pair.port) for _ in range(20)))
            reads = [asyncio.create_task(reader.read()) for reader, _ in burst]
            await become(lambda: sum(read.done() for read in reads) == 18)
            assert "2 later connections greet" in caplog.text
            assert await pair.echo(b"on") == b"engine:on"  # in place of a silent one
            for read, (_, silent) in zip(reads, burst, strict=True):
                read.cancel()
                silent.close()
            await asyncio.sleep(0.1)
            joined = [await pair.connect() for _ in range(2)]
            for opened, _ in joined:
                await opened.readexactly(7)
            late, _ = await pair.connect()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(late.read(1), 0.3)
            joined[0][1].close()
            assert await asyncio.wait_for(late.readexactly(7), WAIT_S) == b"engine:"

    run(test)


def test_an_engine_that_is_not_there_is_a_sentence(
    ours: HostLinksConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with hosts(tmp_path, ours, ours, number=1) as pair:
            _, writer = await asyncio.open_unix_connection(remote_engines(pair.engine, tmp_path / "decode")[1].socket)
            await become(lambda: "Engine prefill-1 is asked for, and it has 1" in caplog.text)
            writer.close()

    run(test)


def test_the_server_itself_is_a_sentence(
    ours: HostLinksConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with hosts(tmp_path, ours, ours, server=SERVER) as pair:
            _, writer = await pair.connect()
            await become(lambda: "It is the server itself" in caplog.text)
            writer.close()

    run(test)


def test_another_version_is_a_sentence(
    ours: HostLinksConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_links, "package_version", lambda: "0.0.9")

    async def test() -> None:
        async with hosts(tmp_path, ours, ours) as pair:
            _, writer = await pair.connect()
            await become(lambda: "both hosts need the same version" in caplog.text)
            assert "other messages than version 0.0.9 here" in caplog.text
            writer.close()

    run(test)


def test_a_host_is_tried_again_until_it_serves(
    ours: HostLinksConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(host_links, "RETRY_S", 0.05)

    async def test() -> None:
        async with hosts(tmp_path, ours, ours, serves=False) as pair:
            reader, writer = await pair.connect()
            writer.write(b"early")
            await become(lambda: "prefill-0 does not serve now" in caplog.text)
            server = await serve_echo(str(tmp_path / "prefill" / "engine.sock"), b"engine")
            assert await asyncio.wait_for(reader.readexactly(12), WAIT_S) == b"engine:early"
            assert caplog.text.count("is not reached") == caplog.text.count("is reached") == 1
            writer.close()
            server.close()

    run(test)


def test_a_client_that_leaves_while_a_host_is_missing_is_forgotten(
    ours: HostLinksConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_links, "RETRY_S", 0.05)

    async def test() -> None:
        async with hosts(tmp_path, ours, ours, serves=False) as pair:
            before = len(asyncio.all_tasks())
            _, writer = await pair.connect()
            writer.write(b"hello")
            await become(lambda: len(asyncio.all_tasks()) > before)
            writer.close()
            await become(lambda: len(asyncio.all_tasks()) <= before)

    run(test)


def test_a_port_in_use_is_a_sentence(ours: HostLinksConfig, tmp_path: Path) -> None:
    async def test() -> None:
        async with hosts(tmp_path, ours, ours) as pair:
            address = PrefillHost("127.0.0.1", pair.port)
            words = f"--disaggregate-listen 127.0.0.1:{pair.port} cannot be listened on: it is in use"
            with pytest.raises(StartupError, match=words):
                prefill_listener.listen(address)
            with pytest.raises(StartupError, match="cannot be listened on: "):
                prefill_listener.listen(PrefillHost("198.51.100.1", pair.port))

    run(test)


def test_more_engines_than_are_named_are_logged(
    ours: HostLinksConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        listener = prefill_listener.listen(PrefillHost("127.0.0.1", port := free_port()))
        lent = [prefill_listener.LentEngine(f"prefill-{i}", str(tmp_path / "engine"), "unused") for i in range(2)]
        server = await serve_echo(lent[0].socket, b"engine")
        serving = asyncio.create_task(prefill_listener.PrefillListener(listener, ours, lent, server=0).run())
        peer = PeerConfig(
            role="decode", index=0, num_prefill=0, num_decode=1, prefill_hosts=[PrefillHost("127.0.0.1", port)]
        )
        spec = EngineSpec(0, "decode-0", EngineConfig(model="m", peer=peer), "unused")
        dialing = HostLinks(ours, [spec], tmp_path)
        await dialing.start()
        reader, writer = await asyncio.open_unix_connection(remote_engines(spec.config, tmp_path)[0].socket)
        await asyncio.wait_for(reader.readexactly(7), WAIT_S)
        assert f"2p@127.0.0.1:{port} would use all" in caplog.text
        writer.close()
        await dialing.aclose()
        serving.cancel()
        server.close()

    run(test)


def test_a_message_ends_with_its_connection() -> None:
    async def test() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(b"\x09\0\0\0half")
        reader.feed_eof()
        with pytest.raises(EOFError):
            await read_message(reader, Dial)

    run(test)
