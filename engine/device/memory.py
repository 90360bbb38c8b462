"""Measures a device's memory, allocates it, and checks that a model fits before its weights load. Imports torch."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.interface.config import EngineConfig
from engine.interface.errors import StartupError
from engine.interface.units import GIB, format_count, format_size
from models.config.model_config import ModelConfig

# By default, the KV pool on a CPU takes this share of the memory that is free at start
_HOST_SHARE = 0.4
_CGROUP, _OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# A cgroup's files: its limit, its use, and in memory.stat the files that are not in use, those of children included
_NAMES = ("memory.max", "memory.current", "inactive_file")
_NAMES_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
# Quantization schemes to suggest, the fastest first
_SMALLER = ("fp8", "bitsandbytes-nf4")


@dataclass(frozen=True)
class DeviceMemory:
    """A device's memory at one moment, in bytes."""

    name: str  # display name: "NVIDIA H100 80GB HBM3"
    total: int
    free: int
    usable: int  # the daemon may still allocate this much
    pool_share: float = 1.0  # share of the remaining memory that the KV pool takes by default

    def pool_bytes(self, *, needed_bytes: int) -> int:
        """Return the size of the KV pool, given that everything else takes needed_bytes."""
        return int((self.usable - needed_bytes) * self.pool_share)


def measure_memory(config: EngineConfig, device: torch.device) -> DeviceMemory:
    """Return the device's memory now. On the CPU: the system's available memory, within this cgroup's limit."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        usable = int(free - total * (1 - config.gpu_memory_utilization))
        return DeviceMemory(torch.cuda.get_device_name(device), total, free, usable)
    if device.type == "mps":
        total, taken = torch.mps.recommended_max_memory(), torch.mps.current_allocated_memory()
        return DeviceMemory("The GPU", total, total - taken, int(total * config.gpu_memory_utilization) - taken)
    total, free = _host_memory_bytes()
    return DeviceMemory("This machine", total, free, free, _HOST_SHARE)


def check_memory(
    config: EngineConfig,
    model: ModelConfig,
    memory: DeviceMemory,
    *,
    dtype: torch.dtype,
    device: torch.device,
    step_bytes: int,
    pool_bytes: int,
) -> None:
    """Raise StartupError if weights, a step and the smallest KV pool do not fit; it names sizes and remedies."""
    weights = model.weight_bytes(dtype, device)
    if weights + step_bytes + pool_bytes <= memory.usable:
        return
    kind = str(dtype).removeprefix("torch.") if model.quantization is None else model.quantization.describe()
    parts = [f"{format_size(weights)} for its weights in {kind}"]
    parts += [f"{format_size(step_bytes)} to compute a step"] if step_bytes else []
    raise StartupError(
        f"{memory.name} has {format_size(memory.free)} free of {format_size(memory.total)}, of which this daemon may"
        f" use {format_size(memory.usable)}; {model.architecture} with {format_count(model.num_parameters)} parameters"
        f" needs {', '.join(parts)} and {format_size(pool_bytes)} of KV cache: use "
        + ", or ".join(_what_fits(config, model, memory, dtype, device, step_bytes=step_bytes, pool_bytes=pool_bytes))
        + "."
    )


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros; on the CPU from the system's zero pages, which take time and memory only when written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def free_host_bytes() -> int:
    """Return the memory of the machine that is available now, within this cgroup's limit."""
    return _host_memory_bytes()[1]


def num_host_gpus() -> int:
    """Return the GPUs of this machine, also those that this process may not use, as far as the driver shows them."""
    driver = Path("/proc/driver/nvidia/gpus")
    return max(len(list(driver.iterdir())) if driver.is_dir() else 0, torch.cuda.device_count(), 1)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return True if torch, a CUDA library or the host's allocator ran out of memory."""
    text = str(error)
    is_named = any(words in text for words in ("out of memory", "ALLOC_FAILED", "can't allocate memory"))
    return is_named or isinstance(error, torch.OutOfMemoryError)


def describe_shortage(config: EngineConfig, *, during: str) -> str:
    """Return a sentence that reports lack of memory at a stage of the start, its use, and the remedy."""
    text = f"The device ran out of memory at the stage {during}"
    if config.device == "cpu" or not torch.cuda.is_available():
        return f"{text}: use a smaller model, --dtype bfloat16, or a smaller --kv-cache-memory."
    try:
        free, total = torch.cuda.mem_get_info()
    except RuntimeError:  # not even a context fits
        return f"{text}: end other programs on this GPU."
    ours = torch.cuda.memory_reserved()
    return (
        f"{text}: {torch.cuda.get_device_name()} has {format_size(free)} free of {format_size(total)},"
        f" {format_size(ours)} are held by this daemon and {format_size(total - free - ours)} by contexts and other"
        f" programs: use a smaller --gpu-memory-utilization than {config.gpu_memory_utilization:g},"
        " or end other programs on this GPU."
    )


def _what_fits(
    config: EngineConfig,
    model: ModelConfig,
    memory: DeviceMemory,
    dtype: torch.dtype,
    device: torch.device,
    *,
    step_bytes: int,
    pool_bytes: int,
) -> list[str]:
    """Return changes that each suffice alone; a device with more memory if there are none."""
    needed, held = model.weight_bytes(dtype, device) + step_bytes + pool_bytes, memory.total - memory.free
    spare = memory.usable - needed
    remedies = []
    if config.kv_cache_memory_bytes is not None and spare + pool_bytes > 0:
        remedies.append(f"--kv-cache-memory of at most {format_size(spare + pool_bytes)}")
    if dtype.itemsize == 4 and spare + needed // 2 >= 0:
        remedies.append("--dtype bfloat16")
    for name in () if model.quantization is not None or model.is_foreign else _SMALLER:
        if model.quantized(name).weight_bytes(dtype, device) + step_bytes + pool_bytes <= memory.usable:
            remedies.append(f"--quantization {name}")
            break
    if step_bytes and spare + step_bytes // 2 >= 0:
        remedies.append("half of --max-num-batched-tokens and of --max-num-seqs")
    if needed <= memory.free:
        remedies.append("a larger --gpu-memory-utilization")
    elif spare + held >= 0:
        remedies.append(f"this device without the other programs, which hold {format_size(held)} of it")
    fitting = (memory.usable - step_bytes - pool_bytes) // dtype.itemsize
    if fitting > 0:
        remedies.append(f"a model of at most about {format_count(fitting)} parameters")
    return remedies or ["a device with more free memory"]


def _host_memory_bytes() -> tuple[int, int]:
    """Return total and available memory: the system's, or that of a cgroup of this process if it is less."""
    total = available = 4 * GIB
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        total, available = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    for limit, used, cached in _cgroup_bytes():
        total = min(total, limit)
        # Files that were read count as used until the system needs their memory, which it then takes
        available = min(available, max(limit - used + cached, 0))
    return total, available


def _cgroup_bytes() -> Iterator[tuple[int, int, int]]:
    """Yield limit, use, and files in it that are not in use, of this process's cgroup and each one around it."""
    for folder, (limit_name, used_name, cached_name) in _cgroups():
        limit, used = _read(folder / limit_name).strip(), _read(folder / used_name).strip()
        if limit.isdecimal() and used.isdecimal():  # not "max", nor missing
            fields = dict(line.partition(" ")[::2] for line in _read(folder / "memory.stat").splitlines())
            yield int(limit), int(used), int(fields.get(cached_name, 0))


def _cgroups() -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Yield folders, which may not be there, and the names in them. A container sees its own cgroup as the first one.

    A limit may be that of any cgroup on the way: of a service (MemoryMax=), a batch job, a container.
    """
    lines = [line.split(":", 2) for line in _read(_OWN_CGROUPS).splitlines()]
    paths = {line[1]: line[2] for line in lines if len(line) == 3}
    of_memory = next((path for names, path in paths.items() if "memory" in names.split(",")), "/")
    for root, path, names in ((_CGROUP, paths.get("", "/"), _NAMES), (_CGROUP / "memory", of_memory, _NAMES_V1)):
        parts = path.strip("/").split("/")
        for count in range(1 if ".." in parts else len(parts) + 1):  # "..": outside of this container
            yield root.joinpath(*parts[:count]), names


def _read(path: Path) -> str:
    """Return a file's text; "" if it is missing or not for this process to read: then nothing is known of a limit."""
    try:
        return path.read_text(errors="surrogateescape")
    except OSError:
        return ""
