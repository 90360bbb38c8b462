"""deploy/ray where a model is split: one replica with two ranks of the demo model on a real Ray cluster of one machine.

Ray is told of two GPUs that are not there, which it believes; the ranks compute on the CPU. One cluster serves all
tests, in the order in which they stand.
"""

import contextlib
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.conftest import need_module
from tests.deploy.ray_cluster import (
    Cluster,
    Stream,
    engine_of,
    environment_of,
    post,
    ranks_of,
    wait_for,
)
from tests.support.daemon import is_alive

ONE = {"replicas": 1, "health_period": 10}  # no check may replace the replica while its engine is restarted
SPLIT = {**ONE, "tensor_parallel_size": 2, "device": "cpu"}
SAME = {"max_tokens": 48, "temperature": 0}


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
        started.start(num_gpus=2, num_replicas=1, health_period=10)
        yield started


def deploy_and_wait(cluster: Cluster, **arguments: object) -> tuple[str, int]:
    """Deploy another version; return the one replica that it has, and its pid."""
    before = set(cluster.pids())
    cluster.deploy(**arguments)

    def is_replaced() -> bool:
        return len(cluster.pids()) == 1 and not before & set(cluster.pids()) and bool(cluster.replicas())

    wait_for(is_replaced, timeout_s=120, what="the next version")
    ((replica, pid),) = cluster.pids().items()
    return replica, pid


def text_of(stream: Stream) -> str:
    return "".join(choice["text"] for event in stream.finished() for choice in event["choices"])


def test_a_split_model_streams_the_tokens_of_one_that_is_not_from_one_bundle_on_one_node(cluster: Cluster) -> None:
    assert cluster.placement_groups() == []
    whole = text_of(Stream(cluster, "", **SAME))
    _, pid = deploy_and_wait(cluster, **SPLIT)
    engine = engine_of(pid)
    assert len(ranks_of(engine)) == 1
    assert text_of(Stream(cluster, "", **SAME)) == whole
    (group,) = cluster.placement_groups()
    assert (group["strategy"], group["state"], group["bundles"]) == ("STRICT_PACK", "CREATED", {"0": {"CPU": 2.0}})


def test_a_rank_that_dies_ends_the_streams_with_an_error_and_its_engine_is_restarted_in_place(cluster: Cluster) -> None:
    ((replica, pid),) = cluster.pids().items()
    (group,) = cluster.placement_groups()
    engine = engine_of(pid)
    (rank,) = ranks_of(engine)
    stream = Stream(cluster, "", max_tokens=1500)
    assert stream.began.wait(60)
    os.kill(rank, signal.SIGKILL)
    error = stream.finished()[-1]["error"]
    assert error["code"] == "engine_dead"
    wait_for(lambda: post(cluster, prompt="Hi", max_tokens=2).status_code == 200, timeout_s=60, what="the next engine")
    assert cluster.pids() == {replica: pid}
    assert engine_of(pid) != engine
    assert len(ranks_of(engine_of(pid))) == 1
    assert not is_alive(engine)
    assert cluster.placement_groups() == [group]


def test_every_rank_is_shown_all_gpus_of_its_replica(cluster: Cluster) -> None:
    _, pid = deploy_and_wait(cluster, **SPLIT | {"device": "auto", "gpus": 2})  # auto: the CPU where there is no GPU
    (group,) = cluster.placement_groups()
    assert group["bundles"] == {"0": {"CPU": 2.0, "GPU": 2.0}}
    engine = engine_of(pid)
    for process in (engine, *ranks_of(engine)):
        assert sorted(environment_of(process)["CUDA_VISIBLE_DEVICES"].split(",")) == ["0", "1"]


def test_scaling_to_zero_leaves_no_rank_and_no_placement_group_and_the_next_request_starts_them(
    cluster: Cluster,
) -> None:
    scaling = {"min_replicas": 0, "max_replicas": 1, "downscale_delay_s": 2, "look_back_period_s": 2}
    ranks = [ranks_of(engine_of(pid)) for pid in cluster.pids().values()]
    cluster.deploy(**SPLIT | {"replicas": 0, "max_replicas": 1}, autoscaling=scaling)
    wait_for(lambda: not cluster.pids(), timeout_s=120, what="no replica")
    wait_for(lambda: cluster.placement_groups() == [], timeout_s=30, what="no placement group")
    assert not any(is_alive(rank) for of_replica in ranks for rank in of_replica)
    assert post(cluster, prompt="Hi", max_tokens=2).status_code == 200
    (pid,) = cluster.pids().values()
    assert len(ranks_of(engine_of(pid))) == 1
    (group,) = cluster.placement_groups()
    assert group["bundles"] == {"0": {"CPU": 2.0}}
