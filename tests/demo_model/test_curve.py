"""The loss curve of the demo's training becomes a picture."""

from benchmarks.demo_model.curve import draw


def test_both_losses_are_drawn_over_the_tokens(tmp_path):
    report = {
        "parameters": 8_360_768,
        "steps": 500,
        "recipe": {"batch_tokens": 65_536},
        "seconds": {"all": 480.0},
        "hardware": "A GPU, 16 cores",
        "curve": [
            {"step": 250, "tokens": 16_000_000, "loss": 1.0, "unseen_loss": 1.1},
            {"step": 300, "tokens": 20_000_000, "loss": 0.9},
            {"step": 500, "tokens": 32_000_000, "loss": 0.5, "unseen_loss": 0.6},
        ],
    }
    figure = draw(report)
    learned, unseen = figure.axes[0].lines
    assert list(learned.get_ydata()) == [1.0, 0.9, 0.5]
    assert list(unseen.get_xdata()) == [16.0, 32.0]
    assert "8.0 minutes on A GPU" in figure.axes[0].get_title()
    figure.savefig(tmp_path / "curve.svg")
    assert (tmp_path / "curve.svg").stat().st_size > 1000
