"""The corpus's skills of facts and small talk: deterministic, readable, and nothing held out is ever taught."""

import itertools
import random
import re

import pytest

from benchmarks.demo_model.corpus import arithmetic, geography, smalltalk, stories, topics, words
from benchmarks.demo_model.corpus.base import Reply
from benchmarks.demo_model.corpus.topics import OPENERS, is_kept, with_article

SKILLS = [geography, arithmetic, words, smalltalk, stories]
NUM_SAMPLED = 20_000
WORDY = re.compile(r"[A-Za-z0-9 \n.,;:!?'\"()*/+=\-áãçéíóôúüÁÉÍÓÚ]*")


def sample(skill, seed, count):
    return list(itertools.islice(skill.dialogues(random.Random(seed)), count))


def bare(text):
    """The text without what a user in a hurry leaves out or puts before."""
    for opener in OPENERS:
        text = text.removeprefix(opener).removeprefix(opener.lower())
    return topics.bare(text)


@pytest.fixture(params=SKILLS, ids=lambda skill: skill.__name__.rsplit(".", 1)[-1], scope="module")
def skill(request):
    return request.param


@pytest.fixture(scope="module")
def dialogues(skill):
    return sample(skill, 1, NUM_SAMPLED)


def test_a_seed_gives_the_same_dialogues_and_questions(skill):
    assert sample(skill, 7, 50) == sample(skill, 7, 50)
    assert sample(skill, 7, 50) != sample(skill, 8, 50)
    first, second = (skill.questions(random.Random(3)) for _ in range(2))
    assert [(q.skill, q.messages, q.held_out) for q in first] == [(q.skill, q.messages, q.held_out) for q in second]


def test_roles_alternate_and_every_message_is_plain_text(dialogues):
    for dialogue in dialogues[:5000]:
        roles = [message["role"] for message in dialogue.messages]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert len(roles) >= 2
        for message in dialogue.messages:
            assert message["content"] == message["content"].strip() != ""
            assert WORDY.fullmatch(message["content"]), message["content"]
            assert "  " not in message["content"]


def test_answers_are_sentences_with_the_right_article(dialogues):
    for dialogue in dialogues[:5000]:
        for message in dialogue.messages[1::2]:
            answer = message["content"]
            assert ".." not in answer
            assert answer[0].isupper() or answer[0].isdigit() or answer[0] == "-" or answer.startswith("a, b"), answer
            assert not re.search(
                r"\ba [aeio]\w|\ban [^aeiouhAEIOUH\W]", answer.replace("a, ", "").replace("a one", "")
            ), answer


def test_no_question_that_is_held_out_is_ever_taught(skill, dialogues):
    asked = [q for seed in range(3) for q in skill.questions(random.Random(seed))]
    single = {bare(q.messages[-1]["content"]) for q in asked if len(q.messages) == 1 and q.held_out != "nothing"}
    assert single
    taught = {bare(message["content"]) for dialogue in dialogues for message in dialogue.messages[::2]}
    assert not single & taught


def test_an_unseen_phrasing_is_no_seen_one_with_other_capitals_or_stops():
    every = [*geography.topics(), *arithmetic.topics(), *words.topics(), *smalltalk.topics()]
    for topic in every:
        for phrasings in (topic.asked, *([topic.again] if topic.again else []), *(link for link, _ in topic.links)):
            assert not {bare(text) for text in phrasings.unseen} & {bare(text) for text in phrasings.seen}


def test_every_example_is_right_and_an_empty_reply_is_not(skill):
    for question in skill.questions(random.Random(5)):
        assert question.is_right(Reply(question.example)), (question.messages[-1], question.example)
        assert not question.is_right(Reply("")), question.messages[-1]
        assert question.messages[-1]["role"] == "user"


def test_every_kind_of_holding_out_is_scored(skill):
    counts = [question.held_out for question in skill.questions(random.Random(5))]
    assert {"nothing", "phrasing", "pair"} == set(counts)
    assert 60 <= len(counts) <= 650


def test_every_country_and_state_has_a_capital():
    places = {place.name: place for place in geography.places()}
    assert sum(place.is_state for place in geography.places()) == 50
    assert sum(len(lines.splitlines()) for lines in geography.COUNTRIES.values()) == 197
    for name, capital in {
        "Ukraine": "Kyiv",
        "Kazakhstan": "Astana",
        "Myanmar": "Naypyidaw",
        "Burundi": "Gitega",
        "Palau": "Ngerulmud",
        "Eswatini": "Mbabane",
        "South Africa": "Pretoria",
        "Tanzania": "Dodoma",
        "Virginia": "Richmond",
        "Washington state": "Olympia",
    }.items():
        assert places[name].capital == capital


def test_the_capital_is_asked_for_in_many_ways():
    capital = geography.topics()[0]
    assert len(set(capital.asked.seen)) >= 40
    assert len(set(capital.asked.unseen)) >= 12


def test_sums_are_right():
    for dialogue in sample(arithmetic, 2, 5000):
        for message in dialogue.messages[1::2]:
            if match := re.fullmatch(r"(\d+) (plus|minus|times|divided by) (\d+) is (-?\d+)\.", message["content"]):
                a, operation, b, c = int(match[1]), match[2], int(match[3]), int(match[4])
                assert {"plus": a + b, "minus": a - b, "times": a * b}.get(operation, a // max(b, 1)) == c


def test_a_sum_held_out_is_taught_in_no_phrasing():
    for dialogue in sample(arithmetic, 3, NUM_SAMPLED):
        for message in dialogue.messages[1::2]:
            if match := re.fullmatch(r"(\d+) (plus|times) (\d+) is \d+\.", message["content"]):
                a, b = int(match[1]), int(match[3])
                key = f"{min(a, b)} + {max(a, b)}" if match[2] == "plus" else f"{a} x {b}"
                assert not is_kept(key)


def test_a_story_has_40_to_120_words():
    rng = random.Random(6)
    lengths = [len(stories.tell(stories.make_plot(rng), rng).split()) for _ in range(2000)]
    assert min(lengths) >= 40
    assert max(lengths) <= 120


def test_articles_follow_the_sound_of_the_noun():
    assert [with_article(noun) for noun in ("fox", "owl", "umbrella", "unicorn", "hour")] == [
        "a fox",
        "an owl",
        "an umbrella",
        "a unicorn",
        "an hour",
    ]
