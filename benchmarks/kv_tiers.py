"""A conversation that comes back from host memory or disk: python -m benchmarks.kv_tiers [--shape NAME] [--json FILE].

[--tokens 32000] [--disk FOLDER] [--device cpu]

Random weights, the engine's loop without HTTP. Three conversations share a pool that holds one and a half of them, so
that the first is evicted before its next turn. Time to first token: computed anew, found on the device, brought back
from host memory and, with --disk, from files that the system may still have in memory. Then the steps of 32 streams
that decode while conversations come and go, those with copies beside those without.
"""

import argparse
import gc
import statistics
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import torch

from benchmarks.report import format_table, host_facts, now, write_report
from engine.core.step import StepPlan
from engine.interface.config import EngineConfig
from engine.interface.protocol import AddRequest, RequestFailed, SamplingParams, StepEvents, pack_token_ids
from engine.offline import OfflineEngine

_SHAPES = Path(__file__).parent / "shapes"
_NUM_STREAMS, _STREAM_TOKENS = 32, 400
_ADDED = 64  # tokens of a new turn
_WRITTEN_S = 3.0  # until a conversation is on the disk, beside the next
Report = dict[str, Any]


class Conversations:
    """An engine, and the prompts that are sent to it."""

    def __init__(self, config: EngineConfig, num_tokens: int) -> None:
        self.offline = OfflineEngine.load(config)
        if self.offline.loaded.disk is not None:
            self.offline.loaded.disk.attach(self.offline.engine.scheduler)
        self._random = Random(1)
        self._vocab_size = self.offline.loaded.model_config.vocab_size
        self._num_tokens = num_tokens
        self._next_id = 0
        self._steps: list[tuple[float, bool, int]] = []  # launched at, only decodes, pages copied

    def new(self) -> list[int]:
        """Return a conversation that was never sent."""
        return self.tokens(self._num_tokens)

    def tokens(self, count: int) -> list[int]:
        """Return random token ids."""
        return [self._random.randrange(min(self._vocab_size, 10_000)) for _ in range(count)]

    def ask(self, prompt: list[int]) -> tuple[float, int]:
        """Send a prompt; return the seconds to its first token, and its cached tokens. Waits until all is copied."""
        engine, transport = self.offline.engine, self.offline.transport
        started, first_s, num_cached = time.perf_counter(), 0.0, 0
        transport.inbox.append((0, self._request(prompt, 1)))
        while transport.inbox or not engine.is_idle:
            engine.run_once()
            while transport.outbox:
                message = transport.outbox.popleft()
                if isinstance(message, RequestFailed):
                    raise RuntimeError(message.message)
                if isinstance(message, StepEvents) and message.token_ids and not first_s:
                    first_s = time.perf_counter() - started
                    num_cached = message.started[0].num_cached_tokens if message.started else 0
        return first_s, num_cached

    def stream_beside(self, conversations: list[list[int]]) -> Report:
        """Decode streams while conversations come back one after the other; return the steps' median times."""
        runner, engine, transport = self.offline.loaded.runner, self.offline.engine, self.offline.transport
        forward, steps = runner.forward, self._steps

        def timed(plan: StepPlan) -> Any:
            num_copies = len(plan.copies_to_host) + len(plan.copies_from_host)
            steps.append((time.perf_counter(), plan.num_rows >= _NUM_STREAMS and not plan.singles, num_copies))
            return forward(plan)

        runner.forward = timed  # type: ignore[method-assign]
        for _ in range(_NUM_STREAMS):
            transport.inbox.append((0, self._request(self.tokens(128), _STREAM_TOKENS)))
        turn, todo = 0, [conversation + self.tokens(_ADDED) for conversation in conversations]
        while transport.inbox or not engine.is_idle:
            engine.run_once()
            transport.outbox.clear()
            turn += 1
            if todo and turn % 60 == 0:
                transport.inbox.append((0, self._request(todo.pop(0), 1)))
        runner.forward = forward  # type: ignore[method-assign]
        decodes = [
            (number, before[2], after - at)
            for number, (before, (at, _, _), (after, _, _)) in enumerate(zip(steps, steps[1:], steps[2:], strict=False))
            if before[1]
        ]
        with_copies = [seconds for _, num_pages, seconds in decodes if num_pages]
        without = [seconds for _, num_pages, seconds in decodes if not num_pages]
        half = max((num_pages for _, num_pages, _ in decodes), default=0) / 2
        none_or_full = [
            (place, num_pages > 0, seconds) for place, num_pages, seconds in decodes if not 0 < num_pages < half
        ]
        return {
            "steps_with_copies": len(with_copies),
            "steps_full_of_copies": sum(is_full for _, is_full, _ in none_or_full),
            "steps_without": len(without),
            "ms_with_copies": statistics.median(with_copies) * 1e3 if with_copies else None,
            "ms_without": statistics.median(without) * 1e3 if without else None,
            "ms_more_of_full_steps_at_equal_lengths": more_s(none_or_full) * 1e3 if with_copies and without else None,
            "pages_copied": sum(step[2] for step in steps),
        }

    def _request(self, prompt: list[int], max_tokens: int) -> AddRequest:
        self._next_id += 1
        params = SamplingParams(max_tokens=max_tokens, min_tokens=max_tokens, temperature=0.0)
        return AddRequest(str(self._next_id), pack_token_ids(prompt), params, arrival_s=self.offline.engine.clock())

    def close(self) -> None:
        """Release the engine."""
        self.offline.loaded.close()


def more_s(steps: list[tuple[int, bool, float]]) -> float:
    """Return how much longer steps with copies take than those without would at the same place.

    steps: place, has copies, seconds. A step takes longer with each token that its rows have, so steps are fitted by a
    line over their places and a number for copies. Those that take more than half as long again as the median, and the
    few beside a prompt among them, are left out.
    """
    longest_s = 1.5 * statistics.median(seconds for _, _, seconds in steps)
    kept = [step for step in steps if step[2] <= longest_s]
    terms = np.array([(1.0, place, float(copies)) for place, copies, _ in kept])
    fitted, *_ = np.linalg.lstsq(terms, np.array([seconds for _, _, seconds in kept]), rcond=None)
    return float(fitted[2])


def measure(config: EngineConfig, num_tokens: int, *, size: int, pool: int, disk: str | None) -> Report:
    """Measure one engine. size, pool: bytes of a conversation and of the pool. disk: a folder, or only host memory."""
    config = msgspec.structs.replace(
        config,
        enable_prefix_caching=True,
        kv_cache_memory_bytes=pool,
        kv_host_memory_bytes=size * (5 if disk else 4),  # what is read may take a quarter of it
        kv_disk=disk,
    )
    chats = Conversations(config, num_tokens)
    try:
        chats.ask(chats.new())  # kernels and memory
        first, others = (
            chats.new(),
            [chats.new() for _ in range(6 if disk else 2)],
        )  # from the disk: past host memory, too
        result: Report = {"computed_s": chats.ask(first)[0]}
        result["on_device_s"], result["on_device_cached"] = chats.ask(first + chats.tokens(_ADDED))
        for other in others:
            chats.ask(other)
            time.sleep(_WRITTEN_S if disk else 0.0)  # what a busy disk cannot take is dropped
        result["returned_s"], result["returned_cached"] = chats.ask(first + chats.tokens(_ADDED))
        if not disk:
            result |= chats.stream_beside([others[0], others[1], first, others[0], others[1]])
    finally:
        chats.close()
    return result


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv_tiers", description=__doc__)
    parser.add_argument("--shape", default="llama-3.1-8b", help="sizes of the model (llama-3.1-8b)")
    parser.add_argument("--tokens", type=int, default=32_000, help="of a conversation (32000)")
    parser.add_argument("--disk", type=Path, help="a folder on the disk, in which a new one is made and deleted")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", help="file for the results")
    arguments = parser.parse_args()
    config = EngineConfig(
        model=str(_SHAPES / arguments.shape),
        load_format="dummy",
        device=arguments.device,
        max_model_len=arguments.tokens + 1024,
        max_num_seqs=64,
        overlap_depth=2 if arguments.device != "cpu" else 1,
    )
    size = _conversation_bytes(config, arguments.tokens)
    pool = max(size * 3 // 2, size * (arguments.tokens + 1024) // arguments.tokens * 17 // 16)
    _give_back()
    rows = {"host memory": measure(config, arguments.tokens, size=size, pool=pool, disk=None)}
    if arguments.disk:
        _give_back()
        with tempfile.TemporaryDirectory(dir=arguments.disk) as folder:
            rows["disk"] = measure(config, arguments.tokens, size=size, pool=pool, disk=folder)
    table = [["back from", "computed, s", "on the device, s", "back, s", "cached", "times faster"]]
    for name, row in rows.items():
        times = [f"{row[key]:.3f}" for key in ("computed_s", "on_device_s", "returned_s")]
        table.append([name, *times, str(row["returned_cached"]), f"{row['computed_s'] / row['returned_s']:.1f}"])
    print(format_table(table))
    print({key: value for key, value in rows["host memory"].items() if "steps" in key or "ms_" in key})
    if arguments.json:
        report = {"benchmark": "kv_tiers", "date": now(), "host": host_facts(), "model": arguments.shape, "rows": rows}
        write_report(arguments.json, report)
    return 0


def _conversation_bytes(config: EngineConfig, num_tokens: int) -> int:
    """Return the bytes of keys and values of a conversation, over all layers."""
    probe = OfflineEngine.load(msgspec.structs.replace(config, enforce_eager=True))
    try:
        plan = probe.loaded.plan
        return plan.bytes_per_page * plan.pages.num_pages(num_tokens)
    finally:
        probe.loaded.close()


def _give_back() -> None:
    """Free the memory of an engine that nothing refers to any more, but in cycles."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
