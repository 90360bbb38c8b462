"""Exports a replica's metrics through Ray, so that one scrape of each node covers all replicas. Imports ray.

Every sample quire_NAME of GET /metrics is there as ray_quire_NAME, with Ray's labels application, deployment and
replica beside its own. Ray knows only gauges that are set, so counters and buckets are such too; rate() and
histogram_quantile() read them alike.
"""

import asyncio
import logging

from prometheus_client.parser import text_string_to_metric_families
from ray.serve import metrics

from engine.interface.errors import EngineError
from server.hosted.app import HostedApp

logger = logging.getLogger(__name__)

EXPORT_INTERVAL_S = 5.0


class RayMetrics:
    """The gauges of one replica, created when a sample first appears."""

    def __init__(self) -> None:
        self._gauges: dict[str, metrics.Gauge] = {}

    def set(self, page: str) -> None:
        """Set the gauges from a metrics page, for every sample named quire_*."""
        for family in text_string_to_metric_families(page):
            if not family.name.startswith("quire_"):
                continue  # an alias with the name of another server
            for sample in family.samples:
                gauge = self._gauges.get(sample.name)
                if gauge is None:
                    keys = tuple(sample.labels)
                    gauge = self._gauges[sample.name] = metrics.Gauge(sample.name, family.documentation, tag_keys=keys)
                gauge.set(sample.value, tags=dict(sample.labels))


async def export(hosted: HostedApp) -> None:
    """Keep Ray's metrics up to date until cancelled."""
    ray_metrics = RayMetrics()
    while True:
        try:
            ray_metrics.set((await hosted.metrics_page()).decode())
        except EngineError as error:  # the launcher is busy or dead; check_health() reports it
            logger.warning("metrics not exported reason=%r", error.message)
        await asyncio.sleep(EXPORT_INTERVAL_S)
