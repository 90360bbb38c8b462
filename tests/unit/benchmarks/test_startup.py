"""The table of a start's stages."""

from benchmarks.startup import stage_table


def test_the_table_has_a_row_for_each_stage_and_a_column_for_each_start() -> None:
    cold = {
        "shape": "qwen3-0.6b",
        "cache": "cold",
        "stages": "process 0.2 s, imports 4.8 s, kernels 9.4 s",
        "daemon_seconds": 19.4,
        "all_graphs_seconds": 20.5,
        "engine_restart_seconds": 8.0,
        "kernels": "kernels compiled=55 of=55",
        "parts": ["graphs captured=18 later=40 capture_s=0.30"],
    }
    warm = {**cold, "cache": "warm", "stages": "process 0.2 s, imports 4.4 s", "kernels": "", "parts": []}
    lines = stage_table([cold, warm]).splitlines()
    assert [line.split() for line in lines[1:4]] == [
        ["process", "0.2", "0.2"],
        ["imports", "4.8", "4.4"],
        ["kernels", "9.4"],
    ]
    assert lines[-2:] == [
        "qwen3-0.6b cold: kernels compiled=55 of=55",
        "qwen3-0.6b cold: graphs captured=18 later=40 capture_s=0.30",
    ]
