"""Online rows of docs/explanation/performance.md: start the daemon on a shape with random weights, load it, stop it.

    python -m benchmarks.online --shape qwen3-0.6b --concurrency 1 64 256 --json out.json
A number of clients that is named several times is measured as often, one after the other, each time with other prompts.
The tokenizer is synthetic (byte-level BPE of the shape's vocabulary size), so that detokenising has a realistic cost.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

import msgspec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.load import LoadConfig
from benchmarks.report import BenchError
from benchmarks.serve import format_report, measure

SHAPES = Path(__file__).parent / "shapes"
_NUM_MERGED = 4000  # tokens that merges are made of


def main() -> int:
    """Measure; print one table per concurrency."""
    args, server_flags = _parser().parse_known_args()
    report: dict = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "shape": args.shape,
        "server_flags": server_flags,
        "online": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        write_model_folder(SHAPES / args.shape / "config.json", Path(folder))
        server, seconds = start_server(folder, args.port, server_flags)
        report["start_to_ready_s"] = [seconds]
        print(f"start 0: ready in {seconds:.1f} s", flush=True)
        for start in range(1, args.starts):
            stop_server(server)
            server, seconds = start_server(folder, args.port, server_flags)
            report["start_to_ready_s"].append(seconds)
            print(f"start {start}: ready in {seconds:.1f} s", flush=True)
        try:
            time.sleep(args.settle)
            for concurrency in args.concurrency:
                again = sum(name.partition(" ")[0] == f"c{concurrency}" for name in report["online"])
                result = _measure(args, concurrency, seed=again * 100_000)
                report["online"][f"c{concurrency} again {again}" if again else f"c{concurrency}"] = result
                print(f"c{concurrency}: {format_report(result)}", flush=True)
        finally:
            stop_server(server)
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
    return 0


def write_model_folder(config: Path, folder: Path) -> None:
    """Write config.json and a byte-level BPE tokenizer of the same vocabulary size, whose merges are random pairs."""
    vocab_size = json.loads(config.read_text())["vocab_size"]
    rng = random.Random(0)
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(tokens)}
    merges: list[tuple[str, str]] = []
    parts = tokens[:_NUM_MERGED]
    while len(tokens) < vocab_size:
        left, right = rng.choice(parts), rng.choice(parts)
        if left + right not in vocab and len(left + right) < 16:
            merges.append((left, right))
            vocab[left + right] = len(tokens)
            tokens.append(left + right)
            if len(parts) < _NUM_MERGED:
                parts.append(left + right)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    shutil.copy(config, folder / "config.json")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")


def start_server(
    folder: str,
    port: int,
    flags: list[str],
    *,
    gpus: str | None = None,
    log: IO[bytes] | None = None,
    timeout_s: float = 600.0,
) -> tuple[subprocess.Popen[bytes], float]:
    """Start the daemon; return it and the seconds until GET /ready was 200. Raises BenchError as wait_until_ready does.

    See launch_server.
    """
    started_s = time.monotonic()
    server = launch_server(folder, port, flags, gpus=gpus, log=log)
    try:
        wait_until_ready(server, port, timeout_s=timeout_s)
    except BaseException:
        stop_server(server)
        raise
    return server, time.monotonic() - started_s


def launch_server(
    folder: str,
    port: int,
    flags: list[str],
    *,
    gpus: str | None = None,
    log: IO[bytes] | None = None,
    checkout: str | None = None,
) -> subprocess.Popen[bytes]:
    """Start the daemon, and do not wait for it.

    gpus: its CUDA_VISIBLE_DEVICES; None: those of this process. log: a file for its output; None: this process's.
    checkout: whose server it is; None: this one's.
    """
    command = [sys.executable, "-m", "server", "serve", folder, "--load-format", "dummy", "--port", str(port)]
    command += ["--max-queue-wait", "0"]  # the load may be more than it serves, and is to be measured whole
    env = os.environ | ({} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus})
    if checkout is not None:
        env["PYTHONPATH"] = os.pathsep.join([checkout, *filter(None, [env.get("PYTHONPATH")])])
    command += ["--log-level", "warning", *flags]
    return subprocess.Popen(command, stdout=log, stderr=log, env=env, cwd=checkout)


def wait_until_ready(server: subprocess.Popen[bytes], port: int, *, timeout_s: float = 600.0) -> None:
    """Block until GET /ready of a daemon is 200. Raises BenchError if it ends or `timeout_s` pass before.

    The error has the daemon's last reply, which tells what it waits for.
    """
    end_s = time.monotonic() + timeout_s
    last = "it did not reply"
    while server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5):  # nosec B310
                return
        except urllib.error.HTTPError as error:
            last = error.read(500).decode(errors="replace").strip()
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            pass
        if time.monotonic() > end_s:
            raise BenchError(f"The daemon was not ready within {timeout_s:g} s: {last}.")
        time.sleep(0.05)
    raise BenchError(f"The daemon ended with {server.returncode} before it was ready.")


def _measure(args: argparse.Namespace, concurrency: int, *, seed: int) -> dict:
    config = LoadConfig(
        host="127.0.0.1",
        port=args.port,
        model=model_name(args.port),
        concurrency=concurrency,
        num_requests=max(concurrency * args.rounds, 12),
        input_len=args.input_len,
        output_len=args.output_len,
        seed=seed,
    )
    processes = min(concurrency, args.processes)
    warm_up = msgspec.structs.replace(config, seed=10_000 + seed, num_requests=concurrency)
    measure(warm_up, num_processes=processes)
    result = measure(config, num_processes=processes) | {"kv_host_bytes": host_bytes(args.port)}
    print(f"host memory: {result['kv_host_bytes']}", flush=True)
    return result


def metrics_page(port: int) -> str:
    """Return a server's GET /metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:  # nosec B310
        return reply.read().decode()


def host_bytes(port: int) -> dict[str, int]:
    """Ask the server how much host memory behind the KV cache can be used, and how much is."""
    lines = metrics_page(port).splitlines()
    return {
        use: int(float(line.split()[-1]))
        for use in ("total", "used")
        for line in lines
        if line.startswith("quire_kv_host_bytes{") and f'use="{use}"' in line
    }


def model_name(port: int) -> str:
    """Ask the server for its model."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=10) as reply:  # nosec B310
        return json.load(reply)["data"][0]["id"]


def stop_server(*servers: subprocess.Popen[bytes]) -> None:
    """End daemons together, by force after 20 seconds."""
    for server in servers:
        server.terminate()
    end_s = time.monotonic() + 20
    for server in servers:
        try:
            server.wait(max(0.0, end_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def add_load_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a closed loop of clients, but for their number."""
    parser.add_argument("--rounds", type=int, default=8, help="requests per concurrent client (default: 8)")
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--processes", type=int, default=4, help="client processes (default: 4)")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.online", description="Other flags go to `quire serve` as they are."
    )
    parser.add_argument("--shape", default="qwen3-0.6b", choices=sorted(path.name for path in SHAPES.iterdir()))
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--settle", type=float, default=0.0, help="seconds between ready and the first request")
    add_load_flags(parser)
    parser.add_argument("--starts", type=int, default=1, help="start the daemon so often, to time warm starts")
    parser.add_argument("--port", type=int, default=8400)
    parser.add_argument("--json", default="")
    return parser


if __name__ == "__main__":
    sys.exit(main())
