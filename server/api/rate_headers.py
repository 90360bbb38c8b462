"""The headers x-ratelimit-*, in OpenAI's form: a key's limits a minute, what is left, and when all is left again."""

from engine.interface.tenant import Rates

RATE_HEADERS = [
    f"x-ratelimit-{what}-{unit}" for unit in ("requests", "tokens") for what in ("limit", "remaining", "reset")
]


def rate_headers(rates: Rates | None) -> dict[str, str]:
    """Return the headers of an answer; none for a key without limits a minute."""
    headers: dict[str, str] = {}
    if rates is not None:
        for unit, rate in (("requests", rates.requests), ("tokens", rates.tokens)):
            if rate is not None:
                headers[f"x-ratelimit-limit-{unit}"] = str(rate.limit)
                headers[f"x-ratelimit-remaining-{unit}"] = str(rate.remaining)
                headers[f"x-ratelimit-reset-{unit}"] = duration(rate.reset_s)
    return headers


def duration(seconds: float) -> str:
    """Return a duration as OpenAI writes it: 20ms, 1.5s, 6m0s."""
    milliseconds = round(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms" if milliseconds else "0s"
    minutes, rest = divmod(milliseconds, 60_000)
    return (f"{minutes}m" if minutes else "") + f"{rest / 1000:g}s"
