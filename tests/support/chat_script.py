"""Events of a chat to feed to the writers of other APIs, and a generation that only has what writers ask of it."""

import json

import msgspec
from hypothesis import strategies as st

from engine.interface.protocol import SamplingParams
from server.api.sse import ReplyHead
from server.generation.events import ChoiceFinished, Event, TextDelta, ToolArguments, ToolCallStart
from server.generation.spec import GenerationSpec, Stats

HEAD = ReplyHead("id_1", 1_700_000_000, "tiny")


class ScriptedChat:
    """Stands in for the CompletionStream of a chat that has run."""

    def __init__(self, **counts: int) -> None:
        params = SamplingParams(max_tokens=99, temperature=0.5, top_p=0.9)
        self.spec = GenerationSpec(prompts=((1, 2, 3),), n=1, params=params, arrival_s=0.0)
        self._stats = Stats(
            **{"num_prompt_tokens": 10, "num_cached_tokens": 4, "num_output_tokens": 7, "num_reasoning_tokens": 2}
            | counts
        )

    def stats(self) -> Stats:
        return self._stats


class Said(msgspec.Struct, frozen=True):
    """A stretch of one answer, and the pieces that it comes in. kind: "text", "reasoning", or a called tool's name."""

    kind: str
    pieces: tuple[str, ...]

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def events_of(script: list[Said], finish_reason: str = "stop", stop_string: str | None = None) -> list[Event]:
    """Return the events of a script; each call has the id call_0, call_1, ..."""
    events: list[Event] = []
    num_calls = 0
    for said in script:
        if said.kind in ("text", "reasoning"):
            events += [TextDelta(0, said.kind, piece, [1], None) for piece in said.pieces]
        else:
            events.append(ToolCallStart(0, num_calls, f"call_{num_calls}", said.kind))
            for piece in said.pieces:
                events.append(ToolArguments(0, num_calls, piece))
                events.append(TextDelta(0, "text", "", [1], None))  # the tokens of a call ride on events without text
            num_calls += 1
    return [*events, ChoiceFinished(0, finish_reason, stop_string)]


def joined(script: list[Said]) -> list[tuple[str, str]]:
    """Return what a reader should see: stretches without text left out, neighbours of a kind joined."""
    seen: list[tuple[str, str]] = []
    for said in script:
        is_call = said.kind not in ("text", "reasoning")
        if is_call or (said.text and not (seen and seen[-1][0] == said.kind)):
            seen.append((said.kind, said.text))
        elif said.text:
            seen[-1] = (said.kind, seen[-1][1] + said.text)
    return seen


_pieces = st.lists(st.text(st.characters(codec="utf-8"), max_size=6), max_size=5).map(tuple)


@st.composite
def _calls(draw: st.DrawFn) -> Said:
    arguments = json.dumps(draw(st.dictionaries(st.text(max_size=4), st.integers() | st.text(max_size=9), max_size=3)))
    cuts = sorted(draw(st.lists(st.integers(0, len(arguments)), max_size=4)))
    pieces = [arguments[i:j] for i, j in zip([0, *cuts], [*cuts, len(arguments)], strict=True)]
    return Said("tool_" + draw(st.sampled_from("ab")), tuple(pieces))


scripts = st.lists(
    st.builds(Said, st.just("text"), _pieces) | st.builds(Said, st.just("reasoning"), _pieces) | _calls(), max_size=6
)
