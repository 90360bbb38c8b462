"""Cells of the tables of speeds: what `quire bench offline` measured, the floor of the same, and the share of it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.floors import SHAPES, WORKLOADS, Card, StepCosts, floor_s, floors, workload_lens
from benchmarks.report import Report
from models.config.model_config import ModelConfig
from tests.models_page import MISSING

# Until then random e2m1 had a mean, as byte 255 was not drawn, and rows chose more of the same experts than by chance
_CENTRED_SINCE = "2026-11-28T08:30"
_MARK = " ¹"  # on batches that are too fast for it


def newest(results: Path, name: str, card: str) -> Path | None:
    """Return the newest offline report of a name on a card, such as qwen3-30b-a3b-fp8 on h100; None: there is none."""
    return max(results.glob(f"offline-{name}-{card}-????-??-??.json"), default=None)


def read(path: Path) -> Report:
    """Read one report of `quire bench offline`."""
    report: dict[str, Any] = json.loads(path.read_text())
    return report


def measured_cells(reports: Iterable[Report]) -> list[str]:
    """Return a cell for each of WORKLOADS, from the last report that has it: measured, floor, share of the floor.

    Milliseconds a token for `single`, tokens a second for the others, those of the prompts for `prefill16`.
    """
    cells = dict.fromkeys(WORKLOADS, MISSING)
    for report in reports:
        for name, seconds in floors(report).items():
            result = report["workloads"][name]
            share = f"{100 * seconds / result['seconds']:.0f} %"
            cell = " · ".join((_rate(name, result, result["seconds"]), _rate(name, result, seconds), share))
            cells[name] = cell + (_MARK if name != "single" and _chose_alike(report) else "")
    return list(cells.values())


def unmeasured_cells(shape: str, card: Card) -> list[str]:
    """Return the cells of a shape that was not run: the floors of a card."""
    costs, cells = StepCosts(ModelConfig.from_folder(SHAPES / shape)), []
    for name in WORKLOADS:
        lens = workload_lens(name)
        counts = {"num_input_tokens": sum(n for n, _ in lens), "num_output_tokens": sum(n for _, n in lens)}
        cells.append(f"{MISSING} · {_rate(name, counts, floor_s(costs, lens, card))}")
    return cells


def _chose_alike(report: Report) -> bool:
    if report["date"] >= _CENTRED_SINCE:
        return False
    config = ModelConfig.from_folder(SHAPES / report["args"]["shape"])
    is_e2m1 = config.quantization is not None and "e2m1" in config.quantization.describe()
    return config.experts is not None and is_e2m1


def _rate(name: str, counts: dict[str, Any], seconds: float) -> str:
    if name == "single":
        return f"{1000 * seconds / counts['num_output_tokens']:.2f}"
    return f"{counts['num_input_tokens' if name == 'prefill16' else 'num_output_tokens'] / seconds:,.0f}"
