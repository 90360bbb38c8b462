"""Tenants and TenantShares: the limits of tenants, and what they used. Plain Python; never torch, a clock or a socket.

    check → open … (settle) … close                  of each engine request
    record_step, in each committed step              device time

A limit a minute holds in every minute: MinuteWindow adds up the last sixty seconds. Prompts are charged when a request
is accepted, generated tokens when they are generated; so a tenant whose requests run may go over its limit of tokens by
what they generate, and is refused until that has left the window. The ledger counts the tokens that answers report as
their usage, and splits the time of a step by the tokens of its rows.

TenantShares limits what running requests may take. Once requests of several tenants have been seen, one row in sixteen
is kept for tenants that have few, so that nobody waits for the end of another tenant's answer: half of them for tenants
without a row, half also for those that have fewer than one in 32. With a kv_share, a
tenant's running requests may never come to hold more pages than that part of the pool, even if all of them generate
max_tokens; blocks that they share count for each.
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from operator import attrgetter

from engine.core.kv_caches import KvCaches
from engine.core.planned_step import PlannedStep
from engine.core.request import Request
from engine.core.waiting_queue import WaitingQueue
from engine.interface.errors import InvalidParameter, RateLimited
from engine.interface.metrics import Metrics
from engine.interface.protocol import AddRequest, GrammarLimit, GrammarUse, TenantUse
from engine.interface.tenant import UNNAMED, Rate, Rates, Tenant

_MINUTE_S = 60.0
_SLOT_S = 0.25  # uses within it are added up, and leave the window together
_MAX_NAMES = 1024  # that are counted by themselves, over all key files since the engine's start
_OTHERS = "others"  # the name under which the rest is counted

_ROWS_PER_KEPT_ROW = 16
_ROWS_PER_FEW = 32  # a tenant with fewer than one in so many rows may take half of those that are kept

_name_of = attrgetter("tenant_name")


class TenantShares:
    """The shares of one engine with max_num_seqs rows."""

    def __init__(self, kv: KvCaches, *, max_num_seqs: int) -> None:
        self._kv = kv
        self._num_kept_rows = max_num_seqs // _ROWS_PER_KEPT_ROW
        self._num_few_rows = max(max_num_seqs // _ROWS_PER_FEW, 1)

    def check(self, request: Request) -> None:
        """Raise InvalidParameter for a request that exceeds its tenant's share by itself."""
        hand_over, num_tokens = request.hand_over, request.max_num_tokens
        if hand_over is not None and hand_over.is_prefill:  # refused by the other engine it would end after a token
            num_tokens = min(request.num_prompt_tokens + hand_over.max_tokens, self._kv.max_num_tokens)
        num_pages, most = self._kv.layout.num_pages(num_tokens), self._most_pages(request)
        if num_pages > most:
            raise InvalidParameter(
                f"Prompt and max_tokens together may take {num_pages} pages of the KV cache; the kv_share"
                f" {request.kv_share:g} of this API key is {most} of {self._kv.pool.num_usable} pages.",
                param="max_tokens",
            )

    def next(
        self, queue: WaitingQueue, running: Sequence[Request], num_free_rows: int, *, is_new: bool
    ) -> Request | None:
        """Return the queued request that may start now, in the order of service; None: none may. Changes nothing.

        Requests at the gate of host memory are passed over, and a row is kept for each. is_new: only newcomers may
        start (engine/core/step_budget.py).
        """
        num_free_rows -= self._kv.tiers.num_waiting
        if not queue or num_free_rows <= 0:
            return None
        holder = self._holder(queue, running, num_free_rows, is_new=is_new)
        return queue.next(is_passed=self._kv.tiers.is_waiting, is_held=holder)

    def _holder(
        self, queue: WaitingQueue, running: Sequence[Request], num_free_rows: int, *, is_new: bool
    ) -> Callable[[Request], bool] | None:
        """Return whether a tenant must wait until one of its running requests has ended; None: none must."""
        is_shared = queue.has_several_tenants
        if not is_shared and queue.tenants[0].requests[0].kv_share == 1.0:
            return None
        num_running = Counter(request.tenant_id for request in running)
        is_scarce = is_shared and (is_new or num_free_rows <= self._num_kept_rows)
        is_scarce_for_few = is_shared and num_free_rows <= self._num_kept_rows // 2

        def is_held(request: Request) -> bool:
            num_rows = num_running[request.tenant_id]
            if not num_rows:
                return False
            has_no_row_left = is_scarce_for_few if num_rows < self._num_few_rows else is_scarce
            if has_no_row_left or request.kv_share == 1.0:
                return has_no_row_left
            held = sum(self._num_pages(other) for other in running if other.tenant_id == request.tenant_id)
            return held + self._num_pages(request) > self._most_pages(request)

        return is_held

    def _num_pages(self, request: Request) -> int:
        return self._kv.layout.num_pages(request.max_num_tokens)

    def _most_pages(self, request: Request) -> int:
        return int(request.kv_share * self._kv.pool.num_usable)


class MinuteWindow:
    """What was used of a limit in the last minute."""

    def __init__(self, limit: float = math.inf) -> None:
        self.limit = limit
        self._used = 0.0
        self._slots: deque[tuple[float, float]] = deque()  # when each leaves the window, and its amount

    def add(self, amount: float, now: float, *, at_s: float = math.inf) -> None:
        """Use an amount, whatever is left. at_s: it was used then, if that is before now."""
        self.used(now)
        end_s = (math.floor(min(now, at_s) / _SLOT_S) + 1) * _SLOT_S + _MINUTE_S
        if end_s <= now:
            return
        later: list[tuple[float, float]] = []  # slots, all but a few times none
        while self._slots and self._slots[-1][0] > end_s:
            later.append(self._slots.pop())
        before = self._slots.pop()[1] if self._slots and self._slots[-1][0] == end_s else 0.0
        self._slots.append((end_s, before + amount))
        self._slots.extend(reversed(later))
        self._used += amount

    def used(self, now: float) -> float:
        """Return what was used in the last minute."""
        while self._slots and self._slots[0][0] <= now:
            self._used -= self._slots.popleft()[1]
        if not self._slots:
            self._used = 0.0  # no rest of rounding
        return self._used

    def wait_s(self, amount: float, now: float) -> float:
        """Return after how many seconds an amount is left; 0: now. One beyond the limit is never left: infinity."""
        missing = self.used(now) + amount - self.limit
        for end_s, freed in self._slots:
            if missing <= 0:
                break
            missing -= freed
            if missing <= 0:
                return end_s - now
        return 0.0 if missing <= 0 else math.inf

    def rate(self, now: float) -> Rate:
        """Return the limit's state for the headers of answers."""
        remaining = max(int(self.limit - self.used(now)), 0)
        return Rate(int(self.limit), remaining, self._slots[-1][0] - now if self._slots else 0.0)


class _Account:
    """One tenant's windows and open requests."""

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = Tenant()
        self.requests, self.tokens, self.grammar_s = MinuteWindow(), MinuteWindow(), MinuteWindow()
        self.num_open_tokens = 0
        self.set_limits(tenant)

    def set_limits(self, tenant: Tenant) -> None:
        """Take the limits of another key file; what was used before counts."""
        if tenant != self.tenant:
            self.requests.limit = _limit(tenant.requests_per_minute)
            self.tokens.limit = _limit(tenant.tokens_per_minute)
            self.grammar_s.limit = _limit(tenant.grammar_seconds)
            self.tenant = tenant

    def rates(self, now: float) -> Rates:
        """Return the state of its limits a minute."""
        return Rates(
            None if self.tenant.requests_per_minute is None else self.requests.rate(now),
            None if self.tenant.tokens_per_minute is None else self.tokens.rate(now),
        )


class _Open:
    """An accepted request that has not ended."""

    __slots__ = ("account", "num_counted", "num_tokens")

    def __init__(self, account: _Account, num_tokens: int, *, num_counted: int) -> None:
        self.account = account
        self.num_tokens = num_tokens  # prompt and max_tokens
        self.num_counted = num_counted  # generated tokens in the ledger; an earlier engine counted what it made


class Tenants:
    """The accounts of all tenants since the engine's start, and the ledger, which is in the metrics."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._accounts: dict[str, _Account] = {}  # of tenants with a name, as only they have limits
        self._names: set[str] = set()
        self._open: dict[Request, _Open] = {}
        self._elsewhere: defaultdict[int, Counter[str]] = defaultdict(Counter)  # open tokens by HTTP worker and name
        self._create_series(UNNAMED)

    def check(self, message: AddRequest, now: float) -> None:
        """Refuse a request that its tenant's limits do not allow now. Raises RateLimited, or InvalidParameter.

        The latter if they never will.
        """
        tenant, charge = message.tenant, message.charge
        if not tenant.name or charge is None or message.is_charged:
            return
        account = self._account(tenant)
        self._check_ever(tenant, charge.num_prompt_tokens, charge.num_tokens)
        name, limit = f"API key {tenant.name}", tenant.tokens_at_once
        wait_s = account.requests.wait_s(1, now)
        if wait_s:
            raise self._refusal(
                account, f"The {name} has reached requests_per_minute, {tenant.requests_per_minute}.", wait_s, now
            )
        wait_s = account.tokens.wait_s(charge.num_prompt_tokens, now)
        if wait_s:
            raise self._refusal(
                account,
                f"The {name} has used {int(account.tokens.used(now))} of tokens_per_minute,"
                f" {tenant.tokens_per_minute}, and this prompt has {charge.num_prompt_tokens}.",
                wait_s,
                now,
            )
        if limit is not None and account.num_open_tokens + charge.num_tokens > limit:
            raise self._refusal(
                account,
                f"The {name} has {account.num_open_tokens} tokens in its open requests, and {charge.num_tokens} more,"
                f" of prompt and max_tokens, would be over tokens_at_once, {limit}.",
                1.0,
                now,
            )

    def open(self, request: Request, message: AddRequest, now: float) -> Rates | None:
        """Charge a request that is accepted; return its tenant's limits a minute, if it has some."""
        tenant = message.tenant
        account = self._account(tenant)
        hand_over, most = message.hand_over, request.max_output_tokens
        if hand_over is not None and hand_over.is_prefill:  # another engine goes on
            most = hand_over.max_tokens
        num_tokens = message.num_prompt_tokens + most
        account.num_open_tokens += num_tokens
        self._open[request] = _Open(account, num_tokens, num_counted=request.num_replayed_tokens)
        if message.charge is None:
            return None
        at_s = message.arrival_s if message.is_charged else now  # the windows of an earlier engine have ended with it
        account.requests.add(1, now, at_s=at_s)
        account.tokens.add(message.charge.num_prompt_tokens, now, at_s=at_s)
        if message.is_charged:
            return None
        self._metrics.count("key_requests_total", label=(request.tenant_name, "accepted"))
        return account.rates(now) if tenant.has_rates else None

    def name_of(self, tenant: Tenant) -> str:
        """Return the name under which a tenant is counted."""
        name = tenant.name or UNNAMED
        if name not in self._names and len(self._names) >= _MAX_NAMES:
            return _OTHERS
        if name not in self._names:
            self._names.add(name)
            self._create_series(name)
        return name

    def count_refused(self, tenant: Tenant) -> None:
        """Count an HTTP request that its limits, or the queue, did not allow."""
        self._metrics.count("key_requests_total", label=(self.name_of(tenant), "refused"))

    def spend(self, client_id: int, use: GrammarUse | TenantUse, now: float) -> GrammarLimit | None:
        """Charge a tenant for what it used outside of this engine's requests; return what its workers are to know."""
        tenant = use.tenant
        if isinstance(use, GrammarUse):
            until_s = self.spend_grammar_s(tenant, use.seconds, now)
            limit_s = tenant.grammar_seconds
            return None if until_s is None or limit_s is None else GrammarLimit(tenant.name, limit_s, until_s)
        account, opened = self._account(tenant), self._elsewhere[client_id]
        if use.num_requests:
            account.requests.add(use.num_requests, now)
        if use.num_tokens:
            account.tokens.add(use.num_tokens, now)
        account.num_open_tokens += use.num_open_tokens - opened[tenant.name]
        opened[tenant.name] = use.num_open_tokens
        return None

    def drop_client(self, client_id: int) -> None:
        """Forget the open requests that an HTTP worker had in other engines, since it is gone."""
        for name, num_tokens in self._elsewhere.pop(client_id, Counter()).items():
            self._accounts[name].num_open_tokens -= num_tokens

    def spend_grammar_s(self, tenant: Tenant, seconds: float, now: float) -> float | None:
        """Charge a tenant for compiled grammars; return the time from which on it may compile more, None: now."""
        account = self._account(tenant)
        account.grammar_s.add(seconds, now)
        self._metrics.count("key_grammar_seconds_total", seconds, self.name_of(tenant))
        if account.grammar_s.used(now) < account.grammar_s.limit:
            return None
        return now + account.grammar_s.wait_s(1e-9, now)

    def record_started(self, request: Request) -> None:
        """Count the prompt of a request whose first token, or whose embedding, is committed."""
        if request.counts_prompt:
            num_cached = request.num_cached_tokens
            self._count(request, "cached", num_cached)
            self._count(request, "computed", request.num_prompt_tokens - num_cached)

    def record_step(self, step: PlannedStep, seconds: float) -> None:
        """Split the time of a committed step by the tokens of its rows."""
        if len(self._names) == 1:
            for name in self._names:
                self._count_device(name, seconds)
            return
        tokens: Counter[str] = Counter()
        for part in step.steady:
            tokens.update(map(_name_of, part.requests))
        for request, row in step.singles:
            tokens[request.tenant_name] += row.num_tokens
        total = sum(tokens.values())
        for name, num_tokens in tokens.items():
            self._count_device(name, seconds * num_tokens / total)

    def settle(self, now: float) -> None:
        """Count and charge what the open requests have generated."""
        for request, opened in self._open.items():
            self._settle(request, opened, now)

    def close(self, request: Request) -> None:
        """Count and charge the rest of a request that has ended. Once: a second call does nothing."""
        opened = self._open.pop(request, None)
        if opened is not None:
            self._settle(request, opened, request.last_token_s or request.arrival_s)
            opened.account.num_open_tokens -= opened.num_tokens

    def _account(self, tenant: Tenant) -> _Account:
        account = self._accounts.get(tenant.name)
        if account is None:
            account = self._accounts[tenant.name] = _Account(tenant)
        account.set_limits(tenant)
        return account

    def _check_ever(self, tenant: Tenant, num_prompt: int, num_tokens: int) -> None:
        per_minute, at_once = tenant.tokens_per_minute, tenant.tokens_at_once
        if per_minute is not None and num_prompt > per_minute:
            raise InvalidParameter(
                f"The prompt has {num_prompt} tokens; tokens_per_minute of the API key {tenant.name} is {per_minute}."
            )
        if at_once is not None and num_tokens > at_once:
            raise InvalidParameter(
                f"Prompt and max_tokens of all choices are {num_tokens} tokens; tokens_at_once of the API key"
                f" {tenant.name} is {at_once}.",
                param="max_tokens",
            )

    def _refusal(self, account: _Account, message: str, wait_s: float, now: float) -> RateLimited:
        rates = account.rates(now) if account.tenant.has_rates else None
        return RateLimited(message, retry_after_s=max(math.ceil(wait_s), 1), rates=rates)

    def _settle(self, request: Request, opened: _Open, now: float) -> None:
        num_new = len(request.output_token_ids) - opened.num_counted
        if num_new:
            opened.num_counted += num_new
            opened.account.tokens.add(num_new, now)
            self._count(request, "generated", num_new)

    def _create_series(self, name: str) -> None:
        """Begin all counters of a name at 0: a rate over one that appears late misses its first increase."""
        for result in ("accepted", "refused"):
            self._metrics.count("key_requests_total", 0, (name, result))
        for kind in ("computed", "cached", "generated"):
            self._metrics.count("key_tokens_total", 0, (name, kind))
        self._count_device(name, 0)
        self._metrics.count("key_grammar_seconds_total", 0, name)

    def _count(self, request: Request, kind: str, num_tokens: int) -> None:
        if num_tokens:
            self._metrics.count("key_tokens_total", num_tokens, (request.tenant_name, kind))

    def _count_device(self, name: str, seconds: float) -> None:
        self._metrics.count("key_device_seconds_total", seconds, name)


def _limit(limit: float | None) -> float:
    return math.inf if limit is None else limit
