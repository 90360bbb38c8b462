"""`quire bench kernels`: what it times is right, what is wrong gets no time, and what cannot run says why."""

import argparse

import pytest
import torch

from benchmarks import attention
from benchmarks.attention import Implementation, Sizes, measure
from benchmarks.attention_baselines import page_loop, quadratic, sdpa, through_backend
from benchmarks.attention_problem import Heads, Problem, make_problem, relative_error
from benchmarks.attention_table import format_report
from kernels.attention.torch_ref import TorchAttention

HEADS = Heads(num_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32, device=torch.device("cpu"))
SIZES = Sizes(HEADS, lengths=[40], batches=[1, 3], contexts=[33])


def problem(*, num_rows: int, query_len: int, seq_len: int) -> Problem:
    return make_problem(HEADS, num_rows=num_rows, query_len=query_len, seq_len=seq_len, block_size=16, num_layers=2)


@pytest.mark.parametrize("prepare", [quadratic, sdpa, through_backend(TorchAttention())])
@pytest.mark.parametrize("length", [1, 16, 77, 150])
def test_prefill_implementations_agree_with_the_reference(prepare, length: int) -> None:
    prompt = problem(num_rows=1, query_len=length, seq_len=length)
    assert relative_error(prompt, prepare(prompt)(-1)) < 1e-5


@pytest.mark.parametrize("prepare", [page_loop, through_backend(TorchAttention())])
@pytest.mark.parametrize(("num_rows", "context"), [(1, 1), (1, 16), (5, 77)])
def test_decode_implementations_agree_with_the_reference(prepare, num_rows: int, context: int) -> None:
    rows = problem(num_rows=num_rows, query_len=1, seq_len=context)
    assert relative_error(rows, prepare(rows)(-1)) < 1e-5


def test_the_reference_sees_one_wrong_row_an_unwritten_value_and_a_shifted_mask() -> None:
    rows = problem(num_rows=3, query_len=1, seq_len=50)
    out = through_backend(TorchAttention())(rows)(-1)
    assert relative_error(rows, torch.stack([out[0], out[1] * 1.05, out[2]])) > 1e-2
    unwritten = out.clone()
    unwritten[0, 0, 0] = float("nan")
    assert relative_error(rows, unwritten) == float("inf")
    prompt = problem(num_rows=1, query_len=200, seq_len=200)
    out = sdpa(prompt)(-1)
    assert relative_error(prompt, out.roll(1, dims=0)) > 0.1


def test_every_case_has_a_cell_per_implementation() -> None:
    pytest.importorskip("triton")  # without, another reason is given
    report = measure(SIZES, "prefill,decode")
    cells = {(r["case"], r["implementation"]): r for r in report["results"]}
    assert len(cells) == 3 * 6 - 2  # prefill has two baselines, decode one
    for case in ("decode 1 × 33", "decode 3 × 33"):
        assert cells[case, "page loop"]["us"] > 0
        assert cells[case, "torch"]["tb_s"] > 0
        whole, fp8 = (cells[case, name]["tb_s"] * cells[case, name]["us"] for name in ("torch", "torch fp8"))
        assert whole == pytest.approx(4 * fp8)  # bytes
        assert cells[case, "triton"]["us"] is None
    assert cells["prefill 40", "O(N²)"]["tflop_s"] > 0
    assert cells["prefill 40", "flash-attn"]["skipped"].startswith("it needs a CUDA device")
    text = format_report(report)
    assert "– triton: it needs a CUDA device, not cpu" in text
    assert "wrong" not in text


def run_with(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], implementation: Implementation
) -> tuple[int, str]:
    """Run the command with one implementation in place of the engine's backends."""
    monkeypatch.setattr(attention, "_backends", lambda heads, part: [implementation])
    monkeypatch.setattr(attention, "_sizes", lambda arguments: SIZES)
    arguments = argparse.Namespace(json=None, plot=None, html=None, compare=None, part="decode")
    return attention.run(arguments), capsys.readouterr().out


def test_a_wrong_kernel_gets_no_time_and_fails_the_command(monkeypatch, capsys) -> None:
    def off_by_one_layer(problem: Problem):
        call = through_backend(TorchAttention())(problem)
        return lambda layer: call(layer) * 1.01

    code, out = run_with(monkeypatch, capsys, Implementation("new", off_by_one_layer))
    assert code == 1
    assert "– new: wrong: relative error 1.0e-02" in out


def test_what_does_not_fit_is_said_to_be_out_of_memory(monkeypatch, capsys) -> None:
    def huge(problem: Problem):
        raise torch.OutOfMemoryError("CUDA out of memory")

    code, out = run_with(monkeypatch, capsys, Implementation("huge", huge))
    assert code == 0
    assert out.count("out of memory") == 2
