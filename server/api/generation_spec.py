"""GenerationSpec: a validated request, and what validation takes from outside. Imports server only."""

from typing import NamedTuple


class Moment(NamedTuple):
    """What a spec takes from outside: arrival, the server's deadline, a drawn seed, and whose request it is."""

    arrival_s: float
    timeout_s: float | None
    seed: int
    key_hash: str = ""

    def timeout_of(self, timeout_s: float | None) -> float | None:
        """Return the seconds that a request with its own `timeout_s` has from its arrival on."""
        return min((seconds for seconds in (timeout_s, self.timeout_s) if seconds is not None), default=None)
