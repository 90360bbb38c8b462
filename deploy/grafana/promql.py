"""Queries of the dashboard, written once: sums over the servers looked at, rates over Grafana's own interval.

`$model_name` and `$instance` are variables of the dashboard, `$__rate_interval` and `$__range` Grafana's.
"""

SELECTED = 'model_name=~"$model_name",instance=~"$instance"'
RATE = "$__rate_interval"
RANGE = "$__range"  # the whole time looked at


def selected(metric: str, labels: str = "") -> str:
    """Return the series of the servers looked at. labels: further matchers."""
    return f"{metric}{{{SELECTED}{',' + labels if labels else ''}}}"


def total(metric: str, labels: str = "", *, by: str = "") -> str:
    """Return a gauge, summed over servers."""
    return f"sum{_by(by)}({selected(metric, labels)})"


def rate(metric: str, labels: str = "", *, by: str = "") -> str:
    """Return how fast a counter grows, per second."""
    return f"sum{_by(by)}(rate({selected(metric, labels)}[{RATE}]))"


def growth(metric: str, labels: str = "", *, by: str = "", over: str = RATE) -> str:
    """Return how much a counter grew."""
    return f"sum{_by(by)}(increase({selected(metric, labels)}[{over}]))"


def quantile(share: float, histogram: str) -> str:
    """Return a quantile of a histogram, over all servers together."""
    return f"histogram_quantile({share:g}, {rate(histogram + '_bucket', by='le')})"


def mean(histogram: str) -> str:
    """Return a histogram's mean."""
    return f"{rate(histogram + '_sum')} / {rate(histogram + '_count')}"


def share_within(bound: float, histogram: str) -> str:
    """Return the share of observations of the whole time looked at that were at most `bound`, one of the buckets."""
    within = growth(histogram + "_bucket", f'le="{bound}"', over=RANGE)
    return f"{within} / {growth(histogram + '_count', over=RANGE)}"


def _by(labels: str) -> str:
    return f" by ({labels}) " if labels else ""
