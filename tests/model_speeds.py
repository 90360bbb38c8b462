"""The table of whole models on docs/explanation/performance.md: what each card measured, beside the floors of the same.

    python -m tests.model_speeds    (writes the table)
Figures are those of the newest benchmarks/results/offline-NAME-CARD-*.json, or of one script of a run on several GPUs.
Schemes of experts are in the table of docs/reference/models.md (tests/scheme_families.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from benchmarks.report import Report
from tests.models_page import RESULTS, with_tables
from tests.speed_cells import measured_cells, newest, read

PAGE = Path("docs/explanation/performance.md")
TABLE = "models"


class Row(NamedTuple):
    """A model, and names of its runs on a card; a later one gives the workloads that it has."""

    model: str
    card: str
    names: tuple[str, ...]


class Split(NamedTuple):
    """A model on several H100: a script of a run of benchmarks.many_gpus."""

    model: str
    num_gpus: int
    run: str
    script: str


ROWS = (
    Row("Qwen3-30B-A3B", "H100", ("qwen3-30b-a3b", "qwen3-30b-a3b-rows")),
    Row("Qwen3-30B-A3B, FP8 blocks", "H100", ("qwen3-30b-a3b-fp8", "qwen3-30b-a3b-fp8-few-tokens")),
    Row("Qwen3-30B-A3B, FP8 blocks", "H200", ("qwen3-30b-a3b-fp8",)),
    Row("Qwen3-30B-A3B, AWQ", "H100", ("qwen3-30b-a3b-awq",)),
    Row("Qwen3-30B-A3B, AWQ", "H200", ("qwen3-30b-a3b-awq",)),
    Row("Qwen3-30B-A3B, NVFP4", "H100", ("qwen3-30b-a3b-nvfp4", "qwen3-30b-a3b-nvfp4-few-tokens")),
    Row("Qwen3-30B-A3B, NF4", "H100", ("qwen3-30b-a3b-nf4",)),
    Row(
        "gpt-oss-20b, MXFP4",
        "H100",
        ("gpt-oss-20b-mxfp4", "gpt-oss-20b-mxfp4-prompts", "gpt-oss-20b-mxfp4-few-tokens"),
    ),
    Row("gpt-oss-20b, MXFP4", "H200", ("gpt-oss-20b-mxfp4",)),
    Row("gpt-oss-20b, bf16", "H100", ("gpt-oss-20b",)),
    Row("gpt-oss-120b, MXFP4", "H100", ("gpt-oss-120b-mxfp4",)),
    Row("gpt-oss-120b, MXFP4", "H200", ("gpt-oss-120b-mxfp4",)),
    Row("Llama-3.1-8B, FP8 blocks", "H100", ("llama-3.1-8b-fp8-blocks",)),
    Row("Llama-3.1-8B, FP8 blocks", "H200", ("llama-3.1-8b-fp8-blocks-few-rows",)),
    Row("Llama-3.1-8B, `--quantization fp8`", "H100", ("llama-3.1-8b-fp8", "llama-3.1-8b-fp8-rows")),
    Row("Llama-3.1-8B, `--quantization fp8`", "H200", ("llama-3.1-8b-fp8-few-rows", "llama-3.1-8b-fp8-mixed-few-rows")),
    Row("Llama-3.1-8B, W8A8", "H100", ("llama-3.1-8b-w8a8",)),
    Row("Llama-3.1-8B, W8A8", "H200", ("llama-3.1-8b-w8a8", "llama-3.1-8b-w8a8-few-rows")),
    Row("Llama-3.1-8B, NVFP4", "H100", ("llama-3.1-8b-nvfp4",)),
    Row("DeepSeek-V2-Lite", "H100", ("deepseek-v2-lite",)),
    Row("GLM-4.7-Flash", "H100", ("glm-4.7-flash",)),
    Row("Qwen3.5 4B", "H100", ("qwen3.5-4b",)),
    Row("Qwen3.5 27B", "H100", ("qwen3.5-27b",)),
    Row("Qwen3.5-35B-A3B", "H100", ("qwen3.5-35b-a3b", "qwen3.5-35b-a3b-routing", "qwen3.5-35b-a3b-scan")),
    Row("Qwen3.5-35B-A3B", "H200", ("qwen3.5-35b-a3b",)),
    Row("Nemotron 3 Nano 30B-A3B", "H100", ("nemotron-3-nano-30b-a3b-scan",)),
    Row("Nemotron 3 Nano 30B-A3B", "H200", ("nemotron-3-nano-30b-a3b",)),
    Row("Gemma 2 9B", "H100", ("gemma-2-9b",)),
    Row("Gemma 4 31B", "H100", ("gemma-4-31b",)),
    Split("Llama-3.1-8B", 1, "many-gpus-offline-4xh100", "llama-3.1-8b-tp1"),
    Split("Llama-3.1-8B", 2, "many-gpus-large-4xh100", "llama-3.1-8b-tp2"),
    Split("Llama-3.1-8B", 4, "many-gpus-offline-4xh100", "llama-3.1-8b-tp4"),
    Split("Llama-3.1-70B, FP8", 2, "many-gpus-large-4xh100", "llama-3.1-70b-tp2-fp8"),
    Split("Llama-3.1-70B", 4, "many-gpus-large-4xh100", "llama-3.1-70b-tp4"),
)


def table_rows(results: Path = RESULTS) -> list[str]:
    """Return the table's rows."""
    rows = []
    for row in ROWS:
        if isinstance(row, Split):
            card = "H100" if row.num_gpus == 1 else f"{row.num_gpus} H100"
            path = max(results.glob(f"{row.run}-????-??-??.json"))
            reports: list[Report] = [json.loads(path.read_text())["scripts"][row.script]["result"]]
            links = [_link(_date(path), path)]
        else:
            card, paths = row.card, [_newest(results, name, row.card) for name in row.names]
            reports, links = [read(path) for path in paths], [_link(_date(path), path) for path in paths]
        rows.append(f"| {' | '.join((row.model, card, *measured_cells(reports), ', '.join(links)))} |")
    return rows


def _newest(results: Path, name: str, card: str) -> Path:
    path = newest(results, name, card.lower())
    assert path is not None, f"no run of {name} on {card}"
    return path


def _link(words: str, path: Path) -> str:
    return f"[{words}](../../{path})"


def _date(path: Path) -> str:
    return path.stem[-5:]


def page(results: Path = RESULTS) -> str:
    """Return docs/explanation/performance.md with the table."""
    return with_tables(PAGE, {TABLE: table_rows(results)})


if __name__ == "__main__":
    PAGE.write_text(page())
