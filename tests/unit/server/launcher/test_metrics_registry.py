"""The metrics page: every name from the start, exact sums, aliases, and what happens when the engine goes."""

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open_metrics
from prometheus_client.parser import text_string_to_metric_families

from engine.interface.metrics import FAILURES, METRICS, Exemplar, Metrics, MetricsDelta
from server.launcher.metrics_registry import MetricsRegistry


def page(registry: MetricsRegistry) -> dict[tuple[str, str], float]:
    """Return {(sample name, its second label's value or ""): value}, as a Prometheus server would parse the page."""
    samples = {}
    for family in text_string_to_metric_families(registry.render().decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            labels.pop("model_name", None)
            samples[sample.name, next(iter(labels.values()), "")] = sample.value
    return samples


@pytest.fixture
def registry() -> MetricsRegistry:
    return MetricsRegistry(model_name="tiny", version="1.2.3")


def test_every_metric_and_label_exists_at_zero_before_anything_happened(registry: MetricsRegistry) -> None:
    samples = page(registry)
    for metric in METRICS.values():
        for name in filter(None, (f"quire_{metric.name}", metric.alias)):
            if metric.kind == "histogram":
                assert samples[f"{name}_count", ""] == 0
                assert samples[f"{name}_bucket", "+Inf"] == 0
            else:
                for label in metric.label_values or (() if metric.labels else ("",)):
                    assert samples[name, label] == 0
    assert samples["quire_requests_failed_total", FAILURES[0]] == 0


def test_deltas_of_two_processes_add_up_under_both_names(registry: MetricsRegistry) -> None:
    for _ in range(2):
        metrics = Metrics()
        metrics.count("prompt_tokens_total", 7)
        metrics.count("requests_finished_total", label="stop")
        metrics.observe("inter_token_latency_seconds", 0.004, 9)
        metrics.observe("inter_token_latency_seconds", 99.0)
        registry.merge(metrics.drain())
    samples = page(registry)
    for prefix in ("quire_", "vllm:"):
        assert samples[prefix + "prompt_tokens_total", ""] == 14
        assert samples[prefix + "inter_token_latency_seconds_count", ""] == 20
        assert samples[prefix + "inter_token_latency_seconds_sum", ""] == pytest.approx(2 * (9 * 0.004 + 99))
        assert samples[prefix + "inter_token_latency_seconds_bucket", "0.003"] == 0
        assert samples[prefix + "inter_token_latency_seconds_bucket", "0.005"] == 18
        assert samples[prefix + "inter_token_latency_seconds_bucket", "5.0"] == 18
        assert samples[prefix + "inter_token_latency_seconds_bucket", "+Inf"] == 20
    assert samples["vllm:request_success_total", "stop"] == 2
    assert samples["vllm:request_success_total", "length"] == 0


@pytest.mark.parametrize("compat", ["vllm", "none"])
def test_a_renamed_metric_is_still_there_under_its_old_name_which_is_called_deprecated(compat: str) -> None:
    registry = MetricsRegistry(model_name="tiny", version="1.2.3", compat=compat)
    metrics = Metrics()
    metrics.observe("iteration_requests", 3, 2)
    registry.merge(metrics.drain())
    samples = page(registry)
    for name in ("quire_iteration_requests", "quire_iteration_rows"):
        assert (samples[f"{name}_count", ""], samples[f"{name}_sum", ""]) == (2, 6)
    text = registry.render().decode()
    assert "# HELP quire_iteration_requests Requests computed per engine step.\n" in text
    assert "# HELP quire_iteration_rows Deprecated: renamed to quire_iteration_requests.\n" in text


def test_counters_survive_the_engine_and_gauges_do_not(registry: MetricsRegistry) -> None:
    metrics = Metrics()
    metrics.count("generation_tokens_total", 5)
    metrics.gauge("num_requests_running", 3)
    registry.merge(metrics.drain(), source="engine-0")
    assert page(registry)["vllm:num_requests_running", ""] == 3
    registry.forget("engine-0")
    registry.count("engine_restarts_total")
    samples = page(registry)
    assert samples["vllm:num_requests_running", ""] == 0
    assert samples["quire_generation_tokens_total", ""] == 5
    assert samples["quire_engine_restarts_total", ""] == 1


def test_cache_config_and_build_are_told_as_labels(registry: MetricsRegistry) -> None:
    assert b"cache_config_info" not in registry.render()
    registry.set_cache_config(block_size=16, num_blocks=4096)
    text = registry.render().decode()
    assert 'vllm:cache_config_info{block_size="16",model_name="tiny",num_gpu_blocks="4096"} 1.0' in text
    assert 'quire_build_info{cuda="",device="",dtype="",torch="",version="1.2.3"} 1.0' in text
    registry.set_build({"torch": "2.11.0", "cuda": "13.0", "device": "cuda", "dtype": "bfloat16"})
    text = registry.render().decode()
    assert text.count("quire_build_info{") == 1
    assert '{cuda="13.0",device="cuda",dtype="bfloat16",torch="2.11.0",version="1.2.3"} 1.0' in text


def test_a_gauge_is_the_sum_over_the_processes_that_live(registry: MetricsRegistry) -> None:
    for source, connections in (("worker-0", 3), ("worker-1", 4), ("worker-1", 5)):
        metrics = Metrics()
        metrics.gauge("http_connections", connections)
        registry.merge(metrics.drain(), source=source)
    assert page(registry)["quire_http_connections", ""] == 8
    registry.forget("worker-0")
    assert page(registry)["quire_http_connections", ""] == 5


def test_requests_are_counted_by_route_and_class_under_both_names(registry: MetricsRegistry) -> None:
    metrics = Metrics()
    metrics.count("http_requests_total", 2, ("/v1/models", "2xx"))
    metrics.count("http_requests_total", label=("/v1/models", "4xx"))
    registry.merge(metrics.drain())
    text = registry.render().decode()
    assert 'quire_http_requests_total{model_name="tiny",route="/v1/models",status="2xx"} 2.0' in text
    assert '\nhttp_requests_total{handler="/v1/models",model_name="tiny",status="4xx"} 1.0' in text


def test_without_compat_there_are_only_our_own_names() -> None:
    registry = MetricsRegistry(model_name="tiny", version="1", compat="none")
    registry.set_cache_config(block_size=16, num_blocks=4096)
    families = list(text_string_to_metric_families(registry.render().decode()))
    assert len(families) == len(METRICS) + sum(bool(metric.old_name) for metric in METRICS.values()) + 2
    assert {family.name.split("_")[0] for family in families} == {"quire"}


def test_vllms_dashboards_see_a_server_that_is_up_or_not() -> None:
    sampled = {("engine_up", ""): 1.0}
    registry = MetricsRegistry(model_name="tiny", version="1", sample=lambda: MetricsDelta(gauges=sampled))
    assert page(registry)["vllm:engine_sleep_state", "awake"] == 1
    sampled["engine_up", ""] = 0.0
    samples = page(registry)
    assert samples["vllm:engine_sleep_state", "awake"] == samples["vllm:engine_sleep_state", "discard_all"] == 0


def test_model_name_is_the_only_common_label_and_is_escaped() -> None:
    text = MetricsRegistry(model_name='a"b\\c\nd', version="1").render().decode()
    assert 'quire_prompt_tokens_total{model_name="a\\"b\\\\c\\nd"} 0.0' in text


@pytest.mark.parametrize(
    "delta",
    [
        MetricsDelta(counters={("no_such_total", ""): 1.0}),
        MetricsDelta(gauges={("no_such", ""): 1.0}),
        MetricsDelta(gauges={("num_requests_waiting_by_reason", "whim"): 1.0}),
        MetricsDelta(counters={("num_requests_running", ""): 1.0}),
        MetricsDelta(counters={("http_requests_total", "/v1/models"): 1.0}),
        MetricsDelta(counters={("generation_tokens_total", "a", "b"): 1.0}),
    ],
)
def test_names_outside_the_table_are_refused(registry: MetricsRegistry, delta: MetricsDelta) -> None:
    with pytest.raises(KeyError):
        registry.merge(delta)


def test_openmetrics_has_the_same_numbers_and_the_newest_exemplar_of_each_bucket(registry: MetricsRegistry) -> None:
    for trace_id, value in (("aa" * 16, 0.04), ("bb" * 16, 0.03), ("cc" * 16, 90.0)):
        metrics = Metrics()
        metrics.observe("time_to_first_token_seconds", value)
        metrics.exemplify("time_to_first_token_seconds", Exemplar(trace_id, value, 1_700_000_000.5))
        registry.merge(metrics.drain(), source="worker:0")
    text = registry.render(is_open_metrics=True).decode()
    assert text.endswith("# EOF\n")
    families = list(parse_open_metrics(text))
    assert {sample.name for family in families for sample in family.samples} == {name for name, _ in page(registry)}
    buckets = [
        sample
        for family in families
        for sample in family.samples
        if sample.name == "quire_time_to_first_token_seconds_bucket"
    ]
    found = {
        sample.labels["le"]: (
            sample.exemplar.labels["trace_id"],
            sample.exemplar.value,
            float(sample.exemplar.timestamp),
        )
        for sample in buckets
        if sample.exemplar is not None
    }
    assert found == {"0.05": ("bb" * 16, 0.03, 1_700_000_000.5), "+Inf": ("cc" * 16, 90.0, 1_700_000_000.5)}
    assert [sample.value for sample in buckets][-1] == 3
    assert "aa" * 16 not in text
    assert "trace_id" not in registry.render().decode()


def test_an_exemplar_of_what_is_no_histogram_is_a_bug_of_the_sender(registry: MetricsRegistry) -> None:
    with pytest.raises(KeyError):
        registry.merge(MetricsDelta(exemplars={"ready": {0: Exemplar("aa", 1.0, 1.0)}}))
