"""What a tenant uses in one engine is known to all others, by HTTP workers' messages; without limits none is sent."""

import asyncio
import random

import pytest

from engine.interface.mailbox import RequestOutput
from engine.interface.metrics import Metrics
from engine.interface.paired_client import PairedEngineClient
from engine.interface.protocol import AddRequest, HandOver, SamplingParams, TenantUse, pack_token_ids
from engine.interface.tenant import Charge, Rates, Tenant
from engine.interface.tenant_uses import FLUSH_S, TenantUses
from tests.support.fakes import FakeEngineClient

TEAM = Tenant(name="team", requests_per_minute=5, tokens_per_minute=1000, tokens_at_once=500)


class Told:
    def __init__(self) -> None:
        self.uses: list[TenantUse] = []

    def tell_use(self, use: TenantUse) -> None:
        self.uses.append(use)

    @property
    def sums(self) -> tuple[int, int, int]:
        """Requests and tokens a minute, and open tokens, as the engine has them of this worker."""
        last = self.uses[-1].num_open_tokens if self.uses else 0
        return sum(use.num_requests for use in self.uses), sum(use.num_tokens for use in self.uses), last


def request_of(name: str, num_prompt: int, max_tokens: int, tenant: Tenant = TEAM, **fields: object) -> AddRequest:
    charge = Charge(num_prompt, num_prompt + max_tokens)
    params = SamplingParams(max_tokens=max_tokens)
    return AddRequest(name, pack_token_ids(range(num_prompt)), params, 0.0, tenant=tenant, charge=charge, **fields)


def test_each_engine_knows_what_the_others_do() -> None:
    async def use() -> None:
        clients = [Told(), Told(), Told()]
        uses = TenantUses(clients)
        request = request_of("a", 10, 20)
        uses.begin(request, clients[1])
        assert [client.sums for client in clients] == [(0, 0, 30), (0, 0, 0), (0, 0, 30)]
        uses.note(request, clients[1], RequestOutput([], rates=Rates()))
        assert [client.sums for client in clients] == [(1, 10, 30), (0, 0, 0), (1, 10, 30)]
        for _ in range(4):
            uses.note(request, clients[1], RequestOutput([1]))
        assert clients[0].sums == (1, 10, 30)
        await asyncio.sleep(FLUSH_S + 0.1)
        assert [client.sums for client in clients] == [(1, 14, 30), (0, 0, 0), (1, 14, 30)]
        uses.end(request, clients[1])
        assert [client.sums for client in clients] == [(1, 14, 0), (0, 0, 0), (1, 14, 0)]
        assert not uses._open
        uses.close()

    asyncio.run(use())


def test_a_prompt_that_is_handed_over_counts_with_its_whole_answer() -> None:
    clients = [Told(), Told()]
    request = request_of("a", 10, 1, hand_over=HandOver(0, is_prefill=True, max_tokens=50))
    TenantUses(clients).begin(request, clients[0])
    assert clients[1].sums == (0, 0, 60)


@pytest.mark.parametrize("tenant", [Tenant(), Tenant(name="team", weight=2.0)])
def test_without_limits_nothing_is_told(tenant: Tenant) -> None:
    clients = [Told(), Told()]
    uses, request = TenantUses(clients), request_of("a", 10, 20, tenant)
    uses.begin(request, clients[0])
    uses.note(request, clients[0], RequestOutput([1, 2, 3]))
    uses.end(request, clients[0])
    assert not any(client.uses for client in clients)


@pytest.mark.parametrize("seed", range(3))
def test_whatever_order_requests_have_the_sums_are_those_of_the_others(seed: int) -> None:
    draw = random.Random(seed)

    async def use() -> None:
        clients = [Told() for _ in range(3)]
        uses, opened = TenantUses(clients), []
        counts = {client: [0, 0] for client in clients}
        for number in range(200):
            if opened and draw.random() < 0.5:
                request, client = opened.pop(draw.randrange(len(opened)))
                num_generated = draw.randrange(3)
                uses.note(request, client, RequestOutput([1] * num_generated))
                counts[client][1] += num_generated
                uses.end(request, client)
            else:
                request, client = (
                    request_of(str(number), draw.randrange(1, 9), draw.randrange(1, 9)),
                    draw.choice(clients),
                )
                uses.begin(request, client)
                opened.append((request, client))
                if draw.random() < 0.8:  # it is accepted
                    uses.note(request, client, RequestOutput([], rates=Rates()))
                    counts[client][0] += 1
                    counts[client][1] += request.charge.num_prompt_tokens
        await asyncio.sleep(FLUSH_S + 0.1)
        for client in clients:
            others = [counts[other] for other in clients if other is not client]
            elsewhere = sum(request.charge.num_tokens for request, other in opened if other is not client)
            assert client.sums == (sum(n for n, _ in others), sum(n for _, n in others), elsewhere)
        uses.close()

    asyncio.run(use())


def test_a_client_of_several_engines_tells_all_of_them() -> None:
    prefill, decode = FakeEngineClient([11]), [FakeEngineClient([11, 12, 13]) for _ in range(2)]
    prefill.rates = Rates()
    client = PairedEngineClient([prefill], decode, min_tokens=4, max_replays=2, metrics=Metrics())

    async def ask() -> None:
        async for _ in client.submit(request_of("a", 10, 3)):
            pass
        await asyncio.sleep(FLUSH_S + 0.1)
        await client.aclose()

    asyncio.run(ask())
    for engine in decode:
        assert sum(use.num_requests for use in engine.told_uses) == 1
        assert engine.told_uses[-1].num_open_tokens == 0
    assert sum(use.num_requests for use in prefill.told_uses) == 0
    served = next(engine for engine in decode if engine.submitted)
    other = next(engine for engine in decode if not engine.submitted)
    assert sum(use.num_tokens for use in other.told_uses) > sum(use.num_tokens for use in served.told_uses) >= 10
    assert max(use.num_open_tokens for use in other.told_uses) == 13
