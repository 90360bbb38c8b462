"""The sweep of quantised products, in small, through Triton's interpreter: each candidate is checked and timed."""

from __future__ import annotations

import json

import pytest

from benchmarks.quantized_linear_kinds import KINDS
from benchmarks.quantized_linear_sweep import main


@pytest.mark.parametrize("name", KINDS)
def test_candidates_are_right_and_timed(name, tmp_path, capsys):
    main(["--smoke", "--kinds", name, "--out", str(tmp_path / "sweep.json")])
    printed = capsys.readouterr().out
    assert "wrong" not in printed
    assert "skipped" not in printed
    results = json.loads((tmp_path / "sweep.json").read_text())["results"]
    assert [result["rows"] for result in results] == [1, 9]
    for result in results:
        assert result["kind"] == name
        assert len(result["cuts"]) >= 2
        assert result["best_us"] == min(cut["us"] for cut in result["cuts"])
        assert min(result["served_us"], result["bf16_us"], result["tb_s"] + 1) > 0
    assert printed.splitlines()[-1].split()[0] == name
