"""Numbers with the units of Grafana that the dashboard uses, as Grafana would write them."""

import math

_SUFFIXES = {"reqps": " req/s", "cps": " /s", "none": ""}


def text_of(value: float, unit: str, decimals: int | None) -> str:
    """Return the value with its unit. decimals: as many as it takes if None. Raises KeyError for an unknown unit."""
    if math.isinf(value):
        return "more"
    if unit == "percentunit":
        return f"{_number(value * 100, decimals)} %"
    if unit == "s":
        return _seconds(value, decimals)
    if unit == "bytes":
        return _bytes(value)
    suffix = " " + unit.removeprefix("suffix: ") if unit.startswith("suffix: ") else _SUFFIXES[unit]
    return _number(value, decimals) + suffix


def _seconds(value: float, decimals: int | None) -> str:
    if value == 0:
        return "0 s"
    if value < 1:
        return f"{_number(value * 1000, 1 if decimals is not None else None)} ms"
    if value < 120:
        return f"{_number(value, decimals)} s"
    return f"{_number(value / 60, 1)} min"


def _bytes(value: float) -> str:
    for exponent, name in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if value >= 2**exponent:
            return f"{_number(value / 2**exponent, None)} {name}"
    return f"{value:.0f} B"


def _number(value: float, decimals: int | None) -> str:
    return f"{value:,.{decimals}f}" if decimals is not None else f"{value:,.4g}"
