"""The agents' trace: the same for all policies, and what it finds is what the caches can supply."""

from random import Random

from benchmarks.checkpoint_policy import (
    BOUND,
    BUILT,
    GROUPS,
    IN_PROMPTS,
    MAX_CONTEXT,
    draw_sessions,
    main,
    measure,
    parse,
)

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
    rows = {name: measure(name, 2.0, parse(FEW)) for name in GROUPS}
    assert len({row["num_prompt_tokens"] for row in rows.values()}) == 1
    found = [rows[name]["num_found_tokens"] for name in (IN_PROMPTS, BUILT, BOUND)]
    assert 0 < found[0] < found[1] < found[2]
    assert rows[BUILT]["states"]["saved"] > rows[IN_PROMPTS]["states"]["saved"] > 0
    assert measure(BUILT, 2.0, parse(FEW)) == rows[BUILT]


def test_the_table_has_a_row_for_each_policy(capsys, tmp_path):
    main(parse([*FEW, "--json", str(tmp_path / "out.json")]))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(GROUPS)
    assert (tmp_path / "out.json").stat().st_size > 500
