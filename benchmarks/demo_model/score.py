"""Examines the demo model: `python -m benchmarks.demo_model.score FOLDER [--json F] [--limit N] [--first-only]`.

Asks the corpus's own questions, greedily and in one batch, through the engine's loop and the server's tokenizer and
chat template. Prints a table of skill by what was held out from training, and wrong replies; then what a newcomer asks
first, which training never has, with the number of good answers.
"""

import argparse
import json
import random
import re
import time
from collections.abc import Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from benchmarks.demo_model.corpus.base import Question, Reply
from benchmarks.demo_model.corpus.mixture import examination
from benchmarks.demo_model.first_questions import as_report, ask_as_newcomers, describe
from benchmarks.offline import versions
from benchmarks.report import Report, format_table, host_facts, now, write_report
from engine.interface.config import EngineConfig
from engine.interface.protocol import SamplingParams
from engine.offline import OfflineEngine
from server.text.generation_defaults import load_generation_defaults
from server.text.tokenizer import Tokenizer, load_tokenizer

_HELD_OUT = ("nothing", "phrasing", "pair")
_THOUGHTS = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)

Cell = tuple[str, str]  # skill, held_out


def ask(
    folder: Path,
    questions: Sequence[Question],
    *,
    device: str = "auto",
    kv_cache_dtype: str = "auto",
    max_tokens: int = 256,
) -> list[Reply]:
    """Return the model's reply to each question. Raises StartupError."""
    tokenizer = load_tokenizer(folder)
    engine = OfflineEngine.load(EngineConfig(model=str(folder), device=device, kv_cache_dtype=kv_cache_dtype))
    ends = load_generation_defaults(folder, tokenizer_eos_id=tokenizer.eos_id).eos_token_ids
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, stop_token_ids=list(ends))
    prompts = [encode(tokenizer, question) for question in questions]
    generations = engine.generate(prompts, [params] * len(prompts))
    return [parse(tokenizer.decode(generation.token_ids)) for generation in generations]


def encode(tokenizer: Tokenizer, question: Question) -> list[int]:
    """Return the prompt that serving makes of a question."""
    rendered = tokenizer.render_chat(
        list(question.messages),
        tools=list(question.tools) or None,
        template_kwargs={"enable_thinking": question.enable_thinking},
    )
    return tokenizer.encode_chat(rendered)


def parse(text: str) -> Reply:
    """Parse a generated text. A tool call that is no object with a name and arguments stays in the content."""
    thoughts = _THOUGHTS.match(text)
    content = text[thoughts.end() :] if thoughts else text
    calls = []
    for written in _CALL.finditer(content):
        call = _as_call(written[1])
        if call is not None:
            calls.append(call)
            content = content.replace(written[0], "")
    return Reply(content.strip(), thoughts[1].strip() if thoughts else None, calls, text)


def score(questions: Sequence[Question], replies: Sequence[Reply]) -> dict[Cell, list[bool]]:
    """Return for each skill and kind of holding out which replies were right, in the order of the questions."""
    cells: dict[Cell, list[bool]] = {}
    for question, reply in zip(questions, replies, strict=True):
        cells.setdefault((question.skill, question.held_out), []).append(bool(question.is_right(reply)))
    return cells


def format_scores(cells: dict[Cell, list[bool]]) -> str:
    """Return a row per skill, a column per kind of holding out: the share of right replies, and their number."""
    rows = [["skill", *(f"held out: {held_out}" for held_out in _HELD_OUT), "all"]]
    for skill in [*dict.fromkeys(skill for skill, _ in cells), None]:
        asked = {cell: answers for cell, answers in cells.items() if skill in (None, cell[0])}
        by_kind = [[right for cell, a in asked.items() if cell[1] == kind for right in a] for kind in _HELD_OUT]
        rows.append([skill or "all", *map(_share, by_kind), _share(list(chain(*by_kind)))])
    return format_table(rows)


def choose(questions: Sequence[Question], limit: int) -> list[Question]:
    """Return at most `limit` questions of each skill and kind of holding out, the same ones each time."""
    chosen = []
    by_cell = sorted(questions, key=_cell)
    for cell, group in groupby(by_cell, key=_cell):
        asked = list(group)
        chosen += random.Random(str(cell)).sample(asked, min(limit, len(asked)))
    return chosen


def main() -> None:
    """Read the flags, examine, print, write."""
    parser = argparse.ArgumentParser(description="Examine the demo model on its corpus's questions.")
    parser.add_argument("folder", type=Path, help="the checkpoint")
    parser.add_argument("--json", help="file for the scores and the wrong replies")
    parser.add_argument("--limit", type=int, default=10**9, help="questions of each skill and kind of holding out")
    parser.add_argument("--seed", type=int, default=0, help="of the questions")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--first-only", action="store_true", help="only what a newcomer asks first")
    parser.add_argument("--failures", type=int, default=3, help="wrong replies shown of each skill")
    flags = parser.parse_args()
    newcomers = ask_as_newcomers(flags.folder, device=flags.device)
    if flags.first_only:
        print("\n".join(describe(newcomers)))
        return
    questions = choose(examination(flags.seed), flags.limit)
    started_s = time.monotonic()
    replies = ask(flags.folder, questions, device=flags.device, kv_cache_dtype=flags.kv_cache_dtype)
    seconds = time.monotonic() - started_s
    cells = score(questions, replies)
    print(_failures(questions, replies, flags.failures))
    print(format_scores(cells))
    print(f"{len(questions)} questions in {seconds:.1f} s, loading included")
    print("\n".join(describe(newcomers)))
    if flags.json:
        report = _report(flags.folder, questions, replies, cells) | {"newcomers": as_report(newcomers)}
        write_report(flags.json, report)


def _as_call(text: str) -> dict[str, Any] | None:
    try:
        call = json.loads(text)
    except ValueError:
        return None
    is_call = isinstance(call, dict) and isinstance(call.get("name"), str) and isinstance(call.get("arguments"), dict)
    return call if is_call else None


def _cell(question: Question) -> Cell:
    return question.skill, question.held_out


def _share(answers: Sequence[bool]) -> str:
    return f"{100 * sum(answers) / len(answers):.1f} % of {len(answers)}" if answers else "-"


def _failures(questions: Sequence[Question], replies: Sequence[Reply], limit: int) -> str:
    lines: list[str] = []
    num_shown: dict[str, int] = {}
    for question, reply in zip(questions, replies, strict=True):
        num_shown.setdefault(question.skill, 0)
        if num_shown[question.skill] < limit and not question.is_right(reply):
            num_shown[question.skill] += 1
            asked = question.messages[-1]["content"]
            lines.append(f"{question.skill} (held out: {question.held_out}): {asked}")
            lines += [f"    said  {reply.raw!r}", f"    right {question.example!r}"]
    return "\n".join(lines)


def _report(
    folder: Path, questions: Sequence[Question], replies: Sequence[Reply], cells: dict[Cell, list[bool]]
) -> Report:
    return {
        "benchmark": "demo_score",
        "date": now(),
        "model": folder.name,
        "host": host_facts(),
        "versions": versions(),
        "scores": [
            {"skill": skill, "held_out": held_out, "asked": len(answers), "right": sum(answers)}
            for (skill, held_out), answers in cells.items()
        ],
        "wrong": [
            {
                "skill": question.skill,
                "held_out": question.held_out,
                "asked": question.messages[-1]["content"],
                "said": reply.raw,
                "right": question.example,
            }
            for question, reply in zip(questions, replies, strict=True)
            if not question.is_right(reply)
        ],
    }


if __name__ == "__main__":
    main()
