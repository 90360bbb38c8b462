"""Precompiled kernels are those that serving launches: after precompile() nothing compiles any more."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.interface.config import EngineConfig
from engine.interface.protocol import SamplingParams
from engine.offline import OfflineEngine

triton = pytest.importorskip("triton")
from engine.startup import precompile  # noqa: E402  (after triton)
from kernels.precompile import Compilation, Kernel, collect_kernels  # noqa: E402  (needs triton)

pytestmark = pytest.mark.gpu

SHAPES = Path(__file__).parents[2] / "benchmarks" / "shapes"


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty Triton cache, on disk and in this process."""
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    yield tmp_path
    torch.cuda.empty_cache()


@pytest.mark.parametrize(
    ("shape", "kv_cache_dtype"),
    [("qwen3-0.6b", "auto"), ("llama-3.1-8b", "auto"), ("qwen3-0.6b", "fp8"), ("qwen3-0.6b", "int8")],
)
def test_a_cold_start_compiles_nothing_after_precompile(shape: str, kv_cache_dtype: str, fresh_cache: Path) -> None:
    _start_cold(SHAPES / shape, fresh_cache, kv_cache_dtype=kv_cache_dtype)


def test_a_cold_start_with_4bit_matrices_compiles_nothing_after_precompile(fresh_cache: Path) -> None:
    _start_cold(SHAPES / "qwen3-0.6b", fresh_cache, quantization="bitsandbytes-nf4")


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_a_cold_start_with_dense_and_sparse_layers_compiles_nothing_after_precompile(
    enforce_eager: bool, fresh_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("model")
    config = json.loads((SHAPES / "qwen3-30b-a3b" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4, "mlp_only_layers": [0]}))
    _start_cold(folder, fresh_cache, enforce_eager=enforce_eager)


def _start_cold(model: Path, fresh_cache: Path, **settings: bool | str) -> None:
    """Load and serve; nothing may compile in this process. A failure tells which were compiled of such kernels."""
    compiled: list[tuple[str, str]] = []
    rehearsed: list[tuple[str, str]] = []

    def listener(*, src: object, cache_hit: bool, **_: object) -> None:
        if not cache_hit:
            compiled.append((src.name, f"{src.constants} {src.signature} {src.attrs}"))

    class Recorded(Compilation):
        def __init__(self, kernels: list[Kernel]) -> None:
            for each in kernels:
                text = f"{dict(each.constants)} {dict(each.signature)} {each.attributes} {dict(each.options)}"
                rehearsed.append((each.function.__name__, text))
            super().__init__(kernels)

    config = EngineConfig(model=str(model), load_format="dummy", kv_cache_memory_bytes=8 * 1024**3, **settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.knobs.compilation, "listener", listener)  # in forked children it fills another list
        patch.setattr(precompile, "Compilation", Recorded)
        engine = OfflineEngine.load(config)
        engine.self_test()
        params = [SamplingParams(max_tokens=20, temperature=i % 2, top_p=0.9, seed=i) for i in range(60)]
        generations = engine.generate([[7] * (1 + 40 * i) for i in range(60)], params)
    assert all(len(generation.token_ids) == 20 for generation in generations)
    names = {name for name, _ in compiled}
    assert compiled == [], "\n".join(text for name, text in rehearsed if name in names)
    assert len(list(fresh_cache.glob("quire-*"))) == 2  # one key for a start, one for a takeover


def test_a_skipped_launch_writes_nothing_and_new_tensors_are_zeros() -> None:
    from kernels.elementwise import triton as elementwise_triton

    x = torch.ones(4, 192, device="cuda")
    with collect_kernels() as kernels:
        out = elementwise_triton.rms_norm(x, x[0], 1e-6)
        again = elementwise_triton.rms_norm(x, x[0], 1e-6)
    assert len(kernels) == 1
    assert not out.any()
    assert not again.any()
    assert elementwise_triton.rms_norm(x, x[0], 1e-6).any()
