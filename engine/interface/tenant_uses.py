"""TenantUses: tells each engine what tenants use in the others, so that limits hold for all together. Never torch.

Each engine checks the limits of a tenant when a request begins in it. What the others need for that comes from the HTTP
workers, each of which tells what its own requests use: requests and prompts when an engine has accepted them, generated
tokens FLUSH_S later at most, and how many tokens its open requests have elsewhere. Tenants without limits cost nothing.

If two engines accept requests of a tenant within the time of a message, it may exceed a limit by one of them. An engine
that was started anew knows nothing of the minute before, and of open requests elsewhere from the tenant's next one on.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Protocol

from engine.interface.mailbox import RequestOutput
from engine.interface.protocol import AddRequest, TenantUse
from engine.interface.tenant import Tenant

FLUSH_S = 0.25


class ToldOfUses(Protocol):
    """The client of an engine."""

    def tell_use(self, use: TenantUse) -> None:
        """Tell the engine what a tenant uses in other engines. Does nothing while it does not serve."""
        ...


class TenantUses:
    """Owns what the requests of one worker use, by tenant and engine. Use inside one event loop."""

    def __init__(self, clients: Sequence[ToldOfUses]) -> None:
        self._clients = clients
        self._tenants: dict[str, Tenant] = {}  # with limits, by name, as their last requests have them
        self._open: defaultdict[str, Counter[ToldOfUses]] = defaultdict(Counter)  # tokens of open requests
        self._generated: defaultdict[str, Counter[ToldOfUses]] = defaultdict(Counter)  # tokens that are not told yet
        self._flushing: asyncio.TimerHandle | None = None

    def begin(self, request: AddRequest, client: ToldOfUses) -> None:
        """Note that a request is sent to an engine."""
        if _has_limits(request.tenant):
            self._tenants[request.tenant.name] = request.tenant
            self._add_open(request, client, _num_tokens(request))

    def note(self, request: AddRequest, client: ToldOfUses, output: RequestOutput) -> None:
        """Note an output of the request."""
        tenant = request.tenant
        if output.rates is not None and request.charge is not None:  # it is accepted
            self._tell(tenant.name, Counter({client: request.charge.num_prompt_tokens}), Counter({client: 1}))
        if tenant.tokens_per_minute is not None and output.token_ids:
            self._generated[tenant.name][client] += len(output.token_ids)
            if self._flushing is None:
                self._flushing = asyncio.get_running_loop().call_later(FLUSH_S, self._flush)

    def end(self, request: AddRequest, client: ToldOfUses) -> None:
        """Note that a request has ended in the engine to which it was sent."""
        if _has_limits(request.tenant):
            self._add_open(request, client, -_num_tokens(request))

    def close(self) -> None:
        """Tell nothing more."""
        if self._flushing is not None:
            self._flushing.cancel()

    def _add_open(self, request: AddRequest, client: ToldOfUses, num_tokens: int) -> None:
        if request.tenant.tokens_at_once is not None:
            self._open[request.tenant.name][client] += num_tokens
            self._tell(request.tenant.name, Counter(), Counter())

    def _flush(self) -> None:
        self._flushing = None
        generated, self._generated = self._generated, defaultdict(Counter)
        for name, num_tokens in generated.items():
            self._tell(name, num_tokens, Counter())

    def _tell(self, name: str, tokens: Counter[ToldOfUses], requests: Counter[ToldOfUses]) -> None:
        """Tell each engine what the tenant has used in the others. tokens, requests: by the engine that knows them."""
        opened = self._open.get(name, Counter())
        for client in self._clients:
            use = TenantUse(
                self._tenants[name],
                num_requests=requests.total() - requests[client],
                num_tokens=tokens.total() - tokens[client],
                num_open_tokens=opened.total() - opened[client],
            )
            if use.num_requests or use.num_tokens or opened:
                client.tell_use(use)
        if opened and not opened.total():
            del self._open[name]


def _has_limits(tenant: Tenant) -> bool:
    return bool(tenant.name) and (tenant.has_rates or tenant.tokens_at_once is not None)


def _num_tokens(request: AddRequest) -> int:
    """Return the tokens of a request's prompt and answer, at most."""
    if request.pooling is not None:
        return request.num_prompt_tokens
    hand_over = request.hand_over
    most = hand_over.max_tokens if hand_over is not None and hand_over.is_prefill else request.params.max_tokens
    return request.num_prompt_tokens + most
