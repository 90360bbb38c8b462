"""AffinityRouter: routes a request to its session's home replica, unless that is much busier. Imports ray.

The session is Ray's: the header x-session-id of the client, or what deploy/ray/edge.py has set by the prompt. Homes are
found by rendezvous hashing (Thaler and Ravishankar 1998), so every proxy finds the same one without asking, and only
the sessions of a replica that comes or goes move.
"""

import random
from collections.abc import Sequence
from hashlib import blake2b

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

NUM_CHOICES = 4  # candidates if any replica will do; querying each of a hundred would cost too much


class AffinityRouter(RequestRouter):
    """Routes requests of one session to one replica, others to the least loaded. max_imbalance: see RaySettings."""

    max_imbalance = 8

    def initialize_state(self, max_imbalance: int) -> None:
        """Take request_router_kwargs, as Ray does after making a router."""
        self.max_imbalance = max_imbalance

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return replicas by rank; Ray takes the least loaded of a rank that is not full, and else the next rank."""
        able = [replica for replica in candidate_replicas if replica.routing_stats.get("is_ready", True)]
        able = able or candidate_replicas  # all are restarting: one of them returns the proper error
        if pending_request is None:
            return [self._least_loaded(able)]
        pending_request.routing_context.should_backoff = True  # all ranks full: wait before they are tried again
        session_id = pending_request.metadata.session_id
        if not session_id or not able:
            return [self._least_loaded(able)]
        home = home_of(session_id, able)
        least_loaded = self._least_loaded(able)
        if self._load(home) - self._load(least_loaded[0]) > self.max_imbalance:
            return [least_loaded, [home]]
        return [[home], least_loaded]

    def _load(self, replica: RunningReplica) -> int:
        """Return the number of requests on a replica as last reported to this proxy; 0 without a recent report."""
        return self.replica_queue_len_cache.get(replica.replica_id) or 0

    def _least_loaded(self, replicas: Sequence[RunningReplica]) -> list[RunningReplica]:
        shuffled = random.sample(replicas, len(replicas))  # so that equally loaded replicas alternate
        return sorted(shuffled, key=self._load)[:NUM_CHOICES]


def home_of(session_id: str, replicas: Sequence[RunningReplica]) -> RunningReplica:
    """Return the replica with the highest hash of session and replica."""
    return max(replicas, key=lambda replica: _weight(session_id, replica.replica_id.unique_id))


def _weight(session_id: str, replica_id: str) -> bytes:
    return blake2b(f"{replica_id} {session_id}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
