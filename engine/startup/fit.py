"""The engine's part of `quire doctor`: examines the machine, and computes whether a model fits. Imports torch.

    python -m engine.startup.fit < ask.json > diagnosis.json        (engine/interface/fit_report.py)
It uses the engine's own arithmetic and loads no weights: it reads config.json and, if present, the weights' headers.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch

from engine.device.memory import DeviceMemory, measure_memory
from engine.device.page_plan import PagePlan
from engine.grammar.compiler import CompilerLoader
from engine.interface.config import EngineConfig
from engine.interface.errors import StartupError, phrase_as_sentence, sentence
from engine.interface.fit_report import Ask, Diagnosis, Gpu, LayersReport, Machine, ModelReport, Room, Stored
from engine.interface.units import GIB, format_size
from engine.startup.device_choice import gpu_bytes, resolve_device, resolve_dtype, resolve_kv_dtype, why_no_cuda
from engine.startup.host_memory import auto_host_bytes
from engine.startup.limits import choose_limits
from engine.startup.load import BACKENDS
from engine.startup.setup import Setup
from kernels.attention.base import AttentionBackend, select_backend
from kernels.attention.torch_ref import TorchAttention
from models.build import check_headers
from models.config.model_config import ModelConfig
from models.errors import ModelError
from models.foreign.choose import describe_class, read_config
from models.parallel import TensorParallel
from models.registry import find_architecture, whole_of_text_part
from models.weights.checkpoint import folder_stats

# Request lengths, in tokens, for which the report has the number of concurrent requests, besides the full context
_TYPICAL_LENS = (512, 2048, 8192, 32_768, 131_072)
_CPU = torch.device("cpu")
# Of a GPU: CUDA's context and the code of kernels. Pools on an H100 were so much, 0.8 to 1.2 GiB, smaller than weights
# and a step alone would leave (21 offline runs with torch 2.11, 2026-11-26 to 28)
_CONTEXT_BYTES = GIB


def examine(ask: Ask) -> Diagnosis:
    """Examine the machine and, if requested, the model."""
    return Diagnosis(
        machine=_machine(ask.num_gpus), model=None if ask.folder is None else _examine_model(ask, Path(ask.folder))
    )


def _examine_model(ask: Ask, folder: Path) -> ModelReport:
    raw = _raw_config(folder)
    names = raw.get("architectures")
    quantization = raw.get("quantization_config")
    report = ModelReport(architecture=str(names[0]) if isinstance(names, list) and names else "unknown")
    report.is_supported = _is_supported(report.architecture)
    if isinstance(quantization, dict):
        report.quantization = str(quantization.get("quant_method", "unknown"))
    try:
        checkpoint = read_config(folder, ask.model_impl)
        report.is_supported, report.computed_by = True, describe_class(checkpoint)
        report.text_of = whole_of_text_part(checkpoint.architecture, is_foreign=checkpoint.is_foreign)
        report.checkpoint_dtype = checkpoint.dtype
        report.checkpoint_bytes = checkpoint.weight_bytes(resolve_dtype(checkpoint.dtype, checkpoint, _CPU))
        model = checkpoint.quantized(ask.quantization)
        report.quantization = model.describe_quantization()
        _fill_in(report, ask, model, folder)
    except ModelError as error:
        report.problem = phrase_as_sentence(str(error))
        if report.stored is None:
            report.stored = _stored(folder, None)
    except StartupError as error:
        report.problem = error.message
    return report


def _is_supported(architecture: str) -> bool:
    try:
        find_architecture(architecture)
    except ModelError:
        return False
    return True


def _fill_in(report: ModelReport, ask: Ask, model: ModelConfig, folder: Path) -> None:
    """Fill the report in. Raises ModelError or StartupError at the first problem."""
    config = EngineConfig(
        model=str(folder),
        device=ask.device,
        dtype=ask.dtype,
        kv_cache_dtype=ask.kv_cache_dtype,
        quantization=ask.quantization,
        max_model_len=ask.max_model_len,
        max_num_seqs=ask.max_num_seqs,
        max_num_batched_tokens=ask.max_num_batched_tokens,
        max_decode_step_tokens=ask.max_decode_step_tokens,
        block_size=ask.block_size,
        kv_cache_memory_bytes=ask.kv_cache_memory_bytes,
        chooses_host_memory=True,  # as quire serve does by default
        gpu_memory_utilization=ask.gpu_memory_utilization,
    )
    device = resolve_device(ask.device, size=ask.num_gpus) if ask.gpu_memory is None else torch.device("cuda")
    dtype = resolve_dtype(ask.dtype, model, device)
    # A hypothetical GPU may support any dtype
    kv_dtype = resolve_kv_dtype(ask.kv_cache_dtype, dtype, device if ask.gpu_memory is None else _CPU, model=model)
    report.num_parameters, report.has_lm_head = model.num_parameters, model.has_lm_head
    report.dtype, report.max_context_len = str(dtype).removeprefix("torch."), model.max_context_len
    report.stored = _stored(folder, model)
    tp = TensorParallel(size=ask.num_gpus, is_expert_parallel=ask.is_expert_parallel)
    model.check_tensor_parallel(tp.size, is_expert_parallel=tp.is_expert_parallel)
    limits = choose_limits(config, gpu_bytes=ask.gpu_memory or gpu_bytes(device, size=ask.num_gpus))
    backend = _backend(model.share_of_rank(tp.size), dtype, device, kv_dtype=kv_dtype)
    setup = Setup(config, model, device, dtype, kv_dtype, limits, backend, CompilerLoader(folder), tp=tp)
    report.weights, report.kv_bytes_per_token = setup.weight_bytes, model.kv_bytes_per_token(tp.size, setup.kv_dtype)
    report.kv_layers = _layers(setup.plan_pages(), setup.kv_dtype)
    memory, is_cpu = _memory(ask, setup), setup.device.type == "cpu"
    alone = _whole(ask, memory, is_cpu=is_cpu)
    memory = alone if ask.is_alone else memory
    plan = setup.plan_pool(has_weights=False, memory=memory)
    kv_cache_alone = None if is_cpu else setup.plan_pool(has_weights=False, memory=alone).num_bytes
    setup = setup.limited_to(plan.max_num_seqs)
    most = plan.max_num_seqs
    lens = sorted({size for size in _TYPICAL_LENS if size < plan.max_model_len} | {plan.max_model_len})
    report.room = Room(
        device=memory.name,
        total=memory.total,
        usable=memory.usable,
        step=setup.step_bytes,
        kv_cache=plan.num_bytes,
        kv_cache_tokens=plan.num_tokens,
        max_model_len=plan.max_model_len,
        max_num_seqs=most,
        num_requests={size: min(plan.num_requests(size), most) for size in lens},
        kv_cache_alone=kv_cache_alone,
    )
    if not model.is_foreign:
        check_headers(model, folder, tp, dtype=dtype)


def _layers(pages: PagePlan, kv_dtype: torch.dtype) -> list[LayersReport]:
    """Return what each kind of layer keeps."""
    reports = [
        LayersReport(
            kind=group.cache.kind,
            num_layers=group.num_layers,
            bytes_per_token=group.num_layers * group.cache.token_bytes(kv_dtype),
            window=group.cache.reach,
            bytes_per_request=(None if group.cache.reach is None else group.num_pages(1 << 40) * pages.page_bytes),
        )
        for group in pages.groups
    ]
    if pages.state is not None:
        per_request = pages.state_pages * pages.page_bytes
        reports.append(
            LayersReport(
                kind="state",
                num_layers=pages.state.num_layers,
                bytes_per_token=0,
                window=None,
                bytes_per_request=per_request,
            )
        )
    return reports


def _memory(ask: Ask, setup: Setup) -> DeviceMemory:
    """Return the memory to plan for: of the hypothetical GPU, or of this machine's device."""
    if ask.gpu_memory is not None:
        size = format_size(ask.gpu_memory)
        name = f"A GPU of {size}" if ask.num_gpus == 1 else f"Each of {ask.num_gpus} GPUs of {size}"
        return _whole(ask, DeviceMemory(name, ask.gpu_memory, ask.gpu_memory, 0), is_cpu=False)
    if ask.num_gpus == 1:
        return setup.measure_memory()
    if setup.device.type == "cpu":
        return dataclasses.replace(setup.measure_memory(), name=f"Each of {ask.num_gpus} ranks on this machine")
    devices = [torch.device("cuda", rank) for rank in range(ask.num_gpus)]
    memory = min((measure_memory(setup.config, device) for device in devices), key=lambda memory: memory.usable)
    return dataclasses.replace(memory, name=f"Each of {ask.num_gpus} × {memory.name}")


def _whole(ask: Ask, memory: DeviceMemory, *, is_cpu: bool) -> DeviceMemory:
    """Return the memory of a device as if no other program held any of it."""
    usable = memory.total if is_cpu else int(memory.total * ask.gpu_memory_utilization) - _CONTEXT_BYTES
    return dataclasses.replace(memory, free=memory.total, usable=usable)


def _backend(
    model: ModelConfig, dtype: torch.dtype, device: torch.device, *, kv_dtype: torch.dtype
) -> AttentionBackend:
    if device.type == "cuda" and not torch.cuda.is_available():
        return TorchAttention()  # for a hypothetical GPU; only the block size depends on it
    try:
        return select_backend(model.attention_spec(1, dtype, device, kv_dtype=kv_dtype), BACKENDS)
    except ValueError as error:
        raise StartupError(sentence(str(error))) from error


def _stored(folder: Path, model: ModelConfig | None) -> Stored | None:
    """Return the folder's weights; of an unsupported model all readable tensors; None if there are none."""
    try:
        if model is None:
            found = folder_stats(folder)
        else:
            ignored_prefixes = () if model.is_foreign else find_architecture(model.architecture).ignored_prefixes
            needs_head = model.has_lm_head and not model.tie_word_embeddings
            found = folder_stats(folder, needs_head=needs_head, ignored_prefixes=ignored_prefixes)
    except ModelError:
        if model is not None:
            raise
        return None
    if found is None:
        return None
    return Stored(num_parameters=found.num_parameters, num_bytes=found.num_bytes, dtypes=list(found.dtypes))


def _machine(num_gpus: int) -> Machine:
    reason, _ = why_no_cuda()
    gpus: list[Gpu] = []
    for index in range(torch.cuda.device_count() if reason is None else 0):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        gpus.append(Gpu(properties.name, total, free, f"{properties.major}.{properties.minor}"))
    return Machine(
        torch=str(torch.__version__),
        cuda=torch.version.cuda,
        triton=_version("triton"),
        driver=_driver(),
        flash_attn=_version("flash-attn-3", "flash_attn_3", "flash-attn"),
        transformers=_version("transformers"),
        why_no_cuda=reason,
        gpus=gpus,
        host_memory=auto_host_bytes(num_gpus) if gpus else 0,
    )


def _version(*distributions: str) -> str | None:
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _driver() -> str | None:
    path = Path("/proc/driver/nvidia/version")
    if not path.is_file():
        return None
    found = re.search(r"Module.*?\s(\d+(?:\.\d+)+)\s", path.read_text(errors="replace"))
    return found[1] if found else "unknown"


def _raw_config(folder: Path) -> dict[str, Any]:
    """Return config.json, or {} if it cannot be read; ModelConfig reports that error."""
    try:
        raw = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return raw if isinstance(raw, dict) else {}


def main() -> int:
    """Entry point of `python -m engine.startup.fit`."""
    ask = msgspec.json.decode(sys.stdin.buffer.read(), type=Ask)
    sys.stdout.buffer.write(msgspec.json.encode(examine(ask)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
