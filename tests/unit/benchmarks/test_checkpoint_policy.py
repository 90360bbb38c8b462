"""The agents' trace: the same for all policies, and what it finds is what the caches can supply."""

from random import Random

from benchmarks import checkpoint_policy
from benchmarks.checkpoint_policy import (
    BOUND,
    BUILT,
    IN_PROMPTS,
    MAX_CONTEXT,
    POLICIES,
    VARIANTS,
    draw_sessions,
    main,
    measure,
    parse,
)
from benchmarks.recorded_trace import read_rows

FEW = ["--sessions", "3", "--turns", "5", "--gap", "1", "--pool-gib", "2"]


def test_a_session_has_turns_and_a_branch_and_drops_earlier_thinking():
    for session in draw_sessions(Random(1), num_sessions=10, num_turns=9):
        prompts, num_kept = [], 0
        while (asked := session.next_request()) is not None:
            prompts.append(asked[0])
            num_kept += len(prompts) > 1 and prompts[-1][: len(prompts[-2])] == prompts[-2]
            assert len(asked[0]) + len(asked[1]) < MAX_CONTEXT
        assert all(prompt[:800] == prompts[0][:800] for prompt in prompts)
        assert 0 < num_kept < len(prompts)


def test_every_policy_serves_the_same_prompts_and_finds_no_more_than_the_bound():
    rows = {name: measure(name, 2.0, parse(FEW)) for name in POLICIES}
    assert len({row["num_prompt_tokens"] for row in rows.values()}) == 1
    found = [rows[name]["num_found_tokens"] for name in (IN_PROMPTS, BUILT, BOUND)]
    assert 0 < found[0] < found[1] < found[2]
    assert rows[BUILT]["states"]["saved"] > rows[IN_PROMPTS]["states"]["saved"] > 0
    assert measure(BUILT, 2.0, parse(FEW)) == rows[BUILT]


def test_the_table_has_a_row_for_each_policy(capsys, tmp_path):
    main(parse([*FEW, "--json", str(tmp_path / "out.json")]))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(POLICIES)
    assert (tmp_path / "out.json").stat().st_size > 500


def test_a_recorded_trace_is_served_under_every_policy(capsys, monkeypatch):
    monkeypatch.setattr(checkpoint_policy, "read_rows", lambda path: read_rows(path)[:12])
    arguments = ["--trace", "ctf-agents", "--copies", "2", "--variants", "--pool-gib", "1"]
    main(parse(arguments))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(POLICIES) + len(VARIANTS)
    rows = {name: measure(name, 1.0, parse(arguments)) for name in (BOUND, BUILT)}
    assert 0.5 < rows[BUILT]["found_share"] < rows[BOUND]["found_share"] < 1.0
