"""Outbox and EngineStats: the loop's outputs, events to clients and counts to the metrics. Never torch or a clock.

Outbox collects one StepEvents message per client in each loop iteration. A message has at most one row per request, and
no row follows a request's end. EngineStats records the metrics of the loop, and logs a line every 10 s while busy; the
caller passes the time.
"""

import logging
from collections.abc import Iterable
from typing import Protocol

from engine.core.disk_tier import DiskTier
from engine.core.host_tier import HostTier
from engine.core.lower_tiers import LowerTiers
from engine.core.planned_step import RowOutput
from engine.core.queue_forecast import QueueForecast
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.core.steady_rows import SteadyOutput
from engine.core.step import StepPlan
from engine.core.tenants import Tenants
from engine.interface.metrics import Metrics
from engine.interface.protocol import Accepted, Begun, ClientGone, Finished, FromEngine, Started, StepEvents, ToEngine

logger = logging.getLogger(__name__)

_LOG_INTERVAL_S = 10.0


class Transport(Protocol):
    """Exchanges messages with the engine's clients.

    Implemented by SocketTransport (engine/interface/transport.py) and LocalTransport (engine/core/local_client.py).
    """

    def receive(self, timeout_s: float | None) -> Iterable[tuple[int, ToEngine | ClientGone]]:
        """Return arrived messages with their client ids. timeout_s: None may block until one arrives; 0 polls."""

    def has_arrivals(self) -> bool:
        """Return whether receive(0) has something to do. Takes microseconds."""

    def send(self, client_id: int, message: FromEngine) -> None:
        """Send without blocking; a disconnected client is ignored."""

    def broadcast(self, message: FromEngine) -> None:
        """Send to every client."""


class EngineStats:
    """Records into a Metrics; reads the scheduler and never changes it."""

    def __init__(
        self,
        metrics: Metrics,
        scheduler: Scheduler,
        *,
        tenants: Tenants,
        forecast: QueueForecast,
        bytes_per_page: int,
        num_ranks: int = 1,
    ) -> None:
        """bytes_per_page: of each rank."""
        self._metrics = metrics
        self._tenants = tenants
        self._forecast = forecast
        self._bytes_per_page = bytes_per_page
        self._host_page_bytes = bytes_per_page * num_ranks
        self._scheduler = scheduler
        self._counted: dict[tuple[str, str], float] = {}  # the scheduler's totals at the last record_state()
        self._last_commit_s: float | None = None  # None after idling
        self._logged_s: float | None = None
        self._num_prompt_tokens = self._num_output_tokens = 0  # since the last log line
        self.record_state(num_deferred=0)

    def record_started(self, request: Request, start: Started) -> None:
        """Count a request whose first token is committed."""
        num_prompt = request.num_prompt_tokens
        self._num_prompt_tokens += num_prompt
        self._metrics.observe("request_queue_time_seconds", start.queue_s)
        self._metrics.observe("request_prefill_time_seconds", start.prefill_s)
        self._metrics.count("prompt_tokens_total", num_prompt)
        self._metrics.count("prompt_tokens_cached_total", request.num_cached_tokens)
        self._tenants.record_started(request)
        self._forecast.observe_start(request)

    def record_finished(self, request: Request) -> None:
        """Count a request's end."""
        self._tenants.close(request)
        self._forecast.observe_end(request)
        metrics, num_output = self._metrics, len(request.output_token_ids)
        if request.is_handed_over:
            return  # the engine that goes on with it counts it
        metrics.count("requests_finished_total", label=request.finish_reason or "error")
        metrics.observe("request_prompt_tokens", request.num_prompt_tokens)
        metrics.observe("request_generation_tokens", num_output)
        first_s, last_s = request.first_token_s, request.last_token_s
        if first_s is None or last_s is None or request.first_scheduled_s is None:
            return
        metrics.observe("request_decode_time_seconds", last_s - first_s)
        metrics.observe("request_inference_time_seconds", last_s - request.first_scheduled_s)
        num_made = num_output - request.num_replayed_tokens
        if num_made > 1:
            metrics.observe("request_time_per_output_token_seconds", (last_s - first_s) / (num_made - 1))

    def record_invalid(self, request: Request) -> None:
        """Count and log the end of a request whose output is not finite."""
        self._metrics.count("nonfinite_requests_total")
        self.record_finished(request)
        logger.error(
            "model output is not finite request_id=%s prompt_tokens=%d output_tokens=%d",
            request.request_id,
            request.num_prompt_tokens,
            len(request.output_token_ids),
        )

    def record_failed(self, request: Request) -> None:
        """Count a request that the engine accepted and then failed."""
        self._tenants.close(request)
        self._metrics.count("requests_finished_total", label="error")

    def record_dropped(self, reason: str) -> None:
        """Count a request that ended before it was queued."""
        self._metrics.count("requests_finished_total", label=reason)

    def record_commit(self, num_tokens: int, now: float) -> None:
        """Count a committed step with `num_tokens` output tokens."""
        self._num_output_tokens += num_tokens
        self._metrics.count("generation_tokens_total", num_tokens)
        if self._last_commit_s is not None:
            self._metrics.observe("step_time_seconds", now - self._last_commit_s)
        self._last_commit_s = now

    def record_turn(self, plan: StepPlan | None, now: float) -> None:
        """Count one iteration of the loop; write the log line if it is due."""
        if plan is not None and plan.num_rows:
            self._metrics.observe("iteration_tokens", plan.num_tokens)
            self._metrics.observe("iteration_requests", plan.num_rows)
        if self._logged_s is None:
            self._logged_s = now
        elif now - self._logged_s >= _LOG_INTERVAL_S:
            self._log(now - self._logged_s)
            self._logged_s = now
        if not self._scheduler.has_work:
            self._last_commit_s = self._logged_s = None

    def record_state(self, *, num_deferred: int) -> None:
        """Record gauges and counts of the scheduler. num_deferred: requests that wait for their grammar."""
        scheduler, kv = self._scheduler, self._scheduler.kv
        self._count_up_to("num_preemptions_total", scheduler.num_preemptions)
        for way, count in kv.tiers.num_resumed.items():
            self._count_up_to("preempted_requests_resumed_total", count, way)
        for source, count in kv.tiers.num_resumed_tokens.items():
            self._count_up_to("preempted_tokens_resumed_total", count, source)
        self._count_up_to("prefix_cache_queries_total", kv.num_queried_tokens)
        self._count_up_to("prefix_cache_hits_total", kv.num_hit_tokens)
        self._count_up_to("prefix_cache_evictions_total", sum(kv.pool.num_evictions))
        for kind, count in kv.num_limited_tokens.items():
            self._count_up_to("prefix_cache_limited_tokens_total", count, kind)
        for reason, count in kv.num_by_reason.items():
            self._count_up_to("prefix_cache_requests_total", count, reason)
        for event, count in kv.state_events().items():
            self._count_up_to("prefix_cache_states_total", count, event)
        self._count_up_to("spec_decode_num_drafts_total", scheduler.drafts.num_rows)
        self._count_up_to("spec_decode_num_draft_tokens_total", scheduler.drafts.num_tokens)
        self._count_up_to("spec_decode_num_accepted_tokens_total", scheduler.drafts.num_accepted)
        gauge, num_waiting = self._metrics.gauge, len(scheduler.waiting)
        gauge("num_requests_running", len(scheduler.running) + len(scheduler.retiring))
        gauge("num_requests_waiting", num_waiting + num_deferred)
        gauge("num_requests_waiting_by_reason", num_waiting, "capacity")
        gauge("num_requests_waiting_by_reason", num_deferred, "deferred")
        gauge("kv_cache_blocks_total", kv.pool.num_usable)
        gauge("kv_cache_blocks_used", kv.pool.num_used)
        gauge("kv_cache_usage_ratio", kv.pool.num_used / kv.pool.num_usable)
        for kind, num_held, num_cached in kv.pages_by_kind():
            gauge("kv_cache_pages_held", num_held, kind)
            gauge("kv_cache_pages_cached", num_cached, kind)
        gauge("kv_cache_pages_pinned", kv.pins.num_pages)
        for reason, total in kv.pins.num_ended.items():
            self._count_up_to("prefix_cache_pinned_blocks_total", total, reason)
        if kv.tiers.host is not None:
            self._record_tier(kv.tiers.host, num_pinned=0 if kv.pins.host is None else kv.pins.host.num_pages)
        if kv.tiers.disk is not None:
            self._record_disk(kv.tiers.disk)
        self._record_hand_overs(kv.tiers)
        num_holders, states = len(scheduler.running) + len(scheduler.retiring), kv.layout.states
        num_saved, num_saved_pages = kv.checkpoints.num_findable()
        gauge("kv_cache_states", num_holders * len(states), "live")
        gauge("kv_cache_states", num_saved, "saved")
        num_live_pages = num_holders * sum(group.pages for group in states)
        gauge("kv_cache_state_bytes", num_live_pages * self._bytes_per_page, "live")
        gauge("kv_cache_state_bytes", num_saved_pages * self._bytes_per_page, "saved")

    def _record_tier(self, tier: HostTier, *, num_pinned: int) -> None:
        page_bytes, gauge = self._host_page_bytes, self._metrics.gauge
        gauge("kv_host_bytes", tier.index.num_used * page_bytes, "used")
        gauge("kv_host_bytes", num_pinned * page_bytes, "pinned")
        gauge("kv_host_bytes", tier.index.num_ready * page_bytes, "total")
        self._count_up_to("kv_host_blocks_total", tier.num_stored, "stored")
        self._count_up_to("kv_host_blocks_total", tier.index.num_evictions, "evicted")
        self._count_up_to("kv_host_blocks_total", tier.num_missed, "missed")
        self._count_up_to("kv_host_lookups_total", tier.num_gates, "longer")
        self._count_up_to("kv_host_lookups_total", tier.num_asked - tier.num_gates - tier.num_too_costly, "none")
        self._count_up_to("kv_host_lookups_total", tier.num_too_costly, "too_costly")
        self._count_up_to("kv_host_hit_tokens_total", tier.num_found_tokens)
        self._count_up_to("kv_host_copied_bytes_total", tier.num_pages_to_host * page_bytes, "to_host")
        self._count_up_to("kv_host_copied_bytes_total", tier.num_pages_from_host * page_bytes, "from_host")
        self._count_up_to("kv_host_wait_seconds_total", tier.waited_s)
        gauge("kv_host_copy_bytes_per_second", self._bytes_per_page / tier.page_s if tier.page_s else 0.0)
        gauge("kv_tier_requests_waiting", len(tier.gates), "host")

    def _record_disk(self, disk: DiskTier) -> None:
        counts, status = disk.facts.counts, disk.facts.status
        gauge = self._metrics.gauge
        gauge("kv_disk_bytes", status.num_bytes)
        gauge("kv_disk_limit_bytes", status.max_bytes)
        gauge("kv_disk_pinned_bytes", status.num_pinned_bytes)
        gauge("kv_disk_queued_bytes", disk.num_queued_bytes * status.num_ranks)
        gauge("kv_disk_paused", float(status.is_paused))
        gauge("kv_tier_requests_waiting", len(disk.waits), "disk")
        self._count_up_to("kv_disk_copy_seconds_total", counts.written_s, "written")
        self._count_up_to("kv_disk_copy_seconds_total", counts.read_s, "read")
        self._count_up_to("kv_disk_lookups_total", disk.num_waits, "longer")
        self._count_up_to("kv_disk_lookups_total", disk.num_too_costly, "too_costly")
        self._count_up_to("kv_disk_errors_total", counts.num_errors)
        self._count_up_to("kv_disk_blocks_total", counts.num_written, "written")
        self._count_up_to("kv_disk_blocks_total", counts.num_dropped + disk.num_dropped, "dropped")
        self._count_up_to("kv_disk_blocks_total", disk.num_read, "read")
        self._count_up_to("kv_disk_blocks_total", disk.num_failed, "failed")
        self._count_up_to("kv_disk_blocks_total", counts.num_evicted, "evicted")
        self._count_up_to("kv_disk_blocks_total", counts.num_damaged, "damaged")
        self._count_up_to("kv_disk_copied_bytes_total", counts.written_bytes * status.num_ranks, "written")
        self._count_up_to("kv_disk_copied_bytes_total", counts.read_bytes * status.num_ranks, "read")
        self._count_up_to("kv_disk_hit_tokens_total", disk.num_found_tokens)
        self._count_up_to("kv_disk_wait_seconds_total", disk.waited_s)

    def _record_hand_overs(self, tiers: LowerTiers) -> None:
        if tiers.offers is not None:
            self._metrics.gauge("kv_handover_open_offers", tiers.offers.num_open)
            self._count_up_to("kv_handover_blocks_total", tiers.offers.num_offered, "offered")
            self._count_up_to("kv_handover_blocks_total", tiers.offers.num_lost, "evicted")
        if tiers.arrivals is not None:
            self._metrics.gauge("kv_handover_peers", len(tiers.arrivals.peers))
            for event, count in tiers.arrivals.num_blocks.items():
                self._count_up_to("kv_handover_blocks_total", count, event)
            for result, count in tiers.arrivals.num_by_result.items():
                self._count_up_to("kv_handover_requests_total", count, result)
            self._count_up_to("kv_handover_bytes_total", tiers.arrivals.num_bytes)
            self._count_up_to("kv_handover_wait_seconds_total", tiers.arrivals.waited_s)

    def _count_up_to(self, name: str, total: float, label: str = "") -> None:
        counted = self._counted.get((name, label), 0)
        if total != counted:
            self._metrics.count(name, total - counted, label)
            self._counted[name, label] = total

    def _log(self, elapsed_s: float) -> None:
        scheduler, kv = self._scheduler, self._scheduler.kv
        logger.info(
            "engine running=%d waiting=%d kv_usage=%.3f prompt_tokens_per_s=%.1f generation_tokens_per_s=%.1f"
            " prefix_hit_rate=%.3f preemptions=%d step_id=%d",
            len(scheduler.running),
            len(scheduler.waiting),
            kv.pool.num_used / kv.pool.num_usable,
            self._num_prompt_tokens / elapsed_s,
            self._num_output_tokens / elapsed_s,
            kv.num_hit_tokens / max(1, kv.num_queried_tokens),
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


class Outbox:
    """Owns the messages being filled."""

    def __init__(self, transport: Transport, stats: EngineStats) -> None:
        self._transport = transport
        self._stats = stats
        self._events: dict[int, StepEvents] = {}  # by client_id
        self._accepted: dict[Request, Accepted] = {}  # to be sent
        self._started: list[tuple[Request, Started]] = []  # to be counted behind their first tokens

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to send."""
        return not self._events

    def accept(self, request: Request, message: Accepted) -> None:
        """Send that a request is accepted: its tenant's limits at once, else with send(), unless it begins before."""
        if message.rates is None:
            self._accepted[request] = message
        else:
            self._transport.send(request.client_id, message)

    def announce(self, requests: list[Request]) -> None:
        """Send at once that work on requests begins, and so that they are accepted."""
        begun: dict[int, Begun] = {}
        for request in requests:
            self._accepted.pop(request, None)
            message = begun.setdefault(request.client_id, Begun([], []))
            message.request_ids.append(request.request_id)
            message.caches.append(request.cache_report)
        for client_id, message in begun.items():
            self._transport.send(client_id, message)

    def add_steady(self, output: SteadyOutput) -> None:
        """Add a token each of requests that go on."""
        if not output.token_ids:
            return
        events = self._events_of(output.client_id)
        events.request_ids += output.request_ids
        events.num_tokens += [1] * len(output.token_ids)
        events.token_ids += output.token_ids

    def add_tokens(self, output: RowOutput) -> None:
        """Add a request's committed tokens, with Started at the first and Finished at the last."""
        request = output.request
        events, row = self._add_row(request, len(output.token_ids))
        events.token_ids += output.token_ids
        if request.unsent_prompt_logprobs:
            events.prompt_logprobs[row], request.unsent_prompt_logprobs = request.unsent_prompt_logprobs, []
        if output.logprobs is not None:
            events.logprobs[row] = output.logprobs
        if len(request.output_token_ids) == len(output.token_ids):
            self._add_start(events, row, request)
        if request.finish_reason is not None:
            events.finished.append(Finished(row, request.finish_reason, request.stop_token_id))
            self._stats.record_finished(request)

    def add_prompt_logprobs(self, request: Request) -> None:
        """Add log-probabilities of a prompt that is only partly computed."""
        events, row = self._add_row(request)
        events.prompt_logprobs[row], request.unsent_prompt_logprobs = request.unsent_prompt_logprobs, []

    def add_embedding(self, request: Request) -> None:
        """Add a prompt's embedding, with both Started and Finished of its request."""
        assert request.embedding is not None
        events, row = self._add_row(request)
        events.embeddings[row] = request.embedding.vector()
        self._add_start(events, row, request)
        events.finished.append(Finished(row, "stop", None))
        self._stats.record_finished(request)

    def add_end(self, request: Request, reason: str) -> None:
        """Add a request's end without a token."""
        events, row = self._add_row(request)
        events.finished.append(Finished(row, reason, None))
        self._stats.record_finished(request)

    def send_end(self, client_id: int, request_id: str, reason: str, *, step_id: int) -> None:
        """Send the end of a request that has never been made."""
        end = Finished(0, reason, None)
        self._transport.send(client_id, StepEvents(step_id, [request_id], [0], [], finished=[end]))
        self._stats.record_dropped(reason)

    def drop(self, client_id: int) -> None:
        """Discard the message for a disconnected client."""
        self._events.pop(client_id, None)

    def send(self, step_id: int) -> None:
        """Send all messages; step_id: the last committed step."""
        for request, message in self._accepted.items():
            self._transport.send(request.client_id, message)
        self._accepted.clear()
        filled, self._events = self._events, {}
        for client_id, events in filled.items():
            events.step_id = step_id
            self._transport.send(client_id, events)
        while self._started:
            self._stats.record_started(*self._started.pop(0))

    def _add_row(self, request: Request, num_tokens: int = 0) -> tuple[StepEvents, int]:
        """Begin a request's row; return the message being filled for its client, and the row's index."""
        events = self._events_of(request.client_id)
        events.request_ids.append(request.request_id)
        events.num_tokens.append(num_tokens)
        return events, len(events.request_ids) - 1

    def _events_of(self, client_id: int) -> StepEvents:
        """Return the message being filled for a client."""
        if (events := self._events.get(client_id)) is None:
            events = self._events[client_id] = StepEvents(0, [], [], [])
        return events

    def _add_start(self, events: StepEvents, row: int, request: Request) -> None:
        scheduled_s, first_s = request.first_scheduled_s, request.first_token_s
        assert scheduled_s is not None
        assert first_s is not None
        queue_s = max(0.0, scheduled_s - request.arrival_s)  # arrival_s was read by another process
        start = Started(row, request.num_cached_tokens, queue_s, first_s - scheduled_s, request.cache_report)
        events.started.append(start)
        self._started.append((request, start))
