"""Panel and Row: a dashboard's description, and its conversion to Grafana's JSON. Contains no metric names."""

from dataclasses import dataclass
from typing import Any

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_HEIGHTS = {"stat": 4, "timeseries": 8, "heatmap": 8}

Json = dict[str, Any]
Steps = tuple[tuple[float | None, str], ...]  # (from this value on, colour), the first from None


@dataclass(frozen=True)
class Query:
    """One query. legend: Grafana's template of a series' name; has_exemplars: its points lead to traces."""

    expr: str
    legend: str = ""
    has_exemplars: bool = False


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
    """A headline and the panels below it. repeat: a variable; the row comes once for each of its values."""

    title: str
    panels: tuple[Panel, ...]
    repeat: str = ""


@dataclass(frozen=True)
class Annotation:
    """Lines on all time series where a query has a result. title: Grafana's template of what happened."""

    name: str
    expr: str
    title: str
    colour: str


def dashboard(
    *,
    uid: str,
    title: str,
    description: str,
    rows: tuple[Row, ...],
    variables: list[Json],
    annotations: tuple[Annotation, ...],
    links: list[Json],
) -> Json:
    """Return a dashboard: rows below each other, the first open, their panels from left to right."""
    panels: list[Json] = []
    top, next_id = 0, 1
    for row in rows:
        head: Json = {
            "id": next_id,
            "type": "row",
            "title": row.title,
            "collapsed": row is not rows[0],
            "gridPos": {"x": 0, "y": top, "w": 24, "h": 1},
            "panels": [],
        }
        if row.repeat:
            head["repeat"] = row.repeat
        within, height = _within(row, top=top + 1, first_id=next_id + 1)
        panels.append(head)
        next_id += 1 + len(within)
        if head["collapsed"]:
            head["panels"] = within
            top += 1
        else:
            panels += within
            top += 1 + height
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
        "annotations": {"list": [_annotation(annotation) for annotation in annotations]},
        "links": links,
        "panels": panels,
    }


def _within(row: Row, *, top: int, first_id: int) -> tuple[list[Json], int]:
    """Return the panels of a row from `top` on, and the height of all."""
    panels: list[Json] = []
    line = left = height = 0
    for panel in row.panels:
        if left + panel.width > 24:
            line, left, height = line + height, 0, 0
        place = {"x": left, "y": top + line, "w": panel.width, "h": panel.height}
        panels.append(_panel(panel, id_=first_id + len(panels), place=place))
        left, height = left + panel.width, max(height, panel.height)
    return panels, line + height


def _annotation(annotation: Annotation) -> Json:
    return {
        "name": annotation.name,
        "datasource": DATASOURCE,
        "enable": True,
        "hide": False,
        "iconColor": annotation.colour,
        "expr": annotation.expr,
        "titleFormat": annotation.title,
        "textFormat": "{{instance}}",
        "step": "15s",
    }


def link(title: str, url: str, tooltip: str) -> Json:
    """Return a link at the dashboard's top, which keeps the time that is shown."""
    return {
        "type": "link",
        "title": title,
        "url": url,
        "tooltip": tooltip,
        "icon": "external link",
        "targetBlank": True,
        "keepTime": True,
        "includeVars": False,
        "asDropdown": False,
        "tags": [],
    }


def sibling_links(tag: str) -> Json:
    """Return links to all dashboards with a tag, which keep the time and the variables."""
    return link("Dashboards", "", "Quire's other dashboards") | {
        "type": "dashboards",
        "tags": [tag],
        "icon": "dashboard",
        "includeVars": True,
        "targetBlank": False,
    }


def text_variable(name: str, label: str, description: str) -> Json:
    """Return a variable that is typed; empty at first."""
    return {
        "name": name,
        "label": label,
        "description": description,
        "type": "textbox",
        "query": "",
        "current": {"text": "", "value": ""},
        "options": [],
        "hide": 0,
    }


def query_variable(name: str, label: str, *, query: str, regex: str) -> Json:
    """Return a hidden variable with what a regular expression finds in a query's series, all of them selected."""
    return label_variable(name, label, metric="up") | {
        "definition": f"query_result({query})",
        "query": {"query": f"query_result({query})", "refId": name},
        "regex": regex,
        "includeAll": True,
        "allValue": None,
        "hide": 2,
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
        "exemplar": query.has_exemplars,
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
