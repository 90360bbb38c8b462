"""Attention of prompts in C against torch's in float32: ragged rows, all rules, pages that hold anything, any cuts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from kernels.attention.base import AttentionMetadata
from kernels.attention.torch_ref import TorchAttention
from kernels.native import library, ops
from kernels.native.library import loaded
from tests.support.native_library import compiled_library

BF16 = torch.bfloat16
BLOCK_SIZE = 16
NAN = float("nan")
# tokens of a row before this step, and in it
ROWS = ((0, 1), (0, 64), (0, 65), (3, 130), (200, 1), (61, 7), (0, 0), (140, 33), (63, 2))


@dataclass(frozen=True)
class Rule:
    """What a layer may ask of attention."""

    window: int | None = None
    chunk: int | None = None
    softcap: float = 0.0
    has_sinks: bool = False


RULES = {
    "whole": Rule(),
    "window": Rule(window=50),
    "narrow": Rule(window=1),
    "chunk": Rule(chunk=48),
    "capped": Rule(softcap=5.0),
    "sinks": Rule(has_sinks=True),
    "all": Rule(window=100, softcap=20.0, has_sinks=True),
}


@pytest.fixture(scope="module", autouse=True)
def compiled() -> Iterator[None]:
    with compiled_library(with_products=True) as native:
        native.products_level = native.use_products(1)  # attention of prompts is for CPUs without AMX
        yield


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


class Step:
    """Rows over a pool whose other pages and slots are NaN. Keys and values of a block lie side by side."""

    def __init__(self, rows: tuple[tuple[int, int], ...], kv_heads: int, head_dim: int, window: int | None) -> None:
        num_pages = [-(-(before + now) // BLOCK_SIZE) for before, now in rows]
        self.rows = rows
        self.pool = torch.full((sum(num_pages) + 1, 2, BLOCK_SIZE, kv_heads, head_dim), NAN, dtype=BF16)
        self.table = torch.zeros(len(rows), max(num_pages) + 1, dtype=torch.int32)
        pages = torch.randperm(sum(num_pages)) + 1
        for row, (before, now) in enumerate(rows):
            self.table[row, : num_pages[row]], pages = pages[: num_pages[row]].int(), pages[num_pages[row] :]
            oldest = 0 if window is None else max(0, before - window + 1)
            for token in range(oldest // BLOCK_SIZE * BLOCK_SIZE if window else 0, before + now):
                page = self.pool[self.table[row, token // BLOCK_SIZE], :, token % BLOCK_SIZE]
                page.copy_(torch.randn(page.shape))

    def metadata(self, rows: tuple[tuple[int, int, int], ...], *, num_decodes: int = 0) -> AttentionMetadata:
        """Rows as (row of the table, tokens before, tokens)."""
        starts = torch.tensor([0, *(now for _, _, now in rows)]).cumsum(0).int()
        lengths = [before + now for _, before, now in rows]
        return AttentionMetadata(
            query_start_loc=starts,
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            block_table=self.table[[row for row, _, _ in rows]],
            slot_mapping=torch.zeros(int(starts[-1]), dtype=torch.int64),
            max_query_len=max(now for _, _, now in rows),
            max_seq_len=max(lengths),
            num_decodes=num_decodes,
        )

    def whole(self) -> AttentionMetadata:
        """Return all rows."""
        return self.metadata(tuple((row, *lengths) for row, lengths in enumerate(self.rows)))


def attend(
    q: torch.Tensor, pool: torch.Tensor, metadata: AttentionMetadata, rule: Rule, sinks: torch.Tensor | None
) -> torch.Tensor:
    with torch.inference_mode():
        return TorchAttention().forward(
            q, pool[:, 0], pool[:, 1], metadata, scale=q.shape[2] ** -0.5, sliding_window=rule.window,
            chunk=rule.chunk, softcap=rule.softcap, sinks=sinks,
        )  # fmt: skip


def draw_sinks(rule: Rule, heads: int) -> torch.Tensor | None:
    return torch.randn(heads) * 4 if rule.has_sinks else None


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each call of the function in C."""
    found: list[int] = []
    native = loaded()
    assert native is not None
    function = native.attend_prompts

    def call(*args: object) -> None:
        found.append(int(str(args[8])))
        function(*args)

    monkeypatch.setattr(native, "attend_prompts", call)
    return found


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(16, 8, 128), (6, 2, 64), (4, 4, 80), (6, 1, 96), (4, 2, 256), (32, 2, 72), (3, 3, 10)],
)
@pytest.mark.parametrize("kind", RULES)
def test_ragged_rows_attend_as_by_torch_in_float32(
    heads: int, kv_heads: int, head_dim: int, kind: str, calls: list[int]
) -> None:
    rule = RULES[kind]
    step = Step(ROWS, kv_heads, head_dim, rule.window)
    metadata, sinks = step.whole(), draw_sinks(rule, heads)
    q = torch.randn(int(metadata.query_start_loc[-1]), heads, head_dim).to(BF16)
    found = attend(q, step.pool, metadata, rule, sinks)
    assert calls == [len(ROWS)]
    expected = attend(q.float(), step.pool.float(), metadata, rule, sinks)
    # weights of a softmax and results are rounded to bf16
    torch.testing.assert_close(found.float(), expected, atol=0.015, rtol=2.0**-7)
    assert (found.float() - expected).abs().mean() < 0.002


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("cuts", [(1, 63, 1, 100, 35), (64, 136), (199, 1), (7,) * 28 + (4,)])
def test_a_prompt_that_is_cut_gives_the_same_bits(kind: str, cuts: tuple[int, ...]) -> None:
    rule, heads, length = RULES[kind], 6, 200
    step = Step(((0, length), (0, 77)), 2, 64, None)
    sinks, q = draw_sinks(rule, heads), torch.randn(length + 77, heads, 64).to(BF16)
    whole = attend(q, step.pool, step.whole(), rule, sinks)[:length]
    start, parts = 0, []
    for tokens in cuts:
        metadata = step.metadata(((0, start, tokens),))
        parts.append(attend(q[start : start + tokens], step.pool, metadata, rule, sinks))
        start += tokens
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("kind", ["capped", "sinks", "all"])
def test_rows_of_one_token_without_a_plain_softmax_attend_so_too(kind: str, calls: list[int]) -> None:
    rule = RULES[kind]
    step = Step(((130, 1), (0, 1), (63, 1)), 2, 64, rule.window)
    metadata, sinks = step.metadata(((0, 130, 1), (1, 0, 1), (2, 63, 1)), num_decodes=3), draw_sinks(rule, 6)
    q = torch.randn(3, 6, 64).to(BF16)
    found = attend(q, step.pool, metadata, rule, sinks)
    assert calls == [3]
    expected = attend(q.float(), step.pool.float(), metadata, rule, sinks)
    torch.testing.assert_close(found.float(), expected, atol=0.015, rtol=2.0**-7)


def test_a_row_of_no_tokens_seen_is_zeros() -> None:
    step = Step(((0, 5), (0, 3)), 2, 64, None)
    metadata = step.whole()
    metadata.seq_lens[0] = 0
    found = attend(torch.randn(8, 6, 64).to(BF16), step.pool, metadata, Rule(), None)
    assert not found[:5].any()
    assert found[5:].isfinite().all()


def test_numbers_that_are_not_finite_stay_with_their_row() -> None:
    step = Step(((0, 70), (0, 70), (0, 70)), 2, 64, None)
    q = torch.randn(210, 6, 64).to(BF16)
    expected = attend(q, step.pool, step.whole(), Rule(), None)
    q[5, 0, 0] = NAN
    step.pool[step.table[1, 0], 0, 3] = float("inf")
    found = attend(q, step.pool, step.whole(), Rule(), None)
    assert found[5, 0].isnan().all()
    assert torch.equal(found[6:70], expected[6:70])
    assert found[75:140].isnan().any(-1).all()
    assert torch.equal(found[140:], expected[140:])


def test_logits_of_any_size_keep_the_softmax_finite() -> None:
    step = Step(((0, 130),), 2, 64, None)
    q = (torch.randn(130, 6, 64) * 1000).to(BF16)
    for rule in (Rule(), RULES["capped"]):
        found = attend(q, step.pool, step.whole(), rule, None)
        expected = attend(q.float(), step.pool.float(), step.whole(), rule, None)
        torch.testing.assert_close(found.float(), expected, atol=0.015, rtol=2.0**-7)


def test_pools_and_cpus_that_it_does_not_serve_stay_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    q, pool = torch.ones(3, 4, 64, dtype=BF16), torch.ones(2, 16, 2, 64, dtype=BF16)
    assert ops.takes_prompts(q, pool, pool)
    assert not ops.takes_prompts(q[..., :63].contiguous(), pool[..., :63].contiguous(), pool)
    assert not ops.takes_prompts(q, pool.float(), pool.float())
    assert not ops.takes_prompts(q, pool[:, :, :1].expand(-1, -1, 2, -1), pool)
    native = library.loaded()
    for level in (0, ops.BY_AMX):
        monkeypatch.setattr(native, "products_level", level)
        assert not ops.takes_prompts(q, pool, pool)
