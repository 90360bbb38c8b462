"""Adapters on the device: the Triton kernels against float64, in a CUDA graph, and the whole engine with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.core.local_client import generate
from engine.interface.config import EngineConfig, LoraSource
from engine.interface.protocol import SamplingParams
from engine.offline import OfflineEngine
from kernels.ops import LoraTokens
from tests.support.lora_adapters import ATTENTION, MLP, adapter_config, make_tensors, modules, save_adapter
from tests.support.tiny_llama import save_tiny_qwen3
from tests.unit.engine.test_real_model import make_engine, mixed_params, prompts, tokens
from tests.unit.kernels.triton_cases.lora_problem import LoraProblem, make_problem
from tests.unit.kernels.triton_cases.ragged import relative_error

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 8e-4, torch.float32: 1e-5}
DECODES = {"row_lens": [1] * 33, "row_loras": [1, 0, 2] * 11, "num_adapters": 2, "is_decode": True}
MIXED = {"row_lens": [300, 1, 64, 63, 1, 500], "row_loras": [1, 0, 2, 3, 3, 0], "num_adapters": 3}
SMALL = {"row_lens": [1, 9, 1, 40, 70], "row_loras": [2, 3, 0, 1, 1], "num_adapters": 3}


def expected_of(problem: LoraProblem) -> torch.Tensor:
    """As LoraProblem.expected, adapter by adapter: it has thousands of tokens."""
    out = problem.out.double()
    for index in range(problem.weights.a.shape[0]):
        rows = problem.loras == index + 1
        a, b = problem.weights.a[index].double(), problem.weights.b[index].double()
        parts = zip(a, b.split(problem.weights.part_sizes), strict=True)
        out[rows] += torch.cat([problem.x[rows].double() @ part_a.T @ part_b.T for part_a, part_b in parts], dim=1)
    return out


def gathered(problem: LoraProblem) -> LoraTokens:
    num_adapters = problem.weights.a.shape[0]
    loras = LoraTokens(num_adapters=num_adapters, max_tokens=problem.x.shape[0], device=CUDA)
    loras.gather(problem.lora_indices, problem.req_index, problem.token_rows)
    return loras


@pytest.mark.parametrize("rows", [DECODES, MIXED, SMALL], ids=["decodes", "mixed", "small"])
@pytest.mark.parametrize(
    ("rank", "k", "part_sizes"),
    [
        (16, 4096, (4096, 1024, 1024)),
        (64, 4096, (14336, 14336)),
        (32, 14336, (4096,)),
        (128, 1024, (2048, 1024, 1024)),
        (16, 1100, (70, 30)),
    ],
)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_every_token_gets_its_own_adapter(rows, rank, k, part_sizes, dtype):
    torch.backends.cuda.matmul.allow_tf32 = False
    problem = make_problem(**rows, rank=rank, k=k, part_sizes=part_sizes, dtype=dtype, device="cuda")
    expected, before = expected_of(problem), problem.out.clone()
    gathered(problem).add(problem.out, problem.x, problem.weights)
    assert relative_error(problem.out, expected) < TOLERANCE[dtype]
    assert torch.equal(problem.out[problem.loras == 0], before[problem.loras == 0])


def test_two_runs_give_equal_bits():
    problem = make_problem(**SMALL, rank=16, k=4096, part_sizes=(4096,), dtype=torch.bfloat16, device="cuda")
    loras, outs = gathered(problem), [problem.out.clone() for _ in range(2)]
    for out in outs:
        loras.add(out, problem.x, problem.weights)
    assert torch.equal(*outs)


@pytest.mark.parametrize("num_adapters", [1, 5, 40])
@pytest.mark.parametrize("num_tokens", [1, 31, 256, 257, 4096, 8192])
def test_a_graph_follows_whoever_the_tokens_belong_to(num_tokens, num_adapters):
    problem = make_problem(
        row_lens=[1] * num_tokens,
        row_loras=[0] * num_tokens,
        num_adapters=num_adapters,
        rank=16,
        k=512,
        part_sizes=(256, 128),
        dtype=torch.float32,
        device="cuda",
        is_decode=True,
    )
    loras, out = gathered(problem), torch.empty_like(problem.out)

    def run() -> None:
        loras.gather(problem.lora_indices, problem.req_index)
        out.copy_(problem.out)
        loras.add(out, problem.x, problem.weights)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for seed in range(4):
        generator = torch.Generator("cuda").manual_seed(seed)
        most = (num_adapters, 0, 1, num_adapters)[seed]
        problem.lora_indices.random_(0, most + 1, generator=generator)
        problem.loras = problem.lora_indices[problem.req_index]
        graph.replay()
        assert relative_error(out, expected_of(problem)) < 1e-5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[LoraSource]]:
    """A tiny random Qwen3 with heads of 64, and two adapters."""
    root = tmp_path_factory.mktemp("lora")
    save_tiny_qwen3(root / "base")
    sources = []
    for index, names in enumerate([ATTENTION + MLP, ("self_attn.k_proj", "mlp.down_proj")]):
        rank = (8, 40)[index]
        tensors = make_tensors(root / "base", dict.fromkeys(modules(names), rank), seed=index)
        targets = [name.rpartition(".")[2] for name in names]
        settings = adapter_config(r=rank, lora_alpha=4 * rank, target_modules=targets)
        sources.append(LoraSource(f"a{index}", str(save_adapter(root / f"a{index}", tensors, settings))))
    return root / "base", sources


LENGTHS = (5, 17, 30, 61, 12, 40, 23, 35)
OWNERS = [0, 1, 2, 1, 2, 0, 1, 2]


@pytest.fixture(scope="module")
def expected(model: tuple[Path, list[LoraSource]]) -> list[list[int]]:
    """What the torch path gives on the CPU."""
    folder, sources = model
    engine, transport = make_engine(folder, block_size=16, loras=sources)
    params = mixed_params(len(LENGTHS))
    found = tokens(generate(engine, transport, prompts(*LENGTHS), params, lora_indices=OWNERS))
    assert found != tokens(generate(engine, transport, prompts(*LENGTHS), params))
    return found


@pytest.mark.parametrize("enforce_eager", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
def test_cuda_gives_the_cpus_tokens(
    model: tuple[Path, list[LoraSource]], expected: list[list[int]], enforce_eager: bool, depth: int
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    folder, sources = model
    engine, transport = make_engine(
        folder,
        loras=sources,
        device="cuda",
        dtype="float32",
        block_size=16,
        overlap_depth=depth,
        enforce_eager=enforce_eager,
        kv_cache_memory_bytes=64 * 1024**2,
    )
    params = mixed_params(len(LENGTHS))
    for _ in range(2):  # the second time with prefix hits
        assert tokens(generate(engine, transport, prompts(*LENGTHS), params, lora_indices=OWNERS)) == expected
    assert engine.scheduler.kv.pool.num_used == 0


def test_in_bf16_a_mixed_batch_gives_what_each_request_gives_alone(model: tuple[Path, list[LoraSource]]) -> None:
    folder, sources = model
    engine, transport = make_engine(
        folder, loras=sources, device="cuda", block_size=16, max_num_seqs=64, max_num_batched_tokens=512,
        kv_cache_memory_bytes=64 * 1024**2,
    )  # fmt: skip
    inputs = [prompt for prompt in prompts(*LENGTHS) for _ in range(3)]
    owners = [0, 1, 2] * len(LENGTHS)
    params = [SamplingParams(max_tokens=1, temperature=0.0, logprobs=0)] * len(inputs)
    together = generate(engine, transport, inputs, params, lora_indices=owners)
    for prompt, owner, generation in zip(inputs, owners, together, strict=True):
        (alone,) = generate(engine, transport, [prompt], params[:1], lora_indices=[owner])
        assert generation.logprobs[0].logprob == pytest.approx(alone.logprobs[0].logprob, abs=0.1)


def test_a_cold_start_with_adapters_compiles_nothing_after_precompile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = pytest.importorskip("triton")
    shapes = {"self_attn.q_proj": (2048, 1024), "self_attn.v_proj": (1024, 1024), "mlp.down_proj": (1024, 3072)}
    tensors = {}
    for layer in range(28):
        for name, (num_outputs, num_inputs) in shapes.items():
            module = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{module}.lora_A.weight"] = torch.randn(8, num_inputs)
            tensors[f"{module}.lora_B.weight"] = torch.randn(num_outputs, 8)
    targets = [name.rpartition(".")[2] for name in shapes]
    settings = adapter_config(r=8, lora_alpha=1, target_modules=targets)
    source = LoraSource("a", str(save_adapter(tmp_path / "a", tensors, settings)))
    compiled: list[str] = []

    def listener(*, src: object, cache_hit: bool, **_: object) -> None:
        if not cache_hit:
            compiled.append(src.name)

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "cache"))
    monkeypatch.setattr(triton.knobs.compilation, "listener", listener)
    folder = Path(__file__).parents[2] / "benchmarks" / "shapes" / "qwen3-0.6b"
    config = EngineConfig(
        model=str(folder), load_format="dummy", kv_cache_memory_bytes=8 * 1024**3, loras=[source, source]
    )
    engine = OfflineEngine.load(config)
    engine.self_test()
    params = [SamplingParams(max_tokens=20, temperature=i % 2, top_p=0.9, seed=i) for i in range(60)]
    inputs = [[7] * (1 + 40 * i) for i in range(60)]
    generations = engine.generate(inputs, params, lora_indices=[i % 3 for i in range(60)])
    assert all(len(generation.token_ids) == 20 for generation in generations)
    assert compiled == []
