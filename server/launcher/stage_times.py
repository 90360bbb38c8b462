"""How long each stage of a start took, so that a slow one shows. Imports nothing; the clock is the caller's."""

_LEAST_S = 0.05  # shorter stages are not worth a word


class StageTimes:
    """Begins in the stage `first`; enter() each stage once it begins, also again."""

    def __init__(self, first: str, now: float) -> None:
        self._name = first
        self._since_s = now
        self._seconds = {first: 0.0}

    def enter(self, name: str, now: float) -> None:
        """End the stage that runs and begin another, or go on with the same."""
        self._seconds[self._name] += now - self._since_s
        self._seconds.setdefault(name, 0.0)
        self._name, self._since_s = name, now

    def text(self, now: float) -> str:
        """Return the stages in order, the one that runs as if it ended now: "process 0.3 s, imports 2.7 s"."""
        self.enter(self._name, now)
        return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self._seconds.items() if seconds >= _LEAST_S)
