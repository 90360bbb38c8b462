"""benchmarks.standby_gpu: which tokens a replay chose, and which streams are compared with what."""

from benchmarks.replayed_tokens import TokenStream
from benchmarks.standby_gpu import Killed, at_once, replayed_from


def killed(at_s: float) -> Killed:
    return Killed(
        at_s=at_s, ready_s=1.0, first_stream_s=1.1, last_stream_s=1.2, new_request_s=None, new_request_status=0,
        open_streams=1,
    )  # fmt: skip


def stream(number: int, token_ids: list[int], times_s: list[float], *, num_replays: int = 0) -> TokenStream:
    made = TokenStream(str(number), times_s[0] - 0.5, 200, list(times_s), is_whole=True, num_replays=num_replays)
    made.token_ids, made.token_times_s = list(token_ids), list(times_s)
    made.logprobs, made.gaps = [-1.0] * len(token_ids), [0.5] * len(token_ids)
    return made


def test_a_replay_begins_with_the_first_token_that_was_not_on_its_way_at_the_kill() -> None:
    asked = stream(0, [1, 2, 3, 4], [10.0, 11.0, 12.05, 13.5], num_replays=1)
    assert replayed_from(asked, [killed(12.0)]) == 3
    assert replayed_from(asked, [killed(5.0), killed(10.5)]) == 1
    assert replayed_from(asked, [killed(10.5), killed(12.0), killed(20.0)]) == 3


def test_streams_are_compared_with_the_undisturbed_run_of_their_request() -> None:
    times_s = [1.0, 2.0, 3.0]
    once = [stream(0, [1, 2, 3], times_s), stream(1, [4, 5, 6], times_s)]
    twice = [stream(0, [1, 2, 3], times_s), stream(1, [4, 5, 7], times_s)]
    later = [
        stream(0, [1, 2, 9], [11.0, 12.0, 14.0], num_replays=1),
        stream(0, [9, 2, 3], [11.0, 12.0, 14.0], num_replays=1),
        stream(1, [4, 5, 6], [15.0, 16.0, 17.0]),
    ]
    found = at_once(once, twice, later, [killed(12.5)])
    greedy, sampled = found["greedy"], found["sampled"]
    assert (greedy["undisturbed_again"]["equal"], sampled["undisturbed_again"]["equal"]) == (1, 0)
    assert (greedy["not_replayed"]["streams"], sampled["not_replayed"]["equal"]) == (0, 1)
    replayed = greedy["replayed"]
    assert (replayed["streams"], replayed["differed_before"], replayed["equal"]) == (2, 1, 0)
    assert replayed["of_these_after_begin"] == [0]
