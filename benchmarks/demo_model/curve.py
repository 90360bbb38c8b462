"""Draws the loss curve of a training.json: `python -m benchmarks.demo_model.curve FOLDER PICTURE`. Needs matplotlib."""

import argparse
import json
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.report import Report

_LEARNED, _UNSEEN = "#56B4E9", "#D55E00"


def draw(report: Report) -> Figure:
    """Draw the loss of answers over the tokens trained on, in the corpus and in unseen dialogues."""
    points, recipe = report["curve"], report["recipe"]
    measured = [point for point in points if "unseen_loss" in point]
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.plot(*_columns(points, "loss"), color=_LEARNED, linewidth=1.2, label="learned from")
    axes.plot(*_columns(measured, "unseen_loss"), color=_UNSEEN, marker="o", markersize=3, label="never learned from")
    axes.set(xlabel="million tokens", ylabel="nats per token of an answer", yscale="log")
    hardware, minutes = report["hardware"].split(",")[0], report["seconds"]["all"] / 60
    axes.set_title(
        f"{report['parameters'] / 1e6:.1f} M parameters, {report['steps']:,} steps of {recipe['batch_tokens']:,} tokens"
        f", {minutes:.1f} minutes on {hardware}",
        fontsize=10,
    )
    axes.grid(color="#E5E5E5", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


def _columns(points: list[Report], name: str) -> tuple[list[float], list[float]]:
    return [point["tokens"] / 1e6 for point in points], [point[name] for point in points]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draw the loss curve of the demo model's training.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("picture", help="PNG or SVG by its suffix")
    flags = parser.parse_args()
    draw(json.loads((flags.folder / "training.json").read_text(encoding="utf-8"))).savefig(flags.picture, dpi=150)
