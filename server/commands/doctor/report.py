"""Formats the report of `quire doctor`: aligned text, with colours on a terminal, or JSON. Imports msgspec."""

import os
from collections.abc import Iterator

import msgspec

from engine.interface.fit_report import Machine, ModelReport, Room
from engine.interface.units import format_count, format_size
from server.commands.doctor.checks import Host
from server.commands.doctor.run import Report

_BOLD, _RED, _GREEN, _YELLOW, _PLAIN = "\x1b[1m", "\x1b[31m", "\x1b[32m", "\x1b[33m", "\x1b[0m"
_LABEL_WIDTH = 15

Row = tuple[str, str]  # label, text


def to_json(report: Report) -> str:
    """Return everything as one JSON object."""
    return msgspec.json.format(msgspec.json.encode(report)).decode()


def to_text(report: Report, *, is_terminal: bool) -> str:
    """Return the report in rows, the verdict last."""
    is_coloured = is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "") != "dumb"
    blocks = [list(_model_rows(report))] if report.name is not None else []
    if report.machine is not None:
        blocks.append([*_machine_rows(report.machine), *_host_rows(report.host)])
    else:
        blocks.append(list(_host_rows(report.host)))
    lines: list[str] = []
    for rows in blocks:
        lines += [f"{_paint(label.ljust(_LABEL_WIDTH), _BOLD, is_coloured)} {text}" for label, text in rows]
        lines.append("")
    lines += [f"{_paint('Note:', _YELLOW, is_coloured)} {note}" for note in report.notes]
    lines += [f"{_paint('Also:', _RED, is_coloured)} {problem}" for problem in report.problems[1:]]
    word, colour = ("Yes:", _GREEN) if report.can_be_served else ("No:", _RED)
    return "\n".join([*lines, f"{_paint(word, colour, is_coloured)} {report.sentence}"])


def _model_rows(report: Report) -> Iterator[Row]:
    yield "Model", f"{report.name} ({report.origin})"
    model = report.model
    if model is None:
        return
    yield "Architecture", f"{model.architecture}, {_support(model)}"
    if model.num_parameters is not None and report.serves is not None:
        unread = "" if model.text_of is None else " alone; its vision and audio are not read"
        yield "Serves", report.serves + unread
    if model.computed_by is not None:
        yield "Computed by", model.computed_by
    stored = None if model.stored is None else model.stored.num_parameters
    if (num_parameters := model.num_parameters or stored) is not None:
        yield "Parameters", f"{num_parameters:,} ({format_count(num_parameters)})"
    yield "Quantization", model.quantization or "none"
    yield from _weight_rows(model)
    if model.kv_bytes_per_token is not None:
        yield "KV cache", _kv_text(model)
    if model.room is not None:
        yield from _room_rows(model, model.room)
    elif model.max_context_len is not None:
        yield "Context", f"{model.max_context_len:,} tokens that its positions reach"


def _support(model: ModelReport) -> str:
    return "supported" if model.is_supported else "not supported"


def _kv_text(model: ModelReport) -> str:
    """Return the bytes per token, by kind of layer if some keep the last tokens alone or a state."""
    if all(layers.kind == "full" for layers in model.kv_layers):
        return f"{format_size(model.kv_bytes_per_token or 0)} per token"
    parts = []
    for layers in model.kv_layers:
        if layers.kind == "state":
            parts.append(f"{format_size(layers.bytes_per_request or 0)} per request in {layers.num_layers} with states")
            continue
        text = f"{format_size(layers.bytes_per_token)} per token in {layers.num_layers} layers"
        if layers.window is not None and layers.bytes_per_request is not None:
            most = format_size(layers.bytes_per_request)
            text += f" that keep {layers.window:,} tokens, at most {most} per request"
        parts.append(text)
    return "; ".join(parts)


def _weight_rows(model: ModelReport) -> Iterator[Row]:
    stored = model.stored
    on_disk = "not here" if stored is None else f"{format_size(stored.num_bytes)} of {', '.join(stored.dtypes)} on disk"
    if model.weights is not None:
        kind = model.dtype if model.quantization is None else f"{model.quantization}, the rest {model.dtype}"
        yield "Weights", f"{format_size(model.weights)} in {kind}; {on_disk}"
    elif stored is not None:
        yield "Weights", on_disk


def _room_rows(model: ModelReport, room: Room) -> Iterator[Row]:
    reach = "all that its positions reach"
    if room.max_model_len != model.max_context_len:
        reach = f"of {model.max_context_len:,} that its positions reach"
    yield "Context", f"{room.max_model_len:,} tokens, {reach}"
    yield "Device", f"{room.device}: {format_size(room.total)}, of which {format_size(room.usable)} can be used"
    step = f", {format_size(room.step)} to compute a step" if room.step else ""
    yield (
        "Memory",
        (
            f"{format_size(model.weights or 0)} for weights{step},"
            f" {format_size(room.kv_cache)} of KV cache = {room.kv_cache_tokens:,} tokens"
        ),
    )
    for size, count in room.num_requests.items():
        at_once = " (as many as run at once)" if count == room.max_num_seqs else ""
        yield f"At {size:,}", f"{count:,} request{'s' * (count != 1)} of so many tokens{at_once}"


def _machine_rows(machine: Machine) -> Iterator[Row]:
    for gpu in machine.gpus:
        yield "GPU", f"{gpu.name}, {format_size(gpu.total)}, {format_size(gpu.free)} free, capability {gpu.capability}"
    if not machine.gpus:
        yield "GPU", f"none: {machine.why_no_cuda}"
    if machine.host_memory:
        taken = format_size(machine.host_memory)
        yield "Host memory", f"{taken} for blocks that leave the KV cache (--kv-host-memory off: none)"
    yield "Driver", machine.driver or "none"
    yield "torch", f"{machine.torch}, {f'CUDA {machine.cuda}' if machine.cuda else 'without CUDA'}"
    yield "Triton", machine.triton or "none"
    yield "flash-attn", machine.flash_attn or "none (optional)"
    yield "transformers", machine.transformers or "none"


def _host_rows(host: Host) -> Iterator[Row]:
    yield "Quire", host.quire
    yield "Python", f"{host.python} on {host.system}"
    headers = "" if host.has_python_headers else ", without Python.h"
    yield "C compiler", (host.c_compiler or "none") + headers
    yield "Model cache", f"{host.cache}, {format_size(host.cache_free)} free"
    yield "Port", f"{host.address} is {'free' if host.port_problem is None else 'not free'}"


def _paint(text: str, colour: str, is_coloured: bool) -> str:
    return f"{colour}{text}{_PLAIN}" if is_coloured else text
