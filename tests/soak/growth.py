"""What the processes of a server keep: samples of memory and open files over hours, and the slope through them."""

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.daemon import resident_bytes, role_of

_WARM_UP_S = 300.0  # torch and malloc take what they keep in the first minutes
_MIB = 1 << 20


@dataclass
class Series:
    """The samples of one process. Each sample: seconds since the start, resident bytes, open files."""

    role: str
    samples: list[tuple[float, int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Growth:
    """What became of one process. slope_mib_h: of the line through the samples after the warm-up."""

    process: str
    first_mib: float  # after the warm-up
    last_mib: float
    most_mib: float
    slope_mib_h: float
    grown_mib: float  # along that line
    first_files: int
    last_files: int


class Sampler:
    """Looks at processes from outside, through /proc."""

    def __init__(self) -> None:
        self.series: dict[int, Series] = {}
        self._start_s = time.monotonic()

    def sample(self, pids: Iterable[int]) -> None:
        """Take a sample of each process."""
        for pid in pids:
            if (role := role_of(pid)) and (size := resident_bytes(pid)):
                at_s = time.monotonic() - self._start_s
                self.series.setdefault(pid, Series(role)).samples.append((at_s, size, _num_files(pid)))

    def growths(self) -> list[Growth]:
        """Return each process's growth, those that lived to the end and long enough for a line."""
        end_s = max(samples[-1][0] for samples in (series.samples for series in self.series.values()))
        found = []
        for pid, series in self.series.items():
            fitted = [sample for sample in series.samples if sample[0] >= warm_up_s(end_s)]
            if len(fitted) >= 3 and fitted[-1][0] > end_s * 0.9:
                found.append(_growth(f"{series.role} {pid}", series, fitted))
        return found


def warm_up_s(seconds: float) -> float:
    """Return how much of a run is not fitted: a quarter, at least five minutes, at most half."""
    return max(seconds / 4, min(_WARM_UP_S, seconds / 2))


def slope(points: list[tuple[float, float]]) -> float:
    """Return the slope of the line through points, by least squares."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


def faults(growths: Iterable[Growth], *, most_mib_h: float, noise_mib: float) -> list[str]:
    """Return a sentence for each process that grows faster than allowed.

    noise_mib: growth along the line that proves nothing: in minutes a single arena of malloc makes a steep slope.
    """
    found = []
    for growth in growths:
        if growth.slope_mib_h > most_mib_h and growth.grown_mib > noise_mib:
            found.append(
                f"{growth.process} grows by {growth.slope_mib_h:.1f} MiB/h ({growth.grown_mib:.1f} MiB in this time), "
                f"the limit is {most_mib_h:g}"
            )
        if growth.last_files > growth.first_files + 32:
            found.append(f"{growth.process} had {growth.first_files} files open, and at the end {growth.last_files}")
    return found


def _growth(process: str, series: Series, fitted: list[tuple[float, int, int]]) -> Growth:
    per_s = slope([(at_s, size / _MIB) for at_s, size, _ in fitted])
    return Growth(
        process=process,
        first_mib=round(fitted[0][1] / _MIB, 1),
        last_mib=round(fitted[-1][1] / _MIB, 1),
        most_mib=round(max(size for _, size, _ in series.samples) / _MIB, 1),
        slope_mib_h=round(per_s * 3600, 2),
        grown_mib=round(per_s * (fitted[-1][0] - fitted[0][0]), 2),
        first_files=fitted[0][2],
        last_files=fitted[-1][2],
    )


def _num_files(pid: int) -> int:
    try:
        return len(os.listdir(Path(f"/proc/{pid}/fd")))
    except (FileNotFoundError, ProcessLookupError):
        return 0
