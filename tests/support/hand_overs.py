"""Hand-overs of prompts from prefill engines to decode engines: waits until there can be one, and counts them."""

from tests.support.daemon import Daemon, wait_for

_RESULTS = ("quire_kv_handover_requests_total", "quire_prefill_fallbacks_total")


def wait_joined(daemon: Daemon, *, num_peers: int = 1) -> Daemon:
    """Wait until a daemon with one HTTP worker can hand over, and return it.

    "Ready" promises a decode engine alone. The worker may connect to a prefill engine some hundredths of a second
    later, as may the decode engine; a prompt that comes before is computed where it is decoded, and not counted.
    num_peers: prefill engines whose blocks the decode engine reads.
    """

    def is_joined() -> bool:
        engines = daemon.get("/health").json()["engines"]
        peers = daemon.metrics()["quire_kv_handover_peers"]
        return set(engines.values()) == {"ready"} and peers >= num_peers

    wait_for(is_joined, timeout_s=60, what="links between all engines and the worker")
    return daemon


def hand_overs(daemon: Daemon) -> dict[str, float]:
    """Return how many requests were handed over, by result, and how many were not, by reason; zeros are left out."""
    counts = {name: value for name, value in daemon.metrics().items() if name.startswith(_RESULTS)}
    return {name.rpartition("=")[2].rstrip("}"): value for name, value in counts.items() if value}


def assert_handed_over(daemon: Daemon, num_requests: int, *, before: dict[str, float] | None = None) -> None:
    """Assert that so many requests were handed over with all of their blocks since `before`, and none in another way.

    A page of metrics may be of the last half second if an engine cannot answer in time: on a busy host.
    """
    former = before or {}

    def grown() -> dict[str, float]:
        counts = {name: value - former.get(name, 0) for name, value in hand_overs(daemon).items()}
        return {name: value for name, value in counts.items() if value}

    wait_for(lambda: sum(grown().values()) >= num_requests, timeout_s=10, what=f"{num_requests} hand-overs")
    assert grown() == {"complete": num_requests}
