"""EngineStats: records the metrics of the engine's loop, and logs a line every 10 s while busy. Never torch or a clock.

It imports the scheduler and the metrics recorder; the caller passes the time.
"""

import logging

from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.core.step import StepPlan
from engine.interface.metrics import Metrics

logger = logging.getLogger(__name__)

_LOG_INTERVAL_S = 10.0


class EngineStats:
    """Records into a Metrics; reads the scheduler and never changes it."""

    def __init__(self, metrics: Metrics, scheduler: Scheduler) -> None:
        self._metrics = metrics
        self._scheduler = scheduler
        self._counted: dict[str, int] = {}  # the scheduler's totals at the last record_state()
        self._last_commit_s: float | None = None  # None after idling
        self._logged_s: float | None = None
        self._num_prompt_tokens = 0  # since the last log line
        self._num_output_tokens = 0
        self.record_state(num_deferred=0)

    def record_started(self, request: Request) -> tuple[float, float]:
        """Count a request whose first token is committed; return its queue and prefill times in seconds."""
        assert request.first_scheduled_s is not None
        assert request.first_token_s is not None
        queue_s = max(0.0, request.first_scheduled_s - request.arrival_s)  # arrival_s was read by another process
        prefill_s = request.first_token_s - request.first_scheduled_s
        num_prompt = len(request.prompt_token_ids)
        self._num_prompt_tokens += num_prompt
        self._metrics.observe("request_queue_time_seconds", queue_s)
        self._metrics.observe("request_prefill_time_seconds", prefill_s)
        self._metrics.count("prompt_tokens_total", num_prompt)
        self._metrics.count("prompt_tokens_cached_total", request.num_cached_tokens)
        return queue_s, prefill_s

    def record_finished(self, request: Request) -> None:
        """Count a request's end."""
        metrics, num_output = self._metrics, len(request.output_token_ids)
        metrics.count("requests_finished_total", label=request.finish_reason or "error")
        metrics.observe("request_prompt_tokens", len(request.prompt_token_ids))
        metrics.observe("request_generation_tokens", num_output)
        first_s, last_s = request.first_token_s, request.last_token_s
        if first_s is None or last_s is None or request.first_scheduled_s is None:
            return
        metrics.observe("request_decode_time_seconds", last_s - first_s)
        metrics.observe("request_inference_time_seconds", last_s - request.first_scheduled_s)
        if num_output > 1:
            metrics.observe("request_time_per_output_token_seconds", (last_s - first_s) / (num_output - 1))

    def record_failed(self) -> None:
        """Count a request that the engine accepted and then failed."""
        self._metrics.count("requests_finished_total", label="error")

    def record_commit(self, num_tokens: int, now: float) -> None:
        """Count a committed step with `num_tokens` output tokens."""
        if num_tokens:
            self._num_output_tokens += num_tokens
            self._metrics.count("generation_tokens_total", num_tokens)
        if self._last_commit_s is not None:
            self._metrics.observe("step_time_seconds", now - self._last_commit_s)
        self._last_commit_s = now

    def record_turn(self, plan: StepPlan | None, now: float) -> None:
        """Count one iteration of the loop; write the log line if it is due."""
        if plan is not None:
            self._metrics.observe("iteration_tokens", plan.num_tokens)
            self._metrics.observe("iteration_requests", len(plan.rows))
        if self._logged_s is None:
            self._logged_s = now
        elif now - self._logged_s >= _LOG_INTERVAL_S:
            self._log(now - self._logged_s)
            self._logged_s = now
        if not self._scheduler.has_work:
            self._last_commit_s = self._logged_s = None

    def record_state(self, *, num_deferred: int) -> None:
        """Record gauges and the scheduler's own counts. Called before metrics are drained, not in each step.

        num_deferred: requests that wait for their grammar.
        """
        scheduler, blocks = self._scheduler, self._scheduler.blocks
        self._count_up_to("num_preemptions_total", scheduler.num_preemptions)
        self._count_up_to("prefix_cache_queries_total", blocks.num_queried_tokens)
        self._count_up_to("prefix_cache_hits_total", blocks.num_hit_tokens)
        self._count_up_to("prefix_cache_evictions_total", blocks.num_evictions)
        self._count_up_to("spec_decode_num_drafts_total", scheduler.drafts.num_rows)
        self._count_up_to("spec_decode_num_draft_tokens_total", scheduler.drafts.num_tokens)
        self._count_up_to("spec_decode_num_accepted_tokens_total", scheduler.drafts.num_accepted)
        gauge, num_waiting = self._metrics.gauge, len(scheduler.waiting)
        gauge("num_requests_running", len(scheduler.running) + len(scheduler.retiring))
        gauge("num_requests_waiting", num_waiting + num_deferred)
        gauge("num_requests_waiting_by_reason", num_waiting, "capacity")
        gauge("num_requests_waiting_by_reason", num_deferred, "deferred")
        gauge("kv_cache_blocks_total", blocks.num_usable)
        gauge("kv_cache_blocks_used", blocks.num_used)
        gauge("kv_cache_usage_ratio", blocks.num_used / blocks.num_usable)

    def _count_up_to(self, name: str, total: int) -> None:
        counted = self._counted.get(name, 0)
        if total != counted:
            self._metrics.count(name, total - counted)
            self._counted[name] = total

    def _log(self, elapsed_s: float) -> None:
        scheduler, blocks = self._scheduler, self._scheduler.blocks
        logger.info(
            "engine running=%d waiting=%d kv_usage=%.3f prompt_tokens_per_s=%.1f generation_tokens_per_s=%.1f"
            " prefix_hit_rate=%.3f preemptions=%d step_id=%d",
            len(scheduler.running),
            len(scheduler.waiting),
            blocks.num_used / blocks.num_usable,
            self._num_prompt_tokens / elapsed_s,
            self._num_output_tokens / elapsed_s,
            blocks.num_hit_tokens / max(1, blocks.num_queried_tokens),
            scheduler.num_preemptions,
            scheduler.committed_step_id,
        )
        if scheduler.drafts.num_tokens:
            logger.info(
                "speculation draft_tokens=%d accepted_tokens=%d acceptance_rate=%.3f tokens_per_drafted_row=%.2f",
                scheduler.drafts.num_tokens,
                scheduler.drafts.num_accepted,
                scheduler.drafts.num_accepted / scheduler.drafts.num_tokens,
                1 + scheduler.drafts.num_accepted / scheduler.drafts.num_rows,
            )
        self._num_prompt_tokens = self._num_output_tokens = 0
