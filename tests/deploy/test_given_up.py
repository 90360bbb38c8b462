"""What /health says of a daemon whose engine does not come back, which takes five back-offs to know."""

from pathlib import Path

from tests.integration.conftest import needs_proc
from tests.integration.daemon import wait_for
from tests.integration.test_launch import stub

pytestmark = needs_proc


def test_an_engine_that_does_not_come_back_is_dead_and_is_still_tried(tmp_path: Path) -> None:
    with stub(tmp_path, "doom") as daemon:
        wait_for(lambda: "delay_s=8 " in daemon.log, timeout_s=40, what="the fifth death in a row")
        assert daemon.get("/health").status_code == 200
        wait_for(lambda: daemon.get("/health").status_code == 503, timeout_s=40, what="given up")
        assert daemon.get("/health").json()["status"] == "engine dead"
        assert "delay_s=16 " in daemon.log
        assert daemon.process.poll() is None
