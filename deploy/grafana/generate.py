"""Write the dashboard and the alerts, or compare: `python -m deploy.grafana.generate [--check]` in the root.

The generated files are committed, so that monitoring needs no Python code of Quire.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from deploy.grafana.alerts import rules
from deploy.grafana.check import dashboard_faults, exported, rule_faults
from deploy.grafana.panels import Json, Row, dashboard, datasource_variable, label_variable
from deploy.grafana.rows_requests import LATENCY, OVERVIEW, THROUGHPUT, WORKLOAD
from deploy.grafana.rows_server import API_KEYS, API_SERVER, CACHING, PROCESSES, SATURATION

ROOT = Path(__file__).parents[2]
COMMAND = "python -m deploy.grafana.generate"
ROWS: tuple[Row, ...] = (OVERVIEW, LATENCY, THROUGHPUT, SATURATION, CACHING, WORKLOAD, API_KEYS, API_SERVER, PROCESSES)

_DASHBOARD = Path("deploy/grafana/dashboards/quire.json")
_ALERTS = Path("deploy/prometheus/alerts.yml")
_RUNBOOK = Path("docs/how-to/alerts.md")


def quire_dashboard() -> Json:
    """Return the dashboard."""
    return dashboard(
        uid="quire",
        title="Quire",
        description="An LLM server: what its users feel, what it does, and what it runs short of.",
        rows=ROWS,
        variables=[
            datasource_variable(),
            label_variable("model_name", "Model", metric="quire_ready"),
            label_variable("instance", "Server", metric='quire_ready{model_name=~"$model_name"}'),
        ],
    )


def files() -> dict[Path, str]:
    """Return the text of the generated files, by path below the root."""
    alerts = yaml.safe_dump(rules(), sort_keys=False, width=10_000, allow_unicode=True)
    return {
        _DASHBOARD: json.dumps(quire_dashboard(), indent=2, ensure_ascii=False) + "\n",
        _ALERTS: f"# Written by {COMMAND} from deploy/grafana/alerts.py\n{alerts}",
    }


def faults(root: Path = ROOT) -> Iterator[str]:
    """Yield a sentence for each fault of the files below `root`, stale ones included."""
    known = exported()
    for path, text in files().items():
        written = root / path
        if not written.is_file():
            yield f"{path} is missing: run {COMMAND}."
        elif written.read_text(encoding="utf-8") != text:
            yield f"{path} is stale: run {COMMAND}."
    for path in sorted((root / _DASHBOARD).parent.glob("*.json")):
        yield from dashboard_faults(json.loads(path.read_text(encoding="utf-8")), known)
    if (root / _ALERTS).is_file():
        written_rules = yaml.safe_load((root / _ALERTS).read_text(encoding="utf-8"))
        yield from rule_faults(written_rules, known, (root / _RUNBOOK).read_text(encoding="utf-8"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if something is stale or wrong")
    if not parser.parse_args(arguments).check:
        for path, text in files().items():
            (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
            (ROOT / path).write_text(text, encoding="utf-8")
    found = list(faults())
    for fault in found:
        print(fault, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
