"""Asks the demo model what a newcomer asks: sixty questions, and three chats in which it has its own answers before it.

Greedily, and with the model's own sampling, as a client that sets nothing gets it, for some seeds. Part of
`python -m benchmarks.demo_model.score`. Imports the engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.demo_model.corpus.base import Message, assistant, user
from benchmarks.demo_model.corpus.first_questions import CHATS, QUESTIONS, Asked
from engine.interface.config import EngineConfig
from engine.interface.protocol import SamplingParams
from engine.offline import OfflineEngine
from server.text.generation_defaults import load_generation_defaults
from server.text.tokenizer import load_tokenizer

MAX_TOKENS = 512
SEEDS = (1, 2, 3, 4, 5)


@dataclass(frozen=True)
class Answer:
    """What was asked, what was said, and whether it is a good answer."""

    asked: str
    said: str
    is_good: bool


@dataclass(frozen=True)
class Newcomer:
    """All answers of one way to sample. seed: None if greedy."""

    seed: int | None
    questions: Sequence[Answer]
    chats: Sequence[Sequence[Answer]]

    def summary(self) -> str:
        """Return the counts in a line."""
        way = "greedy" if self.seed is None else f"sampled, seed {self.seed}"
        chats = ", ".join(f"{_good(chat)} of {len(chat)}" for chat in self.chats)
        return f"first questions: {_good(self.questions)} of {len(self.questions)}; chats: {chats} ({way})"


class Asker:
    """A loaded model that answers chats. Life: __init__ → answers, as often as wanted."""

    def __init__(self, folder: Path, *, device: str = "auto") -> None:
        self._tokenizer = load_tokenizer(folder)
        self._engine = OfflineEngine.load(EngineConfig(model=str(folder), device=device))
        self._defaults = load_generation_defaults(folder, tokenizer_eos_id=self._tokenizer.eos_id)

    def answers(self, chats: Sequence[Sequence[Message]], seed: int | None) -> list[tuple[str, bool]]:
        """Return the text of each answer and whether it ended by itself. seed: None for greedy decoding."""
        prompts = [self._tokenizer.encode_chat(self._tokenizer.render_chat(list(chat))) for chat in chats]
        generations = self._engine.generate(prompts, [self._params(seed, at) for at in range(len(chats))])
        return [(self._tokenizer.decode(one.token_ids).strip(), one.finish_reason == "stop") for one in generations]

    def _params(self, seed: int | None, at: int) -> SamplingParams:
        ends = list(self._defaults.eos_token_ids)
        if seed is None:
            return SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, stop_token_ids=ends)
        return SamplingParams(
            max_tokens=MAX_TOKENS,
            temperature=self._defaults.temperature,
            top_p=self._defaults.top_p,
            seed=seed * 1000 + at,
            stop_token_ids=ends,
        )


def ask_as_newcomers(folder: Path, *, device: str = "auto") -> list[Newcomer]:
    """Ask everything greedily, then once for each seed. Raises StartupError."""
    asker = Asker(folder, device=device)
    return [_ask(asker, seed) for seed in (None, *SEEDS)]


def describe(newcomers: Sequence[Newcomer]) -> Iterator[str]:
    """Yield the bad answers of greedy decoding and a line of counts for each way to sample."""
    greedy = newcomers[0]
    for answer in [*greedy.questions, *(answer for chat in greedy.chats for answer in chat)]:
        if not answer.is_good:
            yield f"first question: {answer.asked}\n    said  {answer.said!r}"
    for newcomer in newcomers:
        yield newcomer.summary()


def as_report(newcomers: Sequence[Newcomer]) -> list[dict[str, Any]]:
    """Return counts and bad answers for a report."""
    return [
        {
            "seed": newcomer.seed,
            "questions": {"asked": len(newcomer.questions), "good": _good(newcomer.questions)},
            "chats": [{"asked": len(chat), "good": _good(chat)} for chat in newcomer.chats],
            "bad": [
                asdict(answer)
                for answer in (*newcomer.questions, *(answer for chat in newcomer.chats for answer in chat))
                if not answer.is_good
            ],
        }
        for newcomer in newcomers
    ]


def judge(asked: Asked, said: str, *, has_ended: bool) -> Answer:
    """Return the judged answer: one that does not end is bad."""
    return Answer(asked.text, said, has_ended and bool(said) and asked.is_good(said))


def _ask(asker: Asker, seed: int | None) -> Newcomer:
    said = asker.answers([[user(asked.text)] for asked in QUESTIONS], seed)
    questions = [judge(asked, text, has_ended=ended) for asked, (text, ended) in zip(QUESTIONS, said, strict=True)]
    chats: list[list[Answer]] = [[] for _ in CHATS]
    messages: list[list[Message]] = [[] for _ in CHATS]
    for turns in zip(*CHATS, strict=True):
        for before, turn in zip(messages, turns, strict=True):
            before.append(user(turn.text))
        for chat, before, turn, (text, ended) in zip(
            chats, messages, turns, asker.answers(messages, seed), strict=True
        ):
            chat.append(judge(turn, text, has_ended=ended))
            before.append(assistant(text))
    return Newcomer(seed, questions, chats)


def _good(answers: Sequence[Answer]) -> int:
    return sum(answer.is_good for answer in answers)
