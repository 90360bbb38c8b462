"""KvDisk: the disk behind host memory, from --kv-disk to a tier of the running engine. Imports torch.

Life: stamp_files(), before anything of the model is read → check_kv_disk() → digest_weights(), before they are loaded →
KvDisk, with the loaded model, which raises StartupError if its files changed meanwhile → attach() to the engine that
serves → close().
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.core.disk_tier import DiskParts
from engine.core.scheduler import Scheduler
from engine.device.host_pages import HostPages
from engine.device.kv_cache import KVCachePlan
from engine.device.memory import format_size
from engine.device.page_plan import PagePlan
from engine.interface.config import EngineConfig
from engine.interface.errors import StartupError
from engine.tensor_parallel.disk_shares import OtherShares
from engine.tensor_parallel.ranks import Ranks
from engine.tiers.block_folder import FOLDER_NAME, BlockFolder, bytes_on_disk, check_folder
from engine.tiers.disk_store import DiskStore
from engine.tiers.identity import (
    CacheIdentity,
    DigestMemory,
    adapter_digest,
    digest_of_dummy,
    stamps_of,
    weights_digest,
)
from engine.tiers.store_threads import StoreThreads
from models.lora.adapter import WEIGHTS_FILE
from models.lora.config import CONFIG_FILE
from models.weights.checkpoint import INDEX_FILE, weight_files

logger = logging.getLogger(__name__)

DEFAULT_SIZE_BYTES = 64 * 2**30
_SHARE_QUEUED = 4  # of host memory, blocks that wait to be written take at most one part in so many
_CLOSE_S = 5.0  # to write what is queued when the engine ends
DUMMY_SEED = 0  # of Weights.dummy()


@dataclass(frozen=True)
class DiskFacts:
    """What a KvDisk must know of the model that was loaded, beside its files."""

    model_impl: str
    quantization: str
    dtype: torch.dtype
    kv_dtype: torch.dtype
    is_long: bool  # see CacheIdentity
    device: torch.device
    attention_backend: str


def stamp_files(config: EngineConfig) -> dict[str, tuple[int, ...]]:
    """Return the stamps of all files on which blocks depend, by path; {}: there is no disk."""
    if config.kv_disk is None:
        return {}
    folder = Path(config.model)
    files = [folder / "config.json"]
    if config.load_format != "dummy":
        files += [folder / INDEX_FILE, *weight_files(folder)]
    for source in config.loras:
        files += [Path(source.folder) / CONFIG_FILE, Path(source.folder) / WEIGHTS_FILE]
    return stamps_of(files)


def check_kv_disk(config: EngineConfig, *, block_bytes: int) -> None:
    """Raise StartupError if --kv-disk and --kv-disk-size cannot be met. block_bytes: of the largest, on one rank."""
    folder = config.kv_disk
    if folder is None:
        if config.kv_disk_bytes is not None:
            raise StartupError(
                f"--kv-disk-size {format_size(config.kv_disk_bytes)} bounds the blocks on disk, and there is no"
                " --kv-disk: name its folder."
            )
        return
    if config.kv_host_memory_bytes is None:
        raise StartupError(f"--kv-disk {folder} is behind host memory, and --kv-host-memory is off: give it a size.")
    least = config.tensor_parallel_size * bytes_on_disk(block_bytes)
    if _size_bytes(config) < least:
        raise StartupError(
            f"--kv-disk-size {format_size(_size_bytes(config))} is less than one block of this model's KV cache: use at"
            f" least {format_size(least)}."
        )
    check_folder(Path(folder), size_bytes=_size_bytes(config))


def digest_weights(config: EngineConfig) -> bytes | None:
    """Return the digest of the model's weights, if there is a disk; reads files that it does not know. Blocks."""
    if config.kv_disk is None:
        return None
    if config.load_format == "dummy":
        return digest_of_dummy(seed=DUMMY_SEED, generator=f"torch {torch.__version__}")
    memory = DigestMemory(Path(config.kv_disk) / FOLDER_NAME)
    try:
        return weights_digest(weight_files(Path(config.model)), memory)
    except OSError as error:
        raise StartupError(f"{config.model}: weights cannot be read: {error.strerror or error}.") from error


class KvDisk:
    """A disk for one model's blocks; of one engine at a time."""

    def __init__(
        self,
        config: EngineConfig,
        facts: DiskFacts,
        plan: KVCachePlan,
        host: HostPages,
        *,
        weights: bytes,
        stamps: dict[str, tuple[int, ...]],
        ranks: Ranks | None = None,
    ) -> None:
        """weights: digest_weights(); stamps: stamp_files(), from before. Raises StartupError if files have changed.

        ranks: the others of a split model, which keep the files of their shares.
        """
        assert config.kv_disk is not None
        self._folder = Path(config.kv_disk)
        self._size_bytes = _size_bytes(config)
        self._pin_share = config.pin_share
        self._host = host
        of_rank = (config.kv_host_memory_bytes or 0) // config.tensor_parallel_size
        self._queued_bytes = of_rank // _SHARE_QUEUED  # of this rank
        self._identities = [
            cache_identity(config, weights, facts, plan, rank=rank).digest()
            for rank in range(config.tensor_parallel_size)
        ]
        self._ranks = ranks
        self._threads: StoreThreads | None = None
        try:
            self.adapter_digests = [
                adapter_digest(Path(source.folder) / CONFIG_FILE, Path(source.folder) / WEIGHTS_FILE)
                for source in config.loras
            ]
        except OSError as error:
            raise StartupError(f"{error.filename} was there while the model was loaded, and is no more.") from error
        after = stamp_files(config)
        changed = [path for path in stamps | after if stamps.get(path) != after.get(path)]
        if changed:
            raise StartupError(f"{changed[0]} changed while the model was loaded: start again.")

    def attach(self, scheduler: Scheduler) -> None:
        """Put the disk behind host memory of an engine that has served nothing. Blocks are found a moment later."""
        own, *others = self._identities
        store = DiskStore(
            BlockFolder(self._folder),
            identity=own,
            other_identities=others,
            size_bytes=self._size_bytes,
            pin_share=self._pin_share,
        )
        shares = None
        if self._ranks is not None:
            shares = OtherShares(
                store,
                self._ranks.tell,
                num_ranks=len(self._identities),
                committed_step=lambda: scheduler.committed_step_id,
            )
            self._ranks.on_share = shares.take
        self._threads = StoreThreads(
            store, max_queued_bytes=self._queued_bytes, prepare=store.find_blocks, shares=shares
        )
        scheduler.kv.tiers.open_disk(
            DiskParts(threads=self._threads, slot_memory=self._host.slot_memory, facts=store, pins=store)
        )
        logger.info("blocks are kept on disk folder=%s size=%r", self._folder, format_size(self._size_bytes))

    def close(self) -> None:
        """Write what is queued, for some seconds. The engine must have ended."""
        if self._threads is not None:
            self._threads.close(_CLOSE_S)


def _size_bytes(config: EngineConfig) -> int:
    return DEFAULT_SIZE_BYTES if config.kv_disk_bytes is None else config.kv_disk_bytes


def cache_identity(
    config: EngineConfig, weights: bytes, facts: DiskFacts, plan: KVCachePlan, *, rank: int = 0
) -> CacheIdentity:
    """Return the facts on which the bytes of a rank's blocks depend. weights: what stands for them, of all ranks."""
    return CacheIdentity(
        weights=weights,
        config_json=(Path(config.model) / "config.json").read_bytes(),
        model_impl=facts.model_impl,
        quantization=facts.quantization,
        dtype=str(facts.dtype),
        kv_dtype=str(facts.kv_dtype),
        is_long=facts.is_long,
        block_size=plan.block_size,
        groups=plan.groups,
        page_layout=_describe_layout(plan.pages),
        tensor_parallel_size=config.tensor_parallel_size,
        tensor_parallel_rank=rank,
        is_expert_parallel=config.is_expert_parallel,
        device=facts.device.type,
        attention_backend=facts.attention_backend,
    )


def _describe_layout(pages: PagePlan) -> str:
    """Return where the parts of each layer are in a page, as text."""
    groups = [
        (group.layers_per_page, group.lanes_per_tensor, group.units_per_row, group.block_tokens, list(group.tables))
        for group in pages.groups
    ]
    return f"{pages.num_lanes} x {pages.lane_bytes}; {groups}; {pages.layers}; {pages.state}"
