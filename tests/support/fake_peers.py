"""FakePeers: a prefill and a decode engine over FakeExecutors, with links and copies that a test can slow and break."""

from collections import deque

from engine.interface.protocol import HandOver, pack_token_ids
from engine.peers.kv_transport import Reading
from engine.peers.messages import Welcome
from engine.tensor_parallel.peer_shares import OtherRanks, PeerDone
from engine.tensor_parallel.ranked_links import FencedLinks


class FakeLink:
    """One end of the connection between two engines: poll() takes what the other end sent."""

    is_holding = False
    connecting: list[int] = []  # noqa: RUF012 - a test may set it

    def __init__(self):
        self.inbox = deque()
        self.other = None
        self.is_connected = False
        self.num_held_back = 0  # polls that still return nothing

    @property
    def peers(self):
        return [0] if self.is_connected else []

    def send(self, peer, message):
        assert peer == 0
        if self.is_connected:
            self.other.inbox.append((0, message))

    def poll(self):
        if self.num_held_back:
            self.num_held_back -= 1
            return []
        came, self.inbox = list(self.inbox), deque()
        return came

    def drop(self, peer):
        self.is_connected = self.other.is_connected = False
        self.other.inbox.append((0, None))


class FakeTransport:
    """KvTransport between the host memories of two FakeExecutors. A copy reads its sources when it ends, not before."""

    memory = b"memory"

    def __init__(self, source, target):
        self._source, self._target = source, target
        self.polls_until_done = 1
        self.loses = lambda reading: False
        self.is_connected = False
        self.late_rank = None  # of the source
        self._running = []  # [reading, polls left]

    def connect(self, peer, memory):
        assert memory == self.memory
        self.is_connected = True

    def disconnect(self, peer):
        self.is_connected = False

    def read(self, peer, sources, targets):
        assert self.is_connected
        reading = Reading(peer, sources, targets)
        self._running.append([reading, self.polls_until_done])
        return reading

    def take_done(self):
        for entry in self._running:
            entry[1] -= 1
        done = [reading for reading, left in self._running if left <= 0]
        self._running = [entry for entry in self._running if entry[1] > 0]
        for reading in done:
            reading.is_done, reading.is_whole = True, not self.loses(reading)
            if reading.is_whole:
                for source, target in zip(reading.sources, reading.targets, strict=True):
                    if self.late_rank is not None:
                        assert self.late_rank.has_copied(source), "the second rank has not ended the step of an offer"
                    memory, kinds = self._source._host[source]
                    self._target._host[target] = (list(memory), kinds)
        return done


class LateRank:
    """The second rank of a prefill engine, some turns behind: its host memory is what that of the first was then."""

    def __init__(self, executor, turns_late):
        self.others = OtherRanks(self._tell, num_ranks=2)
        self._turns_late = turns_late
        self._executor = executor
        self._asked = deque()  # [job, turns left]
        self._host = []

    def _tell(self, rank, job):
        self._asked.append([job, self._turns_late()])

    def turn(self):
        for entry in self._asked:
            entry[1] -= 1
        while self._asked and self._asked[0][1] <= 0:
            job, _ = self._asked.popleft()
            self._host = [repr(content) for content in self._executor._host]
            self.others.take(1, PeerDone(job.job_id))

    def has_copied(self, slot):
        return bool(self._host) and self._host[slot] == repr(self._executor._host[slot])


class FakePeers:
    """Two Harnesses whose tiers are joined. A request goes to `prefill` first, then with its token to `decode`."""

    def __init__(self, prefill, decode, *, turns_late=None):
        """turns_late: makes a number of turns by which a second rank of `prefill` is late; None: it has one rank."""
        self.prefill, self.decode = prefill, decode
        self.links = FakeLink(), FakeLink()
        self.links[0].other, self.links[1].other = self.links[1], self.links[0]
        self.transport = FakeTransport(prefill.executor, decode.executor)
        self.late_rank, links = None, self.links[0]
        if turns_late is not None:
            self.late_rank = self.transport.late_rank = LateRank(prefill.executor, turns_late)
            links = FencedLinks(
                links, self.late_rank.others, committed_step=lambda: prefill.scheduler.committed_step_id
            )
        prefill.scheduler.kv.tiers.open_offers(links)
        decode.scheduler.kv.tiers.open_arrivals(self.links[1], self.transport, slot_bytes=1)
        self.connect()
        self.prompts = {}
        self.continued = set()
        self.decoded = {}  # by request_id: requests of the decode engine

    @property
    def offers(self):
        return self.prefill.scheduler.kv.tiers.offers

    @property
    def arrivals(self):
        return self.decode.scheduler.kv.tiers.arrivals

    def connect(self):
        for link in self.links:
            link.is_connected = True
        self.links[1].inbox.append((0, Welcome(FakeTransport.memory)))

    def cut(self):
        """Let the connection be lost, on both ends."""
        for link in self.links:
            link.is_connected = False
            link.inbox.clear()
            link.inbox.append((0, None))

    def add(self, request_id, prompt, max_tokens=8, **params):
        self.prompts[request_id] = (prompt, max_tokens, params)
        self.prefill.add(request_id, prompt, 1, hand_over=HandOver(0, is_prefill=True, max_tokens=max_tokens), **params)

    def go_on(self):
        """Send the requests that have their first token to the decode engine."""
        for request_id, (prompt, max_tokens, params) in self.prompts.items():
            seen = self.prefill.seen[request_id]
            if request_id in self.continued or seen.ends != ["length"]:
                continue
            self.continued.add(request_id)
            self.decode.add(
                request_id,
                prompt,
                max_tokens,
                hand_over=HandOver(0),
                output=pack_token_ids(seen.token_ids),
                **params | {"charge": None, "counts_prompt": False},
            )

    def num_cached(self, request_id):
        """Return the tokens that the decode engine did not compute."""
        return self.decoded[request_id].num_cached_tokens

    def turn(self, times=1):
        for _ in range(times):
            self.prefill.turn()
            self.decode.turn()
            if self.late_rank is not None:
                self.late_rank.turn()
            self.decoded |= self.decode.scheduler.requests
            self.go_on()

    def drain(self):
        engines = (self.prefill, self.decode)
        for _ in range(5000):
            if not any(engine.transport.inbox or not engine.engine.is_idle for engine in engines):
                break
            self.turn()
        self.turn(2)  # what the links still have
        self.prefill.drain()
        self.decode.drain()
        assert not self.arrivals.is_active
        assert not self.arrivals.slots
