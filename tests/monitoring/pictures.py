"""Draw the dashboard: `python -m tests.monitoring.pictures docs/images`, from a daemon under three minutes of load.

The load grows from a few readers to more than the KV pool holds, with one burst, and shrinks again.
"""

import json
import re
import sys
import tempfile
import time
from pathlib import Path

from deploy.grafana import check
from deploy.grafana.panels import Json
from tests.monitoring.draw import draw_row
from tests.monitoring.load import FLAGS, burst, running
from tests.monitoring.prometheus import Prometheus
from tests.support.daemon import ROOT, Daemon

_PHASES = ((3, 40), (8, 45), (16, 60), (3, 35))  # readers, seconds
_DASHBOARDS = ROOT / "deploy/grafana/dashboards"
_NOT_DRAWN = {"LoRA adapters", "GPU of $gpu", "Prefill and decode engines of $handover"}  # the demo on a CPU has none


def rows() -> dict[str, list[Json]]:
    """Return the panels of each row, by its title."""
    found: dict[str, list[Json]] = {}
    for path in sorted(_DASHBOARDS.glob("*.json"), key=lambda path: len(path.name)):
        for panel in check.every_panel(json.loads(path.read_text())):
            if panel["type"] == "row":
                found[panel["title"]] = panels = []
            else:
                panels.append(panel)
    return {title: panels for title, panels in found.items() if title not in _NOT_DRAWN}


def draw(folder: Path, prometheus: Prometheus, *, start_s: float, end_s: float) -> None:
    """Write a picture per row."""
    for title, panels in rows().items():
        slug = re.sub(r"\W+", "-", title.lower())
        draw_row(
            folder / f"dashboard-{slug}.png",
            title,
            panels,
            lambda expr: prometheus.ask(expr, start_s=start_s, end_s=end_s, step_s=2.0),
        )


def main() -> int:
    """Write dashboard-*.png into a folder."""
    with tempfile.TemporaryDirectory() as name, Daemon(*FLAGS, folder=Path(name)) as daemon:
        target = daemon.wait_ready().base_url.removeprefix("http://")
        with Prometheus(target, folder=Path(name)) as prometheus:
            start_s = time.time()
            for num_readers, seconds in _PHASES:
                with running(daemon.base_url, num_readers=num_readers):
                    time.sleep(seconds / 2)
                    if num_readers == max(readers for readers, _ in _PHASES):
                        burst(daemon.base_url)
                    time.sleep(seconds / 2)
                    end_s = time.time()  # before the last readers have ended
            draw(Path(sys.argv[1]), prometheus, start_s=start_s, end_s=end_s)
    return 0


if __name__ == "__main__":
    sys.exit(main())
