"""precompile(): compiles Triton kernels in parallel before serving, from workloads with recorded launches.

keep_times() and known_times(): the times of steps that the last start measured, beside the compiled kernels.

Otherwise each kernel compiles at its first launch, one after another. Precompilation happens once per model, limits and
machine: a file in Triton's cache then marks the cache as complete. A failure here only costs time. Imports torch.
What is kept has several keys (keys_of()), of which a start looks up the first.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch

from engine.device.step_times import StepTimes
from engine.interface.errors import first_line
from engine.startup.setup import Setup

try:
    import triton

    from kernels.precompile import Compilation, collect_kernels
except ImportError:  # then the caller does not precompile
    pass

logger = logging.getLogger(__name__)

_ROOT = Path(__file__).resolve().parent.parent.parent
_NEARLY = 0.1  # by which two measurements may differ
_SOURCES = ("engine", "kernels", "models")


def keys_of(setup: Setup, *, max_num_seqs: int, takes_over: bool) -> tuple[str, str]:
    """Return two keys of a start: with the requests at once that memory allows, and without. A takeover's are swapped.

    A standby keeps some memory, so with layers with states it may run one request less than the engine before. Its
    steps have the same sizes nevertheless, and nearly always the same kernels; any other compiles when it is launched.
    The keys differ also where memory limits nothing: what is kept under both would seem to be measured twice.
    setup: as decided, before what differs from start to start.
    """
    own, of_all = repr(setup.limited_to(max_num_seqs)), f"{setup!r}, for takeovers"
    return (of_all, own) if takes_over else (own, of_all)


class Precompilation:
    """Running compilations of kernels, one for each workload. Life: precompile() → wait()."""

    def __init__(self, compilations: Sequence[Compilation], done: Sequence[Path]) -> None:
        self._compilations = compilations
        self._done = done

    def wait(self, on_progress: Callable[[int, int], None]) -> None:
        """Wait until all kernels are compiled; progress counts those of one workload after the other."""
        if all([part.wait(on_progress) for part in self._compilations]):  # noqa: C419 - every one is waited for
            for path in self._done:
                path.touch()


def precompile(
    workloads: Sequence[Callable[[], object]],
    *,
    keys: Sequence[str],
    before_fork: Callable[[], object] = lambda: None,
) -> Precompilation | None:
    """Run each workload with kernel launches recorded instead of executed, and start to compile those kernels.

    keys: whatever decides which kernels these are, beside the code and the versions. Returns None if the same was
    compiled before, or cannot be. before_fork: called before processes are forked, to end what runs in threads.
    """
    try:
        done = [_cache_file("quire", key) for key in keys]
        if done[0].exists():
            return None
        before_fork()
        compilations: list[Compilation] = []
        num_before = 0
        with collect_kernels() as kernels:
            for run in workloads:
                run()
                _free_memory()
                # the kernels of this workload compile while the next one is recorded
                compilations.append(Compilation(kernels[num_before:]))
                num_before = len(kernels)
        return Precompilation(compilations, done)
    except Exception as error:  # an error that also affects serving occurs there again
        reason = f"{type(error).__name__}: {first_line(error)}"
        logger.warning("precompilation failed, so kernels compile at their first launch: %s", reason)
    _free_memory()
    return None


def _free_memory() -> None:
    gc.collect()  # graphs and their runner reference each other
    torch.cuda.empty_cache()


class _Measured(msgspec.Struct, frozen=True):
    times: StepTimes
    is_settled: bool  # the start before measured nearly the same


def keep_times(keys: Sequence[str], times: StepTimes) -> None:
    """Write what a start has measured, for those after it. A failure here only costs time."""
    with contextlib.suppress(OSError, NameError):  # NameError: without Triton
        for key in keys:
            path, before = _cache_file("steps", key), known_times([key], is_settled=False)
            is_settled = before is not None and _are_near(before, times)
            beside = path.with_suffix(f".{os.getpid()}")
            beside.write_bytes(msgspec.json.encode(_Measured(times, is_settled)))
            beside.replace(path)


def known_times(keys: Sequence[str], *, is_settled: bool) -> StepTimes | None:
    """Return what the last start with the first of these keys measured, on this machine with this code.

    None: it is not known.
    is_settled: only if two starts measured nearly the same: another process may have used the device in one of them.
    """
    try:
        measured = msgspec.json.decode(_cache_file("steps", keys[0]).read_bytes(), type=_Measured)
    except (OSError, NameError, msgspec.MsgspecError):
        return None
    return measured.times if measured.is_settled or not is_settled else None


def _are_near(before: StepTimes, now: StepTimes) -> bool:
    """Return True if the seconds on the device are nearly equal; those of a launch are the host's, and less even."""
    if before.seconds.keys() != now.seconds.keys():
        return False
    return all(abs(seconds / now.seconds[size] - 1) <= _NEARLY for size, seconds in before.seconds.items())


def _cache_file(kind: str, key: str) -> Path:
    digest = hashlib.sha256(_digest_sources())
    for text in (key, torch.__version__, triton.__version__, torch.cuda.get_device_name()):
        digest.update(text.encode())
    cache = Path(triton.knobs.cache.dir)
    cache.mkdir(parents=True, exist_ok=True)
    return cache / f"{kind}-{digest.hexdigest()[:32]}"


@functools.cache
def _digest_sources() -> bytes:
    digest = hashlib.sha256()
    for folder in _SOURCES:
        for path in sorted((_ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.digest()
