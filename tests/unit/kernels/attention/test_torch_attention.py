"""TorchAttention against attention written as loops over rows, heads and tokens."""

import math

import pytest
import torch

from kernels.attention.base import AttentionMetadata, AttentionSpec, select_backend
from kernels.attention.torch_ref import TorchAttention
from tests.unit.kernels.triton_cases.ragged import make_problem, reference, relative_error


def naive_attention(q, k_cache, v_cache, metadata, *, scale, sliding_window=None, softcap=0.0):
    """Straight from the definitions in kernels/attention/base.py."""
    _, block_size, num_kv_heads, _ = k_cache.shape
    group = q.shape[1] // num_kv_heads
    out = torch.zeros_like(q, dtype=torch.float64)
    starts = metadata.query_start_loc.tolist()
    for row, seq_len in enumerate(metadata.seq_lens.tolist()):
        slots = [(int(metadata.block_table[row, t // block_size]), t % block_size) for t in range(seq_len)]
        num_queries = starts[row + 1] - starts[row]
        for i in range(num_queries):
            position = seq_len - num_queries + i
            first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            for head in range(q.shape[1]):
                query = q[starts[row] + i, head].double()
                keys = torch.stack([k_cache[b, o, head // group] for b, o in slots[first : position + 1]]).double()
                values = torch.stack([v_cache[b, o, head // group] for b, o in slots[first : position + 1]]).double()
                logits = keys @ query * scale
                if softcap > 0:
                    logits = softcap * torch.tanh(logits / softcap)
                out[starts[row] + i, head] = logits.softmax(0) @ values
    return out


def make_case(*, query_lens, seq_lens, num_kv_heads=2, group=2, head_dim=16, block_size=4, dtype=torch.float32, seed=0):
    """Random pool and queries; rows' blocks are shuffled over the pool, and each table has a spare entry."""
    generator = torch.Generator().manual_seed(seed)
    max_blocks = max(-(-seq_len // block_size) for seq_len in seq_lens) + 1
    num_blocks = len(seq_lens) * max_blocks
    pool = (num_blocks, block_size, num_kv_heads, head_dim)
    k_cache, v_cache = (torch.randn(pool, generator=generator).to(dtype) for _ in range(2))
    q = torch.randn(sum(query_lens), num_kv_heads * group, head_dim, generator=generator).to(dtype)
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).int(),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table=torch.randperm(num_blocks, generator=generator).view(len(seq_lens), max_blocks).int(),
        slot_mapping=torch.zeros(sum(query_lens), dtype=torch.int64),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        num_decodes=next((i for i, n in enumerate(query_lens) if n > 1), len(query_lens)),
    )
    return q, k_cache, v_cache, metadata


RAGGED = {"query_lens": [1, 1, 1, 5, 9, 1, 3], "seq_lens": [1, 7, 12, 5, 13, 4, 30]}


def check(case, *, sliding_window=None, softcap=0.0, atol=2e-6):
    scale = case[0].shape[-1] ** -0.5 * 3  # peaked enough that a wrong mask shows
    options = {"scale": scale, "sliding_window": sliding_window, "softcap": softcap}
    out = TorchAttention().forward(*case, **options)
    torch.testing.assert_close(out.double(), naive_attention(*case, **options), atol=atol, rtol=0)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("num_kv_heads", [1, 3])
def test_ragged_rows_with_grouped_heads(group, num_kv_heads):
    check(make_case(**RAGGED, group=group, num_kv_heads=num_kv_heads))


@pytest.mark.parametrize("block_size", [1, 3, 4, 16, 64])
def test_any_block_size(block_size):
    check(make_case(**RAGGED, block_size=block_size))


@pytest.mark.parametrize("sliding_window", [1, 2, 5, 12, 100])
def test_sliding_window_counts_the_token_itself(sliding_window):
    check(make_case(**RAGGED), sliding_window=sliding_window)


@pytest.mark.parametrize("sliding_window", [None, 5])
@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_softcap(softcap, sliding_window):
    check(make_case(**RAGGED), softcap=softcap, sliding_window=sliding_window)


@pytest.mark.parametrize("seed", range(12))
def test_random_ragged_shapes(seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return int(torch.randint(low, high + 1, (), generator=generator))

    num_decodes, num_chunks = draw(0, 5), draw(0, 4)
    query_lens = [1] * num_decodes + [draw(1, 20) for _ in range(num_chunks)] or [1]
    seq_lens = [n + draw(0, 25) for n in query_lens]
    case = make_case(
        query_lens=query_lens,
        seq_lens=seq_lens,
        group=draw(1, 8),
        num_kv_heads=draw(1, 3),
        block_size=draw(1, 20),
        head_dim=8 * draw(1, 4),
        seed=seed,
    )
    check(case, sliding_window=draw(1, 20) if draw(0, 1) else None, softcap=2.0 if draw(0, 3) == 0 else 0.0)


def test_bf16_is_close_to_exact_attention():
    check(make_case(**RAGGED, dtype=torch.bfloat16), atol=2e-2)


def test_max_seq_len_may_be_only_an_upper_bound():
    q, k_cache, v_cache, metadata = make_case(query_lens=[1, 1, 1], seq_lens=[3, 9, 12])
    expected = TorchAttention().forward(q, k_cache, v_cache, metadata, scale=0.25)
    metadata.max_seq_len = 1000
    torch.testing.assert_close(TorchAttention().forward(q, k_cache, v_cache, metadata, scale=0.25), expected)


def test_padding_row_is_zeros_and_changes_no_other_row():
    q, k_cache, v_cache, metadata = make_case(query_lens=[1, 1, 1], seq_lens=[3, 9, 12])
    expected = TorchAttention().forward(q, k_cache, v_cache, metadata, scale=0.25)
    metadata.seq_lens[1] = 0
    k_cache[metadata.block_table[1].long()], q[1] = math.nan, math.nan
    for sliding_window in (None, 20):
        out = TorchAttention().forward(
            q, k_cache, v_cache, metadata, scale=0.25, sliding_window=sliding_window, softcap=0.0
        )
        assert not out[1].any()
        torch.testing.assert_close(out[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("masked", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 5}, {"softcap": 2.0}, {"sliding_window": 5, "softcap": 2.0}]
)
@pytest.mark.parametrize("device_masks", [False, True])
def test_what_no_query_sees_never_counts(options, masked, device_masks, monkeypatch):
    if device_masks:  # as on devices whose output the host does not read
        monkeypatch.setattr("kernels.attention.torch_ref._is_finite", lambda out: False)
    problem = make_problem(
        query_lens=[1, 1, 1, 1, 7, 3], context_lens=[3, 90, 40, 0, 20, 0], num_heads=4, num_kv_heads=2, head_dim=16,
        block_size=4, dtype=torch.float32, device="cpu", masked=masked, sliding_window=options.get("sliding_window"),
    )  # fmt: skip
    out = TorchAttention().forward(*problem, scale=0.25, **options)
    assert relative_error(out, reference(*problem, scale=0.25, **options)) < 1e-5


@pytest.mark.parametrize("spoiled", range(4))
def test_a_row_that_is_no_number_spoils_no_other_row(spoiled):
    q, k_cache, v_cache, metadata = make_case(query_lens=[1, 1, 1, 5], seq_lens=[3, 9, 30, 12])
    expected = TorchAttention().forward(q, k_cache, v_cache, metadata, scale=0.25)
    blocks = metadata.block_table[spoiled].long()
    k_cache[blocks], v_cache[blocks] = math.nan, math.nan
    # the other rows' tables end in blocks of this row, as in a reused row of the device state
    for row, seq_len in enumerate([3, 9, 30, 12]):
        if row != spoiled:
            metadata.block_table[row, -(-seq_len // 4) :] = int(blocks[0])
    out = TorchAttention().forward(q, k_cache, v_cache, metadata, scale=0.25)
    is_spoiled = torch.repeat_interleave(torch.arange(4), torch.tensor([1, 1, 1, 5])) == spoiled
    assert out[is_spoiled].isnan().all()
    torch.testing.assert_close(out[~is_spoiled], expected[~is_spoiled])


def test_reused_backend_keeps_nothing_of_earlier_steps():
    backend = TorchAttention()
    for dtype, seq_lens in ((torch.float32, [40, 3]), (torch.float32, [2, 5]), (torch.bfloat16, [60, 1])):
        case = make_case(query_lens=[1, 1], seq_lens=seq_lens, dtype=dtype)
        fresh = TorchAttention().forward(*case, scale=0.25)
        torch.testing.assert_close(backend.forward(*case, scale=0.25), fresh, atol=0, rtol=0)


def test_backend_made_in_inference_mode_also_works_outside():
    backend = TorchAttention()
    case = make_case(**RAGGED)
    with torch.inference_mode():
        expected = backend.forward(*case, scale=0.25)
    torch.testing.assert_close(backend.forward(*case, scale=0.25), expected)


def test_queries_may_be_a_view_of_merged_projections():
    q, k_cache, v_cache, metadata = make_case(**RAGGED)
    merged = torch.cat((q, torch.full_like(q, math.nan)), dim=1)
    expected = TorchAttention().forward(q, k_cache, v_cache, metadata, scale=0.25)
    strided = merged[:, : q.shape[1]]
    torch.testing.assert_close(TorchAttention().forward(strided, k_cache, v_cache, metadata, scale=0.25), expected)


def test_selection_names_the_reason_of_each_refusal():
    spec = AttentionSpec(num_heads=5, num_kv_heads=2, head_dim=8, dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(ValueError, match="torch: num_heads 5 is not a multiple of num_kv_heads 2"):
        select_backend(spec, [TorchAttention])
