"""LoadedEngine: a loaded model, with the facts that the engine's loop and the start-up panel need. Imports torch.

Life: Setup.assemble() → engine(), which may be called again for another loop over the same runner, and
pin_host_memory() when requests can come → close().
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from engine.core.engine import Engine
from engine.core.engine_parts import EngineParts
from engine.core.grammars import Grammars
from engine.core.host_copies import SlotSource
from engine.core.outputs import Transport
from engine.core.scheduler import Scheduler
from engine.core.spare_work import SpareWork
from engine.core.speculative import make_drafter
from engine.device.graph_captures import GraphCaptures
from engine.device.kv_cache import KVCachePlan
from engine.device.model_runner import ModelRunner
from engine.grammar.compiler import CompilerLoader
from engine.interface.config import SchedulerConfig, SpeculativeConfig
from engine.interface.metrics import Metrics
from engine.interface.protocol import EngineReady
from engine.startup.kv_disk import KvDisk
from engine.startup.kv_peers import KvPeers
from engine.tensor_parallel.process_group import leave_ranks
from engine.tensor_parallel.ranks import NeverRaised, RankedExecutor, Ranks
from engine.tensor_parallel.slot_shares import PinSlots
from models.config.model_config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class LoadedEngine:
    """A loaded model with the facts that the engine's loop and the start-up panel need."""

    runner: ModelRunner
    scheduler_config: SchedulerConfig
    overlap_depth: int
    facts: dict[str, str]
    compiler_loader: CompilerLoader
    model_config: ModelConfig
    plan: KVCachePlan
    dtype: torch.dtype
    num_loras: int = 0
    speculative: SpeculativeConfig | None = None
    ranks: Ranks | None = None  # the other ranks of a split model
    captures: GraphCaptures | None = None  # of the runner; None: it has no graphs
    disk: KvDisk | None = None  # behind host memory; whoever serves attaches it
    slots: SlotSource | None = None  # of host memory, as ranks pin them; None: all are ready, or there are none
    peers: KvPeers | None = None  # engines with which it exchanges blocks; whoever serves attaches them

    def greeting(self, *, max_queued_requests: int, max_queued_tokens: int) -> EngineReady:
        """Return what a client is told first. max_queued_requests, max_queued_tokens: the bounds of its queue."""
        sizes = self.scheduler_config
        return EngineReady(
            max_model_len=sizes.max_model_len,
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            num_blocks=sizes.num_pages,
            block_size=sizes.block_size,
            vocab_size=self.model_config.vocab_size,
            max_queued_requests=max_queued_requests,
            hidden_size=self.model_config.hidden_size,
            max_queued_tokens=max_queued_tokens,
            can_generate=self.model_config.has_lm_head,
            cache_identity="" if self.peers is None else self.peers.identity,
        )

    def engine(
        self,
        transport: Transport,
        metrics: Metrics,
        *,
        overlap_depth: int | None = None,
        max_queued_requests: int = 2048,
        max_queued_tokens: int | None = None,
        max_queue_wait_s: float | None = None,
        captures_graphs: bool = False,
    ) -> Engine:
        """Return an engine over the runner, with its own scheduler and prefix cache.

        captures_graphs: it captures the graphs that the start left out, whenever it has nothing else to do; the urgent
        ones between steps.
        """
        parts = EngineParts(
            executor=self.runner if self.ranks is None else RankedExecutor(self.runner, self.ranks),
            scheduler=Scheduler(self.scheduler_config),
            transport=transport,
            metrics=metrics,
            clock=time.monotonic,
            vocab_size=self.model_config.vocab_size,
            overlap_depth=overlap_depth or self.overlap_depth,
            max_queued_requests=max_queued_requests,
            max_queued_tokens=max_queued_tokens,
            max_queue_wait_s=max_queue_wait_s,
            # several ranks cannot drop a step that one of them has begun
            memory_error=torch.OutOfMemoryError if self.ranks is None else NeverRaised,
            release_memory=self._release_memory,
            grammars=Grammars(self.compiler_loader.get, vocab_size=self.model_config.vocab_size),
            can_generate=self.model_config.has_lm_head,
            num_loras=self.num_loras,
            adapter_digests=() if self.disk is None else self.disk.adapter_digests,
            make_drafter=None if self.speculative is None else partial(make_drafter, self.speculative),
            bytes_per_block=self.plan.bytes_per_page,
            num_ranks=self.num_ranks,
            spare_work=(
                SpareWork(self._capture_next, self.captures.capture_urgent, transport.has_arrivals)
                if captures_graphs and self.captures is not None
                else None
            ),
        )
        if self.slots is not None:
            parts.scheduler.kv.tiers.follow(self.slots)
        return Engine(parts)

    def pin_host_memory(self) -> None:
        """Start to pin the rest of host memory, on all ranks, beside all that follows. Does not block."""
        if self.slots is None:
            return
        assert self.runner.host_pages is not None
        assert self.runner.host_pages.pins is not None
        self.runner.host_pages.pins.pin_rest()
        for rank in range(1, self.num_ranks):
            assert self.ranks is not None
            self.ranks.tell(rank, PinSlots())

    @property
    def num_ranks(self) -> int:
        """The processes among which the model is split."""
        return 1 if self.ranks is None else 1 + len(self.ranks.pids)

    @property
    def build(self) -> dict[str, str]:
        """Labels of the metric quire_build_info: versions, device and dtype."""
        return {
            "torch": str(torch.__version__),  # a TorchVersion cannot be sent
            "cuda": torch.version.cuda or "",
            "device": self.runner.device.type,
            "dtype": str(self.dtype).removeprefix("torch."),
        }

    def measure_gpu_memory(self) -> tuple[int, int]:
        """Return used (by all programs) and total bytes of the CUDA device; 0 and 0 without one. Does not sync."""
        if self.runner.device.type != "cuda":
            return 0, 0
        free, total = torch.cuda.mem_get_info(self.runner.device)
        return total - free, total

    def close(self) -> None:
        """Release the model's memory, and end the other ranks."""
        if self.disk is not None:
            self.disk.close()
        if self.peers is not None:
            self.peers.close()
        if self.captures is not None:
            self.captures.close()
        self.runner.close()
        if self.ranks is not None:
            self.ranks.close()
            leave_ranks()

    def _capture_next(self, is_awaited: Callable[[], bool]) -> bool:
        """See GraphCaptures.capture_next. While memory is pinned the driver may keep a capture waiting, too."""
        assert self.captures is not None
        host_pages = self.runner.host_pages
        if host_pages is not None and host_pages.pins is not None:
            host_pages.pins.note_step()
        return self.captures.capture_next(is_awaited)

    def _release_memory(self) -> None:
        """Wait for all launched steps, then return cached memory to the device."""
        if self.runner.device.type == "cuda":
            torch.cuda.synchronize(self.runner.device)
            torch.cuda.empty_cache()
