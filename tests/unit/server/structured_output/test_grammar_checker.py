"""The process that tries grammars, a real one: forks that take turns and are killed, replaced when it dies."""

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from engine.interface.errors import GrammarError, Overloaded, ShuttingDown, UnsupportedFeature
from engine.interface.protocol import GrammarSpec, GrammarVerdict
from server.structured_output.compile_check import GrammarChecker
from server.structured_output.grammar_spec import choice_grammar, json_schema_grammar, regex_grammar

pytestmark = pytest.mark.slow

GOOD = choice_grammar(["yes", "no"])
SLOW = json_schema_grammar({"type": "integer", "multipleOf": 100_000_007})  # more than half a minute
RULES = "\n".join(f'r{i}: r{i + 1} r{i + 1} | "x"' for i in range(4000))
CRASHING = GrammarSpec(f'start: r0\n{RULES}\nr4000: "y"')


@contextlib.contextmanager
def ended(checker):
    try:
        yield checker
    finally:
        checker.kill()


def run(folder, *steps, deadline_s=5.0):
    """Await each step, a function of the checker, in one event loop."""

    async def all_steps():
        with ended(GrammarChecker(folder, deadline_s=deadline_s)) as checker:
            return [await step(checker) for step in steps]

    return asyncio.run(all_steps())


async def refusal(checker, spec, param="field"):
    with pytest.raises(GrammarError) as info:
        await checker.check(spec, param=param)
    assert info.value.param == param
    return info.value.message


def forks_of(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


# rule: Limits: A grammar compiles within 5 s, in a process that can be killed
@pytest.mark.slow
def test_a_cheap_grammar_does_not_wait_for_costly_ones(model_folder):
    """It is done while they all still take turns."""

    async def steps(checker):
        await checker.check(GOOD)
        slow = [asyncio.create_task(checker.check(slow_grammar(i))) for i in range(12)]
        await until(lambda: len(forks_of(checker._process.pid)) == 12)
        for i in range(3):
            await checker.check(regex_grammar(f"a{i}"))
        assert not any(task.done() for task in slow)
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)

    run(model_folder, steps)


def slow_grammar(i):
    return json_schema_grammar({"type": "integer", "multipleOf": 100_000_007 + 2 * i})


@pytest.mark.slow
def test_the_cost_of_a_grammar_is_told(model_folder, monkeypatch):
    monkeypatch.setattr("server.structured_output.compile_check._COSTLY_S", 0.05)

    async def steps(checker):
        costly = json_schema_grammar({"type": "integer", "multipleOf": 29_989})
        assert (await checker.check(GOOD)) == GOOD
        for _ in range(2):  # the verdict is remembered, and so is its cost
            assert (await checker.check(costly)) == GrammarSpec(costly.source, is_costly=True)

    run(model_folder, steps, deadline_s=60)


def test_one_key_cannot_take_all_places(model_folder):
    async def steps(checker):
        never = asyncio.Event()

        async def ask(spec):
            await never.wait()

        checker._ask = ask
        tasks = [asyncio.create_task(checker.check(regex_grammar(f"a{i}"), client="one")) for i in range(16)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="of this API key are being compiled; the limit is 16"):
            await checker.check(regex_grammar("b"), client="one")
        others = [
            asyncio.create_task(checker.check(regex_grammar(f"c{i}"), client=c)) for i, c in enumerate(["two", ""])
        ]
        await asyncio.sleep(0)
        assert not any(task.done() for task in others)
        for task in tasks + others:
            task.cancel()
        await asyncio.gather(*tasks, *others, return_exceptions=True)

    run(model_folder, steps)


# rule: Limits: A grammar compiles within 5 s, in a process that can be killed
@pytest.mark.slow
def test_a_grammar_that_takes_too_long_is_refused_and_its_fork_killed(model_folder):
    async def steps(checker):
        await checker.check(GOOD)
        pid = checker._process.pid
        checker._deadline_s = 0.3  # for this one alone: on a busy machine the others take longer
        message = await refusal(checker, SLOW)
        checker._deadline_s = 60.0
        assert message == "field takes longer to compile than 0.3 s, the limit."
        assert not forks_of(pid)
        await checker.check(regex_grammar("a"))
        assert await refusal(checker, SLOW) == message  # remembered
        assert checker._process.pid == pid

    run(model_folder, steps, deadline_s=60)


def test_a_grammar_that_crashes_the_process_is_refused(model_folder):
    async def steps(checker):
        assert "nested too deeply" in await refusal(checker, CRASHING)
        await checker.check(GOOD)

    run(model_folder, steps)


def test_a_process_that_was_killed_is_replaced(model_folder):
    async def steps(checker):
        await checker.check(GOOD)
        os.kill(checker._process.pid, signal.SIGKILL)
        await checker.check(regex_grammar("b"))

    run(model_folder, steps)


def test_a_process_that_hangs_is_replaced(model_folder, monkeypatch):
    """Stopped, it neither answers nor ends: who waited is refused, and who comes next has another process."""

    async def steps(checker):
        await checker.check(GOOD)
        process = checker._process
        monkeypatch.setattr("server.structured_output.compile_check._TURN_DEADLINE_S", 0.5)
        os.kill(process.pid, signal.SIGSTOP)
        waiting = [checker.check(regex_grammar(text)) for text in ("b", "c")]
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [Overloaded, Overloaded]
        assert process.popen.returncode == -signal.SIGKILL
        monkeypatch.undo()
        await checker.check(regex_grammar("b"))
        assert checker._process.pid != process.pid

    run(model_folder, steps)


def test_a_process_that_was_heard_of_lately_is_kept_when_a_turn_does_not_come(model_folder, monkeypatch):
    async def steps(checker):
        await checker.check(GOOD)
        process = checker._process
        monkeypatch.setattr("server.structured_output.compile_check._TURN_DEADLINE_S", 0.5)
        os.kill(process.pid, signal.SIGSTOP)
        waiting = asyncio.create_task(checker.check(regex_grammar("b")))
        await asyncio.sleep(0)
        process.heard_s = float("inf")  # a verdict on another grammar, however long this test is held up
        with pytest.raises(Overloaded, match=r"this one had no turn within 0\.5 s"):
            await waiting
        assert process.popen.poll() is None
        monkeypatch.undo()
        os.kill(process.pid, signal.SIGCONT)
        await checker.check(regex_grammar("c"))
        assert checker._process is process

    run(model_folder, steps)


def test_a_process_that_was_killed_while_it_started_is_replaced(model_folder):
    async def steps(checker):
        asking = asyncio.create_task(checker.check(GOOD))
        while checker._process is None:
            await asyncio.sleep(0)
        os.kill(checker._process.pid, signal.SIGKILL)  # Python itself takes longer to start
        await asking

    run(model_folder, steps)


def test_a_refusal_names_no_setting_that_clients_do_not_have(model_folder):
    async def steps(checker):
        message = await refusal(checker, json_schema_grammar({"oneOf": [{"type": "integer"}, {"type": "number"}]}))
        assert "coerce_one_of" not in message
        assert "does not compile: oneOf is enforced where its alternatives exclude each other" in message

    run(model_folder, steps)


def test_verdicts_are_remembered(model_folder):
    async def steps(checker):
        bad = regex_grammar("[")
        await checker.check(GOOD)
        message = await refusal(checker, bad)
        checker.kill()
        await checker.check(GOOD)
        assert await refusal(checker, bad) == message
        assert (await refusal(checker, bad, "other")).startswith("other does not compile: ")
        assert checker._process is None

    run(model_folder, steps)


def test_requests_at_once_share_a_process_and_a_verdict(model_folder):
    async def steps(checker):
        asked = []
        ask = checker._ask

        async def counted(spec):
            asked.append(spec)
            return await ask(spec)

        checker._ask = counted
        specs = [GOOD, regex_grammar("a"), GOOD, regex_grammar("b"), GOOD]
        await asyncio.gather(*(checker.check(spec) for spec in specs))
        assert len(asked) == 3

    run(model_folder, steps)


def test_a_client_that_leaves_spoils_nothing(model_folder):
    async def steps(checker):
        leaving = asyncio.create_task(checker.check(GOOD))
        staying = asyncio.create_task(checker.check(GOOD))
        await asyncio.sleep(0)
        leaving.cancel()
        await staying
        assert await refusal(checker, regex_grammar("["))

    run(model_folder, steps)


def test_too_many_grammars_at_once_are_refused_at_once(model_folder):
    async def steps(checker):
        tasks = [asyncio.create_task(checker.check(regex_grammar(f"a{i}"))) for i in range(64)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="64"):
            await checker.check(regex_grammar("one more"))
        await asyncio.gather(*tasks)

    run(model_folder, steps)


@pytest.mark.slow
def test_a_grammar_that_nobody_waits_for_any_more_is_given_up(model_folder):
    async def steps(checker):
        await checker.check(GOOD)
        pid = checker._process.pid
        specs = [slow_grammar(i) for i in range(64)]
        tasks = [asyncio.create_task(checker.check(spec)) for spec in specs]
        twin = asyncio.create_task(checker.check(specs[1]))
        await until(lambda: len(forks_of(pid)) == 64)
        for task in tasks:  # one of two leaves the second; the rest is forsaken
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: len(forks_of(pid)) == 1)
        assert len(checker._trials) == 1
        await asyncio.gather(*(checker.check(regex_grammar(f"b{i}")) for i in range(63)))  # there is room
        twin.cancel()
        await asyncio.gather(twin, return_exceptions=True)
        await until(lambda: not forks_of(pid))
        assert not checker._trials

    run(model_folder, steps, deadline_s=60)


# rule: Limits: A grammar compiles within 5 s, in a process that can be killed
def test_a_grammar_that_has_no_turn_in_time_is_refused_as_overload(model_folder, monkeypatch):
    monkeypatch.setattr("server.structured_output.compile_check._TURN_DEADLINE_S", 0.2)

    async def steps(checker):
        may_answer = asyncio.Event()

        async def ask(spec):
            await may_answer.wait()
            return GrammarVerdict(), float("inf")

        checker._ask = ask
        with pytest.raises(Overloaded, match=r"no turn within 0\.2 s"):
            await checker.check(regex_grammar("a"))
        may_answer.set()
        await checker.check(regex_grammar("a"))

    run(model_folder, steps)


def test_a_model_without_a_tokenizer_json_does_not_do_it(tmp_path):
    async def steps(checker):
        for spec in (GOOD, regex_grammar("a")):
            with pytest.raises(UnsupportedFeature, match=r"tokenizer\.json"):
                await checker.check(spec, param="field")

    run(tmp_path, steps)


def test_leaving_the_context_ends_the_process(model_folder):
    async def use():
        checker = GrammarChecker(model_folder)
        async with checker:
            await checker.check(GOOD)
            return checker._process.pid

    pid = asyncio.run(use())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_closing_ends_who_waits_and_starts_nothing(model_folder):
    async def use():
        checker = GrammarChecker(model_folder)
        async with checker:
            await checker.check(GOOD)
            pid = checker._process.pid
            running = asyncio.create_task(checker.check(SLOW))
            queued = asyncio.create_task(checker.check(slow_grammar(1)))
            await asyncio.sleep(0.1)
        late = asyncio.create_task(checker.check(regex_grammar("b")))
        outcomes = await asyncio.gather(running, queued, late, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [ShuttingDown] * 3
        await checker.check(GOOD)  # known
        assert checker._process is None
        return pid

    pid = asyncio.run(use())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_closing_while_the_process_starts_ends_it(model_folder):
    async def use():
        checker = GrammarChecker(model_folder)
        async with checker:
            starting = asyncio.create_task(checker.check(GOOD))
            while checker._process is None:
                await asyncio.sleep(0.001)
            pid = checker._process.pid
        with pytest.raises(ShuttingDown):
            await starting
        assert checker._process is None
        return pid

    pid = asyncio.run(use())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.slow
def test_an_old_refusal_for_time_is_forgotten(model_folder, monkeypatch):
    async def steps(checker):
        await refusal(checker, SLOW)
        now = time.monotonic()
        monkeypatch.setattr("server.structured_output.compile_check.time.monotonic", lambda: now + 61)
        assert not checker._kept(next(iter(checker._verdicts)))

    run(model_folder, steps, deadline_s=0.3)
