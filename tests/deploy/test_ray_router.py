"""The router's choice among replicas, without a cluster. Needs Ray."""

import asyncio
from dataclasses import dataclass, field

import pytest

from deploy.ray.routing import NUM_CHOICES, AffinityRouter, home_of


@dataclass(frozen=True)
class ReplicaId:
    unique_id: str


@dataclass(eq=False)
class Replica:
    """Stands for Ray's RunningReplica."""

    replica_id: ReplicaId
    routing_stats: dict[str, bool] = field(default_factory=dict)


@dataclass
class Routing:
    should_backoff: bool = False


@dataclass
class Metadata:
    session_id: str


@dataclass
class Pending:
    """Stands for Ray's PendingRequest."""

    metadata: Metadata
    routing_context: Routing = field(default_factory=Routing)


class Router(AffinityRouter):
    """An AffinityRouter that knows the loads of replicas from a dict, and of Ray nothing."""

    def __init__(self, loads: dict[ReplicaId, int]) -> None:
        self._loads = loads
        self.initialize_state(max_imbalance=4)

    @property
    def replica_queue_len_cache(self) -> dict[ReplicaId, int]:
        return self._loads

    def choose(self, replicas: list[Replica], session_id: str) -> list[list[Replica]]:
        pending = Pending(Metadata(session_id))
        ranks = asyncio.run(self.choose_replicas(replicas, pending))
        assert pending.routing_context.should_backoff  # else Ray would turn in a loop while all are full
        assert all(ranks)
        return ranks


@pytest.fixture
def replicas() -> list[Replica]:
    return [Replica(ReplicaId(f"r{i}")) for i in range(10)]


def test_a_session_goes_home_and_else_to_the_least_loaded(replicas: list[Replica]) -> None:
    loads = {replica.replica_id: 3 for replica in replicas[2:]}
    home = home_of("s", replicas)
    ranks = Router(loads).choose(replicas, "s")
    assert ranks[0] == [home]
    assert len(ranks[1]) == NUM_CHOICES
    assert set(ranks[1][:2]) == set(replicas[:2])


def test_home_may_lead_by_so_much_and_no_more(replicas: list[Replica]) -> None:
    home = home_of("s", replicas)
    router = Router(loads := {home.replica_id: 4})
    assert router.choose(replicas, "s")[0] == [home]
    loads[home.replica_id] = 5
    ranks = router.choose(replicas, "s")
    assert home not in ranks[0]
    assert ranks[1] == [home]


def test_without_a_session_the_least_loaded_serve_by_turns(replicas: list[Replica]) -> None:
    router = Router({replica.replica_id: 1 for replica in replicas[5:]})
    firsts = {router.choose(replicas, "")[0][0].replica_id for _ in range(200)}
    assert firsts == {replica.replica_id for replica in replicas[:5]}


def test_a_replica_whose_engine_is_gone_is_left_out_unless_all_are(replicas: list[Replica]) -> None:
    home = home_of("s", replicas)
    home.routing_stats = {"is_ready": False}
    assert all(home not in rank for rank in Router({}).choose(replicas, "s"))
    for replica in replicas:
        replica.routing_stats = {"is_ready": False}
    assert Router({}).choose(replicas, "s")[0] == [home]


def test_a_replica_that_goes_moves_its_own_sessions_only(replicas: list[Replica]) -> None:
    homes = {f"s{i}": home_of(f"s{i}", replicas) for i in range(2000)}
    gone = replicas.pop()
    for session_id, home in homes.items():
        assert home is gone or home_of(session_id, replicas) is home
    counts = [sum(home is replica for home in homes.values()) for replica in [*replicas, gone]]
    assert min(counts) > 130  # of 200 each
    assert max(counts) < 280
