"""The rows of hardware that not every server has: its GPU, and prefill and decode engines.

Each comes once for each server that has it, by a hidden variable, and for no other.
"""

from deploy.grafana.panels import Panel, Query, Row
from deploy.grafana.promql import RATE

_SERVER = 'model_name=~"$model_name",instance=~"$handover"'

GPU = Row(
    "GPU of $gpu",
    (
        Panel(
            "timeseries",
            "GPU memory",
            "Memory in use by all programs, and total memory; with several GPUs, of the first.",
            "bytes",
            (
                Query('quire_gpu_memory_used_bytes{model_name=~"$model_name",instance=~"$gpu"} > 0', "used"),
                Query('quire_gpu_memory_total_bytes{model_name=~"$model_name",instance=~"$gpu"} > 0', "all"),
            ),
            width=12,
        ),
        Panel(
            "timeseries",
            "KV cache",
            "Memory of the KV pool on each GPU.",
            "bytes",
            (Query('quire_kv_cache_bytes{model_name=~"$model_name",instance=~"$gpu"}', "KV pool"),),
            width=12,
        ),
    ),
    repeat="gpu",
)


def _rate(metric: str, *, by: str = "") -> str:
    labels = f" by ({by}) " if by else ""
    return f"sum{labels}(rate({metric}{{{_SERVER}}}[{RATE}]))"


# what only servers with prefill or decode engines have: a decode engine that lost its peers has had blocks
HANDOVER_QUERY = (
    'quire_kv_handover_peers{model_name=~"$model_name",instance=~"$instance"} > 0'
    ' or quire_kv_handover_blocks_total{model_name=~"$model_name",instance=~"$instance"} > 0'
)
HANDOVER = Row(
    "Prefill and decode engines of $handover",
    (
        Panel(
            "timeseries",
            "Prompts of prefill engines",
            "Per second. complete: all blocks came or were known. lost: the prefill engine ended. late: they came "
            "after the time for them. The missing part is computed by the decode engine.",
            "reqps",
            (Query(_rate("quire_kv_handover_requests_total", by="result"), "{{result}}"),),
            is_stacked=True,
        ),
        Panel(
            "timeseries",
            "Long prompts without a prefill engine",
            "Per second, by reason: none served, all were full, or it died before the first token. The decode engine "
            "computes them.",
            "reqps",
            (Query(_rate("quire_prefill_fallbacks_total", by="reason"), "{{reason}}"),),
            is_stacked=True,
        ),
        Panel(
            "timeseries",
            "Blocks handed over",
            "Blocks per second. offered and evicted are counted where prompts are computed, the others where they are "
            "decoded. no_room: host memory is too small for them (--kv-host-memory).",
            "cps",
            (Query(_rate("quire_kv_handover_blocks_total", by="event"), "{{event}}"),),
        ),
        Panel(
            "timeseries",
            "Bytes handed over",
            "Bytes per second that decode engines copied from prefill engines.",
            "Bps",
            (Query(_rate("quire_kv_handover_bytes_total"), "copied"),),
        ),
        Panel(
            "timeseries",
            "Wait for blocks",
            "Mean time that a request waited for the blocks of its prompt.",
            "s",
            (
                Query(
                    f"{_rate('quire_kv_handover_wait_seconds_total')} / {_rate('quire_kv_handover_requests_total')}",
                    "mean",
                ),
            ),
        ),
        Panel(
            "timeseries",
            "Peers and open offers",
            "Connections between prefill and decode engines, counted where they decode, and offers of blocks whose "
            "memory prefill engines keep for copies that run: these return to 0.",
            "none",
            (
                Query(f"sum(quire_kv_handover_peers{{{_SERVER}}})", "peers"),
                Query(f"sum(quire_kv_handover_open_offers{{{_SERVER}}})", "open offers"),
            ),
        ),
    ),
    repeat="handover",
)
