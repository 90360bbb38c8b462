"""Recorded agent traces: which requests came, and what of their prompts earlier ones had. Never torch.

A trace file (benchmarks/traces/) has no text and no tokens, only the structure of a recording. Each row is a request:

    conversation   its number
    after_s        seconds from the start of the recording to a conversation's first request; to a later one from the
                   end of the answer before it
    parent         the row of an earlier request whose prompt and answer begin like this prompt; -1: none
    num_shared     tokens of the parent's prompt and answer that this prompt begins with: no earlier row shares more
    num_new        tokens of the prompt behind them
    num_answer     tokens of the answer

The rows are a tree, and so have the same longest common prefixes as the recording. Tokens are drawn for them.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import NamedTuple

VOCABULARY = 1 << 17
FOLDER = Path(__file__).parent / "traces"


class Row(NamedTuple):
    """A request of a trace, as its file has it."""

    conversation: int
    after_s: float
    parent: int
    num_shared: int
    num_new: int
    num_answer: int


@dataclass
class Conversation:
    """The requests of one recorded conversation, to be asked one after another."""

    asked: list[tuple[list[int], list[int]]] = field(default_factory=list)  # prompts and answers
    waits_s: list[float] = field(default_factory=list)  # before each
    num_done: int = 0

    def next_request(self) -> tuple[list[int], list[int]] | None:
        """Return prompt and answer of the next request; None: it is over."""
        if self.num_done == len(self.asked):
            return None
        self.num_done += 1
        return self.asked[self.num_done - 1]

    def wait_s(self, rng: Random) -> float:
        """Return the seconds before the next request. rng: unused, since they were recorded."""
        return self.waits_s[self.num_done] if self.num_done < len(self.waits_s) else 0.0


def read_rows(path: Path) -> list[Row]:
    """Read the rows of a trace file. Raises ValueError that names the row if it can't be one of a tree."""
    with path.open() as file:
        rows = [Row(*values) for values in json.load(file)["requests"]]
    for number, row in enumerate(rows):
        lengths = [0] if row.parent < 0 else [len_of(rows, row.parent) + rows[row.parent].num_answer]
        if row.parent >= number or not 0 <= row.num_shared <= lengths[0] or min(row.num_new, row.num_answer) < 1:
            raise ValueError(f"{path.name}: row {number} is no request that follows earlier ones: {tuple(row)}")
    return rows


def len_of(rows: list[Row], number: int) -> int:
    """Return the tokens of a row's prompt."""
    return rows[number].num_shared + rows[number].num_new


def draw_conversations(rows: list[Row], *, num_copies: int, seed: int) -> list[tuple[float, Conversation]]:
    """Draw tokens for the rows. Returns all conversations, with the seconds at which they begin.

    Copies are further conversations like the recorded ones, which share with them what recorded ones share among
    themselves: a system prompt, as a rule. They begin spread over the time of the recording.
    """
    common = num_common_tokens(rows)
    span_s = max((row.after_s for row in first_rows(rows)), default=0.0)
    original = _draw_tokens(rows, Random(f"{seed}"))
    drawn: list[tuple[float, Conversation]] = []
    for copy in range(num_copies):
        tokens = _draw_tokens(rows, Random(f"{seed} {copy}")) if copy else original
        conversations: dict[int, Conversation] = {}
        for number, row in enumerate(rows):
            if row.conversation not in conversations:
                conversations[row.conversation] = Conversation()
                begin_s = row.after_s + span_s * copy / num_copies
                drawn.append((begin_s, conversations[row.conversation]))
            length, num_kept = len_of(rows, number), common.get(row.conversation, 0)
            prompt = original[number][: min(num_kept, length)] + tokens[number][min(num_kept, length) : length]
            conversations[row.conversation].asked.append((prompt, tokens[number][length:]))
            conversations[row.conversation].waits_s.append(row.after_s)
    return sorted(drawn, key=lambda begun: begun[0])


def first_rows(rows: list[Row]) -> list[Row]:
    """Return the first row of each conversation."""
    return list({row.conversation: row for row in reversed(rows)}.values())


def num_common_tokens(rows: list[Row]) -> dict[int, int]:
    """Return, by conversation, how many first tokens of its prompts another conversation has, too."""
    common: dict[int, int] = {}
    for row in rows:
        if row.parent >= 0 and rows[row.parent].conversation != row.conversation:
            for conversation in (row.conversation, rows[row.parent].conversation):
                common[conversation] = max(common.get(conversation, 0), row.num_shared)
    return common


def _draw_tokens(rows: list[Row], rng: Random) -> list[list[int]]:
    """Draw prompt and answer of each row."""
    drawn: list[list[int]] = []
    for row in rows:
        begin = drawn[row.parent][: row.num_shared] if row.parent >= 0 else []
        drawn.append(begin + [rng.randrange(VOCABULARY) for _ in range(row.num_new + row.num_answer)])
    return drawn
