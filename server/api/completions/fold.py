"""Events of a generation, joined into whole choices, and its counts as usage and timings. Imports server only."""

from collections.abc import Sequence

import msgspec

from engine.interface.protocol import TokenLogprobs
from server.generation.generation import Ended, Event, Piece


class FoldedChoice(msgspec.Struct):
    """All events of one choice, joined."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: str


def fold(events: Sequence[Event]) -> list[FoldedChoice]:
    """Join the events of each choice, in order of index."""
    pieces: dict[int, list[Piece]] = {}
    reasons: dict[int, str] = {}
    for event in events:
        if isinstance(event, Ended):
            reasons[event.index] = event.finish_reason
        else:
            pieces.setdefault(event.index, []).append(event)
    choices = []
    for index in sorted(reasons):
        own = pieces.get(index, [])
        logprobs = [entry for piece in own for entry in piece.logprobs or ()]
        choices.append(
            FoldedChoice(
                index,
                "".join(piece.text for piece in own),
                [id_ for piece in own for id_ in piece.token_ids],
                logprobs if any(piece.logprobs is not None for piece in own) else None,
                reasons[index],
            )
        )
    return choices
