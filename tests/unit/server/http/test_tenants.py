"""Tenants at the HTTP side: what the engine is told, headers, refusals, ceilings, grammars, and /v1/usage."""

import asyncio
import csv
import io

import pytest

from engine.interface.control import KeyUsage, Ledger
from engine.interface.errors import Overloaded, RateLimited, error_from_code
from engine.interface.tenant import Charge, Rate, Rates, Tenant
from server.api.rate_headers import RATE_HEADERS, duration
from server.config.api_keys import read_key_hashes
from server.structured_output.compile_check import GrammarChecker
from tests.support.fakes import FakeEngineClient, FakeLauncherChannel
from tests.unit.server.http.test_auth import check_error

HASHES = read_key_hashes(["one", "two"], file=None, environment={})
TEAM = Tenant(name="team", requests_per_minute=60, tokens_per_minute=1000, priority_ceiling=5)
KEYS = {"api_key_hashes": HASHES, "api_key_tenants": {HASHES[0]: TEAM}}
CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
ONE, TWO = {"x-api-key": "one"}, {"x-api-key": "two"}
BODIES = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
    COMPLETIONS: {"prompt": "a"},
    EMBEDDINGS: {"input": "a"},
}
RATES = Rates(Rate(60, 59, 0.98), Rate(1000, 900, 61.5))


@pytest.mark.parametrize("path", BODIES)
def test_requests_carry_the_tenant_of_their_key_and_what_they_ask(harness, path) -> None:
    app = harness(**KEYS, pooling="mean")
    assert app.post(path, BODIES[path], headers=ONE).status_code == 200
    assert app.post(path, BODIES[path], headers=TWO).status_code == 200
    named, unnamed = app.client.submitted
    assert (named.tenant, unnamed.tenant) == (TEAM, Tenant())
    assert named.charge.num_prompt_tokens == named.num_prompt_tokens
    max_tokens = 0 if path == EMBEDDINGS else named.params.max_tokens
    assert named.charge.num_tokens == named.num_prompt_tokens + max_tokens


def test_prompts_and_choices_are_charged_together_and_once(harness) -> None:
    app = harness(**KEYS)
    body = {"prompt": [[1, 2, 3], [4, 5]], "n": 2, "max_tokens": 7, "timeout": 60}
    assert app.post(COMPLETIONS, body, headers=ONE).status_code == 200
    first, *others = sorted(app.client.submitted, key=lambda request: request.request_id)
    assert first.charge == Charge(5, 2 * 5 + 4 * 7)
    assert [request.charge for request in others] == [None] * 3
    assert [request.counts_prompt for request in (first, *others)] == [True, False, True, False]
    assert all(request.deadline_s == pytest.approx(request.arrival_s + 60) for request in app.client.submitted)


# rule: Limits: Answers name the limits of their API key in x-ratelimit headers, and a 429 names the limit
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_answers_have_openais_headers(harness, path, stream) -> None:
    app = harness(**KEYS, pooling="mean")
    app.client.rates = RATES
    body = BODIES[path] if path == EMBEDDINGS else BODIES[path] | {"stream": stream}
    reply = app.post(path, body, headers=ONE)
    assert {name: reply.headers.get(name) for name in RATE_HEADERS} == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "980ms",
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "900",
        "x-ratelimit-reset-tokens": "1m1.5s",
    }
    app.client.rates = None
    assert not any(name in app.post(path, body, headers=ONE).headers for name in RATE_HEADERS)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (0.0204, "20ms"), (1.0, "1s"), (1.5, "1.5s"), (60, "1m0s"), (360, "6m0s")]
)
def test_durations_are_openais(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# rule: Limits: Answers name the limits of their API key in x-ratelimit headers, and a 429 names the limit
@pytest.mark.parametrize("path", [*BODIES, "/v1/messages"])
def test_a_refusal_is_a_429_with_the_headers(harness, path) -> None:
    limited = RateLimited(
        "The API key team has reached requests_per_minute, 60.", retry_after_s=17, rates=Rates(Rate(60, 0, 30.0))
    )
    app = harness(**KEYS, engine={"fail": limited}, pooling="mean")
    body = BODIES.get(path, {"model": "tiny", "max_tokens": 5, "messages": BODIES[CHAT]["messages"]})
    reply = app.post(path, body, headers=ONE)
    assert reply.status_code == 429
    assert reply.headers["retry-after"] == "17"
    assert reply.headers["x-ratelimit-remaining-requests"] == "0"
    assert "x-ratelimit-limit-tokens" not in reply.headers
    assert "requests_per_minute" in reply.text
    if path != "/v1/messages":
        check_error(reply, 429, "rate_limit_exceeded")
    assert app.metrics.drain().counters["requests_rejected_total", "rate_limit_exceeded"] == 1


def test_errors_of_the_engine_keep_their_time_and_rates() -> None:
    error = error_from_code("rate_limit_exceeded", "no", retry_after_s=5, rates=RATES)
    assert isinstance(error, RateLimited)
    assert (error.retry_after_s, error.rates) == (5, RATES)
    error = error_from_code("overloaded", "no", retry_after_s=9)
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == 9


@pytest.mark.parametrize("path", BODIES)
def test_a_ceiling_bounds_priorities_and_is_the_default(harness, path) -> None:
    app = harness(**KEYS, pooling="mean", priority="all")
    asked = [({}, 5), ({"priority": 5}, 5), ({"priority": 9}, 9)]
    for fields, _ in asked:
        assert app.post(path, BODIES[path] | fields, headers=ONE).status_code == 200
    assert [request.priority for request in app.client.submitted] == [priority for _, priority in asked]
    error = check_error(app.post(path, BODIES[path] | {"priority": 4}, headers=ONE), 400, "invalid_parameter")
    assert error["param"] == "priority"
    assert "priority is 4; the API key team has the priority_ceiling 5" in error["message"]
    assert app.post(path, BODIES[path] | {"priority": -4}, headers=TWO).status_code == 200


def test_a_priority_that_may_not_be_set_becomes_the_ceiling(harness) -> None:
    app = harness(**KEYS, priority="off")
    reply = app.post(COMPLETIONS, {"prompt": "a", "priority": -4}, headers=ONE)
    assert reply.headers["x-quire-ignored"] == "priority"
    assert app.client.submitted[0].priority == 5


def test_grammars_are_checked_and_charged_once_for_each_compilation(model_folder) -> None:
    from engine.interface.protocol import GrammarSpec

    client = FakeEngineClient()
    spec = GrammarSpec("start: /[ab]+/")

    async def check_twice() -> None:
        async with (checker := GrammarChecker(model_folder, meter=client)):
            for _ in range(2):
                await checker.check(spec, tenant=TEAM)

    asyncio.run(check_twice())
    assert client.checked_tenants == [TEAM]
    ((tenant, seconds),) = client.spent_grammar_s
    assert tenant == TEAM
    assert 0 < seconds < 5


USAGE = KeyUsage("team", 3, 1, 100, 20, 30, 1.25, 0.5)


# rule: Security: The ledger of all keys is for the role admin
def test_usage_is_for_admins(harness) -> None:
    launcher = FakeLauncherChannel()
    launcher.ledger = Ledger(0, 1_790_000_000.5, [USAGE])
    app = harness(**KEYS, launcher=launcher, api_key_roles={HASHES[0]: ["inference"]})
    check_error(app.request("GET", "/v1/usage", headers=ONE), 403, "missing_role")
    reply = app.request("GET", "/v1/usage", headers=TWO)
    assert reply.json() == {
        "object": "usage",
        "start_time": 1_790_000_000,
        "data": [
            {
                "key": "team",
                "requests": 3,
                "refused_requests": 1,
                "computed_tokens": 100,
                "cached_tokens": 20,
                "generated_tokens": 30,
                "device_seconds": 1.25,
                "grammar_seconds": 0.5,
            }
        ],
    }


def test_the_command_prints_csv(capsys, monkeypatch) -> None:
    import httpx

    from server.cli import main

    pages = {
        "good": httpx.Response(200, json={"start_time": 7, "data": [{"key": "team", "requests": 3}]}),
        "role": httpx.Response(403, json={"error": {"message": "needs an API key with the role admin"}}),
        "none": httpx.Response(401, json={"error": {"message": "no"}}),
        "other": httpx.Response(200, text="<html>"),
    }
    for name, page in pages.items():
        monkeypatch.setattr(
            "server.commands.server_target.make_client",
            lambda *_, page=page, **__: httpx.Client(
                base_url="http://x", transport=httpx.MockTransport(lambda request: page)
            ),
        )
        code = main(["usage", "--url", "http://x"])
        out, err = capsys.readouterr()
        if name == "good":
            (row,) = csv.DictReader(io.StringIO(out))
            assert code == 0
            assert (row["since"], row["key"], row["requests"], row["device_seconds"]) == ("7", "team", "3", "0.000")
        else:
            assert code == (3 if name == "other" else 2)
            assert err.startswith("quire: error: ")
