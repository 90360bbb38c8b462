"""`quire doctor`: reads the model's configuration, asks the engine how much fits, and writes a report. Never torch.

The engine's part runs in a separate process (server/config/fit_check.py), because it imports torch.
"""

import tempfile
from pathlib import Path
from typing import NamedTuple

import msgspec

from engine.interface.config import LaunchConfig
from engine.interface.errors import StartupError
from engine.interface.fit_report import Ask, Diagnosis, Machine, ModelReport
from engine.interface.units import format_size
from server.commands.doctor.checks import FoundModel, Host, check_files, find_model, look_at_host
from server.config.fit_check import ask_engine
from server.text.embedding_model import load_embedding_model


class Question(NamedTuple):
    """The question of `quire doctor`. model None: check only the machine."""

    model: str | None
    revision: str | None
    pooling: str
    ask: Ask
    address: LaunchConfig


class Report(msgspec.Struct, kw_only=True):
    """The answer of `quire doctor`. `sentence` is its summary."""

    can_be_served: bool
    sentence: str
    problems: list[str]  # why it cannot be served
    notes: list[str]  # what does not stand in the way
    name: str | None = None  # of the model
    origin: str | None = None
    serves: str | None = None
    model: ModelReport | None = None
    machine: Machine | None
    host: Host


def look(question: Question) -> Report:
    """Check machine and model. Raises StartupError for wrong usage; other faults are in the report."""
    found: FoundModel | None = None
    problems: list[str] = []
    notes: list[str] = []
    serves: str | None = None
    host = look_at_host(question.address)
    with tempfile.TemporaryDirectory(prefix="quire-doctor-") as scratch:
        try:
            if question.model is not None:
                found = find_model(question.model, revision=question.revision, scratch=Path(scratch))
                serves = _serves(found.folder, question.pooling)
                notes += check_files(found)
        except StartupError as error:
            if error.exit_code == 2:
                raise
            problems.append(error.message)
        ask = msgspec.structs.replace(question.ask, folder=None if found is None else str(found.folder))
        diagnosis = _ask_engine(ask, problems)
    report = Report(
        can_be_served=False,
        sentence="",
        problems=problems,
        notes=notes,
        name=None if found is None else found.name,
        origin=None if found is None else found.origin,
        serves=serves,
        model=None if diagnosis is None else diagnosis.model,
        machine=None if diagnosis is None else diagnosis.machine,
        host=host,
    )
    _judge(report, needs_download=found is not None and found.needs_download)
    return report


def _serves(folder: Path, pooling: str) -> str:
    """Return the tasks that the model serves: text, embeddings or both."""
    embedding = load_embedding_model(folder, pooling=pooling)
    if embedding is None:
        return "text"
    of = {"last": "of the last token", "mean": "the mean of all tokens"}[embedding.pooling]
    return f"embeddings ({of})"


def _ask_engine(ask: Ask, problems: list[str]) -> Diagnosis | None:
    """Run the engine's part; None, and a problem, if it does not come to its end."""
    try:
        return ask_engine(ask)
    except StartupError as error:
        problems.append(error.message)
        return None


def _judge(report: Report, *, needs_download: bool) -> None:
    """Decide the verdict from all findings."""
    problems, host, model = report.problems, report.host, report.model
    if model is not None and model.problem is not None:
        problems.append(model.problem)
    if model is not None and model.has_lm_head and report.serves is not None and report.serves != "text":
        report.serves = f"text, {report.serves}"
    if host.packages_problem is not None:
        problems.append(host.packages_problem)
    if report.machine is not None and report.machine.gpus and host.c_compiler is None:
        problems.append("Triton compiles with a C compiler, and there is none: install gcc, or name one in CC.")
    if needs_download:
        _judge_disk(report)
    _add_notes(report)
    report.can_be_served = not problems
    if problems:
        report.sentence = problems[0]
    elif report.name is None:
        report.sentence = "This machine is ready; name a MODEL to see what fits."
    else:
        where = "here" if model is None or model.room is None else f"on {_lower_first(model.room.device)}"
        report.sentence = f"{report.name} can be served {where}."


def _judge_disk(report: Report) -> None:
    model, free = report.model, report.host.cache_free
    if model is None or model.checkpoint_bytes is None:
        return
    needed = model.checkpoint_bytes
    if needed > free:
        report.problems.append(
            f"Its weights take about {format_size(needed)} to download, and {report.host.cache} has"
            f" {format_size(free)} free."
        )


def _add_notes(report: Report) -> None:
    host, machine, model = report.host, report.machine, report.model
    if host.port_problem is not None:
        report.notes.append(host.port_problem)
    if machine is not None and machine.gpus:
        if machine.triton is None:
            report.notes.append("Without the package triton every kernel falls back to torch, several times slower.")
        elif not host.has_python_headers:
            report.notes.append("Python.h is missing, which Triton may compile against: install python3-dev.")
    if model is None or model.stored is None or model.num_parameters is None or model.quantization:
        return
    if model.stored.num_parameters != model.num_parameters:
        report.notes.append(
            f"The files hold {model.stored.num_parameters:,} parameters, and config.json means"
            f" {model.num_parameters:,}: loading may fail, naming the tensors."
        )


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:] if text.startswith(("A ", "Each ", "This ", "The ")) else text
