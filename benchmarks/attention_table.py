"""The report of `quire bench kernels` as text. Never imports torch."""

from collections.abc import Sequence

from benchmarks.report import Report, format_table

Cells = Sequence[dict]


def format_report(report: Report) -> str:
    """Return tables of time and memory per part, a column per implementation, then the reasons for empty cells."""
    heads, machine = report["heads"], report["machine"]
    device = machine["gpu"] if heads["device"] == "cuda" else "CPU"
    lines = [
        f"{device}, torch {machine['torch']}; {heads['num_heads']} query heads, {heads['num_kv_heads']} KV heads of "
        f"{heads['head_dim']}, {heads['dtype']}; each result checked against float64"
    ]
    for part, title, rate, unit in (
        ("prefill", "prefill, one causal prompt of N tokens: µs (TFLOP/s)", "tflop_s", "{:.3g}"),
        ("decode", "decode, rows × tokens of each in pages: µs (TB/s read)", "tb_s", "{:.3g}"),
    ):
        cells = [result for result in report["results"] if result["part"] == part]
        if not cells:
            continue
        times = [_time(cell, rate, unit) for cell in cells]
        lines += ["", title, _table(cells, times)]
        if part == "prefill" and any(cell["memory_mib"] is not None for cell in cells):
            lines += ["", "prefill: MiB taken beside the inputs, output included", _table(cells, _memories(cells))]
    return "\n".join([*lines, "", *_notes(report["results"])])


def _time(cell: dict, rate: str, unit: str) -> str:
    if cell["us"] is None:
        return "out of memory" if cell["skipped"] == "out of memory" else "wrong" if cell["error"] else "–"
    us = f"{cell['us']:,.1f}" if cell["us"] < 1000 else f"{cell['us']:,.0f}"
    return f"{us} ({unit.format(cell[rate])})"


def _memories(cells: Cells) -> list[str]:
    return ["–" if cell["memory_mib"] is None else f"{cell['memory_mib']:,.0f}" for cell in cells]


def _table(cells: Cells, texts: Sequence[str]) -> str:
    """Cells come case by case, each with every implementation in the same order."""
    names = list(dict.fromkeys(cell["implementation"] for cell in cells))
    rows = [["", *names]]
    for i in range(0, len(cells), len(names)):
        rows.append([cells[i]["case"].partition(" ")[2], *texts[i : i + len(names)]])
    return format_table(rows)


def _notes(cells: Cells) -> list[str]:
    notes = [f"– {cell['implementation']}: {cell['skipped']}" for cell in cells if cell["skipped"]]
    notes = [note for note in dict.fromkeys(notes) if not note.endswith("out of memory")]
    if any(cell["timed_by"] == "graph" for cell in cells):
        notes.append("Short calls are timed inside CUDA graphs, page loops and calls over 5 ms with their launches.")
    if any(cell["implementation"] == "torch" for cell in cells):
        notes.append("torch: pages gathered by one index_select, then SDPA.")
    return notes
