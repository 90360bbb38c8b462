"""The table of schemes × families of experts on docs/reference/models.md, and the measurement of its errors.

    python -m tests.scheme_families --measure FILE     (a JSON of benchmarks/results)
    python -m tests.scheme_families                    (writes the table)
Errors: the checkpoints of tests/support against what they mean, dequantised by others' code, in float32 on the CPU.
Bytes come from benchmarks/shapes, speeds from the newest benchmarks/results/offline-SHAPE-CARD-*.json of each card, the
floors beside them from benchmarks/floors.py. What has no run is said to have none.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.floors import CARDS, SHAPES, StepCosts
from models.build import Model
from models.config.model_config import ModelConfig
from models.layers.moe import SparseMLP
from models.parallel import whole
from tests.models_page import MISSING, PAGE, RESULTS, with_tables
from tests.speed_cells import measured_cells, newest, read, unmeasured_cells
from tests.support.float_experts import save_float_experts
from tests.support.int_experts import FORMATS, save_int_experts
from tests.support.models_harness import PagedRunner, load
from tests.support.packed_experts import save_fp8_blocks, save_mxfp4
from tests.support.quantized_checkpoints import PROMPT, relative_error

TABLE, ERRORS = "scheme families", "experts-errors-cpu-*.json"
# Shapes of published widths with fewer layers than are published, which one GPU holds
LAYERS = {"deepseek-v3-8-layers-fp8": 61, "deepseek-v3-8-layers-int8": 61, "minimax-m2-16-layers-fp8": 62}
Save = Callable[[Path, Path], None]  # (dense folder, packed folder)


class Row(NamedTuple):
    """A scheme of experts in a family, and the published shapes that are measured as it."""

    scheme: str
    kind: str  # checkpoint kind of tests/support/checkpoints.py
    family: str  # for people
    shapes: tuple[str, ...]


ROWS = (
    Row("mxfp4", "gpt_oss", "gpt-oss", ("gpt-oss-20b-mxfp4", "gpt-oss-120b-mxfp4")),
    Row("fp8_blocks", "qwen3_moe", "Qwen3-MoE", ("qwen3-30b-a3b-fp8",)),
    Row("fp8_blocks", "glm4_moe", "GLM-4.5", ("glm-4.5-air-fp8",)),
    Row("fp8_blocks", "deepseek_v3", "DeepSeek-V3", ("deepseek-v3-8-layers-fp8",)),
    Row("fp8_blocks", "minimax_m2", "MiniMax-M2", ("minimax-m2-16-layers-fp8",)),
    Row("fp8_blocks", "kimi_linear", "Kimi-Linear", ("kimi-linear-48b-a3b-fp8",)),
    Row("fp8_rows", "qwen3_moe", "Qwen3-MoE", ("qwen3-30b-a3b-fp8-rows",)),
    Row("fp8_tensor", "qwen3_moe", "Qwen3-MoE", ("qwen3-30b-a3b-fp8-tensor",)),
    Row("awq", "qwen3_moe", "Qwen3-MoE", ("qwen3-30b-a3b-awq",)),
    Row("awq", "qwen3_next", "Qwen3-Next", ("qwen3-next-80b-a3b-awq",)),
    Row("gptq", "glm4_moe", "GLM-4.5", ("glm-4.5-air-gptq",)),
    Row("gptq_8bit", "qwen3_moe", "Qwen3-MoE", ("qwen3-30b-a3b-gptq-int8",)),
    Row("packed", "glm4_moe", "GLM-4.5", ("glm-4.5-air-int4",)),
    Row("packed", "mixtral", "Mixtral", ("mixtral-8x7b-int4",)),
    Row("packed_8bit", "deepseek_v3", "DeepSeek-V3", ("deepseek-v3-8-layers-int8",)),
    Row("nvfp4", "qwen3_moe", "Qwen3-MoE", ("qwen3-30b-a3b-nvfp4",)),
    Row("mxfp4_each", "qwen3_moe", "Qwen3-MoE", ("qwen3-30b-a3b-mxfp4",)),
    Row("nf4", "qwen3_moe", "Qwen3-MoE", ("qwen3-30b-a3b-nf4",)),
    Row("fp4", "qwen3_moe", "Qwen3-MoE", ("qwen3-30b-a3b-fp4",)),
)


def measure(row: Row, folder: Path) -> dict[str, Any]:
    """Return the relative errors of the last layer's experts and of the logits. folder: an empty one."""
    dense, packed = folder / "dense", folder / "packed"
    _saver(row)(dense, packed)
    with torch.inference_mode():
        models = [load(each) for each in (dense, packed)]
        configs = [ModelConfig.from_folder(each) for each in (dense, packed)]
        hidden = torch.randn(64, configs[0].hidden_size, generator=torch.Generator().manual_seed(0))
        layers = [_experts_of(model, hidden) for model in models]
        logits = [_logits_of(model, config) for model, config in zip(models, configs, strict=True)]
    described = configs[1].quantization
    assert described is not None
    return {
        "describe": described.describe(),
        "layer_error": relative_error(layers[1], layers[0]),
        "logits_error": relative_error(logits[1], logits[0]),
    }


def table_rows(results: Path = RESULTS) -> list[str]:
    """Return the table's rows."""
    errors = json.loads(max(results.glob(ERRORS)).read_text())["rows"]
    rows = []
    for row in ROWS:
        error = errors.get(f"{row.scheme} {row.kind}")
        words = row.scheme if error is None else error["describe"]
        found = [MISSING] * 2 if error is None else [_rounded(error[name]) for name in ("layer_error", "logits_error")]
        for shape in row.shapes:
            rows += [_join(words, row.family, *found, *cells) for cells in _shape_cells(shape, words, results)]
    return rows


def _shape_cells(shape: str, scheme: str, results: Path) -> list[list[str]]:
    """Return the cells of each card that a shape was run on, or those of its floors."""
    config = ModelConfig.from_folder(SHAPES / shape)
    assert config.quantization is not None
    published = config.quantization.describe()
    notes = [] if published == scheme else [published]
    notes += [f"{config.num_layers} of {LAYERS[shape]} layers"] if shape in LAYERS else []
    read_gb = f"{StepCosts(config).weight_bytes(1) / 1e9:.2f}"
    rows = []
    for card in CARDS.values():
        path = newest(results, shape, card.name.lower())
        if path is not None:
            name = "; ".join([f"[`{shape}`](../../{path})", *notes])
            rows.append([name, card.name, read_gb, *measured_cells([read(path)])])
    if not rows:
        card = next(card for card in CARDS.values() if config.weight_bytes(torch.bfloat16) < card.memory_bytes)
        rows.append(["; ".join([f"`{shape}`", *notes]), card.name, read_gb, *unmeasured_cells(shape, card)])
    return rows


def _rounded(error: float) -> str:
    return "0" if error == 0 else f"{error:.0e}"


def _join(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _saver(row: Row) -> Save:
    if row.scheme == "mxfp4":
        return save_mxfp4
    if row.scheme == "fp8_blocks":
        return lambda dense, packed: save_fp8_blocks(dense, packed, kind=row.kind)
    if row.scheme in FORMATS:
        return lambda dense, packed: save_int_experts(
            dense, packed, FORMATS[row.scheme], family=row.kind, quantizes_attention=False
        )
    return lambda dense, packed: save_float_experts(
        dense, packed, scheme=row.scheme.removesuffix("_each"), kind=row.kind
    )


def _experts_of(model: Model, hidden: torch.Tensor) -> torch.Tensor:
    """Return the output of the last mixture for these inputs."""
    layer = [module for module in model.modules() if isinstance(module, SparseMLP)][-1]
    return whole(layer(hidden))


def _logits_of(model: Model, config: ModelConfig) -> torch.Tensor:
    assert isinstance(model, torch.nn.Module)
    runner = PagedRunner(model, config)
    return runner.step([(runner.add_row(), list(PROMPT))])[0]


def page(results: Path = RESULTS) -> str:
    """Return docs/reference/models.md with the table."""
    return with_tables(PAGE, {TABLE: table_rows(results)})


def main(arguments: list[str]) -> None:
    """Measure the errors, or write the table."""
    if arguments[:1] != ["--measure"]:
        PAGE.write_text(page())
        return
    rows = {}
    for row in ROWS:
        with tempfile.TemporaryDirectory() as folder:
            rows[f"{row.scheme} {row.kind}"] = measure(row, Path(folder))
    report = {
        "benchmark": "experts-errors",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": "python -m tests.scheme_families --measure",
        "versions": {"torch": str(torch.__version__)},
        "rows": rows,
    }
    Path(arguments[1]).write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
