"""How long the engine was gone, and what /health says of it, on a clock of the tests' own."""

from server.launcher.engine_health import EngineDowntime


class Engines:
    """One engine after the other, the first of them ready, and what is said of each end."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.downtime = EngineDowntime(lambda: self.now_s)
        self.downtime.end()

    def end(self, *, after_s: float, hung_s: float = 0.0, was_killed: bool = False) -> str:
        """End the one there is, which may never have been ready; return the fault."""
        self.now_s += after_s + hung_s
        self.downtime.begin(hung_s=hung_s, was_killed=was_killed)
        return self.downtime.fault

    def replace(self, *, after_s: float) -> str:
        """Get the next one ready; return the fault."""
        self.now_s += after_s
        self.downtime.end()
        return self.downtime.fault


def test_an_outage_is_as_long_as_from_the_first_end_to_the_next_readiness() -> None:
    engines = Engines()
    assert (engines.downtime.last_s, engines.downtime.fault) == (0.0, "")
    for _ in range(3):
        engines.end(after_s=4.0)
    assert engines.replace(after_s=1.0) == ""
    assert engines.downtime.last_s == 9.0


def test_an_engine_is_being_restarted_until_restart_after_restart_has_failed() -> None:
    engines = Engines()
    for _ in range(2):  # a minute of service, and it counts from the beginning
        faults = [engines.end(after_s=60.0), *(engines.end(after_s=90.0) for _ in range(6))]
        assert faults == ["restarting"] * 5 + ["dead"] * 2
        assert engines.replace(after_s=1.0) == ""


def test_engines_that_get_ready_and_die_soon_are_restarts_that_failed() -> None:
    engines = Engines()
    faults = []
    for _ in range(7):
        faults.append(engines.end(after_s=59.0))
        assert engines.replace(after_s=300.0) == ""  # it serves, whatever was before
    assert faults == ["restarting"] * 5 + ["dead"] * 2
    assert engines.end(after_s=61.0) == "restarting"


def test_how_long_an_engine_served_is_without_its_load() -> None:
    engines = Engines()
    engines.end(after_s=70.0)
    assert engines.downtime.served_s == 70.0
    engines.end(after_s=80.0)  # while it loaded
    assert engines.downtime.served_s == 0.0
    engines.replace(after_s=90.0)
    engines.end(after_s=5.0)
    assert engines.downtime.served_s == 5.0


def test_engines_that_get_ready_and_hang_at_once_are_restarts_that_failed() -> None:
    engines = Engines()
    faults = []
    for _ in range(6):
        assert engines.downtime.stall_fault == "stalled"
        faults.append(engines.end(after_s=1.0, hung_s=300.0))
        assert engines.downtime.served_s == 1.0
        assert engines.replace(after_s=5.0) == ""
    assert faults == ["restarting"] * 5 + ["dead"]
    assert engines.downtime.stall_fault == "dead"  # also while the next one hangs
    assert engines.end(after_s=61.0, hung_s=300.0) == "restarting"  # it had served


def test_a_kill_from_outside_is_no_failed_restart_of_an_engine_that_served() -> None:
    engines = Engines()
    for _ in range(12):
        assert engines.end(after_s=5.0, was_killed=True) == "restarting"
        engines.replace(after_s=1.0)
    faults = [engines.end(after_s=5.0, was_killed=True) for _ in range(7)]  # all but the first while they load
    assert faults == ["restarting"] * 5 + ["dead"] * 2
