"""Chooses the engine's device and dtypes, and explains a missing device. Imports torch."""

from __future__ import annotations

import logging
import warnings

import torch

from engine.interface.errors import StartupError
from engine.interface.units import GIB
from kernels.dispatch import HAS_TRITON, has_bf16_products
from kernels.elementwise.reference import FP8, INT8
from models.config.model_config import ModelConfig

logger = logging.getLogger(__name__)

# Below this, float32 weights fit in a core's cache, and waking a second thread costs more than it computes
# (docs/reference/measurements.md)
SMALL_PARAMETERS = 20_000_000
_KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3", "int8")
_FP8_CAPABILITY = (8, 9)  # the first with fp8 conversion in hardware and in Triton
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def resolve_device(name: str, *, rank: int = 0, size: int = 1) -> torch.device:
    """Return the requested device. auto: CUDA, else MPS, else the CPU. Raises StartupError if it is not available.

    rank, size: this rank and the number of ranks of a split model. Each uses its own GPU, set as the current device.
    """
    device = _resolve_kind(name)
    if size == 1:
        return device
    if device.type == "mps":
        raise StartupError(f"--tensor-parallel-size {size}: Apple GPUs cannot share a model: use --device cpu, or 1.")
    if device.type == "cpu":
        return device
    num_gpus = torch.cuda.device_count()
    if num_gpus < size:
        raise StartupError(f"--tensor-parallel-size {size} needs {size} GPUs, and this process sees {num_gpus}.")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def resolve_dtype(name: str, model: ModelConfig, device: torch.device) -> torch.dtype:
    """Return the requested dtype. auto: a 16-bit dtype on a GPU; on the CPU see default_cpu_dtype."""
    if name != "auto":
        return _DTYPES[name]
    if device.type == "cpu":
        return default_cpu_dtype(model, has_bf16=has_bf16_products())
    return torch.float16 if model.dtype == "float16" else torch.bfloat16


def default_cpu_dtype(model: ModelConfig, *, has_bf16: bool) -> torch.dtype:
    """Return bfloat16 for a 16-bit checkpoint on a CPU with such products (has_bf16), otherwise float32.

    Half the bytes to read for each token. A small model is read from the cores' caches, where that saves nothing, so it
    keeps float32, in which its tokens do not depend on the other requests of a step.
    """
    is_small = model.num_parameters < SMALL_PARAMETERS
    return torch.bfloat16 if has_bf16 and not is_small and model.dtype != "float32" else torch.float32


def head_copy_bytes(model: ModelConfig, dtype: torch.dtype, device: torch.device) -> int:
    """Return the bytes of an LM head beside an embedding that has the same rows: rounded, or packed for the CPU.

    model: the dimensions of one rank.
    """
    if model.is_foreign or not model.has_lm_head or not model.tie_word_embeddings:
        return 0
    size = model.vocab_size * model.hidden_size
    if model.quantization is not None and model.quantization.rounds_head:
        return size
    return size * dtype.itemsize if device.type == "cpu" and dtype == torch.bfloat16 and has_bf16_products() else 0


def resolve_kv_dtype(
    name: str, dtype: torch.dtype, device: torch.device, *, model: ModelConfig | None = None
) -> torch.dtype:
    """Return the dtype of the KV pool. auto: the model's dtype. Raises StartupError.

    model: None: any that fp8 and int8 serve.
    """
    if name not in _KV_CACHE_DTYPES:
        raise StartupError(f"--kv-cache-dtype {name} is not known: choose from {', '.join(_KV_CACHE_DTYPES)}.")
    if name == "auto":
        return dtype
    if name == "int8":
        if model is not None and any(cache.values_in_keys for cache in model.kv_caches):
            raise StartupError(
                f"--kv-cache-dtype int8: {model.architecture} keeps latents, whose kernels read no scales of tokens:"
                " use fp8 or auto."
            )
        return INT8
    if device.type == "mps":
        raise StartupError(f"--kv-cache-dtype {name}: torch has no fp8 on Apple GPUs: use int8 or auto.")
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else _FP8_CAPABILITY
    if capability < _FP8_CAPABILITY:
        raise StartupError(
            f"--kv-cache-dtype {name} needs a GPU of compute capability {_FP8_CAPABILITY[0]}.{_FP8_CAPABILITY[1]} or"
            f" higher, and this one has {capability[0]}.{capability[1]}: use int8 or auto."
        )
    return FP8


def describe_device(device: torch.device) -> str:
    """Return the device's name and size as text."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name}, {properties.total_memory / GIB:.0f} GiB"
    if device.type == "mps":
        return "mps (Apple GPU; untested path)"
    num_threads = torch.get_num_threads()
    return f"cpu, {num_threads} thread{'s' * (num_threads != 1)}"


def why_no_cuda() -> tuple[str | None, bool]:
    """Return the reason why CUDA is unavailable, or None; and True if the cause is a fault of GPU or driver."""
    if not torch.backends.cuda.is_built():
        return f"torch {torch.__version__} is built without CUDA", False
    with warnings.catch_warnings(record=True) as caught:  # torch warns if the driver is too old or broken
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return None, False
    if caught:
        return _first_sentence(str(caught[-1].message)), True
    return "no NVIDIA driver or no GPU is found", False


def _resolve_kind(name: str) -> torch.device:
    if name in ("cuda", "auto"):
        reason, is_fault = why_no_cuda()
        if reason is None:
            if not HAS_TRITON:
                logger.warning(
                    "the package triton cannot be imported, so every kernel falls back to torch, which is several times"
                    " slower: install it with `pip install triton`"
                )
            return torch.device("cuda")
        if name == "cuda":
            raise StartupError(f"--device cuda: {reason}: use --device cpu")
        if torch.backends.mps.is_available():
            return torch.device("mps")
        logger.log(logging.WARNING if is_fault else logging.INFO, "no CUDA device, the CPU is used reason=%r", reason)
        return torch.device("cpu")
    if name == "mps" and not torch.backends.mps.is_available():
        raise StartupError(f"--device mps: torch {torch.__version__} finds no Apple GPU here: use --device cpu")
    return torch.device(name)


def _first_sentence(text: str) -> str:
    text = text.strip().partition("\n")[0].partition(". ")[0].removesuffix(".")
    return text.removeprefix("CUDA initialization: ")


def gpu_bytes(device: torch.device, *, size: int) -> int | None:
    """Return the memory of the smallest of the CUDA devices of `size` ranks; None for another kind of device."""
    if device.type != "cuda":
        return None
    indices = range(size) if size > 1 else (device.index or 0,)
    return min(int(torch.cuda.get_device_properties(index).total_memory) for index in indices)
