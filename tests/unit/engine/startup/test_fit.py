"""The doctor's numbers are those of the start: what it says fits is what the engine then makes."""

import json
from pathlib import Path

import pytest
import torch

from engine.device import memory
from engine.interface.config import EngineConfig
from engine.interface.fit_report import Ask
from engine.interface.units import GIB
from engine.offline import OfflineEngine
from engine.startup.fit import examine
from models.config.model_config import ModelConfig
from models.quantization import experts_scheme
from tests.unit.engine.test_real_model import checkpoint  # noqa: F401  (a fixture)

LLAMA_3_1_8B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "torch_dtype": "bfloat16",
}
PARAMETERS, KV_BYTES = 8_030_261_248, 2 * 32 * 8 * 128 * 2


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """Return a folder with a published configuration alone."""
    return write(tmp_path)


def write(folder: Path, **changes: object) -> Path:
    (folder / "config.json").write_text(json.dumps({**LLAMA_3_1_8B, **changes}))
    return folder


def look(folder: Path, **options: object):
    report = examine(Ask(folder=str(folder), **options)).model
    assert report is not None
    return report


def test_what_fits_is_what_the_engine_makes(checkpoint: Path) -> None:  # noqa: F811
    report = look(checkpoint, device="cpu")
    sizes = OfflineEngine.load(EngineConfig(model=str(checkpoint), device="cpu")).loaded.scheduler_config
    assert report.problem is None
    assert report.room.max_model_len == sizes.max_model_len == 512
    assert report.room.kv_cache_tokens == (sizes.num_pages - 1) * sizes.block_size
    assert report.room.max_num_seqs == sizes.max_num_seqs
    assert report.room.num_requests == {512: sizes.max_num_seqs}
    assert report.stored.num_parameters == report.num_parameters
    assert report.weights == report.stored.num_bytes  # both float32


@pytest.mark.parametrize("memory", [24 * GIB, 80 * GIB])
def test_a_published_model_on_a_gpu_that_is_not_here(llama: Path, memory: int) -> None:
    report = look(llama, gpu_memory=memory)
    assert report.problem is None
    assert (report.num_parameters, report.weights) == (PARAMETERS, 2 * PARAMETERS)
    assert (report.kv_bytes_per_token, report.dtype, report.max_context_len) == (KV_BYTES, "bfloat16", 131_072)
    assert report.stored is None
    room = report.room
    assert room.usable == int(memory * 0.9) - GIB
    left = room.usable - report.weights - room.step
    assert left - 16 * KV_BYTES <= room.kv_cache <= left
    assert room.kv_cache == (room.kv_cache_tokens + 16) * KV_BYTES
    assert room.max_model_len == min(131_072, room.kv_cache_tokens)
    for size, count in room.num_requests.items():
        blocks = room.kv_cache_tokens // 16
        assert count == min(blocks // -(-size // 16), 256)
        assert count > 0


def test_experts_are_counted_as_the_device_arranges_them(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(__file__).parents[4] / "benchmarks" / "shapes" / "gpt-oss-20b-mxfp4"
    monkeypatch.setattr(
        experts_scheme,
        "takes_planes",
        lambda dtype, device, is_integer: dtype == torch.bfloat16 and device.type == "cuda",
    )
    weights = ModelConfig.from_folder(folder).weight_bytes(torch.bfloat16)
    assert look(folder, gpu_memory=80 * GIB, dtype="float16").weights == weights
    # 2,880 inputs of 17 / 32 bytes become 23 groups of 68 bytes
    padding = 24 * 32 * 3 * 2880 * (23 * 68 - 2880 * 17 // 32)
    assert look(folder, gpu_memory=80 * GIB).weights == weights + padding


# GiB of the pool that a daemon had on an H100, whose memory is 79.18 GiB (benchmarks/results/offline-*-h100-*.json)
MEASURED_POOLS = {
    "qwen3-0.6b": 67.0,
    "llama-3.1-8b": 51.5,
    "llama-3.1-8b-fp8-blocks": 57.6,
    "gpt-oss-20b-mxfp4": 53.5,
    "qwen3-30b-a3b-fp8": 38.2,
    "qwen3-30b-a3b-awq": 51.1,
    "qwen3-30b-a3b-nvfp4": 50.2,
    "glm-4.7-flash": 9.8,
    "qwen3.5-35b-a3b": 2.5,
    "nemotron-3-nano-30b-a3b": 7.5,
}


@pytest.mark.parametrize("shape", MEASURED_POOLS)
def test_the_pool_is_as_large_as_it_was_on_a_gpu(shape: str) -> None:
    folder = Path(__file__).parents[4] / "benchmarks" / "shapes" / shape
    report = look(folder, gpu_memory=int(79.18 * GIB), max_model_len=8192)
    assert abs(report.room.kv_cache / GIB - MEASURED_POOLS[shape]) <= 0.25


def test_a_model_that_does_not_fit_says_what_would(llama: Path) -> None:
    report = look(llama, gpu_memory=16 * GIB)
    assert report.room is None
    assert report.weights == 2 * PARAMETERS
    assert report.problem.startswith("A GPU of 16 GiB has 16 GiB free")
    assert "a model of at most about" in report.problem


def test_a_context_that_does_not_fit_is_refused_with_numbers(llama: Path) -> None:
    assert "--max-model-len" in look(llama, gpu_memory=24 * GIB, max_model_len=100_000).problem
    assert "131072" in look(llama, gpu_memory=24 * GIB, max_model_len=200_000).problem
    fitting = look(llama, gpu_memory=24 * GIB, max_model_len=4096)
    assert (fitting.problem, fitting.room.max_model_len) == (None, 4096)
    assert list(fitting.room.num_requests) == [512, 2048, 4096]


def test_each_gpu_has_its_share_of_a_model(llama: Path) -> None:
    whole, half = look(llama, gpu_memory=80 * GIB), look(llama, gpu_memory=80 * GIB, num_gpus=2)
    assert half.kv_bytes_per_token * 2 == whole.kv_bytes_per_token
    norms = 2 * (2 * 32 + 1) * 4096  # which every GPU has whole, two bytes each
    assert half.weights * 2 == whole.weights + norms
    assert half.problem is None
    assert half.room is not None
    assert "does not split over 3 ranks" in look(llama, gpu_memory=80 * GIB, num_gpus=3).problem


def test_a_split_that_would_cut_blocks_of_quantised_weights_is_a_problem(tmp_path: Path) -> None:
    folder = write(tmp_path, intermediate_size=11_008)
    options = {"gpu_memory": 80 * GIB, "quantization": "bitsandbytes-nf4"}
    assert look(folder, num_gpus=4, **options).problem is None
    problem = look(folder, num_gpus=8, **options).problem
    assert "down_proj: 8 ranks have 1376 inputs each" in problem
    assert "only at multiples of 64" in problem


def test_ranks_on_the_cpu_share_its_memory(checkpoint: Path) -> None:  # noqa: F811
    whole, half = (look(checkpoint, device="cpu", num_gpus=num_ranks) for num_ranks in (1, 2))
    assert (whole.problem, half.problem) == (None, None)
    assert half.room.usable < 0.7 * whole.room.usable
    assert half.room.device == "Each of 2 ranks on this machine"


def test_more_gpus_than_kv_heads_hold_one_each() -> None:
    config = ModelConfig.from_json({**LLAMA_3_1_8B, "num_key_value_heads": 2})
    assert config.share_of_rank(4).num_kv_heads == config.num_kv_heads_per_rank(4) == 1


def test_what_flags_would_make_of_it_is_told(llama: Path) -> None:
    plain = look(llama, gpu_memory=80 * GIB)
    report = look(llama, gpu_memory=80 * GIB, quantization="fp8", kv_cache_dtype="fp8")
    assert report.problem is None
    assert report.weights < 0.6 * plain.weights
    assert report.kv_bytes_per_token * 2 == plain.kv_bytes_per_token
    int8 = look(llama, gpu_memory=80 * GIB, kv_cache_dtype="int8")
    assert int8.kv_bytes_per_token * 256 == plain.kv_bytes_per_token * 132  # 128 numbers and a float32 of a head
    assert [layers.bytes_per_token for layers in int8.kv_layers] == [int8.kv_bytes_per_token]
    assert 1.9 * plain.room.kv_cache_tokens < int8.room.kv_cache_tokens < 1.95 * plain.room.kv_cache_tokens
    assert report.checkpoint_bytes == plain.checkpoint_bytes == 2 * PARAMETERS
    assert "quantized on load" in report.quantization
    refused = look(llama, gpu_memory=80 * GIB, quantization="awq")
    assert refused.problem.startswith("--quantization awq: ")


def test_the_start_says_what_quantised_weights_are(checkpoint: Path) -> None:  # noqa: F811
    config = EngineConfig(model=str(checkpoint), device="cpu", quantization="fp8")
    facts = OfflineEngine.load(config).loaded.facts
    assert facts["Quantization"] in facts["Weights"]
    assert "float32" not in facts["Weights"]


@pytest.mark.parametrize(
    ("changes", "words", "is_supported"),
    [
        ({"architectures": ["NoSuchForCausalLM"]}, "'NoSuchForCausalLM' is not supported", False),
        ({"architectures": None}, "architectures must be a list", False),
        ({"quantization_config": {"quant_method": "no-such-method"}}, "no-such-method", True),
        ({"hidden_size": "4096"}, "hidden_size must be a positive integer", True),
    ],
)
def test_what_is_not_served_is_said(tmp_path: Path, changes: dict, words: str, is_supported: bool) -> None:
    report = look(write(tmp_path, **changes), gpu_memory=80 * GIB)
    assert words in report.problem
    assert report.problem.endswith(".")
    assert report.is_supported == is_supported
    assert report.room is None
    assert (report.quantization is not None) == ("quantization_config" in changes)


def test_the_machine_is_named_without_a_model() -> None:
    diagnosis = examine(Ask())
    assert diagnosis.model is None
    assert diagnosis.machine.torch
    assert bool(diagnosis.machine.gpus) == (diagnosis.machine.why_no_cuda is None)
    assert bool(diagnosis.machine.gpus) == (diagnosis.machine.host_memory > 0)


GEMMA_3_27B = {
    "architectures": ["Gemma3ForCausalLM"],
    "vocab_size": 262_208,
    "hidden_size": 5376,
    "intermediate_size": 21_504,
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 168,
    "max_position_embeddings": 131_072,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_layers_with_windows_are_told_apart_and_keep_little(tmp_path: Path, num_gpus: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA_3_27B))
    report = look(tmp_path, gpu_memory=80 * GIB, num_gpus=num_gpus)
    assert report.problem is None
    full, window = report.kv_layers
    assert (full.kind, full.num_layers, full.window, full.bytes_per_request) == ("full", 10, None, None)
    assert (window.kind, window.num_layers, window.window) == ("window", 52, 1024)
    assert full.bytes_per_token == 10 * 2 * 16 * 128 * 2 // num_gpus
    assert full.bytes_per_token + window.bytes_per_token == report.kv_bytes_per_token
    page = 13 * 2**19 // num_gpus
    assert window.bytes_per_request == (1024 // 16 + 2) * page
    room = report.room
    num_pages = room.kv_cache // page - 1
    for size, count in room.num_requests.items():
        pages = -(-size // 80) + min(-(-size // 16), 66)
        assert count == min(num_pages // pages, room.max_num_seqs)
    assert room.max_model_len == 131_072
    assert room.kv_cache_tokens > 1.8 * num_pages * page // report.kv_bytes_per_token


def test_memory_that_other_programs_hold_can_be_planned_for(
    checkpoint: Path,  # noqa: F811
    llama: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "_host_memory_bytes", lambda: (4 * GIB, 1 << 16))
    assert "64 KiB free" in look(checkpoint, device="cpu").problem
    report = look(checkpoint, device="cpu", is_alone=True)
    assert report.problem is None
    assert (report.room.usable, report.room.kv_cache_alone) == (4 * GIB, None)
    room = look(llama, gpu_memory=80 * GIB).room
    assert room.kv_cache_alone == room.kv_cache
    assert room.usable == int(0.9 * 80 * GIB) - GIB
