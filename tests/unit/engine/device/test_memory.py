"""Memory that is too small, before loading and while loading: numbers, and what would fit."""

import json
from pathlib import Path

import pytest
import torch

import engine.startup.setup
from engine.device.memory import DeviceMemory, check_memory, format_count, is_out_of_memory
from engine.interface.config import EngineConfig
from engine.interface.errors import StartupError
from engine.startup.load import load_engine
from models.config.model_config import ModelConfig
from models.foreign.choose import read_config

ROOT = Path(__file__).parents[4]
DEMO = ROOT / "models" / "demo" / "checkpoint"
GPU = torch.device("cuda")
LLAMA_8B = ROOT / "benchmarks" / "shapes" / "llama-3.1-8b"
GIB = 2**30


def refusal(
    *,
    total: float,
    free: float,
    usable: float,
    dtype: torch.dtype = torch.bfloat16,
    step: float = 1.0,
    **config: object,
) -> str:
    """What is said of a GPU with so many GiB to a model of 8 B parameters, 15 GiB in bfloat16."""
    memory = DeviceMemory("GPU Name", *(int(size * GIB) for size in (total, free, usable)))
    with pytest.raises(StartupError) as info:
        check_memory(
            EngineConfig(model=str(LLAMA_8B), **config),
            ModelConfig.from_folder(LLAMA_8B),
            memory,
            dtype=dtype,
            device=GPU,
            step_bytes=int(step * GIB),
            pool_bytes=config.get("kv_cache_memory_bytes", 2**20),
        )
    assert info.value.exit_code == 3
    assert "\n" not in info.value.message
    assert info.value.message.endswith(".")
    return info.value.message


def test_the_device_its_memory_and_every_need_are_named() -> None:
    message = refusal(total=12, free=11.5, usable=10.3)
    assert message.startswith("GPU Name has 11.5 GiB free of 12 GiB, of which this daemon may use 10.3 GiB; ")
    assert "LlamaForCausalLM with 8.0 B parameters" in message
    assert "needs 15 GiB for its weights in bfloat16, 1 GiB to compute a step and 1 MiB of KV cache" in message
    assert message.endswith("use --quantization fp8, or a model of at most about 5.0 B parameters.")


def test_the_fastest_quantisation_that_fits_is_named() -> None:
    assert "use --quantization bitsandbytes-nf4, or " in refusal(total=9, free=8.5, usable=8)
    assert "--quantization" not in refusal(total=6, free=5.5, usable=5)


def test_transformers_own_class_is_offered_no_quantisation(tmp_path: Path) -> None:
    config = json.loads((LLAMA_8B / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    memory, model = DeviceMemory("GPU", 12 * GIB, 11 * GIB, 11 * GIB), read_config(tmp_path, "transformers")
    with pytest.raises(StartupError, match="a model of at most about") as info:
        check_memory(
            EngineConfig(model=str(tmp_path)),
            model,
            memory,
            dtype=torch.bfloat16,
            device=GPU,
            step_bytes=GIB,
            pool_bytes=1,
        )
    assert "--quantization" not in info.value.message


def test_weights_are_counted_as_quantised() -> None:
    memory, config = DeviceMemory("GPU", 12 * GIB, 11 * GIB, 11 * GIB), EngineConfig(model=str(LLAMA_8B))
    model = ModelConfig.from_folder(LLAMA_8B).quantized("fp8")
    check_memory(config, model, memory, dtype=torch.bfloat16, device=GPU, step_bytes=GIB, pool_bytes=GIB)
    with pytest.raises(StartupError, match=r"needs 8\.5 GiB for its weights in fp8 \(e4m3"):
        check_memory(config, model, memory, dtype=torch.bfloat16, device=GPU, step_bytes=GIB, pool_bytes=4 * GIB)


def test_a_16_bit_dtype_is_named_where_it_is_enough() -> None:
    assert "use --dtype bfloat16, or " in refusal(total=24, free=23, usable=21, dtype=torch.float32)
    assert "--dtype" not in refusal(total=12, free=11.5, usable=10.3, dtype=torch.float32)


def test_memory_that_is_only_kept_back_is_named_as_that() -> None:
    assert "a larger --gpu-memory-utilization, or" in refusal(total=24, free=23, usable=15.5)


def test_memory_that_other_programs_hold_is_told_where_it_is_the_cause() -> None:
    message = refusal(total=24, free=8, usable=5.6)
    assert "without the other programs, which hold 16 GiB of it" in message
    assert "other programs" not in refusal(total=12, free=8, usable=6.8)


def test_a_step_that_is_too_large_names_the_limits_that_size_it() -> None:
    assert "half of --max-num-batched-tokens and of --max-num-seqs" in refusal(total=24, free=20, usable=18, step=4)


def test_a_pool_that_is_too_large_names_the_largest() -> None:
    message = refusal(total=24, free=20, usable=18, kv_cache_memory_bytes=100 * GIB)
    assert "--kv-cache-memory of at most 2 GiB" in message


def test_what_fits_is_not_refused() -> None:
    memory = DeviceMemory("GPU", 24 * GIB, 23 * GIB, 21 * GIB)
    config, model = EngineConfig(model=str(LLAMA_8B)), ModelConfig.from_folder(LLAMA_8B)
    check_memory(config, model, memory, dtype=torch.bfloat16, device=GPU, step_bytes=GIB, pool_bytes=GIB)


def test_a_model_too_large_is_refused_before_its_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = DeviceMemory("This machine", 16 * GIB, 8 * GIB, 8 * GIB, 0.4)
    monkeypatch.setattr(engine.startup.setup, "measure_memory", lambda config, device: memory)
    stages: list[str] = []
    with pytest.raises(
        StartupError, match=r"This machine has 8 GiB free of 16 GiB.*29.9 GiB for its weights in float32"
    ):
        load_engine(
            EngineConfig(model=str(LLAMA_8B), device="cpu", dtype="float32"), lambda stage: stages.append(stage.name)
        )
    assert stages == ["config"]


def test_a_context_that_the_weights_leave_no_room_for_is_refused_before_they_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = DeviceMemory("This machine", 16 * GIB, 16 * GIB, 16 * GIB, 0.5)
    monkeypatch.setattr(engine.startup.setup, "measure_memory", lambda config, device: memory)
    config = EngineConfig(model=str(LLAMA_8B), device="cpu", dtype="bfloat16", max_model_len=131072)
    with pytest.raises(StartupError, match=r"Context 131072 needs 16 GiB of KV cache.*use --max-model-len \d+, or"):
        load_engine(config, lambda stage: None)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee documentation"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_memory_that_runs_out_while_loading_is_one_sentence(
    error: RuntimeError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    assert is_out_of_memory(error)
    monkeypatch.setattr("engine.startup.load._load_weights", fail)
    with pytest.raises(StartupError) as info:
        load_engine(EngineConfig(model=str(DEMO), device="cpu"), lambda stage: None)
    assert info.value.exit_code == 3
    assert info.value.message.startswith("The device ran out of memory at the stage config: use ")
    assert "\n" not in info.value.message


def test_another_error_while_loading_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("engine.startup.load._load_weights", fail)
    with pytest.raises(RuntimeError, match="illegal"):
        load_engine(EngineConfig(model=str(DEMO), device="cpu"), lambda stage: None)


def test_the_context_that_fits_by_itself_is_said_aloud(caplog: pytest.LogCaptureFixture) -> None:
    config = EngineConfig(model=str(DEMO), device="cpu", kv_cache_memory_bytes=2**20)
    loaded = load_engine(config, lambda stage: None)
    assert loaded.scheduler_config.max_model_len < 4096
    assert f"max_model_len={loaded.scheduler_config.max_model_len} model_max_len=4096" in caplog.text


@pytest.mark.parametrize(("count", "text"), [(8_030_000_000, "8.0 B"), (596_000_000, "596 M"), (10, "1 M")])
def test_parameters_are_counted_for_people(count: int, text: str) -> None:
    assert format_count(count) == text
