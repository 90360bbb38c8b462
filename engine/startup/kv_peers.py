"""KvPeers: the engines with which one engine exchanges blocks, from --disaggregate to its tiers. Imports torch.

Life: check_peers() and with_host_memory(), before anything is loaded → KvPeers, with the loaded model → attach() to the
engine that serves → close().
"""

from __future__ import annotations

import logging
from hashlib import blake2b
from pathlib import Path

import msgspec
import torch

from engine.core.offers import LinksToDecode
from engine.core.scheduler import Scheduler
from engine.device.host_pages import HostPages
from engine.device.kv_cache import KVCachePlan
from engine.device.memory import format_size, free_host_bytes
from engine.interface.config import EngineConfig, PeerConfig
from engine.interface.errors import StartupError
from engine.peers.kv_transport import KvTransport
from engine.peers.links import DecodeLinks, OnSocket, PrefillLinks
from engine.peers.messages import PeerHello
from engine.peers.nixl import NixlTransport, import_nixl
from engine.peers.shared_memory import HAS_MEMFD, SharedMemory
from engine.startup.host_memory import AUTO_MOST_BYTES, AUTO_SHARE
from engine.startup.kv_disk import DUMMY_SEED, DiskFacts, cache_identity
from engine.tensor_parallel.peer_shares import OtherRanks, RankedTransport
from engine.tensor_parallel.ranked_links import ConnectingLinks, FencedLinks
from engine.tensor_parallel.ranks import Ranks
from engine.tiers.block_folder import FOLDER_NAME
from engine.tiers.identity import DigestMemory, adapter_digest, digest_of_dummy, weights_digest, weights_stamp
from models.lora.adapter import WEIGHTS_FILE
from models.lora.config import CONFIG_FILE
from models.weights.checkpoint import weight_files

logger = logging.getLogger(__name__)

_IDENTITY_BYTES = 16


def check_peers(config: EngineConfig) -> None:
    """Raise StartupError if this engine cannot exchange blocks."""
    peer = config.peer
    if peer is None:
        return
    if not HAS_MEMFD:
        raise StartupError("--disaggregate shares host memory between processes by memfd_create, which Linux has.")
    if peer.transport == "nixl":
        try:
            import_nixl()
        except ImportError as error:
            raise StartupError(f"--kv-transport nixl needs NIXL: pip install nixl ({error}).") from error


def with_host_memory(config: EngineConfig) -> EngineConfig:
    """Return the configuration with host memory for an engine that exchanges blocks, if no size is given."""
    if config.peer is None or config.kv_host_memory_bytes is not None:
        return config
    num_engines = config.peer.num_engines
    size = min(int(free_host_bytes() * AUTO_SHARE / num_engines), AUTO_MOST_BYTES)  # all engines share the share
    logger.info("host memory for blocks of other engines size=%r", format_size(size))
    return msgspec.structs.replace(config, kv_host_memory_bytes=size)


def open_transport(peer: PeerConfig, host: HostPages) -> SharedMemory | NixlTransport:
    """Return what copies blocks to or from this rank's host memory. Raises StartupError if NIXL cannot be used here."""
    assert host.shared is not None
    if peer.transport != "nixl":
        return SharedMemory(host.shared)
    try:
        return NixlTransport(host.shared.array)
    except Exception as error:  # NIXL's errors have no common class
        raise StartupError(f"--kv-transport nixl cannot be used here: {error}.") from error


class KvPeers:
    """The engine's links to its peers, and the transport between their host memories."""

    def __init__(
        self,
        config: EngineConfig,
        peer: PeerConfig,
        facts: DiskFacts,
        plan: KVCachePlan,
        host: HostPages,
        *,
        ranks: Ranks | None = None,
    ) -> None:
        """ranks: the others of a split model, each with its own host memory. Raises StartupError."""
        self._peer = peer
        self._num_ranks = config.tensor_parallel_size
        self._slot_bytes = host.page_bytes
        self._facts = _facts(config, peer, facts, plan)
        self._own = open_transport(peer, host)
        self._others: OtherRanks | None = None
        if ranks is not None:
            self._others = OtherRanks(ranks.tell, num_ranks=self._num_ranks)
            ranks.on_peer = self._others.take
        self._links: PrefillLinks | DecodeLinks | None = None

    @property
    def identity(self) -> str:
        """A digest of what must be equal on both sides: engines with equal ones can exchange blocks."""
        return blake2b(msgspec.json.encode(self._facts, order="sorted"), digest_size=_IDENTITY_BYTES).hexdigest()

    def attach(self, scheduler: Scheduler, *, on_socket: OnSocket, off_socket: OnSocket) -> None:
        """Let an engine that has served nothing exchange blocks. on_socket, off_socket: of its selector.

        Raises StartupError if a rank cannot.
        """
        peer, tiers = self._peer, scheduler.kv.tiers

        def committed_step() -> int:
            return scheduler.committed_step_id

        transport: KvTransport = self._own
        ranked: RankedTransport | None = None
        if self._others is not None:
            try:
                transport = ranked = RankedTransport(self._own, self._others, committed_step=committed_step)
            except OSError as error:
                raise StartupError(f"Blocks of other engines cannot be exchanged: {error}.") from error
        if peer.role == "prefill":
            links = PrefillLinks(
                peer.prefill_sockets[peer.index],
                self._facts,
                lambda: transport.memory,
                on_socket=on_socket,
                off_socket=off_socket,
            )
            told: LinksToDecode = links
            if self._others is not None:
                told = FencedLinks(links, self._others, committed_step=committed_step)
            tiers.open_offers(told)
            self._links = links
        else:
            hello = PeerHello(peer.first_decode + peer.index, self._facts)
            self._links = DecodeLinks(peer.prefill_sockets, hello, on_socket=on_socket, off_socket=off_socket)
            heard = self._links if ranked is None else ConnectingLinks(self._links, ranked)
            tiers.open_arrivals(heard, transport, slot_bytes=self._slot_bytes * self._num_ranks)
        logger.info(
            "blocks are exchanged role=%s index=%d transport=%s ranks=%d",
            peer.role,
            peer.index,
            peer.transport,
            self._num_ranks,
        )

    def close(self) -> None:
        """End the links and the copies. The engine must have ended."""
        if self._links is not None:
            self._links.close()
        self._own.close()


def _facts(config: EngineConfig, peer: PeerConfig, facts: DiskFacts, plan: KVCachePlan) -> dict[str, str]:
    """Return what must be equal on both sides, each with the name that a sentence gives it.

    Files of one host are compared by path and time. Those of several are read for it: copies of them are equal.
    """
    try:
        weights, loras = (_digest_files if peer.is_on_several_hosts else _stamp_files)(config)
    except OSError as error:
        raise StartupError(f"{error.filename or config.model} cannot be read: {error.strerror or error}.") from error
    identity = cache_identity(config, weights, facts, plan)
    named = {name: value for name in identity.__struct_fields__ if (value := getattr(identity, name)) is not None}
    told = {name: value.hex() if isinstance(value, bytes) else str(value) for name, value in named.items()}
    told["config_json"] = blake2b(identity.config_json, digest_size=8).hexdigest()
    told["loras"] = loras
    told["kv_transport"] = peer.transport
    return told


def _stamp_files(config: EngineConfig) -> tuple[bytes, str]:
    """Return what stands for weights and adapters within one host."""
    weights = _dummy_digest() if config.load_format == "dummy" else weights_stamp(weight_files(Path(config.model)))
    return weights, ", ".join(f"{source.name}={source.folder}" for source in config.loras)


def _digest_files(config: EngineConfig) -> tuple[bytes, str]:
    """Return digests of weights and adapters. Reads the files; --kv-disk remembers those of weights."""
    if config.load_format == "dummy":
        weights = _dummy_digest()
    else:
        memory = DigestMemory(None if config.kv_disk is None else Path(config.kv_disk) / FOLDER_NAME)
        weights = weights_digest(weight_files(Path(config.model)), memory)
    adapters = [
        adapter_digest(Path(source.folder) / CONFIG_FILE, Path(source.folder) / WEIGHTS_FILE).hex()[:16]
        for source in config.loras
    ]
    return weights, ", ".join(f"{source.name}={digest}" for source, digest in zip(config.loras, adapters, strict=True))


def _dummy_digest() -> bytes:
    return digest_of_dummy(seed=DUMMY_SEED, generator=f"torch {torch.__version__}")
