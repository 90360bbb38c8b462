"""deploy/ray on a real Ray cluster of one machine: three replicas of the demo model behind Ray's proxy.

One cluster serves all tests, in the order in which they stand.
"""

import contextlib
import os
import signal
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.deploy.conftest import need_module
from tests.deploy.ray_cluster import (
    LONG,
    NUM_REPLICAS,
    Cluster,
    Stream,
    engine_of,
    post,
    samples,
    session_of,
    wait_for,
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A cluster in a short folder: Ray puts unix sockets there, whose paths may have 107 bytes."""
    need_module("ray")
    with contextlib.ExitStack() as stack:
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="q", dir="/tmp", ignore_cleanup_errors=True))
        )
        started = Cluster(folder)
        stack.callback(started.stop)
        started.start()
        yield started


def test_a_stream_and_a_whole_answer_are_those_of_our_api(cluster: Cluster) -> None:
    whole = post(cluster, model="quire-demo", prompt="A quire is", max_tokens=24, temperature=0)
    assert whole.status_code == 200
    assert len(whole.headers.get_list("x-request-id")) == 1
    stream = Stream(cluster, "", model="quire-demo", max_tokens=24, temperature=0, ignore_eos=False)
    events = stream.finished()
    assert len(events) > 5
    text = "".join(choice["text"] for event in events for choice in event["choices"])
    assert text == whole.json()["choices"][0]["text"]
    refused = post(cluster, prompt="x", max_tokens=-1)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "max_tokens"


def test_sessions_and_prompts_keep_their_replica_and_are_spread(cluster: Cluster) -> None:
    num_same, homes = 0, Counter()
    for i in range(40):
        replies = [
            httpx.get(f"{cluster.url}/v1/models", headers={"x-session-id": f"s{i}"}, timeout=30) for _ in range(3)
        ]
        found = Counter(reply.headers["x-quire-replica"] for reply in replies)
        num_same += max(found.values())
        homes[replies[0].headers["x-quire-replica"]] += 1
    assert num_same >= 0.95 * 120
    assert len(homes) == NUM_REPLICAS
    num_same, homes = 0, Counter()
    for i in range(20):
        chat = [{"role": "user", "content": f"Question {i}"}]
        found = Counter()
        for _ in range(3):
            body = {"messages": chat, "max_tokens": 2}
            reply = httpx.post(f"{cluster.url}/v1/chat/completions", json=body, timeout=60)
            found[reply.headers["x-quire-replica"]] += 1
            answer = reply.json()["choices"][0]["message"]["content"]
            chat = [*chat, {"role": "assistant", "content": answer or ""}, {"role": "user", "content": "And then?"}]
        num_same += max(found.values())
        homes[max(found, key=found.__getitem__)] += 1
    assert num_same >= 0.95 * 60
    assert len(homes) == NUM_REPLICAS


def test_a_session_overflows_when_its_home_is_far_busier(cluster: Cluster) -> None:
    streams = [Stream(cluster, "busy", max_tokens=60) for _ in range(20)]
    for stream in streams:
        stream.finished()
    counts = Counter(stream.replica for stream in streams)
    assert len(counts) > 1
    assert max(counts.values()) >= 9  # max_imbalance, which its home may lead by


def test_a_client_that_leaves_frees_what_it_held_on_its_replica(cluster: Cluster) -> None:
    before = samples(cluster, "leaver")
    with httpx.stream(
        "POST", f"{cluster.url}/v1/completions", json=LONG, headers={"x-session-id": "leaver"}, timeout=60
    ) as reply:
        lines = reply.iter_lines()  # the connection ends with it
        assert next(lines).startswith("data: ")
        wait_for(lambda: samples(cluster, "leaver")["quire_kv_cache_blocks_used"] > 0, timeout_s=20, what="its blocks")
    name = "quire_requests_finished_total[abort]"
    wait_for(lambda: samples(cluster, "leaver")[name] == before[name] + 1, timeout_s=30, what="the abort")
    assert samples(cluster, "leaver")["quire_kv_cache_blocks_used"] == 0


def test_every_replica_is_among_rays_metrics(cluster: Cluster) -> None:
    def found() -> set[str]:
        page = httpx.get(f"http://127.0.0.1:{cluster.metrics_port}/metrics", timeout=30).text
        return {
            sample.labels["replica"]
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name == "ray_quire_ready" and sample.labels["model_name"] == "quire-demo" and sample.value == 1
        }

    wait_for(lambda: found() == set(cluster.replicas()), timeout_s=60, what="metrics of every replica")


def test_a_killed_replica_loses_its_own_requests_and_comes_back(cluster: Cluster) -> None:
    pids = cluster.pids()
    sessions = {replica: session_of(cluster, replica) for replica in cluster.replicas()}
    streams = [Stream(cluster, f"load-{i}", max_tokens=900) for i in range(9)]
    for stream in streams:
        assert stream.began.wait(60)
    victim, num_streams = Counter(stream.replica for stream in streams).most_common(1)[0]
    session = sessions[victim]
    wholes: list[httpx.Response] = []
    body = {"prompt": "A quire is", "max_tokens": 1500, "ignore_eos": True}
    whole = threading.Thread(target=lambda: wholes.append(post(cluster, session, **body)))
    whole.start()
    wait_for(
        lambda: samples(cluster, session)["quire_num_requests_running"] > num_streams, timeout_s=30, what="the request"
    )
    os.kill(pids[victim], signal.SIGKILL)
    for stream in streams:
        events = stream.finished()
        if stream.replica == victim:
            assert events[-1]["error"]["code"] == "engine_dead"
        else:
            assert events[-1]["choices"][0]["finish_reason"] == "length"
    whole.join(60)
    assert wholes[0].status_code == 503
    assert wholes[0].json()["error"]["code"] == "engine_dead"
    assert post(cluster, session, prompt="Hi", max_tokens=2).status_code == 200  # by another replica, or the next one
    wait_for(lambda: len(cluster.replicas()) == NUM_REPLICAS, timeout_s=120, what="the next replica")
    assert victim not in cluster.replicas()


def test_an_engine_that_is_stuck_costs_its_replica_its_place(cluster: Cluster) -> None:
    victim = cluster.replicas()[0]
    session, engine = session_of(cluster, victim), engine_of(cluster.pids()[victim])
    stream = Stream(cluster, session)
    assert stream.began.wait(60)
    os.kill(engine, signal.SIGSTOP)
    wait_for(lambda: victim not in cluster.replicas(), timeout_s=60, what="routing around the stuck replica")
    wait_for(lambda: len(cluster.replicas()) == NUM_REPLICAS, timeout_s=120, what="another replica in its place")
    assert victim not in cluster.replicas()
    assert victim in cluster.pids()  # it drains
    os.kill(engine, signal.SIGKILL)
    assert stream.finished()[-1]["error"]["code"] in ("engine_dead", "shutting_down")
    wait_for(lambda: victim not in cluster.pids(), timeout_s=60, what="its end")


def test_replicas_that_are_scaled_down_finish_their_streams(cluster: Cluster) -> None:
    streams = [Stream(cluster, session_of(cluster, replica), max_tokens=400) for replica in cluster.replicas()]
    for stream in streams:
        assert stream.began.wait(60)
    assert len({stream.replica for stream in streams}) == NUM_REPLICAS
    cluster.deploy(replicas=1)
    for stream in streams:
        assert stream.finished()[-1]["choices"][0]["finish_reason"] == "length"
    wait_for(lambda: len(cluster.replicas()) == 1, timeout_s=60, what="one replica")
    wait_for(lambda: len(cluster.pids()) == 1, timeout_s=60, what="the end of the others")
    assert post(cluster, prompt="Hi", max_tokens=2).status_code == 200


def test_more_requests_than_are_aimed_at_start_more_replicas(cluster: Cluster) -> None:
    cluster.deploy(replicas=1, max_replicas=NUM_REPLICAS, target_ongoing_requests=2)
    streams: list[Stream] = []

    def keep_asking() -> bool:
        num_open = sum(stream.is_alive() for stream in streams)
        streams.extend(Stream(cluster, f"crowd-{len(streams) + i}", max_tokens=600) for i in range(9 - num_open))
        return len(cluster.replicas()) == NUM_REPLICAS  # a rollout alone has two at most: the old one and the new

    wait_for(keep_asking, timeout_s=150, what="more replicas")
    for stream in streams:
        assert stream.finished()[-1]["choices"][0]["finish_reason"] == "length"
