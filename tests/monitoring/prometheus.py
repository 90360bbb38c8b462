"""A real Prometheus of its own beside one daemon, asked like Grafana asks it. Needs Debian's package `prometheus`."""

import contextlib
import math
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

import httpx
import yaml

from tests.support.daemon import ROOT, wait_for

ALERTS = ROOT / "deploy/prometheus/alerts.yml"
IS_INSTALLED = shutil.which("prometheus") is not None and shutil.which("promtool") is not None

_SCRAPE_INTERVAL_S = 1
# as Grafana would: four scrapes at least, and some more, since scrapes come late on a busy machine
_RATE_INTERVAL_S = 10


class Series(NamedTuple):
    """One series of an answer; values without NaN."""

    labels: dict[str, str]
    times_s: list[float]
    values: list[float]


class Prometheus:
    """Scrapes `target` (host:port) every second, and names it as in a compose file. Leaving the context ends it."""

    def __init__(self, target: str, *, folder: Path) -> None:
        self._folder = folder
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._started_s = time.time()
        config = {
            "global": {"scrape_interval": f"{_SCRAPE_INTERVAL_S}s", "evaluation_interval": "1s"},
            "rule_files": [str(ALERTS)],
            "scrape_configs": [
                {"job_name": "quire", "static_configs": [{"targets": [target], "labels": {"instance": "quire:8000"}}]}
            ],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        with (folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{port}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def __enter__(self) -> "Prometheus":
        wait_for(self._is_scraping, timeout_s=30, what=f"a first scrape, see {self._folder / 'prometheus.log'}")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise

    def names(self) -> set[str]:
        """Return the names of everything it has seen."""
        return set(self._get("/api/v1/label/__name__/values", {}))

    def rule_groups(self) -> list[dict]:
        """Return the rules as it evaluates them."""
        return self._get("/api/v1/rules", {})["groups"]

    def ask(
        self, expr: str, *, start_s: float | None = None, end_s: float | None = None, step_s: float = 1.0
    ) -> list[Series]:
        """Run a dashboard's query over a time, by default the whole; series without any number are left out."""
        end_s = time.time() if end_s is None else end_s
        start_s = self._started_s if start_s is None else start_s
        for name, value in {
            "$__rate_interval": f"{_RATE_INTERVAL_S}s",
            "$__range": f"{math.ceil(end_s - start_s)}s",
            "$model_name": ".*",
            "$instance": ".*",
            "$gpu": ".*",
            "$handover": ".*",
        }.items():
            expr = expr.replace(name, value)
        assert "$" not in expr, expr
        parameters = {"query": expr, "start": str(start_s), "end": str(end_s), "step": str(step_s)}
        found = []
        for series in self._get("/api/v1/query_range", parameters)["result"]:
            points = [(at_s, float(value)) for at_s, value in series["values"] if math.isfinite(float(value))]
            if points:
                found.append(Series(series["metric"], [at for at, _ in points], [value for _, value in points]))
        return found

    def _get(self, path: str, parameters: dict[str, str]) -> dict:
        answer = httpx.get(self.url + path, params=parameters, timeout=30)
        assert answer.status_code == 200, f"{parameters}: {answer.text}"
        return answer.json()["data"]

    def _is_scraping(self) -> bool:
        assert self._process.poll() is None, (self._folder / "prometheus.log").read_text()
        with contextlib.suppress(httpx.TransportError, AssertionError, KeyError):
            return any(series.values[-1] == 1 for series in self.ask('up{job="quire"}'))
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
