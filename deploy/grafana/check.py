"""Checks the dashboard and the alerts against the exported metrics, and reports faults as sentences."""

import re
from collections.abc import Iterator
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from deploy.grafana.alerts import RUNBOOK
from engine.interface.metrics import METRICS, MetricsDelta
from server.launcher.metrics_registry import MetricsRegistry

Json = dict[str, Any]
Exported = dict[str, frozenset[str]]  # name of a sample → its labels

_OF_PROMETHEUS: Exported = {
    "up": frozenset(),
    "scrape_duration_seconds": frozenset(),
    "ALERTS": frozenset({"alertname", "alertstate", "severity"}),
}
_TARGET_LABELS = frozenset({"job", "instance"})
_KEYWORDS = frozenset(
    {"and", "or", "unless", "by", "without", "on", "ignoring", "group_left", "group_right", "bool", "offset"}
)
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_RANGE = re.compile(r"\[[^\]]*\]")
_GROUPING = re.compile(r"\b(by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_SELECTOR = re.compile(r"(?<![\w$:])([a-zA-Z_:][\w:]*)\s*(?:\{([^}]*)\})?")
_MATCHER = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
_RATE = re.compile(r"\b(i?rate)\s*\([^\[]*\[([^\]]*)\]")


def exported() -> Exported:
    """Return every sample of a ready server's metrics page, rendered by the real registry."""
    page = MetricsRegistry(model_name="m", version="0")
    page.set_cache_config(block_size=1, num_blocks=1)
    routed = {(name, *metric.labels): 0.0 for name, metric in METRICS.items() if isinstance(metric.label, tuple)}
    page.merge(MetricsDelta(counters=routed))
    return names(page.render().decode())


def names(page: str) -> Exported:
    """Return the samples of a page and their labels."""
    return {
        sample.name: frozenset(sample.labels)
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def queried(expr: str) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield the metrics of a query, each with the labels in its selector."""
    text = _RANGE.sub(" ", _GROUPING.sub(" ", _STRING.sub('""', expr)))
    for name, matchers in _SELECTOR.findall(_without_functions(text)):
        if name not in _KEYWORDS:
            yield name, frozenset(_MATCHER.findall(matchers))


def every_panel(dashboard: Json) -> Iterator[Json]:
    """Yield the rows and panels of a dashboard, those in collapsed rows too."""
    for panel in dashboard["panels"]:
        yield panel
        yield from panel.get("panels", ())


def dashboard_faults(dashboard: Json, known: Exported) -> Iterator[str]:
    """Yield a sentence for each fault of a dashboard."""
    for note in dashboard["annotations"]["list"]:
        yield from _query_faults(
            f"Annotation {note['name']!r} of dashboard {dashboard['title']!r}", note["expr"], known
        )
    for panel in every_panel(dashboard):
        where = f"Panel {panel['id']} {panel.get('title', '')!r} of dashboard {dashboard['title']!r}"
        for field in ("title",) if panel["type"] == "row" else ("title", "description"):
            if not panel.get(field):
                yield f"{where} has no {field}."
        if panel["type"] == "row":
            continue
        if not panel["fieldConfig"]["defaults"].get("unit"):
            yield f"{where} has no unit."
        if not panel.get("targets"):
            yield f"{where} has no query."
        for target in panel.get("targets", ()):
            for function, interval in _RATE.findall(_STRING.sub('""', target["expr"])):
                if interval != "$__rate_interval":
                    yield f"{where} takes a {function} over [{interval}]: only [$__rate_interval] fits every zoom."
            yield from _query_faults(where, target["expr"], known)


def rule_faults(rules: Json, known: Exported, runbook: str) -> Iterator[str]:
    """Yield a sentence for each fault of the alerts. runbook: the text of the runbook page."""
    anchors = {_anchor(line) for line in runbook.splitlines() if line.startswith("#")}
    for rule in (rule for group in rules["groups"] for rule in group["rules"]):
        where = f"Alert {rule['alert']}"
        for field in ("summary", "description", "runbook"):
            if not rule["annotations"].get(field):
                yield f"{where} has no {field}."
        if not rule["labels"].get("severity"):
            yield f"{where} has no severity."
        page, _, anchor = rule["annotations"].get("runbook", "").partition("#")
        if page and (page != RUNBOOK or anchor not in anchors):
            yield f"{where} has the runbook {page}#{anchor}, and there is no such heading."
        yield from _query_faults(where, rule["expr"], known)


def _query_faults(where: str, expr: str, known: Exported) -> Iterator[str]:
    known = known | _OF_PROMETHEUS
    for name, labels in queried(expr):
        if name not in known:
            yield f"{where} asks for {name}, which the server does not export."
        elif unknown := labels - known[name] - _TARGET_LABELS:
            yield f"{where} selects {name} by {', '.join(sorted(unknown))}, which is no label of it."


def _without_functions(text: str) -> str:
    return re.sub(r"\b[a-z_]+\s*\(", "(", text)


def _anchor(heading: str) -> str:
    """Return GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lstrip("#").strip().lower()).replace(" ", "-")
