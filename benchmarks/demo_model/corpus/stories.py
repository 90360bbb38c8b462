"""Short stories from a grammar (hero, place, wish, obstacle, helper, end), four-line poems, and talk about them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence

from benchmarks.demo_model.corpus import stories_data as data
from benchmarks.demo_model.corpus import stories_phrasings as asked
from benchmarks.demo_model.corpus.base import Dialogue, HeldOut, Message, Phrasings, Question, Reply, assistant, user
from benchmarks.demo_model.corpus.topics import conversations, has, is_kept, sentence, typed, with_article

Plot = Mapping[str, str]  # everything that a story is told from

THEIR = {"it": "its", "he": "his", "she": "her"}
STORY_REQUESTS = (
    (asked.ANY_STORY, 3),
    (asked.STORY, 8),
    (asked.STORY_OF_TWO, 2),
    (asked.NAMED_STORY, 2),
    (asked.PLACED_STORY, 2),
)
ABOUT_STORIES = (  # question | answer | right
    (asked.SHORTER, "{name} the {hero} wanted {wish}. With the help of {a_helper}, it ended well.", "{name}"),
    (asked.WHO, "The story is about {a_hero} called {name}.", "{name}"),
    (asked.WISH, "{name} wanted {wish}.", "{wish}"),
    (asked.HELPER, "{name} was helped by {a_helper}.", "{helper}"),
)


def exchange(rng: random.Random) -> list[Message]:
    """Return a story or a poem and perhaps talk about it."""
    return _story_exchange(rng) if rng.random() < 0.75 else _poem_exchange(rng)


def dialogues(rng: random.Random) -> Iterator[Dialogue]:
    """Yield dialogues without end."""
    return conversations(exchange, rng)


def questions(rng: random.Random) -> list[Question]:
    """Return the examination: stories with what was asked for in them, poems of four lines, and talk about stories."""
    kinds: tuple[HeldOut, ...] = ("nothing", "phrasing")
    scored = []
    for held_out in kinds:
        for requests, count in STORY_REQUESTS:
            scored += [_story_question(requests, rng, held_out) for _ in range(2 * count)]
        scored += [_poem_question(rng, held_out) for _ in range(10)]
        for requests, answer, right in ABOUT_STORIES:
            scored += [_question_about(requests, answer, right, rng, held_out) for _ in range(4)]
    placed = [_story_question(asked.PLACED_STORY, rng, "pair") for _ in range(10)]
    return scored + placed


def make_plot(rng: random.Random, kept: bool = False) -> Plot:
    """Return the parts of a story; kept: whether its hero and its place are a pair that is kept for scoring."""
    heroes = [row.split() for row in data.HEROES.replace("\n", " ").split(",")]
    places = data.PLACES.splitlines()
    while True:
        (hero, they), place = rng.choice(heroes), rng.choice(places)
        if is_kept(f"{hero} {place}") == kept:
            break
    wish, obstacle, help_, result = rng.choice(data.PLOTS.splitlines()).split("|")
    name = rng.choice(data.NAMES[they] if they in data.NAMES else data.NAMES["he"] + data.NAMES["she"])
    helper = rng.choice(data.HELPERS)
    words = {"name": name, "their": THEIR[they]}
    adjective = rng.choice(data.ADJECTIVES)
    return {
        **words,
        "hero": hero,
        "a_hero": with_article(hero),
        "a_adj": with_article(adjective),
        "place": place,
        "helper": helper,
        "a_helper": with_article(helper),
        "wish": wish,
        "obstacle": obstacle.format(**words),
        "help": help_.format(**words),
        "result": result.format(**words) + ".",
    }


def tell(plot: Plot, rng: random.Random) -> str:
    """Return the story, of 40 to 120 words."""
    parts = [data.OPENINGS, data.WISHES, data.OBSTACLES, data.HELPS, ("{result}",), data.ENDINGS]
    return " ".join(sentence(rng.choice(part).format(**plot)) for part in parts)


def make_poem(subject: str, rng: random.Random) -> str:
    """Return four lines about the subject."""
    return rng.choice(data.POEMS.splitlines()).format(s=subject).replace("/", "\n")


def _poem_subject(rng: random.Random) -> tuple[str, str]:
    """Return a subject and how it is asked for: "fox" and "a fox"."""
    subject = rng.choice(data.UNIQUE + data.MASSES + data.SUBJECTS)
    if subject in data.SUBJECTS:
        return subject, rng.choice((f"the {subject}", with_article(subject)))
    return subject, rng.choice((f"the {subject}", subject)) if subject in data.MASSES else f"the {subject}"


def _story_exchange(rng: random.Random) -> list[Message]:
    plot = make_plot(rng)
    requests = rng.choices([way for way, _ in STORY_REQUESTS], [weight for _, weight in STORY_REQUESTS])[0]
    messages = _turn(requests, plot, tell(plot, rng), rng)
    while rng.random() < 0.45:
        kind = rng.random()
        if kind < 0.3:
            plot = make_plot(rng)
            messages += _turn(asked.ANOTHER, plot, tell(plot, rng), rng)
        elif kind < 0.4:
            messages += _turn(asked.NEXT, plot, rng.choice(data.NEXT).format(**plot), rng)
        else:
            requests, answer, _ = rng.choice(ABOUT_STORIES)
            messages += _turn(requests, plot, answer.format(**plot), rng)
    return messages


def _poem_exchange(rng: random.Random) -> list[Message]:
    subject, about = _poem_subject(rng)
    words = {"about": about}
    requests = asked.POEM if rng.random() < 0.8 else asked.ANY_POEM
    messages = _turn(requests, words, make_poem(subject, rng), rng)
    if rng.random() < 0.25:
        messages += _turn(asked.ANOTHER_POEM, words, make_poem(_poem_subject(rng)[0], rng), rng)
    return messages


def _turn(requests: Phrasings, words: Plot, answer: str, rng: random.Random) -> list[Message]:
    return [user(typed(rng.choice(requests.seen), words, rng, opens=False)), assistant(answer)]


def _story_question(requests: Phrasings, rng: random.Random, held_out: HeldOut) -> Question:
    plot = make_plot(rng, kept=held_out == "pair")
    request = requests.score(rng, held_out, **plot)
    named = [plot[word] for word in ("hero", "helper", "name") if plot[word] in request.split() + request[:-1].split()]
    return Question("stories", [user(request)], _is_story(named), held_out, example=tell(plot, rng))


def _is_story(named: Sequence[str]) -> Callable[[Reply], bool]:
    """Whether a reply is some sentences with everything in them that was asked for."""
    asked_for = [has(word) for word in named]

    def is_right(reply: Reply) -> bool:
        is_whole = 35 <= len(reply.content.split()) <= 130 and reply.content.rstrip().endswith(".")
        return is_whole and all(found(reply) for found in asked_for)

    return is_right


def _poem_question(rng: random.Random, held_out: HeldOut) -> Question:
    subject, about = _poem_subject(rng)
    request = asked.POEM.score(rng, held_out, about=about)
    has_subject = has(subject)

    def is_right(reply: Reply) -> bool:
        return len(reply.content.strip().splitlines()) == 4 and has_subject(reply)

    return Question("poems", [user(request)], is_right, held_out, example=make_poem(subject, rng))


def _question_about(requests: Phrasings, answer: str, right: str, rng: random.Random, held_out: HeldOut) -> Question:
    plot = make_plot(rng)
    story = [user(asked.ANY_STORY.seen[0]), assistant(tell(plot, rng))]
    messages = [*story, user(requests.score(rng, held_out, **plot))]
    return Question("about a story", messages, has(right.format(**plot)), held_out, example=answer.format(**plot))
