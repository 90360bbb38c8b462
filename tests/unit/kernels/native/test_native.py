"""The functions in C against the same ops of torch: ragged rows, odd sizes, numbers not finite, and no compiler."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from kernels.attention.base import AttentionMetadata
from kernels.attention.torch_ref import TorchAttention
from kernels.elementwise import cpu
from kernels.linear import onednn
from kernels.linear.int4_cpu import _is_in_blocks, int4_linear, pack_int4
from kernels.linear.onednn import can_pack_int8, pack_int8
from kernels.linear.reference import make_int_weight
from kernels.native import library
from kernels.native.library import Compilation, compiled_beside, loaded, unload
from kernels.native.ops import takes_attention, takes_rows
from tests.support.native_library import compiled_library

BF16 = torch.bfloat16
ROUNDING = 2.0**-7  # of the largest: a number of bf16 may be rounded the other way after sums in another order
T = TypeVar("T")
Both = Callable[[Callable[[], T]], tuple[T, T]]


@pytest.fixture(scope="module")
def both() -> Iterator[Both]:
    """Call a function with the library and without it; return both results."""
    with compiled_library(with_products=False) as native:

        def call(function: Callable[[], T]) -> tuple[T, T]:
            library._loaded[:] = [native]
            with torch.inference_mode():
                found = function()
                unload()
                return found, function()

        yield call


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    unload()


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(BF16)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    largest = expected.float().abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(found, expected, atol=ROUNDING * largest, rtol=ROUNDING)
    # nearly all are equal: only sums differ
    assert (found != expected).float().mean().item() <= 0.02


@pytest.mark.parametrize("rows", [1, 3, 16, 64])
@pytest.mark.parametrize("size", [1, 77, 1024])
def test_norms_equal_those_of_torch(both: Both[tuple[torch.Tensor, ...]], rows: int, size: int) -> None:
    x, residual, weight = draw(rows, size), draw(rows, size), draw(size)
    found, expected = both(lambda: (*cpu.add_rms_norm(x, residual, weight, 1e-6), cpu.rms_norm(x, weight, 1e-6)))
    assert torch.equal(found[1], expected[1])
    assert_close(found[0], expected[0])
    assert_close(found[2], expected[2])


def test_a_norm_of_numbers_that_are_not_finite_is_not_finite(both: Both[torch.Tensor]) -> None:
    x = draw(2, 40)
    x[0, 3], x[1, 5] = float("nan"), float("inf")
    found, expected = both(lambda: cpu.rms_norm(x, torch.ones(40, dtype=BF16), 1e-6))
    assert torch.equal(found.isnan(), expected.isnan())


@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize("size", [1, 77, 3072])
def test_gates_equal_those_of_torch(both: Both[torch.Tensor], rows: int, size: int) -> None:
    x = draw(rows, 2 * size) * 8
    x[0, 0] = 300.0
    found, expected = both(lambda: cpu.silu_and_mul(x))
    assert_close(found, expected)


def test_gates_that_are_not_finite_stay_so(both: Both[torch.Tensor]) -> None:
    x = torch.tensor([[float("nan"), float("inf"), -200.0, 1.0, 2.0, 3.0]], dtype=BF16)
    found, expected = both(lambda: cpu.silu_and_mul(x))
    torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "head_dim"), [(1, 16, 8, 128), (7, 6, 2, 64), (64, 3, 3, 10), (33, 8, 1, 256)]
)
@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize("turns_dtype", [BF16, torch.float32])
def test_heads_are_normed_turned_and_written_as_by_torch(
    both: Both[tuple[torch.Tensor, ...]],
    rows: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    has_norms: bool,
    turns_dtype: torch.dtype,
) -> None:
    qkv = draw(rows, (heads + 2 * kv_heads) * head_dim)
    weights = (draw(head_dim), draw(head_dim)) if has_norms else (None, None)
    turns = torch.randn(500, head_dim).to(turns_dtype)
    positions, slots = torch.randint(0, 500, (rows,)), torch.randperm(24 * 16)[:rows]

    def write() -> tuple[torch.Tensor, ...]:
        pool = torch.zeros(24, 2, 16, kv_heads, head_dim, dtype=BF16)  # keys and values of a block side by side
        q = cpu.norm_rope_write_kv(
            qkv, *weights, 1e-6, positions, turns, pool[:, 0], pool[:, 1], slots, num_heads=heads
        )  # fmt: skip
        return q, pool

    found, expected = both(write)
    assert_close(found[0], expected[0])
    assert_close(found[1][:, 0], expected[1][:, 0])
    assert torch.equal(found[1][:, 1], expected[1][:, 1])


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(16, 8, 128), (6, 2, 64), (32, 2, 72), (4, 4, 256)])
@pytest.mark.parametrize("kind", ["whole", "window", "chunk"])
def test_rows_of_one_token_attend_as_by_torch(
    both: Both[torch.Tensor], heads: int, kv_heads: int, head_dim: int, kind: str
) -> None:
    lengths = [1, 63, 64, 65, 200, 0, 16, 131]
    pool = draw(128, 2, 16, kv_heads, head_dim)
    pool[0] = float("nan")  # what no row sees may hold anything
    table = torch.zeros(len(lengths), 13, dtype=torch.int32)
    pages = iter(range(1, 128))
    for row, length in enumerate(lengths):
        for column in range(-(-length // 16)):
            table[row, column] = next(pages)
            if (column + 1) * 16 > length:
                pool[table[row, column], :, length % 16 :] = float("nan")
    metadata = AttentionMetadata(
        query_start_loc=torch.arange(len(lengths) + 1, dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.zeros(len(lengths), dtype=torch.int64),
        max_query_len=1,
        max_seq_len=max(lengths),
        num_decodes=len(lengths),
    )
    q = draw(len(lengths), heads, head_dim)
    window, chunk = (50 if kind == "window" else None), (48 if kind == "chunk" else None)

    def attend() -> torch.Tensor:
        return TorchAttention().forward(
            q, pool[:, 0], pool[:, 1], metadata, scale=head_dim**-0.5, sliding_window=window, chunk=chunk
        )

    found, expected = both(attend)
    # torch rounds the softmax to bf16 before the product with the values
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)
    assert not found[5].any()


@pytest.mark.parametrize("rows", [1, 2, 33])
@pytest.mark.parametrize("size", [16, 77, 3072])
def test_activations_are_rounded_to_the_same_integers(both: Both[torch.Tensor], rows: int, size: int) -> None:
    values = torch.randint(-127, 128, (48, size), dtype=torch.int8)
    if not can_pack_int8(values):
        pytest.skip("this CPU has no product of bytes")
    x, matrix = draw(rows, size), pack_int8(values, torch.rand(48))
    x[0] = 0.0
    found, expected = both(lambda: onednn.int8_linear(x, matrix, None))
    assert torch.equal(found, expected)


def test_activations_that_are_not_finite_give_products_that_are_not(both: Both[torch.Tensor]) -> None:
    values = torch.ones(16, 32, dtype=torch.int8)
    if not can_pack_int8(values):
        pytest.skip("this CPU has no product of bytes")
    x, matrix = draw(3, 32), pack_int8(values, torch.ones(16))
    x[0, 1], x[1, 2] = float("nan"), float("inf")
    found, _ = both(lambda: onednn.int8_linear(x, matrix, None))
    assert not found[:2].isfinite().any()
    assert found[2].isfinite().all()


@pytest.mark.parametrize("has_bias", [True, False])
def test_scaled_sums_are_those_of_torch(both: Both[torch.Tensor], has_bias: bool) -> None:
    values, bias = torch.randint(-127, 128, (96, 64), dtype=torch.int8), draw(96) if has_bias else None
    if not can_pack_int8(values):
        pytest.skip("this CPU has no product of bytes")
    x, matrix = draw(40, 64), pack_int8(values, torch.rand(96))
    found, expected = both(lambda: onednn.int8_linear(x, matrix, bias, input_scale=torch.tensor(0.02)))
    assert_close(found, expected)


@pytest.mark.parametrize(("n", "k", "group_size"), [(64, 64, 32), (192, 256, 64), (128, 256, 256)])
@pytest.mark.parametrize("has_zeros", [True, False])
def test_4_bit_products_of_many_rows_equal_those_of_few(
    both: Both[torch.Tensor], n: int, k: int, group_size: int, has_zeros: bool
) -> None:
    codes = torch.randint(0, 16, (n, k)).to(torch.uint8)
    zeros = torch.randint(0, 16, (k // group_size, n)).to(torch.uint8) if has_zeros else None
    scales = (torch.rand(k // group_size, n) + 0.5) / 64
    matrix = pack_int4(make_int_weight(codes, scales, zeros, bits=4, order=None), BF16)
    if not matrix.is_in_blocks:
        pytest.skip("torch packs 4-bit weights in another order on this CPU")
    for rows in (31, 32, 64):
        x = draw(rows, k)
        found, expected = both(lambda x=x: int4_linear(x, matrix, None))
        largest = expected.float().abs().max().item()
        torch.testing.assert_close(found, expected, atol=0.01 * largest, rtol=0.02)


def test_an_order_that_is_not_known_is_not_unpacked() -> None:
    codes = torch.randint(0, 16, (64, 64)).to(torch.uint8)
    other = torch.randint(0, 256, (64, 32)).to(torch.uint8)
    assert not _is_in_blocks(other, codes)
    assert not _is_in_blocks(other[:48], codes[:48])


def test_several_threads_give_the_same_numbers(both: Both[torch.Tensor]) -> None:
    x, residual, weight = draw(129, 1024), draw(129, 1024), draw(1024)
    before = torch.get_num_threads()
    alone, _ = both(lambda: cpu.add_rms_norm(x, residual, weight, 1e-6)[0])
    try:
        torch.set_num_threads(3)
        compilation = Compilation.start()
        assert compilation is not None
        assert compilation.finish()
        shared = cpu.add_rms_norm(x, residual, weight, 1e-6)[0]
    finally:
        torch.set_num_threads(before)
    assert torch.equal(alone, shared)


def test_other_dtypes_and_strides_stay_with_torch(both: Both[bool]) -> None:
    cases = [torch.ones(4, 8), draw(4, 8).T, torch.empty(0, 8, dtype=BF16)]
    assert both(lambda: any(takes_rows(x) for x in cases)) == (False, False)
    pool = draw(4, 16, 2, 320)
    assert both(lambda: takes_attention(draw(1, 4, 320), pool, pool)) == (False, False)
    assert both(lambda: takes_rows(draw(4, 8))) == (True, False)


def test_a_machine_without_a_compiler_keeps_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with compiled_beside(is_wanted=True):
        pass
    assert loaded() is None


def test_a_compiler_that_fails_keeps_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cc").write_text("#!/bin/sh\necho no such machine >&2\nexit 1\n")
    (tmp_path / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with compiled_beside(is_wanted=True):
        pass
    assert loaded() is None
    assert "no such machine" in caplog.text


def slow_compiler(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """One whose child keeps its pipes open."""
    (folder / "cc").write_text(f"#!/bin/sh\necho $$ > {folder}/pid\n/bin/sleep 60\n")
    (folder / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_a_compiler_that_hangs_is_ended_with_its_children(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slow_compiler(monkeypatch, tmp_path)
    monkeypatch.setattr(library, "_TIMEOUT_S", 0.5)
    compilation = Compilation.start()
    assert compilation is not None
    began_s = time.monotonic()
    assert not compilation.finish()
    assert time.monotonic() - began_s < 30
    assert not Path(compilation.folder.name).exists()


def test_a_load_that_fails_does_not_wait_for_the_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slow_compiler(monkeypatch, tmp_path)
    began_s = time.monotonic()
    with pytest.raises(ValueError, match="no weights"), compiled_beside(is_wanted=True):
        raise ValueError("no weights")
    assert time.monotonic() - began_s < 30


def test_nothing_is_compiled_that_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Compilation, "start", lambda: pytest.fail("compiled"))
    with compiled_beside(is_wanted=False):
        pass
