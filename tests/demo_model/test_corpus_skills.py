"""The corpus's skills of behaviour (Quire, styles, thinking, tools, JSON) and the mixture of all skills."""

import itertools
import json
import random
import re

import pytest

from benchmarks.demo_model.corpus import (
    held_out,
    json_output,
    json_phrasings,
    mixture,
    names,
    quire,
    styles,
    styles_phrasings,
    thinking,
    thinking_phrasings,
    tool_grammar,
    tool_jobs,
    tools,
)
from benchmarks.demo_model.corpus.base import Dialogue, Phrasings, Reply, assistant, user
from benchmarks.demo_model.corpus.replies import read_reply, with_calls, with_reasoning
from benchmarks.demo_model.corpus.topics import is_kept

NUM_SAMPLED = 20_000
SKILLS = [quire, styles, thinking, tools, json_output]
TEXT = re.compile(r"[\x20-\x7e\náãçéíóôúüÁÃÇÉÍÓÔÚÜ]*")
THE_NEW_OF_TOOLS = {*names.NEW_CITIES, *names.NEW_WORDS, *names.NEW_PEOPLE, *tool_jobs.NEW_SYMBOLS}


def sample(skill, seed, count=NUM_SAMPLED):
    return list(itertools.islice(skill.dialogues(random.Random(seed)), count))


def bare(text):
    return text.casefold().rstrip("?.! ")


@pytest.fixture(params=SKILLS, ids=lambda skill: skill.__name__.rsplit(".", 1)[-1], scope="module")
def skill(request):
    return request.param


@pytest.fixture(scope="module")
def dialogues(skill):
    return sample(skill, 1)


def prompts(dialogues):
    return [m["content"] for d in dialogues for m in d.messages if m["role"] in ("user", "system")]


def unseen(module):
    """The literal pieces of every phrasing of a module that training must not use."""
    phrasings = [value for value in vars(module).values() if isinstance(value, Phrasings)]
    return [re.split(r"\{\w+\}", bare(template)) for one in phrasings for template in one.unseen]


def is_made_of(text, pieces):
    """Whether a text is a template filled in, given the template's literal pieces."""
    text, at = bare(text), 0
    if not text.startswith(pieces[0]) or not text.endswith(pieces[-1]):
        return False
    for piece in pieces:
        at = text.find(piece, at)
        if at < 0:
            return False
        at += len(piece)
    return True


def calls(messages):
    return [call["function"] for message in messages for call in message.get("tool_calls", ())]


def test_a_seed_gives_the_same_dialogues_and_questions(skill):
    assert sample(skill, 7, 50) == sample(skill, 7, 50)
    assert sample(skill, 7, 50) != sample(skill, 8, 50)
    first, second = (skill.questions(random.Random(3)) for _ in range(2))
    assert [(q.skill, q.messages, q.tools) for q in first] == [(q.skill, q.messages, q.tools) for q in second]


def test_every_message_is_plain_text_and_the_assistant_has_the_last_word(dialogues):
    for dialogue in dialogues:
        roles = [message["role"] for message in dialogue.messages if message["role"] != "system"]
        assert roles[0] == "user"
        assert roles[-1] == "assistant"
        assert not any(one == two != "tool" for one, two in itertools.pairwise(roles))
        for message in dialogue.messages:
            assert TEXT.fullmatch(message["content"]), message["content"]
            assert message["content"] or message.get("tool_calls")


def test_every_example_is_right_and_an_empty_reply_is_wrong(skill):
    for question in skill.questions(random.Random(5)):
        assert question.messages[-1]["role"] in ("user", "tool")
        assert question.is_right(read_reply(question.example)), question
        assert not question.is_right(Reply(""))


def test_an_examination_has_seen_and_unseen_questions(skill):
    questions = skill.questions(random.Random(5))
    assert 60 <= len(questions) <= 1100
    assert {question.held_out for question in questions} == {"nothing", "phrasing", "pair"}


# Quire


def test_quire_has_enough_subjects_each_in_many_phrasings():
    assert len(quire.SUBJECTS) >= 120
    for subject in quire.SUBJECTS:
        templates = subject.templates()
        assert len({*templates.seen}) * len(subject.names) * bool(templates.seen) + len(subject.asked.seen) >= 8
        assert len(templates.unseen) + len(subject.asked.unseen) >= 2
        assert 2 <= len(subject.answers) <= 4
    assert sum(bool(one.extras["e"] and one.extras["s"]) for one in quire.SUBJECTS) >= 40


def test_every_answer_about_quire_has_its_keys():
    for subject in quire.SUBJECTS:
        for answer in subject.answers:
            assert quire.contains(subject.keys)(Reply(answer)), (subject.names, answer)


def test_no_two_subjects_of_quire_are_asked_for_in_the_same_words():
    owners = {}
    for subject in quire.SUBJECTS:
        filled = [subject.fill(way, name) for way in subject.templates().seen for name in subject.names]
        for way in [*subject.asked.seen, *filled]:
            assert owners.setdefault(bare(way), subject) is subject, way


def test_no_held_out_words_about_quire_are_in_the_whole_mixture():
    kept = set()
    for subject in quire.SUBJECTS:
        filled = [subject.fill(way, name) for way in subject.templates().unseen for name in subject.names]
        kept |= {bare(way) for way in [*subject.asked.unseen, *filled]}
        pairs = [subject.fill(way, name) for way in subject.templates().seen for name in subject.names]
        own = {bare(way) for way in subject.asked.seen}
        kept |= {bare(way) for way in pairs if quire.is_held_out(way)} - own
    kept |= {bare(way) for phrasings in quire.FOLLOW_UPS.values() for way in phrasings.unseen}
    said = {bare(text) for text in prompts(itertools.islice(mixture.stream(1), NUM_SAMPLED))}
    assert not said & kept


def test_commands_for_curl_and_the_client_are_whole():
    for subject in quire.SUBJECTS:
        for request in subject.extras["c"]:
            assert quire.with_curl(request).startswith("curl http://127.0.0.1:8000/")
            if request.startswith('"'):
                body = re.search(r"-d '(.*)'", quire.with_curl(request))[1]
                assert json.loads(body)["messages"]
                compile(quire.with_client(request), "client", "eval")


def test_the_curl_requests_are_ones_that_the_server_takes():
    from server.api.schemas import ChatBody

    for subject in quire.SUBJECTS:
        for request in subject.extras["c"]:
            if request.startswith('"'):
                ChatBody.model_validate_json(re.search(r"-d '(.*)'", quire.with_curl(request))[1])


# styles


def test_held_out_style_prompts_and_words_are_never_taught():
    patterns = unseen(styles_phrasings)
    words = re.compile(rf"\b({'|'.join((*styles.NEW_PEOPLE, *map(re.escape, styles.NEW_STARTS)))})")
    for dialogue in sample(styles, 1):
        system = [m["content"] for m in dialogue.messages if m["role"] == "system"]
        for text in system:
            assert not any(is_made_of(text, pieces) for pieces in patterns), text
            assert not words.search(text), text


def test_a_style_goes_over_any_dialogue():
    base = itertools.repeat(Dialogue([user("What is 1 + 1?"), assistant("1 plus 1 is 2.")]))
    answers = {d.messages[-1]["content"] for d in itertools.islice(styles.styled(base, random.Random(2)), 400)}
    assert {"1 PLUS 1 IS 2.", "1 plus 1 is 2!", "2."} <= answers
    assert any(answer.startswith("Arr! ") for answer in answers)


def test_the_one_word_of_an_answer_is_found():
    assert styles.one_word("The capital of Burkina Faso is Ouagadougou.") == "Ouagadougou."
    assert styles.one_word("3 plus 4 is 7.") == "7."
    assert styles.one_word("Quire is a daemon. It serves models.") is None


# thinking


def test_thoughts_are_there_only_if_thinking_is_on():
    for dialogue in sample(thinking, 2, 5000):
        for message in dialogue.messages:
            if message["role"] == "assistant":
                assert ("reasoning_content" in message) == dialogue.enable_thinking
                assert 1 <= len(message.get("reasoning_content", "x").split("\n")) <= 4


def test_held_out_problems_are_never_taught():
    patterns = unseen(thinking_phrasings)
    sums = re.compile(r"(\d+) ([+-]) (\d+) = ")
    for dialogue in sample(thinking, 3):
        for message in dialogue.messages:
            if message["role"] == "user":
                assert not any(is_made_of(message["content"], pieces) for pieces in patterns), message
            for a, sign, b in sums.findall(message.get("reasoning_content", "")):
                assert not held_out.keeps_sum(int(a), sign, int(b))


def test_a_reply_without_its_closing_tag_is_not_well_formed():
    good = read_reply(with_reasoning("One and one is two.", "It is 2."))
    assert thinking.is_well_formed(good)
    assert not thinking.has_no_thoughts(good)
    assert not thinking.is_well_formed(read_reply("<think>\nOne and one is two. It is 2."))
    assert not thinking.is_well_formed(read_reply("It is 2."))
    assert thinking.has_no_thoughts(read_reply("It is 2."))


# tools


def test_every_call_fits_a_tool_that_was_offered():
    for dialogue in sample(tools, 2, 5000):
        offered = {tool["function"]["name"]: tool["function"]["parameters"] for tool in dialogue.tools}
        assert len(offered) == len(dialogue.tools)
        for call in calls(dialogue.messages):
            arguments, schema = json.loads(call["arguments"]), offered[call["name"]]
            assert set(schema["required"]) <= arguments.keys() <= schema["properties"].keys()
            for field, value in arguments.items():
                kind = schema["properties"][field]
                assert isinstance(value, {"string": str, "integer": int}[kind["type"]])
                assert value in kind.get("enum", [value])


def test_held_out_tools_and_values_are_never_called():
    new = {name for kind in vars(tool_jobs).values() if isinstance(kind, tool_jobs.Names) for name in kind.unseen}
    kept = {f"{verb}_{noun}" for verb in tool_grammar.VERBS for noun in tool_grammar.NOUNS if is_kept(f"{verb}_{noun}")}
    patterns = [*unseen(tool_jobs), *unseen(tool_grammar), *unseen(tools)]
    for dialogue in sample(tools, 3):
        assert not {tool["function"]["name"] for tool in dialogue.tools} & (new | kept)
        for call in calls(dialogue.messages):
            values = json.loads(call["arguments"]).values()
            assert not any(word in THE_NEW_OF_TOOLS for value in values for word in str(value).split(" "))
        if calls(dialogue.messages):
            for text in prompts([dialogue]):
                assert not any(is_made_of(text, pieces) for pieces in patterns), text


def test_calls_are_compared_by_their_arguments_and_not_by_their_text():
    is_right = tools.calls_are(("get_weather", {"city": "Paris", "unit": "celsius"}))
    assert is_right(Reply("", tool_calls=[{"name": "get_weather", "arguments": {"unit": "celsius", "city": "paris"}}]))
    assert not is_right(Reply("", tool_calls=[{"name": "get_weather", "arguments": {"city": "Paris"}}]))
    assert not is_right(Reply("It is 20 degrees in Paris."))


@pytest.mark.parametrize(
    ("raw", "is_right"),
    [
        ('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Atlantis"}}\n</tool_call>', True),
        ('<tool_call>\n{"name": "get_weather", "arguments": {"city": 3, "unit": "kelvin"}}\n</tool_call>', True),
        ('<tool_call>\n{"name": "get_time", "arguments": {"city": "Paris"}}\n</tool_call>', False),
        ('<tool_call>\n{"name": "get_weather", "arguments": {"town": "Paris"}}\n</tool_call>', False),
        ('<tool_call>\n{"name": "get_weather", "arguments": {"unit": "celsius"}}\n</tool_call>', False),
        ('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}\n</tool_call>', False),
        ('I look. <tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>', False),
        ('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>' * 2, False),
        ("It is warm in Paris.", False),
    ],
)
def test_a_call_has_its_form_whatever_its_values(raw, is_right):
    properties = {"city": {"type": "string"}, "unit": {"type": "string"}}
    offered = [tool_jobs.make_tool("get_weather", "The weather.", properties, ["city"])]
    assert tools.is_call_of(offered)(read_reply(raw)) is is_right


def test_a_call_is_read_from_text_and_a_broken_one_is_not():
    call = {"name": "get_weather", "arguments": {"city": "Paris"}}
    reply = read_reply(with_calls([call, call]))
    assert list(reply.tool_calls) == [call, call]
    assert reply.content == ""
    assert read_reply('<tool_call>\n{"name": "get_weather"\n</tool_call>').tool_calls == ()


# JSON


def test_every_answer_is_json_and_nothing_held_out_is_in_it():
    capitals = {place.capital for place in json_output.places()}
    new = sorted(THE_NEW_OF_TOOLS - capitals)
    for dialogue in sample(json_output, 2):
        for message in dialogue.messages:
            if message["role"] == "assistant":
                assert json_output.parses(Reply(message["content"]))
                assert not any(f'"{word}"' in message["content"] for word in new), message


def test_held_out_ways_to_ask_for_json_are_never_used():
    patterns = unseen(json_phrasings)
    kept = [bare(way).split("{")[0] for one in (json_phrasings.WITH_KEYS, json_phrasings.SCHEMA) for way in one.unseen]
    for text in prompts(sample(json_output, 3)):
        assert not any(is_made_of(text, pieces) for pieces in patterns), text
        assert not any(way in bare(text) for way in kept), text


def test_json_with_text_around_it_is_not_right():
    is_right = json_output.is_json({"name": "France", "capital": "Paris"})
    assert is_right(Reply('{"capital": "paris", "name": "France"}'))
    assert not is_right(Reply('Here: {"name": "France", "capital": "Paris"}'))
    assert not is_right(Reply('{"name": "France", "capital": "Lyon"}'))


# the mixture


def test_the_mixture_is_the_same_for_a_seed_and_holds_every_skill():
    first, second = (list(itertools.islice(mixture.stream(4), 300)) for _ in range(2))
    assert first == second
    assert first != list(itertools.islice(mixture.stream(5), 300))
    for name in mixture.SKILLS:
        assert mixture.skill(name).questions(random.Random(0))


def test_the_examination_asks_of_every_skill():
    questions = mixture.examination(1)
    assert len(questions) >= 1000
    skills = {one.skill for one in questions}
    assert {"capitals", "tool call", "tool call form", "JSON parses", "thinking tags", "quire"} <= skills
