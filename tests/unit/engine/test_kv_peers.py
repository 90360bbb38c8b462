"""Two engines with real models exchange blocks: full attention, windows, states; unequal ones refuse each other."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from engine.interface.config import EngineConfig, PeerConfig
from engine.interface.errors import StartupError
from engine.interface.protocol import AddRequest, HandOver, SamplingParams, StepEvents, pack_token_ids
from engine.offline import OfflineEngine
from engine.peers.shared_memory import HAS_MEMFD
from tests.support.checkpoints import make_config
from tests.support.hybrid_model import LAYERS, hybrid_config, served
from tests.support.reference import save_checkpoint
from tests.support.tiny_llama import save_tiny_llama

pytestmark = pytest.mark.skipif(not HAS_MEMFD, reason="needs memfd_create")
MIB = 2**20
PARAMS = (
    SamplingParams(max_tokens=8, temperature=0.0),
    SamplingParams(max_tokens=8, temperature=0.9, seed=7),
    SamplingParams(max_tokens=8, temperature=0.7, seed=8, presence_penalty=0.5, repetition_penalty=1.2),
)
Load = Callable[..., OfflineEngine]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("windows")
    save_checkpoint(folder, make_config("qwen2_windows"))
    return folder


def loader(folder: Path) -> Load:
    def load(**changes: object) -> OfflineEngine:
        settings = {"block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 4, "max_model_len": 120} | changes
        return OfflineEngine.load(EngineConfig(model=str(folder), device="cpu", **settings))

    return load


class Peers:
    """A prefill and a decode engine in this process, each as `quire serve` makes it."""

    def __init__(self, load: Load, socket: Path, *, of_decode: dict[str, object] | None = None) -> None:
        peer = PeerConfig(role="prefill", index=0, num_prefill=1, num_decode=1, prefill_sockets=[str(socket)])
        decode = msgspec.structs.replace(peer, role="decode")
        small = {"kv_host_memory_bytes": 8 * MIB, "kv_cache_memory_bytes": 4 * MIB}
        self.prefill = load(peer=peer, **small)
        self.decode = load(peer=decode, **small | (of_decode or {}))
        for offline in (self.prefill, self.decode):
            assert offline.loaded.peers is not None
            offline.loaded.peers.attach(
                offline.engine.scheduler, on_socket=lambda sock: None, off_socket=lambda sock: None
            )
        for _ in range(4):
            self.turn()

    def turn(self) -> None:
        for offline in (self.prefill, self.decode):
            offline.engine.run_once(0)
            offline.engine.scheduler.check()

    def ask(self, offline: OfflineEngine, message: AddRequest) -> list[int]:
        """Run a request to its end in one engine, both turning; return its tokens."""
        offline.transport.inbox.append((0, message))
        tokens: list[int] = []
        for _ in range(2000):
            self.turn()
            while offline.transport.outbox:
                events = offline.transport.outbox.popleft()
                if not isinstance(events, StepEvents):
                    continue
                tokens += events.token_ids
                if events.finished:
                    return tokens
        raise AssertionError("the request has not ended")

    def answer(self, name: str, prompt: list[int], params: SamplingParams) -> list[int]:
        """Return the tokens of a request whose prompt one engine computes and which the other answers."""
        packed = pack_token_ids(prompt)
        single = msgspec.structs.replace(params, max_tokens=1)
        first = AddRequest(name, packed, single, 0.0, hand_over=HandOver(0, is_prefill=True))
        made = self.ask(self.prefill, first)
        rest = AddRequest(name, packed, params, 0.0, output=pack_token_ids(made), hand_over=HandOver(0))
        return made + self.ask(self.decode, rest)

    def close(self) -> None:
        for offline in (self.prefill, self.decode):
            offline.loaded.close()


@pytest.fixture
def peers_of(tmp_path: Path) -> Iterator[Callable[..., Peers]]:
    made: list[Peers] = []

    def make(load: Load, **settings: object) -> Peers:
        made.append(Peers(load, tmp_path / "peer.sock", **settings))
        return made[-1]

    yield make
    for peers in made:
        peers.close()


def prompts(vocab_size: int, lengths: tuple[int, ...] = (61, 64, 39)) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def check_equal(peers: Peers, load: Load, asked: list[list[int]]) -> None:
    expected = load(enable_prefix_caching=False).generate(asked, list(PARAMS))
    for i, (prompt, params) in enumerate(zip(asked, PARAMS, strict=True)):
        assert peers.answer(str(i), prompt, params) == expected[i].token_ids
    arrivals, offers = peers.decode.engine.scheduler.kv.tiers.arrivals, peers.prefill.engine.scheduler.kv.tiers.offers
    assert arrivals is not None
    assert offers is not None
    assert arrivals.num_by_result == {"complete": len(PARAMS)}
    assert arrivals.num_blocks["taken"] > 0
    assert arrivals.num_blocks["failed"] == 0
    assert peers.decode.engine.scheduler.kv.tiers.host.num_found_tokens > 0  # type: ignore[union-attr]
    for _ in range(3):
        peers.turn()
    assert offers.num_open == 0


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_answers_of_full_attention_are_those_of_one_engine(
    llama: Path, peers_of: Callable[..., Peers], kv_dtype: str
) -> None:
    def load(**changes: object) -> OfflineEngine:
        return loader(llama)(kv_cache_dtype=kv_dtype, **changes)

    check_equal(peers_of(load), load, prompts(320))


def test_answers_of_windows_are_those_of_one_engine(windows: Path, peers_of: Callable[..., Peers]) -> None:
    def load(**changes: object) -> OfflineEngine:
        return loader(windows)(max_model_len=64, **changes)

    check_equal(peers_of(load), load, prompts(97, (50, 41, 33)))


@pytest.mark.parametrize("layers", ["delta rule", "every kind"])
def test_answers_of_states_are_those_of_one_engine(layers: str, peers_of: Callable[..., Peers], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")  # what tells models apart beside their weights

    def load(**changes: object) -> OfflineEngine:
        settings = {"block_size": 4, "max_num_batched_tokens": 80, "max_num_seqs": 2, "max_model_len": 120} | changes
        with served(hybrid_config(*LAYERS[layers])):
            return OfflineEngine.load(EngineConfig(model=str(tmp_path), load_format="dummy", device="cpu", **settings))

    check_equal(peers_of(load), load, prompts(97, (101, 90, 77)))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kv_cache_dtype": "int8"}, "kv_dtype is torch.int8 here"),
        ({"block_size": 8}, "block_size is 8 here and 4 there"),
    ],
)
def test_unequal_engines_compute_alone_and_say_why(
    llama: Path, peers_of: Callable[..., Peers], changes: dict[str, object], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    peers = peers_of(loader(llama), of_decode=changes)
    assert says in caplog.text
    arrivals = peers.decode.engine.scheduler.kv.tiers.arrivals
    assert arrivals is not None
    assert arrivals.peers == []
    assert len(peers.answer("a", prompts(320)[0], PARAMS[0])) == 8
    assert arrivals.num_by_result == {"lost": 1}


def test_other_weights_are_another_identity(llama: Path, tmp_path: Path, peers_of: Callable[..., Peers]) -> None:
    other = save_tiny_llama(tmp_path / "other")
    weights = peers_of(loader(llama)).prefill.loaded.peers._facts["weights"]  # type: ignore[union-attr]
    peer = PeerConfig(role="decode", index=0, num_prefill=1, num_decode=1, prefill_sockets=[])
    loaded = loader(other)(peer=peer, kv_host_memory_bytes=MIB, kv_cache_memory_bytes=4 * MIB).loaded
    assert loaded.peers is not None
    assert loaded.peers._facts["weights"] != weights
    loaded.close()


def test_copies_of_the_weights_on_several_hosts_are_equal(llama: Path, tmp_path: Path) -> None:
    copy, other = tmp_path / "copy", tmp_path / "other"
    shutil.copytree(llama, copy)
    shutil.copytree(llama, other)
    weights = next(other.glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)

    def identity(folder: Path, **changes: object) -> str:
        peer = PeerConfig(role="decode", index=0, num_prefill=1, num_decode=1, is_on_several_hosts=True, **changes)
        loaded = loader(folder)(peer=peer, kv_host_memory_bytes=MIB, kv_cache_memory_bytes=4 * MIB).loaded
        try:
            told = loaded.greeting(max_queued_requests=1, max_queued_tokens=1).cache_identity
            assert loaded.peers is not None
            assert told == loaded.peers.identity
            return told
        finally:
            loaded.close()

    assert identity(llama) == identity(copy) != identity(other)
    assert identity(llama) != identity(llama, transport="another") != ""


def test_nixl_that_is_missing_is_a_sentence(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ImportError("No module named 'nixl'")

    monkeypatch.setattr("engine.startup.kv_peers.import_nixl", missing)
    peer = PeerConfig(role="decode", index=0, num_prefill=1, num_decode=1, transport="nixl")
    with pytest.raises(StartupError, match=r"--kv-transport nixl needs NIXL: pip install nixl"):
        loader(llama)(peer=peer)
