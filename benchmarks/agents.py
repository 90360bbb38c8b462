"""The workload `agent`: conversations of 20 turns with tool results, each of which parts into two branches.

16 agents of four applications: those of one begin with the same instructions of 1,500 tokens. A turn adds a question
or a tool's result to the context and is answered; all agents take a turn at once, as their next one needs the answer.
After half of the turns each conversation goes on in two ways. Deterministic but for the model's answers.
"""

from collections.abc import Sequence
from random import Random
from typing import NamedTuple, Protocol

from engine.core.local_client import GenerationResult
from engine.interface.protocol import SamplingParams

NUM_AGENTS, NUM_APPLICATIONS, NUM_TURNS = 16, 4, 20
_INSTRUCTIONS, _ADDED, _ANSWERED = 1500, (20, 250), (16, 64)
MOST_ANSWERED = _ANSWERED[1]  # tokens
NUM_REQUESTS = NUM_AGENTS * (NUM_TURNS // 2) * 3  # a trunk and two branches
# Tokens of the longest conversation, its last answer included
LONGEST = _INSTRUCTIONS + NUM_TURNS * (_ADDED[1] + _ANSWERED[1])


class Generator(Protocol):
    """Part of OfflineEngine: computes requests at once, in order."""

    def generate(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[GenerationResult]:
        """See OfflineEngine.generate."""
        ...


class Turn(NamedTuple):
    """One request of a conversation."""

    added: list[int]  # token ids after the context so far
    num_answered: int


class Agent(NamedTuple):
    """A conversation: its first turns, and two ways in which it goes on."""

    instructions: list[int]
    trunk: list[Turn]
    branches: tuple[list[Turn], list[Turn]]


class Totals(NamedTuple):
    """Counts over all requests of the workload."""

    num_requests: int
    num_input_tokens: int  # of all prompts, each with the whole conversation before it
    num_cached_tokens: int  # of these, found in the prefix cache
    num_output_tokens: int


def agents(seed: int, vocab_size: int) -> list[Agent]:
    """Draw the conversations. Another seed gives conversations that share no token ids in order with these."""
    rng = Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(min(10_000, vocab_size)) for _ in range(count)]

    def turns(count: int) -> list[Turn]:
        return [Turn(tokens(rng.randint(*_ADDED)), rng.randint(*_ANSWERED)) for _ in range(count)]

    half = NUM_TURNS // 2
    applications = [tokens(_INSTRUCTIONS) for _ in range(NUM_APPLICATIONS)]
    return [
        Agent(applications[number % NUM_APPLICATIONS], turns(half), (turns(half), turns(half)))
        for number in range(NUM_AGENTS)
    ]


def run_agents(generator: Generator, conversations: Sequence[Agent]) -> Totals:
    """Take all turns of all conversations. Raises RuntimeError if a request fails."""
    contexts = [list(agent.instructions) for agent in conversations]
    totals = Totals(0, 0, 0, 0)
    for number in range(NUM_TURNS // 2):
        totals = _take_turns(generator, contexts, [agent.trunk[number] for agent in conversations], totals)
    contexts = [list(context) for context in contexts for _ in range(2)]
    branches = [branch for agent in conversations for branch in agent.branches]
    for number in range(NUM_TURNS // 2):
        totals = _take_turns(generator, contexts, [branch[number] for branch in branches], totals)
    return totals


def _take_turns(generator: Generator, contexts: list[list[int]], turns: list[Turn], totals: Totals) -> Totals:
    """Take one turn of each conversation, which extends its context; return the totals with theirs."""
    for context, turn in zip(contexts, turns, strict=True):
        context.extend(turn.added)
    params = [SamplingParams(max_tokens=turn.num_answered, temperature=0.0) for turn in turns]
    results = generator.generate([list(context) for context in contexts], params)
    num_input = sum(map(len, contexts))
    for context, result in zip(contexts, results, strict=True):
        if result.error is not None:
            raise RuntimeError(f"a request of {len(context):,} tokens failed: {result.error.message}")
        context.extend(result.token_ids)
    return Totals(
        totals.num_requests + len(turns),
        totals.num_input_tokens + num_input,
        totals.num_cached_tokens + sum(result.num_cached_tokens for result in results),
        totals.num_output_tokens + sum(len(result.token_ids) for result in results),
    )
