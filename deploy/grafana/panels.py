"""Panel and Row: a dashboard's description, and its conversion to Grafana's JSON. Contains no metric names."""

from dataclasses import dataclass
from typing import Any

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_HEIGHTS = {"stat": 4, "timeseries": 8, "heatmap": 8}

Json = dict[str, Any]
Steps = tuple[tuple[float | None, str], ...]  # (from this value on, colour), the first from None


@dataclass(frozen=True)
class Query:
    """One query. legend: Grafana's template of a series' name."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """One panel. unit: Grafana's id of it; width: of 24 columns."""

    kind: str  # stat | timeseries | heatmap
    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    width: int = 8
    steps: Steps = ()  # colours of a stat; in a time series, lines
    max: float | None = None
    decimals: int | None = None
    is_stacked: bool = False
    shows_names: bool = False  # a stat that shows its series' names, not their values

    @property
    def height(self) -> int:
        """The panel's height, in rows of Grafana's grid."""
        return _HEIGHTS[self.kind]


@dataclass(frozen=True)
class Row:
    """A headline and the panels below it."""

    title: str
    panels: tuple[Panel, ...]


def dashboard(*, uid: str, title: str, description: str, rows: tuple[Row, ...], variables: list[Json]) -> Json:
    """Return a dashboard: rows below each other, their panels from left to right."""
    panels: list[Json] = []
    top = 0
    for row in rows:
        place = {"x": 0, "y": top, "w": 24, "h": 1}
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "gridPos": place,
                "panels": [],
            }
        )
        top += 1
        left = height = 0
        for panel in row.panels:
            if left + panel.width > 24:
                top, left, height = top + height, 0, 0
            place = {"x": left, "y": top, "w": panel.width, "h": panel.height}
            panels.append(_panel(panel, id_=len(panels) + 1, place=place))
            left, height = left + panel.width, max(height, panel.height)
        top += height
    return {
        "uid": uid,
        "title": title,
        "description": description,
        "tags": ["quire", "llm"],
        "schemaVersion": 41,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timepicker": {},
        "timezone": "browser",
        "templating": {"list": variables},
        "annotations": {"list": []},
        "links": [],
        "panels": panels,
    }


def datasource_variable() -> Json:
    """Return the variable that selects the Prometheus data source."""
    return {
        "name": "datasource",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
        "current": {},
        "hide": 0,
        "refresh": 1,
    }


def label_variable(name: str, label: str, *, metric: str) -> Json:
    """Return a variable with the values of a metric's label `name`; several may be selected, by default all."""
    query = f"label_values({metric}, {name})"
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "hide": 0,
    }


def _panel(panel: Panel, *, id_: int, place: Json) -> Json:
    make = {"stat": _stat, "timeseries": _timeseries, "heatmap": _heatmap}[panel.kind]
    options, custom = make(panel)
    defaults: Json = {"unit": panel.unit, "min": 0, "color": {"mode": "palette-classic"}, "custom": custom}
    if panel.max is not None:
        defaults["max"] = panel.max
    if panel.decimals is not None:
        defaults["decimals"] = panel.decimals
    if panel.steps:
        steps = [{"value": value, "color": colour} for value, colour in panel.steps]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    if panel.kind == "stat":
        defaults["color"] = {"mode": "thresholds"}
    return {
        "id": id_,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "gridPos": place,
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [_target(panel, query, number) for number, query in enumerate(panel.queries)],
    }


def _target(panel: Panel, query: Query, number: int) -> Json:
    target: Json = {
        "refId": chr(ord("A") + number),
        "datasource": DATASOURCE,
        "editorMode": "code",
        "expr": query.expr,
        "legendFormat": query.legend or "__auto",
        "range": True,
        "instant": False,
    }
    if panel.kind == "heatmap":
        target["format"] = "heatmap"
    return target


def _stat(panel: Panel) -> tuple[Json, Json]:
    options = {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "value" if panel.steps else "none",
        "graphMode": "none" if panel.shows_names else "area",
        "textMode": "name" if panel.shows_names else "value",
        "justifyMode": "auto",
        "orientation": "auto",
    }
    return options, {}


def _timeseries(panel: Panel) -> tuple[Json, Json]:
    options = {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    custom = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 40 if panel.is_stacked else 8,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"mode": "normal" if panel.is_stacked else "none", "group": "A"},
        "thresholdsStyle": {"mode": "dashed" if panel.steps else "off"},
    }
    return options, custom


def _heatmap(panel: Panel) -> tuple[Json, Json]:
    options = {
        "calculate": False,
        "cellGap": 1,
        "color": {"mode": "scheme", "scheme": "Oranges", "scale": "exponential", "exponent": 0.5, "steps": 64},
        "filterValues": {"le": 1e-9},
        "legend": {"show": True},
        "rowsFrame": {"layout": "auto"},
        "tooltip": {"mode": "single", "yHistogram": True},
        "yAxis": {"axisPlacement": "left", "unit": panel.unit},
    }
    return options, {"hideFrom": {"legend": False, "tooltip": False, "viz": False}}
