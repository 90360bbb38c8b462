"""NaN of one embedding row on CUDA: only requests with that token fail, in graphs or not, in the pool's dtypes."""

from pathlib import Path

import pytest

from engine.core.local_client import generate
from tests.gpu.test_engine_cuda import checkpoint as clean_checkpoint
from tests.support.nan_checkpoint import spoil_embedding
from tests.unit.engine.test_nonfinite_model import BAD, assert_invalid, good_params, good_prompts, spoiled
from tests.unit.engine.test_real_model import make_engine, tokens

pytestmark = pytest.mark.gpu
__all__ = ["clean_checkpoint"]


@pytest.fixture(scope="module")
def checkpoint(clean_checkpoint: Path) -> Path:
    return spoil_embedding(clean_checkpoint)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "int8"])
@pytest.mark.parametrize("enforce_eager", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("attention_backend", "dtype"), [("triton", "float32"), ("torch", "float32"), ("triton", "bfloat16")]
)
def test_one_spoiled_request_fails_and_the_others_have_their_tokens(
    checkpoint: Path, attention_backend: str, dtype: str, depth: int, enforce_eager: bool, kv_cache_dtype: str
) -> None:
    engine, transport = make_engine(
        checkpoint,
        device="cuda",
        dtype=dtype,
        block_size=16,
        overlap_depth=depth,
        enforce_eager=enforce_eager,
        attention_backend=attention_backend,
        kv_cache_dtype=kv_cache_dtype,
        kv_cache_memory_bytes=4 * 1024**2,
        max_model_len=128,
    )
    goods, params = good_prompts(), good_params()
    expected = generate(engine, transport, goods, params)
    for kind, sampling in BAD.items():
        bads = [spoiled(goods[3], 20), spoiled(goods[5], 0)]
        *first, bad, other = generate(engine, transport, [*goods[:4], *bads], [*params[:4], sampling, sampling])
        assert_invalid(bad)
        assert_invalid(other)
        again = generate(engine, transport, goods, params)
        for results in (first, again):
            if dtype == "float32" and kv_cache_dtype == "auto":  # else the batch decides on the rounding
                assert tokens(results) == tokens(expected)[: len(results)], kind
            assert all(result.finish_reason == "length" for result in results if result.stop_token_id is None)
            assert all(result.error is None for result in results)
    assert engine.scheduler.kv.pool.num_used == 0
