"""What /health says of a daemon whose engine does not come back, which takes five back-offs to know."""

from pathlib import Path

import pytest

from tests.integration.conftest import needs_proc
from tests.integration.test_launch import stub
from tests.support.daemon import wait_for

pytestmark = needs_proc


@pytest.mark.parametrize("mode", ["doom", "flaky"])  # none of the others gets ready; each does, and dies at once
def test_an_engine_that_does_not_come_back_is_dead_and_is_still_tried(tmp_path: Path, mode: str) -> None:
    with stub(tmp_path, mode) as daemon:
        wait_for(lambda: "delay_s=8 " in daemon.log, timeout_s=40, what="the fifth death in a row")
        assert daemon.get("/health").status_code == 200
        wait_for(lambda: daemon.get("/health").status_code == 503, timeout_s=40, what="given up")
        assert daemon.get("/health").json()["status"] == "engine dead"
        assert "delay_s=16 " in daemon.log
        assert daemon.process.poll() is None
        (tmp_path / "model" / "mode").write_text("stay")
        wait_for(lambda: daemon.get("/health").status_code == 200, timeout_s=60, what="one that stays")
