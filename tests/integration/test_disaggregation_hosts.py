"""A prefill host and a decode host, as two servers on this one: answers as of one, also without one."""

import importlib.util
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import trustme

from tests.integration.conftest import needs_proc
from tests.integration.test_disaggregation import BODIES, TEXT, Asking, ask, pid_of
from tests.support.daemon import Daemon, wait_for
from tests.support.hand_overs import assert_handed_over, hand_overs, wait_joined

pytestmark = needs_proc
SIZES = ("--kv-host-memory", "32MiB", "--kv-cache-memory", "64MiB", "--http-workers", "1")
TRANSPORTS = [
    "shared-memory",
    pytest.param("nixl", marks=pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="no NIXL")),
]


class Hosts(NamedTuple):
    prefill: Daemon
    decode: Daemon
    remote: str  # name of the prefill engine at the decode host

    def wait_for_remote(self, state: str) -> None:
        wait_for(lambda: self.decode.get("/health").json()["engines"][self.remote] == state, timeout_s=30, what=state)

    def grown(self, before: dict[str, float], name: str) -> float:
        return self.decode.metrics()[name] - before.get(name, 0)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Return the flags of a certificate."""
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    (folder / "key.pem").chmod(0o600)
    authority.cert_pem.write_to_path(folder / "ca.pem")
    return tuple(
        word for name in ("cert", "key", "ca") for word in (f"--disaggregate-{name}", str(folder / f"{name}.pem"))
    )


@pytest.fixture
def start_hosts(files: tuple[str, ...], tmp_path: Path) -> Iterator[Callable[..., Hosts]]:
    """Return a function that starts both; number: of prefill engines; num_ranks: of each engine."""
    started: list[Daemon] = []

    def start(transport: str = "shared-memory", *, number: int = 1, num_ranks: int = 1) -> Hosts:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        flags = ("--device", "cpu", *SIZES, *files, "--kv-transport", transport)
        flags += ("--tensor-parallel-size", str(num_ranks)) if num_ranks > 1 else ()
        for role in (
            ("--disaggregate", f"{number}p", "--disaggregate-listen", address),
            ("--disaggregate", "1d", "--disaggregate-from", "32", "--prefill-hosts", f"{number}p@{address}"),
        ):
            started.append(Daemon(*flags, *role, folder=tmp_path, env={"UCX_TLS": "tcp"}))
        hosts = Hosts(*(daemon.wait_ready() for daemon in started), f"{address}/prefill-0")
        hosts.wait_for_remote("ready")
        return hosts

    yield start
    for running in started:
        running.__exit__()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_answers_are_those_of_one_server(transport: str, start_hosts: Callable[..., Hosts], daemon: Daemon) -> None:
    hosts = start_hosts(transport)
    wait_joined(hosts.decode)
    for name in ("greedy", "seeded", "logprobs", "grammar"):
        before, results = hosts.decode.metrics(), hand_overs(hosts.decode)
        prompt = f"{name}: " + TEXT * 6
        assert ask(hosts.decode, prompt, **BODIES[name]) == ask(daemon, prompt, **BODIES[name])
        assert_handed_over(hosts.decode, 1, before=results)
        assert hosts.grown(before, "quire_kv_handover_bytes_total") > 0
    assert hosts.decode.get("/health").json()["engines"] == {hosts.remote: "ready", "decode-0": "ready"}
    assert hosts.decode.get(f"/kv/snapshot?engine={hosts.remote}").json()["engine"] == hosts.remote
    assert hosts.prefill.get("/health").json() == {"status": "ok"}
    assert hosts.prefill.metrics()["quire_kv_handover_open_offers"] == 0
    assert ask(hosts.prefill, "Hello", max_tokens=4, temperature=0) == ask(daemon, "Hello", max_tokens=4, temperature=0)


@pytest.mark.full
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_prefill_host_that_ends_costs_no_request(
    number: int, transport: str, start_hosts: Callable[..., Hosts], daemon: Daemon
) -> None:
    hosts = start_hosts(transport)
    prompts = [f"{number}: " + TEXT * 40 for number in range(6)]
    asking = Asking(hosts.decode, prompts, max_tokens=24, temperature=0).start()
    offered = "quire_kv_handover_blocks_total{event=offered}"
    wait_for(lambda: hosts.prefill.metrics()[offered] > 20, timeout_s=30, what="offers")
    os.kill(hosts.prefill.process.pid, number)
    asking.assert_as_of(daemon)
    hosts.wait_for_remote("missing")
    prompt = "while it is gone: " + TEXT * 6
    before = hosts.decode.metrics()
    assert ask(hosts.decode, prompt, max_tokens=8, temperature=0) == ask(daemon, prompt, max_tokens=8, temperature=0)
    assert hosts.grown(before, "quire_prefill_fallbacks_total{reason=missing}") == 1
    assert hosts.decode.get("/ready").status_code == 200


@pytest.mark.full
def test_engines_of_a_prefill_host_are_restarted_one_by_one(start_hosts: Callable[..., Hosts], daemon: Daemon) -> None:
    hosts = start_hosts(number=2)
    killed = pid_of(hosts.prefill, "prefill-0")
    prompts = [f"{number}: " + TEXT * 20 for number in range(6)]
    asking = Asking(hosts.decode, prompts, max_tokens=24, temperature=0).start()
    os.kill(killed, signal.SIGKILL)
    asking.assert_as_of(daemon)
    hosts.wait_for_remote("ready")
    engines = hosts.prefill.get("/health").json()["engines"]
    assert list(engines) == ["prefill-0", "prefill-1"]
    wait_joined(hosts.decode, num_peers=2)
    before = hand_overs(hosts.decode)
    ask(hosts.decode, "after its return: " + TEXT * 6, max_tokens=4, temperature=0)
    assert_handed_over(hosts.decode, 1, before=before)


@pytest.mark.full
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_ranks_of_each_host_exchange_their_parts(
    transport: str, start_hosts: Callable[..., Hosts], daemon: Daemon
) -> None:
    hosts = start_hosts(transport, num_ranks=2)
    wait_joined(hosts.decode)
    prompts = [f"{number}: " + TEXT * 20 for number in range(4)]
    asking = Asking(hosts.decode, prompts, max_tokens=24, temperature=0).start()
    asking.assert_as_of(daemon)
    assert_handed_over(hosts.decode, len(prompts))
    metrics = hosts.decode.metrics()
    assert metrics["quire_kv_handover_blocks_total{event=failed}"] == 0
    assert hosts.prefill.metrics()["quire_kv_handover_open_offers"] == 0


@pytest.mark.full
@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (("--dtype", "bfloat16"), "dtype is torch.float32 here and torch.bfloat16 there"),
        (("--tensor-parallel-size", "2"), "--tensor-parallel-size is 1 here and 2 there"),
    ],
)
def test_a_prefill_host_with_other_weights_or_ranks_is_not_asked(
    other: tuple[str, ...], sentence: str, files: tuple[str, ...], start: Callable[..., Daemon]
) -> None:
    """A first token could be of another model: blocks are not compared alone."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    flags = (*SIZES, *files, "--kv-transport", "shared-memory")
    lends = start(*flags, "--disaggregate", "1p", "--disaggregate-listen", address, *other)
    uses = start(*flags, "--disaggregate", "1d", "--disaggregate-from", "32", "--prefill-hosts", address)
    lends.wait_ready()
    uses.wait_ready()
    wait_for(lambda: sentence in uses.log, timeout_s=30, what=sentence)
    assert ask(uses, TEXT * 6, max_tokens=4, temperature=0)
    assert uses.metrics()["quire_prefill_fallbacks_total{reason=missing}"] == 1
    assert uses.get("/health").json()["engines"][f"{address}/prefill-0"] == "missing"


@pytest.mark.full
def test_two_decode_hosts_share_a_prefill_host(
    files: tuple[str, ...], start: Callable[..., Daemon], start_hosts: Callable[..., Hosts], daemon: Daemon
) -> None:
    hosts = start_hosts()
    flags = (*SIZES, *files, "--kv-transport", "shared-memory", "--disaggregate", "1p1d", "--disaggregate-from", "32")
    other = start(*flags, "--prefill-hosts", hosts.remote.partition("/")[0]).wait_ready()
    decoding = (hosts.decode, other)
    for served, num_peers in zip(decoding, (1, 2), strict=True):
        wait_joined(served, num_peers=num_peers)
    assert list(other.get("/health").json()["engines"]) == ["prefill-0", hosts.remote, "decode-0"]
    prompts = [f"{number}: " + TEXT * 20 for number in range(4)]
    asked = [Asking(served, prompts, max_tokens=24, temperature=0).start() for served in decoding]
    for asking in asked:
        asking.assert_as_of(daemon)
    assert len(set(re.findall(r"decode engine connected index=(\d+)", hosts.prefill.log))) == 2
    for served in decoding:
        assert_handed_over(served, len(prompts))
        served.process.send_signal(signal.SIGKILL)
    opened = "quire_kv_handover_open_offers"
    wait_for(lambda: hosts.prefill.metrics()[opened] == 0, timeout_s=30, what="no open offer")
    assert ask(hosts.prefill, "Hello", max_tokens=4, temperature=0) == ask(daemon, "Hello", max_tokens=4, temperature=0)
