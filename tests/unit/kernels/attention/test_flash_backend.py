"""FlashAttention maps the rows of a step to the library's calls, and names a reason for all that it does not serve."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace

import pytest
import torch

from kernels.attention import flash
from kernels.attention.base import AttentionSpec, select_backend
from kernels.attention.flash import FlashAttention
from kernels.attention.torch_ref import TorchAttention
from tests.unit.kernels.fake_flash import make_fa2, make_fa3
from tests.unit.kernels.triton_cases.ragged import make_problem

SPEC = AttentionSpec(16, 8, 128, torch.bfloat16, torch.device("cuda"))
HOPPER, AMPERE = (9, 0), (8, 6)


def _install(monkeypatch, *, fa2=None, fa3=None, capability=HOPPER):
    """Make the two modules importable, or not, on a GPU of that capability."""
    monkeypatch.setitem(sys.modules, "flash_attn", fa2)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", fa3)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)


@pytest.mark.parametrize(("change", "word"), [
    ({"device": torch.device("cpu")}, "cpu"), ({"dtype": torch.float32}, "float32"), ({"head_dim": 264}, "264"),
    ({"head_dim": 100}, "100"), ({"num_heads": 17}, "17"), ({"block_size": 16}, "multiple of 256"),
    ({"value_head_dim": 64}, "64"), ({"has_chunks": True}, "chunked"),
    ({"frees_windows": True}, "window"),
])  # fmt: skip
def test_a_refusal_names_the_value(monkeypatch, change, word):
    _install(monkeypatch, fa2=make_fa2())
    assert word in (FlashAttention.refuse(replace(SPEC, **change)) or "")


def test_the_usual_model_is_taken_where_it_is_installed(monkeypatch):
    _install(monkeypatch, fa2=make_fa2())
    assert FlashAttention.refuse(SPEC) is None
    assert FlashAttention.refuse(replace(SPEC, block_size=512)) is None
    assert FlashAttention.refuse(replace(SPEC, has_sinks=True)) is None


def test_a_missing_library_is_named(monkeypatch):
    _install(monkeypatch)
    assert FlashAttention.refuse(SPEC) == "the module flash_attn is not installed"


def test_an_old_gpu_is_named(monkeypatch):
    _install(monkeypatch, fa2=make_fa2(), capability=(7, 5))
    assert "7.5" in (FlashAttention.refuse(SPEC) or "")


def test_an_old_library_is_named(monkeypatch):
    _install(monkeypatch, fa2=make_fa2(version="2.5.9.post1"))
    assert "2.5.9" in (FlashAttention.refuse(SPEC) or "")


@pytest.mark.parametrize("source", ["raise OSError('undefined symbol:\\n cudaX')", "import missing_dependency"])
def test_a_failing_import_is_quoted_in_one_line(monkeypatch, tmp_path, source):
    _install(monkeypatch)
    monkeypatch.delitem(sys.modules, "flash_attn")
    (tmp_path / "flash_attn.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    reason = FlashAttention.refuse(SPEC) or ""
    assert "importing flash_attn failed" in reason
    assert "undefined symbol: cudaX" in reason or "missing_dependency" in reason


def test_the_library_is_imported_only_when_asked_for(monkeypatch, tmp_path):
    (tmp_path / "flash_attn.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.reload(flash)
    assert "flash_attn" not in sys.modules


def test_fa3_serves_hopper_and_fa2_the_rest(monkeypatch):
    for capability, block_size_multiple in ((HOPPER, 16), (AMPERE, 256), ((10, 0), 256)):
        _install(monkeypatch, fa2=make_fa2(), fa3=make_fa3(), capability=capability)
        assert FlashAttention().block_size_multiple == block_size_multiple
    _install(monkeypatch, fa2=make_fa2())
    assert FlashAttention().block_size_multiple == 256


def test_selection_by_name_quotes_the_refusal(monkeypatch):
    _install(monkeypatch)
    with pytest.raises(ValueError, match="flash-attn: the module flash_attn is not installed"):
        select_backend(SPEC, [FlashAttention, TorchAttention], wanted="flash-attn")


SINKS = torch.tensor([0.5, -3.0, 6.0, 0.0, 30.0, -30.0])
ROWS = {
    "decodes": ([1] * 4, [0, 255, 256, 700]),
    "chunks": ([7, 300, 2], [0, 20, 513]),
    "both": ([1, 1, 1, 5, 40, 1], [3, 260, 0, 0, 300, 17]),
    "chunks of one token": ([1, 1], [30, 5]),
}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("options", [
    {}, {"sliding_window": 1}, {"sliding_window": 100, "softcap": 5.0}, {"sinks": SINKS},
    {"sinks": SINKS, "sliding_window": 100, "softcap": 5.0},
])  # fmt: skip
@pytest.mark.parametrize(("fa3", "block_size"), [(None, 256), (make_fa3(), 16)])
def test_every_row_equals_the_torch_reference(monkeypatch, rows, options, fa3, block_size):
    _install(monkeypatch, fa2=make_fa2(), fa3=fa3)
    query_lens, context_lens = ROWS[rows]
    *tensors, metadata = make_problem(
        query_lens=query_lens, context_lens=context_lens, num_heads=6, num_kv_heads=2, head_dim=16,
        block_size=block_size, dtype=torch.float32, device="cpu",
    )  # fmt: skip
    tensors = [t.nan_to_num() for t in tensors]  # the torch reference multiplies masked values by 0
    expected = TorchAttention().forward(*tensors, metadata, scale=0.3, **options)
    if rows == "chunks of one token":
        metadata.num_decodes = 0
    views = [metadata]
    if metadata.max_query_len > 1:  # as a graph knows them, by bounds close and far
        views += [replace(metadata, num_decodes=None, max_query_len=bound) for bound in (300, 100_000)]
    for view in views:
        torch.testing.assert_close(FlashAttention().forward(*tensors, view, scale=0.3, **options), expected)


@pytest.mark.parametrize("fa3", [None, make_fa3()])
@pytest.mark.parametrize("max_query_len", [300, 100_000])
@pytest.mark.parametrize("sinks", [None, SINKS[:4]])
def test_padding_rows_of_a_graph_change_no_other_row(monkeypatch, fa3, max_query_len, sinks):
    _install(monkeypatch, fa2=make_fa2(), fa3=fa3)
    *tensors, metadata = make_problem(
        query_lens=[1, 300, 9, 200], context_lens=[40, 0, 9, 0], num_heads=4, num_kv_heads=2, head_dim=16,
        block_size=256, dtype=torch.float32, device="cpu",
    )  # fmt: skip
    metadata.num_decodes, metadata.max_query_len, metadata.max_seq_len = None, max_query_len, 4096
    expected = FlashAttention().forward(*tensors, metadata, scale=0.3, sinks=sinks)
    expected[310:] = 0
    # the last row's tokens become padding; behind it rows without tokens, with lengths of an earlier step
    metadata.query_start_loc = torch.cat((metadata.query_start_loc, torch.full((3,), 510, dtype=torch.int32)))
    metadata.seq_lens = torch.cat((metadata.seq_lens, torch.tensor([7, 0, 300], dtype=torch.int32)))
    metadata.seq_lens[3] = 0
    metadata.block_table = torch.cat((metadata.block_table, torch.zeros(3, 3, dtype=torch.int32)))
    torch.testing.assert_close(FlashAttention().forward(*tensors, metadata, scale=0.3, sinks=sinks), expected)
