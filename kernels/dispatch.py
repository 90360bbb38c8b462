"""op(): selects an op's Triton twin on a CUDA device with Triton installed, otherwise its torch specification.

HAS_TRITON is read at each call, so that a test can run the specifications on a GPU. Some ops have a form of their own
for bf16 on the CPU; has_bf16_products() and has_int8_products() tell what a CPU multiplies in hardware. when_used()
imports a module at its first use: a model needs few of the kernels, and Triton reads the source of each.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Concatenate, ParamSpec, TypeVar

import torch

try:
    import triton  # noqa: F401

    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False

P = ParamSpec("P")
R = TypeVar("R")


def on_triton(x: torch.Tensor) -> bool:
    """Return True if ops on x are Triton's."""
    return HAS_TRITON and x.is_cuda


@functools.cache
def has_pdl(device: torch.device) -> bool:
    """Return True if a kernel may begin before the one before it ends (programmatic dependent launch: Hopper on).

    gdc_wait() returns when the kernel before has ended. That one has waited, too, so all earlier kernels have ended:
    each kernel waits once, on every path. gdc_launch_dependents(), which lets the next one begin, is behind the wait.
    So what is read before a wait must be constant or older than the kernel before. Kernels that round rows signal in
    front of it (wait_for_rows in kernels/linear/triton_fp8.py): the product behind them reads weights alone before its
    wait. Other row kernels could, and steps were slower (benchmarks/notes.md).
    """
    return torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Return True for a CUDA device of compute capability 9, whose kernels in Gluon run on no other."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@functools.cache
def has_bf16_products() -> bool:
    """Return True if this CPU multiplies bf16 in hardware: AVX-512 BF16 or AMX."""
    if not torch.backends.mkldnn.is_available():
        return False
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


@functools.cache
def has_int8_products() -> bool:
    """Return True if this CPU sums products of bytes in 32 bits: AVX-512 VNNI. Older ones saturate in 16 bits."""
    return bool(torch.backends.mkldnn.is_available() and torch.cpu._is_vnni_supported())


def when_used(name: str) -> ModuleType:
    """Return the module `name`, which is imported when one of its attributes is first asked for.

    It must exist, and importing it must not fail.
    """
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.find_spec(name)
    assert spec is not None, f"there is no module {name}"
    assert spec.loader is not None, f"{name} is no module that is loaded from a file"
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    package, _, last = name.rpartition(".")
    setattr(sys.modules[package], last, module)
    return module


def op(
    reference: Callable[Concatenate[torch.Tensor, P], R],
    twins: str,
    *,
    can_run: Callable[[torch.Tensor], bool] = on_triton,
    takes_pdl: bool = True,
    cpu: Callable[Concatenate[torch.Tensor, P], R] | None = None,
) -> Callable[Concatenate[torch.Tensor, P], R]:
    """Make an op with reference's name, signature and docstring that calls its twin if can_run(its first tensor).

    twins: the module of the twin, imported at the first call that the twin serves. The twin is its function of
    reference's name, and has reference's parameters and, if takes_pdl, `pdl`.
    can_run: implies on_triton. cpu: replaces reference for bf16 tensors on the CPU.
    """
    if cpu is not None:
        reference = _with_cpu(reference, cpu)
    if not HAS_TRITON:
        return reference
    kernel: Callable[..., R] | None = None

    @functools.wraps(reference)
    def run(x: torch.Tensor, *args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal kernel
        if can_run(x):
            kernel = kernel or getattr(importlib.import_module(twins), reference.__name__)
            return kernel(x, *args, pdl=has_pdl(x.device), **kwargs) if takes_pdl else kernel(x, *args, **kwargs)
        return reference(x, *args, **kwargs)

    return run


def _with_cpu(
    reference: Callable[Concatenate[torch.Tensor, P], R], cpu: Callable[Concatenate[torch.Tensor, P], R]
) -> Callable[Concatenate[torch.Tensor, P], R]:
    @functools.wraps(reference)
    def run(x: torch.Tensor, *args: P.args, **kwargs: P.kwargs) -> R:
        is_served = x.dtype == torch.bfloat16 and x.device.type == "cpu"
        return cpu(x, *args, **kwargs) if is_served else reference(x, *args, **kwargs)

    return run
