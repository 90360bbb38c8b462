"""Serves a split model under load, kills one of its ranks, and measures the time until the engine is back.

    python -m benchmarks.rank_loss --shape llama-3.1-8b --json out.json --tensor-parallel-size 4
Three loads: one as benchmarks.online sends it; one of long answers, during which the last rank is killed by SIGKILL;
the first again, from the engine that came back. Weights are random.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import msgspec

from benchmarks.load import LoadConfig
from benchmarks.online import SHAPES, add_load_flags, model_name, start_server, stop_server, write_model_folder
from benchmarks.report import Report, now
from benchmarks.serve import format_report, measure

_POLL_S = 0.02
_BACK_S = 120.0
_RANK = b"engine.rank_process"
_NAMED = re.compile(r"Rank \d+ was killed by SIGKILL[^\n']*")


def main() -> int:
    """Measure; return 1 if the loss was not named, the engine did not come back, or a request failed after that."""
    args, server_flags = _parser().parse_known_args()
    report: Report = {"date": now(), "shape": args.shape, "server_flags": server_flags}
    with tempfile.TemporaryDirectory() as folder, Path(folder, "server.log").open("wb") as log:
        write_model_folder(SHAPES / args.shape / "config.json", Path(folder))
        try:
            server, report["start_to_ready_s"] = start_server(folder, args.port, server_flags, log=log)
            try:
                _measure(args, report, server.pid)
            finally:
                stop_server(server)
        finally:
            text = Path(log.name).read_text(errors="replace")
            print(text, file=sys.stderr)
            named = _NAMED.search(text)
            report["named"] = None if named is None else named[0]
            _write(report, args.json)
    loss = report["loss"]
    print(f"named: {report['named']}; errors of the cut streams: {loss['errors']}")
    print(f"not ready after {loss['noticed_s']} s, ready again after {loss['ready_s']} s")
    return int(named is None or loss["ready_s"] is None or report["after"]["num_failed"] > 0)


def _measure(args: argparse.Namespace, report: Report, server_pid: int) -> None:
    usual = LoadConfig(
        host="127.0.0.1",
        port=args.port,
        model=model_name(args.port),
        concurrency=args.concurrency,
        num_requests=args.concurrency * args.rounds,
        input_len=args.input_len,
        output_len=args.output_len,
    )
    once = msgspec.structs.replace(usual, num_requests=args.concurrency)
    processes = min(args.concurrency, args.processes)
    measure(msgspec.structs.replace(once, seed=10_000), num_processes=processes)  # warm-up
    report["before"] = measure(usual, num_processes=processes)
    _write(report, args.json)
    print(f"before: {format_report(report['before'])}", flush=True)
    killer = _Killer(server_pid, args.port, delay_s=args.kill_after)
    killer.start()
    cut = measure(msgspec.structs.replace(once, seed=20_000, output_len=args.cut_len), num_processes=processes)
    killer.join()
    counts = {name: cut[name] for name in ("num_completed", "num_failed", "num_unfinished", "errors", "duration_s")}
    report["loss"] = counts | {"noticed_s": killer.noticed_s, "ready_s": killer.ready_s, "rank_pid": killer.rank_pid}
    _write(report, args.json)
    report["after"] = measure(msgspec.structs.replace(usual, seed=30_000), num_processes=processes)
    print(f"after: {format_report(report['after'])}", flush=True)


def _write(report: Report, path: Path | None) -> None:
    """Write what is measured so far: a time limit may end this process."""
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n")


class _Killer(threading.Thread):
    """Kills the last rank after a while, and waits until the server is ready again."""

    def __init__(self, server_pid: int, port: int, *, delay_s: float) -> None:
        super().__init__(daemon=True)
        self._server_pid, self._port, self._delay_s = server_pid, port, delay_s
        self.rank_pid = 0
        self.noticed_s: float | None = None  # since the kill
        self.ready_s: float | None = None

    def run(self) -> None:
        """See the class."""
        self.rank_pid = ranks_of(self._server_pid)[-1]
        time.sleep(self._delay_s)
        os.kill(self.rank_pid, signal.SIGKILL)
        killed_s = time.monotonic()
        while (passed_s := time.monotonic() - killed_s) < _BACK_S:
            is_ready = _is_ready(self._port)
            if self.noticed_s is None and not is_ready:
                self.noticed_s = round(passed_s, 3)
            elif self.noticed_s is not None and is_ready:
                self.ready_s = round(passed_s, 2)
                return
            time.sleep(_POLL_S)


def ranks_of(server_pid: int) -> list[int]:
    """Return the pids of a server's ranks after the first, in the order of their start."""
    pids, found = [server_pid], []
    for pid in pids:
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            pids += map(int, children.read_text().split())
        if _RANK in Path(f"/proc/{pid}/cmdline").read_bytes():
            found.append(pid)
    return sorted(found)


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5):  # nosec B310
            return True
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rank_loss", description="Other flags go to `quire serve` as they are."
    )
    parser.add_argument("--shape", default="llama-3.1-8b", choices=sorted(path.name for path in SHAPES.iterdir()))
    parser.add_argument("--concurrency", type=int, default=64)
    add_load_flags(parser)
    parser.add_argument("--cut-len", type=int, default=1024, help="tokens of an answer while a rank is killed")
    parser.add_argument("--kill-after", type=float, default=2.0, metavar="S", help="seconds after the load begins")
    parser.add_argument("--port", type=int, default=8400)
    parser.add_argument("--json", type=Path)
    return parser


if __name__ == "__main__":
    sys.exit(main())
