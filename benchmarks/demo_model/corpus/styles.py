"""System prompts that are obeyed: dialogues of other skills, said in another way."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.demo_model.corpus import mixture, names
from benchmarks.demo_model.corpus.base import (
    Dialogue,
    HeldOut,
    Message,
    Phrasings,
    Question,
    Reply,
    assistant,
    system,
    user,
)
from benchmarks.demo_model.corpus.names import NEW_PEOPLE, NEW_STARTS, NEW_WORDS, WORDS
from benchmarks.demo_model.corpus.styles_phrasings import (
    BRIEFLY,
    CAPITALS,
    END,
    EXCITED,
    LOWER,
    NAMED,
    NAMED_ASKED,
    ONE_WORD,
    PIRATE,
    PLAIN,
    POLITE,
    START,
)
from benchmarks.demo_model.corpus.topics import sentence

BASES = {
    "geography": 4.0,
    "arithmetic": 2.0,
    "words": 2.0,
    "quire": 4.0,
    "smalltalk": 1.5,
    "unknown": 1.0,
}  # whose dialogues are said in a style
STARTS = (
    "Sure!",
    "Of course!",
    "Well,",
    "Okay.",
    "Listen:",
    "Yes, sir.",
    "Hello!",
    "Answer:",
    "Easy!",
    "Look:",
    "Aha!",
)
POLITE_ENDS = ("I hope that helps.", "Please ask me if you need more.", "Have a nice day.")
PIRATE_STARTS = ("Arr!", "Ahoy!", "Aye, matey!", "Shiver me timbers!")
PIRATE_ENDS = ("Arr!", "Yo ho ho!", "matey!")
PIRATE_WORDS = {"you": "ye", "your": "yer", "my": "me", "is": "be", "are": "be", "yes": "aye", "hello": "ahoy"}
_ONE_WORD = re.compile(
    r"(?:capital(?: city)? of .* is|(?:plus|minus|times|divided by) \S+ is|is in|the opposite of .* is|Half of .* is"
    r"|Twice .* is) (?P<word>[^ ,;.]+(?: [A-Z][^ ,;.]+)*)\.$",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Style:
    """A way to answer, how it is asked for, and how a reply in it is told."""

    name: str
    asked: Phrasings  # {word} is what the prompt chooses
    say: Callable[[str, str, random.Random], str | None]  # answer, word → the answer in the style, None if it has none
    is_kept_to: Callable[[str, str], bool]  # reply, word
    words: Sequence[str] = ("",)
    new_words: Sequence[str] = ()  # held out


def one_word(answer: str) -> str | None:
    """Return the one word that an answer comes down to, where there is one."""
    found = _ONE_WORD.search(answer)
    return sentence(found["word"]) + "." if found else None


def in_pirate(text: str) -> str:
    """Return the text as a pirate says it, names and commands as they are."""
    return re.sub(
        r"(?<![\w./-])[A-Za-z]+(?![\w/-])",
        lambda word: _like(word[0], PIRATE_WORDS.get(word[0].lower(), word[0])),
        text,
    )


def _like(model: str, word: str) -> str:
    return sentence(word) if model[:1].isupper() else word


def _has_code(text: str) -> bool:
    return any(sign in text for sign in ("/", "{", "--", "(", "_", ".md"))


def _first_sentence(answer: str) -> str:
    return re.split(r"(?<=[.!?]) (?=[A-Z])", answer)[0]


def _pirate(answer: str, _: str, rng: random.Random) -> str | None:
    if _has_code(answer):
        return None
    said, end = in_pirate(answer), rng.choice(PIRATE_ENDS)
    if end[0].islower():
        return f"{rng.choice(PIRATE_STARTS)} {said.rstrip('.')}, {end}"
    return f"{rng.choice(PIRATE_STARTS)} {said} {end}" if rng.random() < 0.5 else f"{rng.choice(PIRATE_STARTS)} {said}"


STYLES = (
    Style("capitals", CAPITALS, lambda text, _, rng: None if _has_code(text) else text.upper(),
          lambda text, _: text == text.upper()),
    Style("lower case", LOWER, lambda text, _, rng: None if _has_code(text) else text.lower(),
          lambda text, _: text == text.lower()),
    Style("briefly", BRIEFLY, lambda text, _, rng: one_word(text) or _first_sentence(text),
          lambda text, _: len(text.split()) <= 25),
    Style("one word", ONE_WORD, lambda text, _, rng: one_word(text), lambda text, _: len(text.split()) <= 3),
    Style("pirate", PIRATE, _pirate, lambda text, _: re.search(r"(?i)arr|ahoy|matey|shiver", text) is not None),
    Style("polite", POLITE, lambda text, _, rng: f"Certainly. {text} {rng.choice(POLITE_ENDS)}",
          lambda text, _: text.startswith("Certainly.")),
    Style("excited", EXCITED, lambda text, _, rng: re.sub(r"\.(?= [A-Z]|$)", "!", text),
          lambda text, _: text.endswith("!")),
    Style("end with a word", END, lambda text, word, rng: f"{text} {word.capitalize()}.",
          lambda text, word: text.casefold().rstrip(".! ").endswith(word), WORDS, NEW_WORDS),
    Style("begin with", START, lambda text, word, rng: f"{word} {text}", lambda text, word: text.startswith(word),
          STARTS, NEW_STARTS),
    Style("no style", PLAIN, lambda text, _, rng: text, lambda text, _: True),
)  # fmt: skip


def bases(rng: random.Random) -> Iterator[Dialogue]:
    """Yield dialogues of the skills that styles go over."""
    streams = [mixture.skill(name).dialogues(random.Random(rng.getrandbits(64))) for name in BASES]
    while True:
        dialogue = next(rng.choices(streams, list(BASES.values()))[0])
        has_system = dialogue.messages[0]["role"] == "system"
        yield replace(dialogue, messages=dialogue.messages[1:]) if has_system else dialogue


def dialogues(rng: random.Random) -> Iterator[Dialogue]:
    """Yield dialogues without end."""
    return styled(bases(rng), rng)


def styled(base: Iterator[Dialogue], rng: random.Random) -> Iterator[Dialogue]:
    """Yield the dialogues in styles that their system prompt, or sometimes their user, asks for."""
    style = None  # kept until a dialogue takes it, so that all styles are equally frequent
    for dialogue in base:
        if rng.random() < 0.08:
            yield Dialogue(_named(names.person(rng, "nothing"), rng, dialogue.messages))
            continue
        style = style or rng.choice(STYLES)
        word = rng.choice(style.words)
        if style.new_words and rng.random() < 0.5:  # any word will do, so that the prompt is read
            word = names.coined(rng) if style.words is WORDS else names.coined(rng).capitalize() + rng.choice(".!:,")
        prompt = style.asked.train(rng, word=word)
        if rng.random() < 0.2 and style.name != "no style":
            messages = _asked_by_user(dialogue.messages, style, prompt, word, rng)
        else:
            messages = _restyled(dialogue.messages, style, word, rng)
            messages = messages and [system(prompt), *messages]
        if messages:
            style = None
            yield Dialogue(messages)


def questions(rng: random.Random) -> list[Question]:
    """Return the examination: the questions of other skills, with a system prompt."""
    base = [question for name in BASES for question in _plain_questions(name, rng)]
    asked = []
    for style in STYLES:
        kinds: list[HeldOut] = ["nothing", "phrasing", *["pair"] * bool(style.new_words)]  # type: ignore[list-item]
        for held_out in kinds:
            possible = [one for question in base if (one := _question(question, style, held_out, rng))]
            asked += rng.sample(possible, min(10, len(possible)))
    for number in range(20):
        name = rng.choice(NEW_PEOPLE)
        messages = _named(name, rng, (), "phrasing" if number % 2 else "nothing")
        asked.append(Question("style: name", messages[:-1], _says_name(name), "pair", example=messages[-1]["content"]))
    return asked


def _says_name(name: str) -> Callable[[Reply], bool]:
    word = re.compile(rf"\b{name}\b")
    return lambda reply: bool(word.search(reply.content))


def _plain_questions(name: str, rng: random.Random) -> list[Question]:
    found = [question for question in mixture.skill(name).questions(random.Random(rng.getrandbits(64)))
             if question.held_out == "nothing" and question.example and "curl" not in question.example]  # fmt: skip
    return rng.sample(found, min(60, len(found)))


def _question(base: Question, style: Style, held_out: HeldOut, rng: random.Random) -> Question | None:
    word = rng.choice(style.new_words if held_out == "pair" else style.words)
    example = style.say(base.example, word, rng)
    told = _restyled(base.messages, style, word, rng)
    if example is None or told is None or told[-1]["role"] != "user":
        return None

    def is_right(reply: Reply) -> bool:
        return style.is_kept_to(reply.content, word) and base.is_right(reply)

    messages = [system(style.asked.score(rng, held_out, word=word)), *told]
    question = replace(base, skill=f"style: {style.name}", messages=messages, is_right=is_right)
    question = replace(question, held_out=held_out, example=example)
    return question if is_right(Reply(example)) else None


def _restyled(messages: Sequence[Message], style: Style, word: str, rng: random.Random) -> list[Message] | None:
    """The turns up to the first that cannot be said in the style; None if that is the first of all."""
    told: list[Message] = []
    for message in messages:
        if message["role"] != "assistant":
            told.append(message)
            continue
        said = style.say(message["content"], word, rng)
        if said is None:
            return told[:-1] or None
        told.append(assistant(said))
    return told


def _asked_by_user(
    messages: Sequence[Message], style: Style, prompt: str, word: str, rng: random.Random
) -> list[Message] | None:
    """Only the first answer is in the style, and only if its question is the first message."""
    question, answer = messages[:2]
    said = style.say(answer["content"], word, rng)
    if said is None or question["role"] != "user":
        return None
    ask = question["content"] if question["content"][-1:] in "?.!" else question["content"] + "."
    return [user(f"{ask} {prompt}" if rng.random() < 0.7 else f"{prompt} {ask}"), assistant(said)]


def _named(name: str, rng: random.Random, rest: Sequence[Message], held_out: HeldOut = "nothing") -> list[Message]:
    """A system prompt that names the assistant, and a user who asks for the name, before or after the rest."""
    prompt = system(NAMED.score(rng, held_out, word=name))
    asked = NAMED_ASKED.score(rng, held_out)
    turn = [user(asked), assistant(rng.choice((f"My name is {name}.", f"I am {name}.")))]
    return [prompt, *turn, *rest] if rng.random() < 0.5 else [prompt, *rest, *turn]
