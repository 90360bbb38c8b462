"""The benchmark of latent attention on the CPU: it checks what it times, counts least work, and names the best."""

import json

import pytest
import torch

from benchmarks import latent_attention
from benchmarks.latent_attention import Cell, best_of_sweep, both_forms, over_latents
from benchmarks.latent_problem import SHAPES, SMOKE, make_problem, work_of_latents, work_of_whole

LIKE = {"dtype": torch.float32, "device": torch.device("cpu")}
V2_LITE, V3, GLM = SHAPES


def _run(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["latent_attention", "--device", "cpu", *arguments])
    latent_attention.main()


def test_all_parts_run_and_are_saved(monkeypatch, tmp_path, capsys):
    _run(monkeypatch, "--smoke", "--json", str(tmp_path / "cells.json"))
    results = json.loads((tmp_path / "cells.json").read_text())["results"]
    assert [(cell["part"], cell["config"]) for cell in results] == [
        ("decode", "served"), ("drafts", "served"), ("prompt", "expanded"), ("prompt", "absorbed")
    ]  # fmt: skip
    assert all(cell["us"] > 0 and cell["error"] < 1e-5 and not cell["trouble"] for cell in results)
    assert capsys.readouterr().out.count("% of floor") == 4


def test_a_sweep_needs_a_gpu(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        _run(monkeypatch, "--smoke", "--sweep")
    assert "--sweep needs Triton's kernels, so --device cuda, not cpu" in capsys.readouterr().err


@pytest.mark.parametrize("candidates", [over_latents, both_forms])
def test_a_wrong_output_is_found(candidates):
    problem = make_problem(SMOKE[0], rows=2, tokens=3, keys=40, num_layers=1, like=LIKE)
    for candidate in candidates(problem, LIKE["device"]):
        out = candidate.run(0)
        assert candidate.error(out) < 1e-5
        out[-1, 0] = 0  # one head of the last token
        assert candidate.error(out) > 0.05
        out[-1, 0] = float("nan")
        assert candidate.error(out) == float("inf")


def test_least_work_is_that_of_the_cheaper_form():
    num_bytes, flops = work_of_latents(V3, 8, 1, 1000, 2)
    assert num_bytes == 2 * (8 * 1000 * 576 + 8 * 128 * (576 + 512))
    assert flops == 2 * 8 * 1000 * 128 * (576 + 512)
    pairs = 4 * 4096 * 4097 / 2
    expansion = 4 * 4096 * 512 * (128 + 128)
    assert work_of_whole(V3, 4, 4096, 4096, 2)[1] == pytest.approx(2 * 128 * (pairs * 320 + expansion))
    absorbed = work_of_latents(GLM, 1, 8, 8000, 2)[1] + 2 * 20 * 8 * 512 * (192 + 256)
    assert work_of_whole(GLM, 1, 8, 8000, 2)[1] == absorbed


def test_the_best_of_a_sweep_is_by_kernel_and_case():
    def cell(config, us, rows=1, **options):
        return Cell("sweep", V2_LITE.name, rows, 1, 8192, config, us=us, **options)

    slow, fast, other = cell("short 16", 9.0), cell("short 32", 8.0), cell("long 64", 20.0)
    wrong, more = cell("short 64", 0.0, trouble="wrong"), cell("short 16", 30.0, rows=8)
    assert best_of_sweep([slow, wrong, fast, other, more]) == [fast, other, more]
