"""Processes that are the ranks of a group, for tests: forked from one that has imported their module once for all."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable


def run_ranks(target: Callable[..., None], size: int, *arguments: object, timeout_s: float = 120.0) -> None:
    """Run target(rank, size, *arguments) in `size` processes to their end; a rank that fails says why on stderr."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([target.__module__])
    ranks = [context.Process(target=target, args=(rank, size, *arguments)) for rank in range(size)]
    end_s = time.monotonic() + timeout_s
    try:
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(max(0.0, end_s - time.monotonic()))
            assert rank.exitcode == 0, f"{rank.name}: {rank.exitcode}"
    finally:
        for rank in ranks:
            rank.kill()
