"""The times of a start's stages."""

from server.launcher.console import StageTimes


def test_a_stage_lasts_until_the_next_and_one_that_comes_again_adds_up():
    times = StageTimes("process", 10.0)
    for name, now in (("imports", 10.4), ("kernels", 13.0), ("weights", 13.2), ("kernels", 15.0)):
        times.enter(name, now)
    assert times.text(16.5) == "process 0.4 s, imports 2.6 s, kernels 1.7 s, weights 1.8 s"


def test_progress_within_a_stage_and_very_short_stages_add_no_words():
    times = StageTimes("config", 0.0)
    for name, now in (("weights", 0.01), ("weights", 1.0), ("weights", 2.0)):
        times.enter(name, now)
    assert times.text(3.01) == "weights 3.0 s"
