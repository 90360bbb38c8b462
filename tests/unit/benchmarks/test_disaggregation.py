"""benchmarks.disaggregation: the arrangements that share the GPUs, and what is refused."""

import pytest

from benchmarks import disaggregation


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_each_arrangement_uses_every_gpu_once(num_ranks):
    found = disaggregation.arrangements(num_ranks)
    assert [each.name for each in found] == ["1p1d", "two servers", f"TP {2 * num_ranks}"]
    for arrangement in found:
        assert sorted(gpu for _, gpus in arrangement.servers for gpu in gpus) == list(range(2 * num_ranks))
        for flags, gpus in arrangement.servers:
            size = int(flags[-1]) if "--tensor-parallel-size" in flags else 1
            assert size * (2 if "--disaggregate" in flags else 1) == len(gpus)


@pytest.mark.parametrize(
    ("flags", "visible", "says"),
    [
        (["--ranks", "0"], "0,1", "--ranks 0 must be at least 1"),
        (["--ranks", "2"], "0,1", "--ranks 2 needs 4 GPUs, and CUDA_VISIBLE_DEVICES names 2"),
        (["--only", "TP 4"], "0,1", "--only TP 4: with --ranks 1 there are 1p1d, two servers, TP 2"),
    ],
)
def test_what_cannot_be_measured_is_refused(flags, visible, says, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["disaggregation", *flags])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(SystemExit):
        disaggregation.main()
    assert says in capsys.readouterr().err
