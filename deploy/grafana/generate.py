"""Write the dashboards and the alerts, or compare: `python -m deploy.grafana.generate [--check]` in the root.

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
from deploy.grafana.panels import (
    Annotation,
    Json,
    Row,
    dashboard,
    datasource_variable,
    label_variable,
    link,
    query_variable,
    sibling_links,
    text_variable,
)
from deploy.grafana.rows_engines import GPU, HANDOVER, HANDOVER_QUERY
from deploy.grafana.rows_requests import LATENCY, OVERVIEW, THROUGHPUT, WORKLOAD
from deploy.grafana.rows_server import ADAPTERS, API_KEYS, API_SERVER, CACHING, PROCESSES, SATURATION

ROOT = Path(__file__).parents[2]
COMMAND = "python -m deploy.grafana.generate"
_OVERVIEW_ROWS: tuple[Row, ...] = (OVERVIEW, LATENCY, THROUGHPUT, ADAPTERS)
_DETAIL_ROWS: tuple[Row, ...] = (SATURATION, CACHING, WORKLOAD, API_KEYS, API_SERVER, PROCESSES, HANDOVER, GPU)
_BUILD = 'quire_build_info{instance=~"$instance"}'
_ANNOTATIONS = (
    Annotation("Daemon started", 'changes(quire_start_time_seconds{instance=~"$instance"}[1m]) > 0', "Started", "blue"),
    Annotation(
        "Engine restarted", 'increase(quire_engine_restarts_total{instance=~"$instance"}[1m]) > 0', "Engine", "red"
    ),
    Annotation(  # a version that was not there before on a server that was
        "Release",
        f"({_BUILD} unless on (instance, version) {_BUILD} offset 5m) and on (instance) ({_BUILD} offset 5m)",
        "Quire {{version}}",
        "purple",
    ),
)

_FOLDER = Path("deploy/grafana/dashboards")
_ALERTS = Path("deploy/prometheus/alerts.yml")
_RUNBOOK = Path("docs/how-to/alerts.md")


def quire_dashboards() -> dict[str, Json]:
    """Return the dashboards by the name of their file: what users feel, and how the server is."""
    variables = [
        datasource_variable(),
        label_variable("model_name", "Model", metric="quire_ready"),
        label_variable("instance", "Server", metric='quire_ready{model_name=~"$model_name"}'),
        text_variable(
            "docs", "Docs", "Where Quire's folder docs/ is on the web; the links Runbook and Docs begin with it."
        ),
    ]
    gpu = query_variable(
        "gpu",
        "GPU",
        query='quire_gpu_memory_total_bytes{model_name=~"$model_name",instance=~"$instance"} > 0',
        regex='/instance="([^"]+)"/',
    )
    handover = query_variable("handover", "Engines", query=HANDOVER_QUERY, regex='/instance="([^"]+)"/')
    links = [
        sibling_links("quire"),
        link("Alerts", "/alerting/list?search=Quire", "Quire's alert rules and whether they fire"),
        link("Runbook", "${docs:raw}/how-to/alerts.md", "What each alert means, and what to do"),
        link("Docs", "${docs:raw}/how-to/dashboards.md", "How to read the dashboards"),
    ]
    return {
        "quire": dashboard(
            uid="quire",
            title="Quire",
            description="An LLM server: what its users feel, and what it does.",
            rows=_OVERVIEW_ROWS,
            variables=variables,
            annotations=_ANNOTATIONS,
            links=links,
        ),
        "quire-details": dashboard(
            uid="quire-details",
            title="Quire details",
            description="An LLM server: what it runs short of, what its cache saves, and what runs it.",
            rows=_DETAIL_ROWS,
            variables=[*variables, gpu, handover],
            annotations=_ANNOTATIONS,
            links=links,
        ),
    }


def files() -> dict[Path, str]:
    """Return the text of the generated files, by path below the root."""
    alerts = yaml.safe_dump(rules(), sort_keys=False, width=10_000, allow_unicode=True)
    return {
        **{
            _FOLDER / f"{name}.json": json.dumps(made, indent=2, ensure_ascii=False) + "\n"
            for name, made in quire_dashboards().items()
        },
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
    for path in sorted((root / _FOLDER).glob("*.json")):
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
