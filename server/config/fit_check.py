"""ask_engine(): what the engine's arithmetic says of this machine and of a model, without its weights. Never torch.

The arithmetic runs in a separate process (engine/startup/fit.py), because it imports torch. ask_of_flags() makes the
question from the flags of `quire serve` and `quire doctor`. Imports engine.interface.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import msgspec

from engine.interface.child_process import PROJECT_ROOT
from engine.interface.errors import StartupError
from engine.interface.fit_report import Ask, Diagnosis
from server.config.serve_flags import is_expert_parallel

_TIMEOUT_S = 180.0


def ask_engine(ask: Ask) -> Diagnosis:
    """Run the engine's part. Blocks for seconds. Raises StartupError if it does not come to its end."""
    command = [sys.executable, "-m", "engine.startup.fit"]
    try:
        done = subprocess.run(
            command, input=msgspec.json.encode(ask), cwd=PROJECT_ROOT, capture_output=True, timeout=_TIMEOUT_S
        )
        if done.returncode == 0:
            return msgspec.json.decode(done.stdout, type=Diagnosis)
        reason = (done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    except subprocess.TimeoutExpired:
        reason = f"it took longer than {_TIMEOUT_S:g} s"
    except msgspec.MsgspecError as error:
        reason = f"it answered what is not understood: {error}"
    raise StartupError(f"The engine's part of the check failed: {reason}.")


def ask_of_flags(arguments: argparse.Namespace, *, folder: str | None = None) -> Ask:
    """Return the question with the parsed flags of `quire serve` or `quire doctor`. folder: of the model, if any."""
    return Ask(
        folder=folder,
        dtype=arguments.dtype,
        kv_cache_dtype=arguments.kv_cache_dtype,
        quantization=arguments.quantization,
        model_impl=arguments.model_impl,
        device=arguments.device,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
        max_model_len=arguments.max_model_len,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        max_decode_step_tokens=arguments.max_decode_step_tokens,
        block_size=arguments.block_size,
        kv_cache_memory_bytes=arguments.kv_cache_memory,
        num_gpus=arguments.tensor_parallel_size,
        is_expert_parallel=is_expert_parallel(arguments),
    )


def check_fits(arguments: argparse.Namespace, folder: Path) -> None:
    """Raise StartupError if a model with only its configuration in `folder` could not be served with these flags."""
    report = ask_engine(ask_of_flags(arguments, folder=str(folder))).model
    if report is not None and report.problem is not None:
        raise StartupError(report.problem)
