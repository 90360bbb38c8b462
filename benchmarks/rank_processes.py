"""Runs one process per GPU for a measurement or a test; the first failure or the deadline ends all of them.

Ranks wait for each other on the device, without end if one has died; the deadline limits that wait.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

_POLL_S = 0.05


def run_ranks(module: str, arguments: Sequence[str], *, num_ranks: int, timeout_s: float) -> int:
    """Run `python -m module RANK SIZE RENDEZVOUS *arguments` per rank; return 0, or the exit code of one that failed.

    RENDEZVOUS: see engine.tensor_parallel.process_group.join_ranks. Output is this process's. The exit code
    is 124 if the time is up.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen([sys.executable, "-m", module, str(rank), str(num_ranks), f"{folder}/meet", *arguments])
            for rank in range(num_ranks)
        ]
        deadline_s = time.monotonic() + timeout_s
        try:
            while True:
                codes = [rank.poll() for rank in ranks]
                failed = [code for code in codes if code]
                if failed:
                    return failed[0]
                if None not in codes:
                    return 0
                if time.monotonic() > deadline_s:
                    print(f"not done after {timeout_s:.0f} s: ended", file=sys.stderr, flush=True)
                    return 124
                time.sleep(_POLL_S)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
