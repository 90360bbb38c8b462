"""Compiles Triton kernels in parallel processes, before they are launched. Imports triton at once.

with collect_kernels() as kernels:      # launches are recorded, not executed; their outputs are zeros
    precompile()
compilation = Compilation(list(kernels))
...                                     # meanwhile the caller does something else
compilation.wait(on_progress)           # now Triton's cache on disk has them all
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import DependenciesFinder, JITCallable, JITFunction

logger = logging.getLogger(__name__)

_TIMEOUT_S = 60.0  # for all kernels; the slowest takes about a second
_POLL_S = 0.02


@dataclass(frozen=True)
class Kernel:
    """One specialisation of a kernel, with the arguments of Triton's launch."""

    function: JITFunction
    signature: Mapping[str, Any]
    constants: Mapping[Any, Any]
    attributes: Mapping[Any, Any]
    options: Mapping[str, Any]

    def compile(self, target: GPUTarget) -> None:
        """Compile the kernel and its launcher into Triton's cache on disk. Touches no device."""
        function = self.function  # a launched kernel has its language set, Triton or Gluon, and its compiler
        source = function.ASTSource(function, self.signature, self.constants, self.attributes)
        compiled = function.compile(source, target=target, options=dict(self.options))
        driver.active.launcher_cls(compiled.src, compiled.metadata)


@contextmanager
def collect_kernels() -> Iterator[list[Kernel]]:
    """Record each kernel that is launched for the first time in this process, and skip the launch.

    New tensors are zeros meanwhile: a skipped kernel might have written an index.
    """
    kernels: list[Kernel] = []
    seen: set[tuple[str, str]] = set()
    caches: list[tuple[dict[str, Any], str]] = []  # with the keys that stand for no kernel

    def note(*, key: str, fn: Any, compile: Mapping[str, Any], **_: object) -> bool:  # noqa: A002 - Triton's name
        if (fn.name, key) not in seen:
            seen.add((fn.name, key))
            cache = fn.jit_function.device_caches[compile["device"]][0]
            cache[key] = _Skipped()  # the next launches need not be described again, which takes most of their time
            caches.append((cache, key))
            options = json.loads(compile["specialization_data"])["options"]
            options = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
            (attributes,) = compile["configs"]
            kernel = Kernel(fn.jit_function, compile["signature"], compile["constants"], attributes, options)
            kernels.append(kernel)
        return True  # tells Triton not to compile, so it does not launch either

    hook, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, note
    try:
        with _ZeroedTensors():
            yield kernels
    finally:
        knobs.runtime.jit_cache_hook = hook
        for cache, key in caches:
            cache.pop(key, None)


class _Skipped:
    """Stands for a kernel whose launches are skipped, as Triton's CompiledKernel."""

    function = packed_metadata = None

    def launch_metadata(self, *_: object) -> None:
        """Do nothing."""

    def run(self, *_: object) -> None:
        """Do nothing."""


def keep_binaries_alone() -> None:
    """Let Triton write the binaries of kernels to its cache without the texts that it makes of the source on the way.

    They are six times as large, and each start would read those of every kernel that it launches.
    """
    knobs.compilation.store_binary_only = True


def settle_cache_keys() -> None:
    """Make a kernel's key in Triton's cache depend on its source alone. Before the first key is asked for.

    A key has the constants of the functions that the kernel calls, but Triton (3.6) collects those of a function that
    has no key yet before it makes that key: they are missing, unless another kernel that calls the function came first.
    So the same kernel had one key in the process that compiled it, and another where it was launched.
    """
    if DependenciesFinder._update_hash is not _update_hash:
        DependenciesFinder._update_hash = _update_hash


_update_hash_early = DependenciesFinder._update_hash


def _update_hash(self: DependenciesFinder, func: JITCallable) -> None:
    _ = func.cache_key  # from here on its constants are known
    _update_hash_early(self, func)


class Compilation:
    """Forked processes that compile kernels for this process's device. Life: __init__ → wait."""

    def __init__(self, kernels: list[Kernel]) -> None:
        # The longest first, by estimate, so that no process begins a long one when the others are done
        self._kernels = sorted(kernels, key=lambda kernel: -len(kernel.function.src))
        self._started_s = time.monotonic()
        context = multiprocessing.get_context("fork")
        self._num_taken: Synchronized[int] = context.Value("i", 0)
        self._num_done: Synchronized[int] = context.Value("i", 0)
        self._seconds = context.Array("d", len(kernels), lock=False)  # each written once
        target = driver.active.get_current_target()
        num_processes = min(len(kernels), len(os.sched_getaffinity(0)))
        self._processes = [
            context.Process(target=self._work, args=(target,), daemon=True) for _ in range(num_processes)
        ]
        with warnings.catch_warnings():  # of threads: these children use neither CUDA nor what such threads may lock
            warnings.simplefilter("ignore", DeprecationWarning)
            for process in self._processes:
                process.start()

    def wait(self, on_progress: Callable[[int, int], None]) -> bool:
        """Wait for the end; return True if all are compiled. The rest compile when they are launched."""
        total = len(self._kernels)
        while any(process.is_alive() for process in self._processes):
            on_progress(self._num_done.value, total)
            if time.monotonic() - self._started_s > _TIMEOUT_S:
                for process in self._processes:
                    process.kill()
            time.sleep(_POLL_S)
        on_progress(self._num_done.value, total)
        times = [(self._seconds[i], kernel.function.__name__) for i, kernel in enumerate(self._kernels)]
        longest_s, longest = max(times, default=(0.0, ""))
        logger.info(
            "kernels compiled=%d of=%d processes=%d seconds=%.1f sum_s=%.1f longest=%s longest_s=%.1f",
            self._num_done.value,
            total,
            len(self._processes),
            time.monotonic() - self._started_s,
            sum(self._seconds),
            longest,
            longest_s,
        )
        return self._num_done.value == total

    def _work(self, target: GPUTarget) -> None:
        """Compile kernels one by one; runs in a child process."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        while True:
            with self._num_taken.get_lock():
                index = self._num_taken.value
                self._num_taken.value += 1
            if index >= len(self._kernels):
                return
            kernel, started_s = self._kernels[index], time.monotonic()
            try:
                kernel.compile(target)
                self._seconds[index] = time.monotonic() - started_s
            except Exception as error:  # any error recurs, and is reported, when the kernel is launched
                logger.warning("kernel=%s not compiled ahead error=%r", kernel.function.__name__, str(error)[:200])
                continue
            with self._num_done.get_lock():
                self._num_done.value += 1


class _ZeroedTensors(TorchFunctionMode):
    """Makes torch.empty and torch.empty_like return zeros."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.zero_() if func in (torch.empty, torch.empty_like) else result
