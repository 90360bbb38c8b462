"""Requests of a load: those of a workload are the offline ones, shared out once; conversations hold their answers."""

import json
from collections import Counter
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from benchmarks.agents import NUM_AGENTS, NUM_REQUESTS, NUM_TURNS, agents
from benchmarks.client_processes import split
from benchmarks.load import Body, LoadConfig, make_bodies, make_conversations, with_workload
from benchmarks.load_client import run_load
from benchmarks.load_connection import Answer
from benchmarks.report import BenchError
from benchmarks.serve import _warnings, make_report
from benchmarks.target import find_target, settle_prompts
from benchmarks.workloads import AGENT, NAMES, workload
from tests.support.fake_openai import fake_openai

CONFIG = LoadConfig(host="127.0.0.1", port=1, model="m", num_requests=7, concurrency=3, input_len=5, output_len=4)


def content(body: Body) -> dict[str, Any]:
    return json.loads(body.data.partition(b"\r\n\r\n")[2])


def sent(config: LoadConfig, num_processes: int) -> list[tuple[list[int], int]]:
    shares = split(config, num_processes)
    bodies = [content(body) for share in shares for body in make_bodies(share)]
    return [(body["prompt"], body["max_tokens"]) for body in bodies]


@pytest.mark.parametrize("name", [name for name in NAMES if name not in (AGENT, "longctx", "prefill")])
def test_a_workload_is_sent_once_by_all_processes_together(name: str) -> None:
    expected = workload(name)
    config = with_workload(CONFIG, name)
    assert (config.num_requests, config.concurrency) == (len(expected), len(expected))
    found = sent(config, 3)
    assert Counter((tuple(prompt), n) for prompt, n in found) == Counter((tuple(prompt), n) for prompt, n in expected)
    assert (config.input_len, config.output_len) == (max(len(p) for p, _ in expected), max(n for _, n in expected))


def test_a_warm_up_and_a_smaller_vocabulary_change_answers_and_ids_alone() -> None:
    config = msgspec.structs.replace(with_workload(CONFIG, "eight"), output_len=8, vocab_size=1000)
    assert sent(config, 1) == [([token % 1000 for token in prompt], 8) for prompt, _ in workload("eight")]
    assert sent(msgspec.structs.replace(config, num_requests=2), 1) == sent(config, 1)[:2]
    assert sent(msgspec.structs.replace(config, seed=1), 1) != sent(config, 1)


def test_random_prompts_differ_between_processes_and_seeds() -> None:
    prompts = [tuple(prompt) for prompt, _ in sent(CONFIG, 3)]
    assert len(set(prompts)) == 7
    assert {len(prompt) for prompt in prompts} == {5}
    assert set(prompts).isdisjoint(tuple(prompt) for prompt, _ in sent(msgspec.structs.replace(CONFIG, seed=50), 3))


def test_words_stand_for_ids_so_that_prefixes_stay_shared() -> None:
    config = msgspec.structs.replace(with_workload(CONFIG, "shared"), prompt_format="text", num_requests=2)
    first, second = (content(body)["prompt"].split() for body in make_bodies(config))
    assert len(first) == len(second) == 2048 + 128
    assert first[:2048] == second[:2048]
    assert first != second


@pytest.mark.parametrize("form", ["ids", "text", "chat"])
def test_a_conversations_next_prompt_holds_its_answer_and_branches_differ(form: str) -> None:
    path = "/v1/chat/completions" if form == "chat" else "/v1/completions"
    config = with_workload(
        LoadConfig(host="h", port=1, model="m", path=path, prompt_format="ids" if form == "ids" else "text"), AGENT
    )
    conversation, agent = make_conversations(config)[0]
    first = content(conversation.ask(agent.trunk[0]))
    conversation.hear(Answer([" to", " you"], [7, 8]))
    left, right = (content(conversation.fork().ask(branch[0])) for branch in agent.branches)
    if form == "chat":
        roles = [message["role"] for message in left["messages"]]
        assert roles == ["system", "user", "assistant", "user"]
        assert left["messages"][2]["content"] == " to you"
        assert left["messages"][:3] == right["messages"][:3]
    elif form == "text":
        assert left["prompt"].startswith(first["prompt"] + "  to you ")
    else:
        assert first["return_token_ids"]
        assert left["prompt"] == first["prompt"] + [7, 8] + agent.branches[0][0].added
    assert left != right


@pytest.mark.parametrize(("behaviour", "is_text"), [("ids", False), ("good", True)])
def test_a_server_gets_all_turns_of_a_conversation_in_ids_if_it_returns_them(behaviour: str, is_text: bool) -> None:
    with fake_openai(behaviour) as fake:
        config = find_target(fake.url, endpoint="completions", model=None, api_key="")
        config = settle_prompts(with_workload(config, AGENT), "auto")
        num_trials = len(fake.requests)
        part = msgspec.structs.replace(config, part=3, num_parts=NUM_AGENTS)
        result = run_load(part)
        requests = [body for _, body in fake.requests[num_trials:]]
    agent = agents(0, 10_000)[3]
    half = NUM_TURNS // 2
    assert len(requests) == len(result.timings) == 3 * half == NUM_REQUESTS // NUM_AGENTS
    turns = [*agent.trunk, *agent.branches[0], *agent.branches[1]]
    assert Counter(body["max_tokens"] for body in requests) == Counter(turn.num_answered for turn in turns)
    prompts = [body["prompt"] for body in requests]
    assert all(isinstance(prompt, str) == is_text for prompt in prompts)
    for before, after in pairwise(prompts[:half]):
        assert after[: len(before)] == before
    if not is_text:
        assert prompts[1][len(prompts[0]) :] == [9] * agent.trunk[0].num_answered + agent.trunk[1].added
    report = make_report(config, [result], goodput={}) | {"is_interrupted": False}
    assert report["num_output_tokens"] == report["num_asked_tokens"] == sum(turn.num_answered for turn in turns)


def test_a_conversation_ends_with_its_failed_turn_and_the_rest_is_told() -> None:
    with fake_openai("error") as fake:
        config = settle_prompts(
            with_workload(find_target(fake.url, endpoint="chat", model=None, api_key=""), AGENT), "auto"
        )
        result = run_load(config)
    assert len(result.timings) == NUM_AGENTS
    report = make_report(config, [result], goodput={}) | {"is_interrupted": False}
    assert report["num_failed"] == NUM_AGENTS
    assert f"{NUM_REQUESTS - NUM_AGENTS} requests were not sent, because a turn before them failed." in _warnings(
        report
    )


def test_ids_alone_are_refused_where_answers_have_none() -> None:
    with fake_openai("good") as fake:
        config = with_workload(find_target(fake.url, endpoint="completions", model=None, api_key=""), AGENT)
        with pytest.raises(BenchError, match=r"returns no token ids of answers.*--prompt-format text"):
            settle_prompts(config, "ids")
