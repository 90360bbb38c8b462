"""The benchmark of delta-rule layers runs, and finds its kernels equal to their specifications, in the interpreter."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import recurrent_kernels


@pytest.mark.full
def test_the_benchmark_of_recurrent_kernels_runs_and_writes_its_figures(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["recurrent_kernels", "--smoke", "--sweep", "--json", str(tmp_path / "out.json")])
    monkeypatch.setattr(recurrent_kernels, "_STEPS", recurrent_kernels._STEPS[:1])
    monkeypatch.setattr(recurrent_kernels, "_CHUNKS", recurrent_kernels._CHUNKS[:1])
    recurrent_kernels.main()
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert {cell["kernel"] for cell in results} == {"conv", "gates", "delta rule", "gated norm"}
    assert {(cell["rows"], cell["tokens"]) for cell in results} == {(3, 1), (2, 3), (2, 70)}
    assert max(cell["error"] for cell in results) < 4e-3
    assert not any(cell["trouble"] for cell in results)
    assert capsys.readouterr().out.count("% of floor") == len(results)
