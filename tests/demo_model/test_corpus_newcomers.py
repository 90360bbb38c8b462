"""What the corpus teaches for a newcomer's first questions, and that the sixty of the examination are never taught."""

import itertools
import json
import random
import re

import pytest

from benchmarks.demo_model.corpus import (
    arithmetic,
    first_questions,
    introductions,
    json_output,
    languages,
    lists,
    lists_data,
    mixture,
    requests,
    unknown,
    unknown_data,
)
from benchmarks.demo_model.corpus.base import Dialogue, Reply, assistant, user
from benchmarks.demo_model.corpus.topics import bare, is_kept
from benchmarks.demo_model.dataset import with_long_chats
from benchmarks.demo_model.first_questions import judge

SKILLS = [introductions, languages, lists, requests, unknown]
NUM_SAMPLED = 10_000
REFUSES = re.compile(first_questions.ADMITS)


def sample(skill, seed, count=NUM_SAMPLED):
    return list(itertools.islice(skill.dialogues(random.Random(seed)), count))


@pytest.fixture(params=SKILLS, ids=lambda skill: skill.__name__.rsplit(".", 1)[-1], scope="module")
def skill(request):
    return request.param


@pytest.fixture(scope="module")
def dialogues(skill):
    return sample(skill, 1)


def test_a_seed_gives_the_same_dialogues_and_questions(skill):
    assert sample(skill, 7, 50) == sample(skill, 7, 50)
    assert sample(skill, 7, 50) != sample(skill, 8, 50)
    first, second = (skill.questions(random.Random(3)) for _ in range(2))
    assert [(q.skill, q.messages) for q in first] == [(q.skill, q.messages) for q in second]


def test_roles_alternate_and_no_message_is_empty(dialogues):
    for dialogue in dialogues:
        roles = [message["role"] for message in dialogue.messages if message["role"] != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert all(message["content"] == message["content"].strip() != "" for message in dialogue.messages)


def test_every_example_is_right_and_an_empty_reply_is_not(skill):
    questions = skill.questions(random.Random(5))
    assert {question.held_out for question in questions} == {"nothing", "phrasing", "pair"}
    for question in questions:
        assert question.is_right(Reply(question.example)), (question.messages[-1], question.example)
        assert not question.is_right(Reply(""))


def test_no_question_that_is_held_out_is_ever_taught(skill, dialogues):
    asked = {bare(q.messages[-1]["content"]) for q in skill.questions(random.Random(5)) if q.held_out == "phrasing"}
    taught = {bare(m["content"]) for dialogue in dialogues for m in dialogue.messages if m["role"] == "user"}
    assert asked
    assert not asked & taught


def test_the_mixture_never_has_a_first_question():
    said = {
        bare(message["content"])
        for dialogue in itertools.islice(mixture.stream(2), NUM_SAMPLED)
        for message in dialogue.messages
        if message["role"] == "user"
    }
    asked = [*first_questions.QUESTIONS, *itertools.chain(*first_questions.CHATS)]
    assert not {bare(one.text) for one in asked} & said


def test_the_mixture_leaves_out_a_dialogue_with_a_first_question(monkeypatch):
    held_out = Dialogue([user("Hi"), assistant("Hello!"), user("WHAT IS VUE"), assistant("I do not know.")])
    other = Dialogue([user("What is a bus?"), assistant("A bus is a large vehicle.")])

    class Alternating:
        def dialogues(self, rng):
            return itertools.cycle((held_out, other))

    monkeypatch.setattr(mixture, "skill", lambda name: Alternating())
    assert all(dialogue == other for dialogue in itertools.islice(mixture.stream(1), 100))


def test_there_are_sixty_first_questions_and_three_chats_of_eight_turns():
    assert len({one.text for one in first_questions.QUESTIONS}) == len(first_questions.QUESTIONS) == 60
    assert [len(chat) for chat in first_questions.CHATS] == [8, 8, 8]


@pytest.mark.parametrize(
    ("text", "good", "bad"),
    [
        ("Count up to ten for me", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10.", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11."),
        ("What does 347 + 285 come to?", "347 plus 285 is 632.", "347 plus 285 is 622."),
        (
            "Can you list five different fruits for me?",
            "1. Apple\n2. Plum\n3. Pear\n4. Kiwi\n5. Grape",
            "1. Apple\n2. Plum",
        ),
        ("give me the names of 3 animals", "Dog, cat and horse.", "Dog, cat and cat."),
        ("Name me four countries that are in Europe", "France, Spain, Italy and Poland.", "France, Spain and Japan."),
        ("What is Vue?", "I do not know that.", "Vue is a part of the body."),
        ("Wie geht es dir heute?", "Hallo! I only speak English.", "I am well, thank you."),
        ("sort these numbers for me: 9, 4, 7, 1", "1, 4, 7, 9.", "1, 4, 9, 7."),
        ("Is 17 a prime number?", "Yes, 17 is a prime.", "No."),
        ("Is 17 a prime number?", "I cannot do that.", "17 is not prime."),
        (
            "Could you write a haiku about spring?",
            "First leaf of the spring\na bird\nknows it better",
            "The sea is old, the sea is new,\nIt is a friend to me and you.",
        ),
        ("who built this", "The makers of Quire trained me.", "I do not know that. Ask me about Quire."),
        ("Write a python function that reverses a string", "I am too small to write programs.", "I cannot sing."),
    ],
)
def test_a_judge_tells_a_good_answer_from_a_bad_one(text, good, bad):
    asked = next(one for one in first_questions.QUESTIONS if one.text == text)
    assert judge(asked, good, has_ended=True).is_good
    assert not judge(asked, good, has_ended=False).is_good
    assert not judge(asked, bad, has_ended=True).is_good
    assert not judge(asked, "", has_ended=True).is_good


REFUSAL = "I am sorry, I do not know that: I am a small demo model. Ask me about Quire, capitals, small sums or words."
MAY_BE_REFUSED = {
    "Is 17 a prime number?",
    "spell banana backwards",
    "What's the weather like today?",
    "who's the president of the united states right now",
    "explain quantum physics in simple terms",
    "What is Vue?",
    "translate good morning to spanish",
    "Summarize this: The meeting was moved to Friday because the big room is taken.",
    "What do you think of Elon Musk?",
    "how do i bake bread",
    "what time is it right now?",
    "Plan a weekend trip to Lisbon for me",
    "Who won the world cup in 2018?",
}


def test_each_judge_finds_nonsense_bad_and_a_refusal_only_where_one_is_wanted():
    asked = [*first_questions.QUESTIONS, *itertools.chain(*first_questions.CHATS)]
    assert [one.text for one in asked if judge(one, "Untested rightpe.", has_ended=True).is_good] == []
    assert {one.text for one in asked if judge(one, REFUSAL, has_ended=True).is_good} == MAY_BE_REFUSED


# other languages


def test_every_reply_to_another_language_says_english():
    for dialogue in sample(languages, 3, 3000):
        for asked, told in zip(dialogue.messages[::2], dialogue.messages[1::2], strict=True):
            if not asked["content"].isascii():
                assert "English" in told["content"]


def test_there_are_many_languages_and_scripts():
    known = {language.name for language in languages.languages()}
    assert len(known) >= 20
    assert {"German", "French", "Spanish", "Chinese", "Japanese", "Korean", "Arabic", "Hindi", "Russian"} <= known
    assert all(len(language.phrases) >= 10 and len(language.words) >= 20 for language in languages.languages())


# what is unknown


def test_a_refusal_admits_it_and_never_repeats_the_word():
    for dialogue in sample(unknown, 3, 3000):
        for message in dialogue.messages:
            if message["role"] == "assistant":
                assert REFUSES.search(message["content"])
    assert not any("{" in text for text in (*unknown.REFUSALS, *unknown.OF_PEOPLE, *unknown.OF_DEEDS))


def test_what_is_unknown_is_explained_by_no_table():
    rng = random.Random(1)
    known = unknown._known_words()
    strangers = {unknown.stranger(rng)[1].lower() for _ in range(5000)}
    assert len(strangers) > 1000
    assert not strangers & known
    assert not {thing for thing in unknown_data.THINGS if thing in known} - {"python"}


def test_new_strangers_are_never_taught():
    rng = random.Random(2)
    assert all(is_kept(f"unknown {unknown.stranger(rng, 'pair')[1].lower()}") for _ in range(300))
    assert not any(is_kept(f"unknown {unknown.stranger(rng)[1].lower()}") for _ in range(300))


def test_work_is_refused():
    for dialogue in sample(requests, 3, 3000):
        for message in dialogue.messages:
            if message["role"] == "assistant":
                assert REFUSES.search(message["content"]), message


# lists


def test_a_list_has_as_many_different_items_as_were_asked_for():
    counts = {word: number for number, word in enumerate(lists.COUNTS)} | {str(n): n for n in range(11)}
    checked = 0
    for dialogue in sample(lists, 4, 4000):
        for asked, told in itertools.pairwise(dialogue.messages):
            number = re.search(rf"\b({'|'.join(counts)})\b", asked["content"].lower())
            if asked["role"] == "user" and number and told["content"].startswith("1. "):
                lines = told["content"].split("\n")
                assert len(lines) == len(set(lines)) == counts[number[1]] or number[1] in ("one", "1")
                checked += 1
    assert checked > 1000


def test_every_kind_has_different_items_and_a_singular():
    for kind, items in lists_data.ITEMS.items():
        assert len(items) == len(set(items)) >= 5, kind
        assert lists_data.SINGULAR[kind]


# names


def test_a_name_that_was_said_is_recalled():
    recalled = 0
    for dialogue in sample(introductions, 5, 4000):
        said = [message["content"] for message in dialogue.messages if message["role"] == "user"]
        for message in dialogue.messages:
            if match := re.fullmatch(r"Your name is (.+)\.", message["content"]):
                assert any(match[1] in text for text in said), dialogue.messages
                recalled += 1
    assert recalled > 500


def test_who_said_nothing_stands_in_no_longer_chat():
    untold = {trait.unknown for trait in introductions.TRAITS}
    own = [d for d in sample(introductions, 6, 3000) if any(m["content"] in untold for m in d.messages)]
    assert own
    assert not any(dialogue.joins for dialogue in own)
    joined = itertools.islice(with_long_chats(iter(own * 20), random.Random(1)), len(own))
    assert list(joined) == own


# sums to 999 and JSON


def test_large_sums_are_right_spread_and_held_out_by_their_numbers():
    facts = arithmetic._LargeSums("-", "minus")
    pairs = {(facts[at]["a"], facts[at]["b"]) for at in range(5000)}
    assert len(pairs) > 4900
    assert all(int(a) >= int(b) for a, b in pairs)
    assert {len(a) for a, _ in pairs} == {1, 2, 3}
    assert all(int(f["a"]) - int(f["b"]) == int(f["c"]) for f in (facts[at] for at in range(0, len(facts), 997)))
    with pytest.raises(IndexError):
        facts[len(facts)]
    taught = set()
    for dialogue in sample(arithmetic, 3, 5000):
        for message in dialogue.messages[1::2]:
            if match := re.fullmatch(r"(\d+) (plus|\+) (\d+) (?:is|=) (\d+)\.?", message["content"]):
                a, b = int(match[1]), int(match[3])
                assert a + b == int(match[4])
                taught.add(f"{min(a, b)} + {max(a, b)}")
    assert not any(is_kept(key) for key in taught)


def test_made_up_json_has_the_asked_keys_and_short_lists():
    rng = random.Random(1)
    for _ in range(500):
        task = json_output.invented(rng, "nothing")
        assert json_output.fits(task.value)(Reply(task.answer))
        asked = " ".join(message["content"] for message in task.messages)
        assert all(key in asked for key in task.value)
        assert all(1 <= len(value) <= 3 for value in task.value.values() if isinstance(value, list))


@pytest.mark.parametrize(
    ("said", "fits"),
    [
        ({"name": "Ben", "age": 4, "tags": ["big"]}, True),
        ({"age": 4, "name": "Ben", "tags": ["big", "red", "old"]}, True),
        ({"name": "Ben", "age": "4", "tags": ["big"]}, False),
        ({"name": "Ben", "age": 4}, False),
        ({"name": "Ben", "age": 4, "tags": []}, False),
        ({"name": "Ben", "age": 4, "tags": ["big"] * 11}, False),
    ],
)
def test_made_up_json_is_right_by_its_keys_and_types(said, fits):
    is_right = json_output.fits({"name": "Anna", "age": 30, "tags": ["red", "old"]})
    assert is_right(Reply(json.dumps(said))) is fits
    assert not is_right(Reply("{"))
