"""Tiers: which tests are left to make test-full, and how many examples hypothesis tries.

A test marked `full` runs in make test-full alone; one of tests/unit marked `slow` runs in make test, not in make
test-unit. A test marked `table` has a long table of parameters: make test runs so many of its rows that each value of
each parameter is in one of them, or `most` of those, make test-full the rest.
Hypothesis tries a quarter of the examples in make test, and all of them in make test-full (`-m "full or hypothesis"`).
"""

import contextlib
import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

# a shell's background jobs and nohup ignore these, and so would the servers that tests interrupt
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

if "PYTEST_XDIST_WORKER" in os.environ:
    # one thread suits tiny models, and those of several processes would wait for each other on cores that they share;
    # torch reads it when it is imported
    os.environ.setdefault("OMP_NUM_THREADS", "1")

with contextlib.suppress(ImportError):  # some environments of the clients are without it
    from hypothesis import HealthCheck, settings

    # nothing is timed here: on a busy machine a slow example is no fault
    UNTIMED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile("full", max_examples=100, **UNTIMED)
    settings.register_profile("quick", max_examples=25, **UNTIMED)
    settings.load_profile("quick")  # --hypothesis-profile, which is read later, wins


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the folder of GPU tests, which has thousands, where -m leaves out all of them."""
    is_left = collection_path == Path(__file__).parent / "gpu" and "not gpu" in config.option.markexpr
    return is_left or None


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what each table has beyond the rows that show every value."""
    tables: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        is_full = item.get_closest_marker("full") is not None  # a row that make test has not to choose from
        if item.get_closest_marker("table") and hasattr(item, "callspec") and not is_full:
            tables.setdefault((str(item.path), item.originalname), []).append(item)
    for rows in tables.values():
        kept = sorted(covering([row.callspec._idlist for row in rows]))  # one for each parametrize
        most = rows[0].get_closest_marker("table").kwargs.get("most", len(kept))
        if len(kept) > most:
            kept = [kept[i * (len(kept) - 1) // max(most - 1, 1)] for i in range(most)]  # the first, the last, others
        for place, row in enumerate(rows):
            if place not in kept:
                row.add_marker("full")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Let the garbage collector rest: imports leave much that stays. What is there by the end no later walk visits.

    The little of it that is garbage stays as well: to find it takes a second.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def covering(rows: list[list[str]]) -> set[int]:
    """Return the places of a few rows that have every value of every column. Greedy, the first of equals."""
    left = {place: set(enumerate(row)) for place, row in enumerate(rows)}
    missing = set().union(*left.values())
    kept = set()
    while missing:
        best = max(left, key=lambda place: len(left[place] & missing))
        missing -= left.pop(best)
        kept.add(best)
    return kept
