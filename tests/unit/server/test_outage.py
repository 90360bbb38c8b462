"""How long the engine was gone, and what /health says of it, on a clock of the tests' own."""

from server.outage import Outage


def test_an_outage_is_as_long_as_from_the_first_end_to_the_next_readiness() -> None:
    times_s = [10.0, 18.0]
    outage = Outage(lambda: times_s.pop(0))
    outage.end()  # the first start
    assert (outage.last_s, outage.fault) == (0.0, "")
    for _ in range(3):
        outage.begin()
    outage.end()
    assert (outage.last_s, outage.fault) == (8.0, "")


def test_an_engine_is_being_restarted_until_restart_after_restart_has_failed() -> None:
    outage = Outage()
    for _ in range(2):  # each time it was ready counts from the beginning
        faults = []
        for _ in range(7):
            outage.begin()
            faults.append(outage.fault)
        assert faults == ["restarting"] * 5 + ["dead"] * 2
        outage.end()
        assert outage.fault == ""
