"""Builds the dashboard's PromQL queries: sums over the selected servers, rates over Grafana's interval.

`$model_name` and `$instance` are variables of the dashboard, `$__rate_interval` and `$__range` Grafana's.
"""

SELECTED = 'model_name=~"$model_name",instance=~"$instance"'
RATE = "$__rate_interval"
RANGE = "$__range"  # the dashboard's time range


def selected(metric: str, labels: str = "") -> str:
    """Return the series of the selected servers. labels: further matchers."""
    return f"{metric}{{{SELECTED}{',' + labels if labels else ''}}}"


def total(metric: str, labels: str = "", *, by: str = "") -> str:
    """Return a gauge, summed over servers."""
    return f"sum{_by(by)}({selected(metric, labels)})"


def rate(metric: str, labels: str = "", *, by: str = "") -> str:
    """Return a counter's increase per second."""
    return f"sum{_by(by)}(rate({selected(metric, labels)}[{RATE}]))"


def growth(metric: str, labels: str = "", *, by: str = "", over: str = RATE) -> str:
    """Return a counter's increase over a time range."""
    return f"sum{_by(by)}(increase({selected(metric, labels)}[{over}]))"


def quantile(share: float, histogram: str) -> str:
    """Return a quantile of a histogram, over all servers together."""
    return f"histogram_quantile({share:g}, {rate(histogram + '_bucket', by='le')})"


def mean(histogram: str) -> str:
    """Return a histogram's mean."""
    return f"{rate(histogram + '_sum')} / {rate(histogram + '_count')}"


def share_within(bound: float, histogram: str) -> str:
    """Return the share of observations up to `bound`, a bucket's bound, over the dashboard's time range."""
    within = growth(histogram + "_bucket", f'le="{bound}"', over=RANGE)
    return f"{within} / {growth(histogram + '_count', over=RANGE)}"


def _by(labels: str) -> str:
    return f" by ({labels}) " if labels else ""
