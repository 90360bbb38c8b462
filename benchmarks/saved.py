"""Reads reports back from JSON, checks their shape, and labels them. Never imports torch.

A file of another format ends in one sentence. Fields that an older version did not save are None or empty; the code
that needs them reports it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from benchmarks.histogram import Histogram
from benchmarks.report import BenchError, Report, load_json

MAX_SOURCES = 6  # as many as a plot can distinguish
_MAX_LABEL = 60

_MAX_CELLS = 4096

_Name = Annotated[str, msgspec.Meta(max_length=200)]
_Number = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class Load(msgspec.Struct, frozen=True):
    """The settings of a load. rate_per_s: 0 in a closed loop of `concurrency`."""

    model: _Name
    concurrency: Annotated[int, msgspec.Meta(ge=1, le=2**24)]
    rate_per_s: _Number
    input_len: _Count
    output_len: _Count
    workload: _Name = ""  # its longest prompt and answer are input_len and output_len


class ServeRun(msgspec.Struct, frozen=True):
    """One load of `quire bench serve`; statistics are None without completed requests."""

    load: Load
    num_completed: _Count
    num_failed: _Count
    request_throughput_per_s: _Number
    output_throughput_tok_per_s: _Number
    date: str = ""
    request_goodput_per_s: _Number | None = None
    median_ttft_ms: _Number | None = None
    p99_ttft_ms: _Number | None = None
    median_tpot_ms: _Number | None = None
    p99_tpot_ms: _Number | None = None
    median_itl_ms: _Number | None = None
    p99_itl_ms: _Number | None = None
    median_e2el_ms: _Number | None = None
    p99_e2el_ms: _Number | None = None
    histograms: dict[str, Histogram] | None = None
    warnings: list[str] = []

    @property
    def name(self) -> str:
        """Name that distinguishes the load within a sweep."""
        return run_name({"concurrency": self.load.concurrency, "rate_per_s": self.load.rate_per_s})

    def statistic(self, name: str) -> float | None:
        """Return median_ttft_ms and its like by name."""
        return msgspec.structs.asdict(self)[name]


class OfflineResult(msgspec.Struct, frozen=True):
    """One workload of `quire bench offline`."""

    num_requests: _Count
    num_input_tokens: _Count
    num_output_tokens: _Count
    seconds: _Number
    input_tok_per_s: _Number
    output_tok_per_s: _Number
    ms_per_step: _Number


class KernelResult(msgspec.Struct, frozen=True):
    """One cell of `quire bench kernels`; `us` is None where nothing was timed."""

    part: _Name
    case: _Name
    implementation: _Name
    num_rows: _Count
    num_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    us: _Number | None
    memory_mib: _Number | None = None


class Source(NamedTuple):
    """A report and its label. The kind of benchmark fills one of runs, workloads and cells."""

    label: str
    kind: str
    report: Report
    runs: list[ServeRun]
    workloads: dict[str, OfflineResult]
    cells: list[KernelResult]


def read_sources(paths: Sequence[str]) -> list[Source]:
    """Read files that --json wrote, all of one kind. Raises BenchError."""
    if len(paths) > MAX_SOURCES:
        raise BenchError(f"{len(paths)} files are too many to tell apart: the limit is {MAX_SOURCES}.", exit_code=2)
    sources = [to_source(load_json(path), name, path) for path, name in zip(paths, _labels(paths), strict=True)]
    for source, path in zip(sources, paths, strict=True):
        if source.kind != sources[0].kind:
            raise BenchError(
                f"{path} is of quire bench {source.kind}, and {paths[0]} of {sources[0].kind}: a report has one kind.",
                exit_code=2,
            )
    return sources


def to_source(report: object, label: str, path: str) -> Source:
    """Check the shape of a report. path: its name in errors. Raises BenchError."""
    whole: Report = report if isinstance(report, dict) else {}
    if "online" in whole and "benchmark" not in whole:
        whole = {**whole, "benchmark": "serve", "sweep": _values(whole["online"])}  # of benchmarks.online
    kind = whole.get("benchmark")
    try:
        if kind == "serve":
            runs = whole.get("sweep", [whole])
            return Source(label, kind, whole, msgspec.convert(runs, Annotated[list[ServeRun], _SOME]), {}, [])
        if kind == "offline":
            workloads = msgspec.convert(whole["workloads"], Annotated[dict[_Name, OfflineResult], _SOME])
            return Source(label, kind, whole, [], workloads, [])
        if kind == "kernels":
            return Source(label, kind, whole, [], {}, msgspec.convert(whole["results"], _Cells))
    except (msgspec.ValidationError, KeyError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error).rstrip(".")
        raise BenchError(f"{path} is not a whole report of quire bench {kind}: {reason}.", exit_code=2) from error
    raise BenchError(f"{path} is not a report of quire bench offline, serve or kernels.", exit_code=2)


def run_name(load: Report) -> str:
    """Return a load's name by the varied setting: c8, or 2.5/s for arrivals at a rate."""
    return f"{load['rate_per_s']:g}/s" if load["rate_per_s"] else f"c{load['concurrency']}"


_SOME = msgspec.Meta(min_length=1, max_length=64)
_Cells = Annotated[list[KernelResult], msgspec.Meta(min_length=1, max_length=_MAX_CELLS)]


def _values(runs: object) -> object:
    return list(runs.values()) if isinstance(runs, dict) else runs


def _labels(paths: Sequence[str]) -> list[str]:
    """Return file names without folder and suffix, with a number if they are equal."""
    stems = [Path(path).stem[:_MAX_LABEL] for path in paths]
    return [stem if stems.count(stem) == 1 else f"{stem} ({i})" for i, stem in enumerate(stems, 1)]
