"""Faults on a real GPU: memory that is too small, filled by others, or runs out; a device that fails; no Triton."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

from benchmarks.online import write_model_folder
from tests.support.daemon import ROOT, Daemon, is_alive, wait_for
from tests.support.faulty_daemon import FaultyDaemon

pytestmark = pytest.mark.gpu

SHAPES = ROOT / "benchmarks" / "shapes"
MIB, GIB = 2**20, 2**30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder in the shape of Qwen3-0.6B, for random weights."""
    path = tmp_path_factory.mktemp("model")
    write_model_folder(SHAPES / "qwen3-0.6b" / "config.json", path)
    return path


@pytest.fixture
def filler() -> Iterator[list[torch.Tensor]]:
    """What is put here is given back after the test."""
    tensors: list[torch.Tensor] = []
    yield tensors
    tensors.clear()
    torch.cuda.empty_cache()


def leave_free(num_bytes: int) -> torch.Tensor:
    """Take all of the GPU's memory but num_bytes."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    return torch.empty(free - num_bytes, dtype=torch.uint8, device="cuda")


def start_fails(model: Path, *flags: str) -> str:
    """Start the daemon, which must end with exit code 3; return its one line of error."""
    command = [sys.executable, "-m", "server", "serve", str(model), "--load-format", "dummy", "--port", "0", *flags]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    output = result.stdout + result.stderr
    assert result.returncode == 3, output
    assert "Traceback" not in output
    (error,) = [line for line in output.splitlines() if "error: " in line]
    print(error)
    return error


def test_a_gpu_too_small_for_the_weights_says_what_fits(folder: Path) -> None:
    share = 4 * GIB / torch.cuda.get_device_properties(0).total_memory
    error = start_fails(folder, "--gpu-memory-utilization", f"{share:.4f}", "--dtype", "float32")
    assert "NVIDIA" in error
    assert "for its weights in float32" in error
    assert "a larger --gpu-memory-utilization" in error


def test_a_context_too_long_for_the_gpu_names_the_one_that_fits(folder: Path) -> None:
    share = 5.6 * GIB / torch.cuda.get_device_properties(0).total_memory
    error = start_fails(folder, "--gpu-memory-utilization", f"{share:.4f}", "--max-model-len", "40960")
    assert "use --max-model-len" in error


def test_memory_held_by_other_programs_is_told(folder: Path, filler: list[torch.Tensor]) -> None:
    filler.append(leave_free(2 * GIB))
    error = start_fails(folder)
    assert " free of " in error
    assert "without the other programs" in error


def test_a_gpu_too_full_for_a_context_is_told_in_one_line(folder: Path, filler: list[torch.Tensor]) -> None:
    filler.append(leave_free(300 * MIB))
    assert "end other programs on this GPU." in start_fails(folder)


def test_memory_that_runs_out_while_serving_is_a_503_and_later_requests_are_served(
    folder: Path, tmp_path: Path, filler: list[torch.Tensor]
) -> None:
    flags = ("--load-format", "dummy", "--kv-cache-memory", "1GB", "--max-num-seqs", "1024", "--max-model-len", "2048")
    with Daemon(str(folder), *flags, folder=tmp_path) as running:
        running.wait_ready()
        url = running.base_url + "/v1/completions"
        plain = {"model": running.get("/v1/models").json()["data"][0]["id"], "prompt": "a", "max_tokens": 8}
        # the logits of a prompt's positions, 256 MiB at a time
        scored = {**plain, "prompt": [5] * 1500, "prompt_logprobs": 0}
        filler.append(leave_free(100 * MIB))
        # counts of each token, 760 MiB for so many rows, are reserved at the start
        assert httpx.post(url, json={**plain, "presence_penalty": 1.0}, timeout=60).status_code == 200
        refused = httpx.post(url, json=scored, timeout=60)
        assert refused.status_code == 503, running.log
        assert refused.json()["error"]["code"] == "out_of_memory"
        assert httpx.post(url, json=plain, timeout=60).status_code == 200
        filler.clear()
        torch.cuda.empty_cache()
        assert httpx.post(url, json=scored, timeout=60).status_code == 200
        assert running.metrics()["quire_engine_restarts_total"] == 0


def test_after_a_fault_of_the_device_every_request_goes_on_with_the_next_engine(tmp_path: Path) -> None:
    with FaultyDaemon(tmp_path) as running:
        running.wait_ready()
        events, thread = running.stream(3000)
        running.fail_next("device")
        reply = running.post()
        assert (reply.status_code, reply.json()["timings"]["replays"]) == (200, 1)
        thread.join(60)
        choices = [event["choices"][0] for event in events if event.get("choices")]
        assert choices[-1]["finish_reason"] == "length"
        assert running.metrics()["quire_request_replays_total"] == 2
        assert running.metrics()["quire_engine_restarts_total"] == 1


def test_a_killed_launcher_leaves_the_gpus_memory_free(folder: Path, tmp_path: Path) -> None:
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    with Daemon(str(folder), "--load-format", "dummy", "--kv-cache-memory", "4GiB", folder=tmp_path) as running:
        running.wait_ready()
        assert torch.cuda.mem_get_info()[0] < free - 4 * GIB
        children = running.children()
        running.process.kill()
        wait_for(lambda: not any(map(is_alive, children)), timeout_s=10, what="the end of every process")
        wait_for(lambda: torch.cuda.mem_get_info()[0] > free - 64 * MIB, timeout_s=10, what="the GPU's memory")


def test_without_triton_torch_serves_the_same_tokens_and_says_so() -> None:
    script = """
import sys, logging
sys.modules["triton"] = None
logging.basicConfig(level=logging.WARNING)
from pathlib import Path
import torch
from engine.interface.config import EngineConfig
from engine.offline import OfflineEngine
from engine.interface.protocol import SamplingParams
from server.config.model_source import DEMO_FOLDER
def tokens(device):
    engine = OfflineEngine.load(EngineConfig(model=str(DEMO_FOLDER), device=device, dtype="float32", max_num_seqs=8))
    engine.self_test()
    kinds = [{"temperature": 0.0}, {"temperature": 0.8, "presence_penalty": 0.5}, {"top_p": 0.8, "logprobs": 2}]
    params = [SamplingParams(max_tokens=20, seed=3, **kind) for kind in kinds]
    return [g.token_ids for g in engine.generate([[5, 6, 7 + i] for i in range(3)], params)], engine.loaded.facts
torch.backends.cuda.matmul.allow_tf32 = False
on_cpu, _ = tokens("cpu")
on_cuda, facts = tokens("cuda")
assert on_cpu == on_cuda, (on_cpu, on_cuda)
print(facts["Attention"])
"""
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "triton cannot be imported" in result.stderr
    assert result.stdout.startswith("torch (")
    assert "all kernels in torch" in result.stdout
