"""Integer weights on the device: kernels against float64, checkpoints against dense ones, an engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from engine.interface.config import EngineConfig
from engine.interface.protocol import SamplingParams
from engine.offline import OfflineEngine
from kernels.linear.ops import IntLinear
from kernels.linear.reference import dequantize_int
from models.config.model_config import ModelConfig
from tests.support.checkpoints import TINY
from tests.support.int_checkpoints import FORMATS, save_quantized, with_groups_of
from tests.support.models_harness import PagedRunner, load
from tests.support.reference import reference_logits, save_checkpoint
from tests.unit.kernels.triton_cases.int_problem import int_problem
from tests.unit.kernels.triton_cases.ragged import relative_error

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
DTYPES = [torch.bfloat16, torch.float16]
# Products are summed in fp32 and rounded once
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4}
SHAPES = Path(__file__).parents[2] / "benchmarks" / "shapes"
PROMPT = torch.randint(0, 97, (29,), generator=torch.Generator().manual_seed(7)).tolist()
# As large as tensors of real models in what decides about cuts: groups of whole planes, splits of K
WIDE = TINY | {"hidden_size": 512, "intermediate_size": 768, "num_attention_heads": 8, "num_hidden_layers": 2}


def _randn(*shape, dtype):
    return torch.randn(*shape, device=CUDA).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("group_size", "has_zeros"), [(32, True), (64, True), (128, True), (128, False), (-1, False)])
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 16, 33, 64, 65, 256, 300, 512])
def test_int_gemm_equals_the_product(rows, group_size, has_zeros, bits, dtype):
    from kernels.linear.splits import SplitKScratch
    from kernels.linear.triton_int import can_int_gemm, int_gemm

    weight, dense = int_problem(1000, 1152, bits=bits, group_size=group_size, has_zeros=has_zeros, device="cuda")
    x, bias = _randn(rows, 1152, dtype=dtype), _randn(1000, dtype=dtype)
    assert can_int_gemm(x, weight)
    scratch = SplitKScratch.allocate(CUDA)
    for pdl in (False, True):
        out = int_gemm(x, weight, bias, scratch, pdl=pdl)
        assert relative_error(out, x.double() @ dense.T + bias.double()) < TOLERANCE[dtype]
    assert not scratch.arrivals.any()


@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (1024, 3072), (48, 96)])
def test_int_gemm_of_real_shapes_is_right_and_the_same_every_time(n, k):
    from kernels.linear.splits import SplitKScratch
    from kernels.linear.triton_int import int_gemm

    weight, dense = int_problem(n, k, group_size=128 if k > 96 else 32, device="cuda")
    scratch = SplitKScratch.allocate(CUDA)
    for dtype in DTYPES:
        for rows in (1, 8, 16, 64, 200, 512):
            x = _randn(rows, k, dtype=dtype)
            out = int_gemm(x, weight, None, scratch, pdl=True)
            assert relative_error(out, x.double() @ dense.T) < TOLERANCE[dtype]
            assert torch.equal(out, int_gemm(x, weight, None, scratch, pdl=True))  # whichever program is last


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 16, 128])
def test_two_codes_per_instruction_are_what_one_is(rows, bits, dtype):
    from kernels.linear.splits import SplitKScratch
    from kernels.linear.triton_int import int_gemm

    weight, _ = int_problem(512, 1024, bits=bits, group_size=64, scale_dtype=torch.bfloat16, device="cuda")
    x, scratch = _randn(rows, 1024, dtype=dtype), SplitKScratch.allocate(CUDA)
    paired, single = (int_gemm(x, weight, None, scratch, uses_asm=uses_asm) for uses_asm in (True, False))
    assert relative_error(paired, single.double()) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("n", "k", "group_size"), [(1000, 1152, 128), (70, 96, 16), (64, 100, -1)])
def test_dequantized_weights_equal_the_specification(n, k, group_size, bits, dtype):
    from kernels.linear.triton_int import dequantize as triton_dequantize

    weight, _ = int_problem(n, k, bits=bits, group_size=group_size, device="cuda")
    assert torch.equal(triton_dequantize(weight, dtype), dequantize_int(weight, dtype))


@pytest.mark.parametrize("rows", [1, 40, 700, 3000])
@pytest.mark.parametrize("has_order", [False, True])
def test_int_linear_replays_in_a_graph(rows, has_order):
    weight, dense = int_problem(768, 512, has_order=has_order, device="cuda")
    linear, x = IntLinear(), _randn(rows, 512, dtype=torch.bfloat16)
    linear(x, weight, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = linear(x, weight, None)
    for _ in range(3):
        x.copy_(_randn(rows, 512, dtype=torch.bfloat16))
        graph.replay()
        assert relative_error(out, x.double() @ dense.T) < 6e-3


@pytest.mark.parametrize("kind", FORMATS)
def test_checkpoints_give_the_logits_of_the_dense_weights_they_mean(kind, tmp_path):
    save_checkpoint(tmp_path / "dense", LlamaConfig(**WIDE, num_key_value_heads=2))
    save_quantized(tmp_path / "dense", tmp_path / "quantized", with_groups_of(64, FORMATS[kind]))
    expected = reference_logits(tmp_path / "dense", PROMPT)
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.float16, 2e-2)):
        model = load(tmp_path / "quantized", device=CUDA, dtype=dtype)
        runner = PagedRunner(model, ModelConfig.from_folder(tmp_path / "quantized"), device=CUDA, dtype=dtype)
        row = runner.add_row()
        logits = (
            runner.step([(row, PROMPT[:20])]) + runner.step([(row, PROMPT[20:21])]) + runner.step([(row, PROMPT[21:])])
        )
        assert relative_error(torch.cat(logits), expected.double()) < tolerance


def test_llama_8b_of_random_awq_weights_serves_and_compiles_nothing_after_its_rehearsal(tmp_path, monkeypatch):
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "cache"))
    compiled: list[str] = []

    def listener(*, src: object, cache_hit: bool, **_: object) -> None:
        if not cache_hit:
            compiled.append(f"{src.name} {src.constants} {src.signature} {src.attrs}")

    monkeypatch.setattr(triton.knobs.compilation, "listener", listener)  # in forked children it fills another list
    before = torch.cuda.memory_allocated()
    engine = OfflineEngine.load(
        EngineConfig(model=str(SHAPES / "llama-3.1-8b-awq"), load_format="dummy", kv_cache_memory_bytes=4 * 1024**3)
    )
    weights = torch.cuda.memory_allocated() - before - 4 * 1024**3
    assert weights < 10 * 1024**3  # 16 in bf16
    engine.self_test()
    params = [SamplingParams(max_tokens=20, temperature=0.0) for _ in range(60)]
    first = engine.generate([[7] * (1 + 40 * i) for i in range(60)], params)
    assert all(len(generation.token_ids) == 20 for generation in first)
    assert compiled == []
