"""What a newcomer types first: sixty questions and three chats of eight turns, each with a judge.

Training never has these wordings: the mixture leaves out every dialogue with one of them (`is_held_out`). A judge is a
regular expression that a good reply has, one that it has not, or a test of its form. A reply that does not end is bad.
Standard library only, and the corpus's tables; never torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from benchmarks.demo_model.corpus import lists_data, smalltalk_jokes
from benchmarks.demo_model.corpus.geography_data import COUNTRIES
from benchmarks.demo_model.corpus.topics import bare, plain

Judge = Callable[[str], bool]

ADMITS = r"\b(?:not|never|cannot|can't|don't|nothing|no|sorry|only|unable|too small)\b"
NO_ANSWER = r"\b(?:not know|not taught|not something I know|sorry|cannot)\b"


@dataclass(frozen=True)
class Asked:
    """One message of a newcomer, and what a good reply to it is."""

    text: str
    is_good: Judge


def says(pattern: str, without: str = "") -> Judge:
    """Whether a reply has the pattern and lacks the other one, whatever the case and the accents."""
    wanted, unwanted = re.compile(pattern, re.IGNORECASE), re.compile(without or r"(?!)", re.IGNORECASE)
    return lambda reply: bool(wanted.search(plain(reply))) and not unwanted.search(plain(reply))


def refuses(without: str = "") -> Judge:
    """Whether a reply admits that it cannot, and says nothing that it must not say."""
    return says(ADMITS, without)


def tells(pattern: str) -> Judge:
    """Whether a reply has the pattern and is no refusal, which may have it too: "I am a small demo model."."""
    return says(pattern, NO_ANSWER)


def names(count: int, known: tuple[str, ...]) -> Judge:
    """Whether a reply lists exactly so many different things, all of them known."""

    def is_good(reply: str) -> bool:
        text = plain(reply).casefold()
        found = [item.strip(" .!") for item in re.split(r"\n|,|;|\band\b", re.sub(r"\d+[.)]|[-*] ", "", text))]
        found = [re.sub(r"^(?:the|an?) ", "", item) for item in found if item.strip(" .!")]
        allowed = {re.sub(r"^(?:the|an?) ", "", plain(item).casefold()) for item in known}
        return len(found) == count == len(set(found)) and all(item in allowed for item in found)

    return is_good


def run(*numbers: int) -> Judge:
    """Whether the numbers of a reply are these, in this order, and no others."""
    return lambda reply: [int(number) for number in re.findall(r"-?\d+", reply)] == list(numbers)


def last_number(number: int) -> Judge:
    """Whether the last number of a reply is this one."""
    return lambda reply: re.findall(r"-?\d+", reply.replace(",", ""))[-1:] == [str(number)]


def tells_a_joke(reply: str) -> bool:
    """Whether a reply has a whole joke of the table."""
    return any(joke in reply for joke in smalltalk_jokes.JOKES.splitlines())


def is_long(words: int, pattern: str) -> Judge:
    """Whether a reply has so many words and the pattern."""
    return lambda reply: len(reply.split()) >= words and re.search(pattern, reply, re.IGNORECASE) is not None


_EUROPE = tuple(line.split("|")[0] for line in COUNTRIES["Europe"].splitlines())
_EUROPEANS = (*_EUROPE, "England", "Scotland", "Wales")
_ENGLISH = says(r"\benglish\b")

QUESTIONS = (
    Asked("hello computer", says(r"\b(?:hello|hi)\b")),
    Asked("Hi, what are you exactly?", tells(r"demo model|language model|program")),
    Asked("so who am i chatting with", tells(r"demo model|language model|Quire")),
    Asked("Is this thing ChatGPT under the hood?", tells(r"\bno\b|demo model")),
    Asked("how many params does this model have?", says(r"million")),
    Asked("what sort of stuff can I ask you?", tells(r"capitals|sums|Quire")),
    Asked("how r u doing", says(r"\b(?:well|fine|good)\b")),
    Asked("Are you conscious?", tells(r"\bno\b|program|model")),
    Asked("who built this", tells(r"Quire|makers")),
    Asked("Do you keep what I type here?", tells(r"\b(?:no|not|never|nothing|without)\b")),
    Asked("how do i set this up with my own model", says(r"quire serve(?!s)")),
    Asked("is there an openai compatible endpoint", says(r"/v1|OpenAI|yes")),
    Asked("Does this run without a graphics card?", says(r"\bCPU\b|no GPU|yes")),
    Asked("What port are you on?", says(r"8000")),
    Asked("can i load gguf models", says(r"\bno\b|safetensors")),
    Asked("Which models can you serve besides this one?", says(r"Llama|Qwen")),
    Asked("how can i make you answer faster", says(r"GPU|smaller|speculative")),
    Asked("Can several people use this server together?", says(r"yes|at once|\b(?:64|256)\b|many")),
    Asked("how do i turn on https", says(r"--tls|proxy|nginx")),
    Asked("Is it free for commercial use?", says(r"Apache|open source|nothing|free|yes")),
    Asked("whats the capital of australia", says(r"Canberra")),
    Asked("What's the capital city of Canada, please?", says(r"Ottawa")),
    Asked("France capital?", says(r"Paris")),
    Asked("Tell me something about Japan", says(r"Tokyo|Asia")),
    Asked("hey which planet is the biggest one", says(r"Jupiter")),
    Asked("how many days are in february", says(r"\b28\b")),
    Asked("what's the opposite of brave?", says(r"coward")),
    Asked("What colour is a ripe banana?", says(r"yellow")),
    Asked("what's two plus two", says(r"\b(?:4|four)\b", r"\b(?:[5-9]|five|six)\b")),
    Asked("What does 347 + 285 come to?", last_number(632)),
    Asked("999 minus 123 is what", last_number(876)),
    Asked("i need to know what 8 times 7 is", last_number(56)),
    Asked("Count up to ten for me", run(*range(1, 11))),
    Asked("count down starting at 5", run(5, 4, 3, 2, 1)),
    Asked("Can you list five different fruits for me?", names(5, lists_data.ITEMS["fruits"])),
    Asked("give me the names of 3 animals", names(3, lists_data.ANIMALS)),
    Asked("Name me four countries that are in Europe", names(4, _EUROPEANS)),
    Asked("sort these numbers for me: 9, 4, 7, 1", lambda reply: _numbers(reply)[-4:] == [1, 4, 7, 9]),
    Asked("Is 17 a prime number?", says(rf"\byes\b|is a prime|{NO_ANSWER}", r"\bno\b|n(?:o|')t a? ?prime")),
    Asked("spell banana backwards", says(rf"a-?n-?a-?n-?a-?b|{ADMITS}")),
    Asked("tell me a really funny joke please", tells_a_joke),
    Asked("write me a little poem about the sea", is_long(12, r"\b(?:sea|waves?|water|sailor|ship)\b")),
    Asked("Could you write a haiku about spring?", is_long(8, r"\bspring\b.*(?:\n|/)|(?:\n|/).*\bspring\b")),
    Asked("tell me a bedtime story about a cat", is_long(40, r"\bcat\b")),
    Asked("got a riddle for me?", lambda reply: any(line.split("|")[0] in reply for line in _riddles())),
    Asked("tell me a random fact", is_long(4, r"\b(?:is|are|has|have|makes?|rises|sets|boils|freezes|goes)\b")),
    Asked("What's the weather like today?", refuses(r"\b(?:sunny|rain|degrees)\b")),
    Asked("who's the president of the united states right now", refuses(r"capital of|\bis a\b")),
    Asked("explain quantum physics in simple terms", refuses(r"token|quantization")),
    Asked("What is Vue?", refuses(r"\bVue is\b")),
    Asked("Write a python function that reverses a string", says(rf"(?=.*{ADMITS}).*(?:program|code|write|do that)")),
    Asked("translate good morning to spanish", refuses(r"good morning!")),
    Asked(
        "Summarize this: The meeting was moved to Friday because the big room is taken.",
        refuses(r"capital of (?!countries)"),
    ),
    Asked("What do you think of Elon Musk?", refuses()),
    Asked("how do i bake bread", refuses(r"quire bench|make serve")),
    Asked("what time is it right now?", refuses(r"\d:\d\d")),
    Asked("Hola, ¿qué tal estás hoy?", _ENGLISH),
    Asked("Wie geht es dir heute?", _ENGLISH),
    Asked("你好,你是谁?", _ENGLISH),
    Asked("Plan a weekend trip to Lisbon for me", refuses(r"capital of Portugal")),
)

CHATS = (
    (
        Asked("Hi there, I'm new here and my name is Sam", says(r"\bSam\b")),
        Asked("so what can you help me with?", tells(r"capitals|sums|Quire")),
        Asked("ok, what's the capital of Spain then?", says(r"Madrid")),
        Asked("and Portugal's?", says(r"Lisbon")),
        Asked("cool, what is 45 + 67", last_number(112)),
        Asked("Do you still know my name?", says(r"\bSam\b")),
        Asked("tell me a joke then", tells_a_joke),
        Asked("haha thanks, bye!", says(r"welcome|bye|glad|pleasure")),
    ),
    (
        Asked("hey, what is this thing?", tells(r"Quire|demo model|language model")),
        Asked("how do I run it with a bigger model?", says(r"quire serve(?!s)")),
        Asked("does it really need a gpu for that?", says(r"\bCPU\b|\bGPU\b")),
        Asked("Is my data sent anywhere?", tells(r"\b(?:no|not|never|nothing|own machine|without)\b")),
        Asked("what's a kv cache?", says(r"keys and values")),
        Asked("huh, can you explain that more simply", says(r"cache|memory|remember|comput|keys|notes")),
        Asked("Can it do JSON output?", says(r"yes|response_format|JSON")),
        Asked("great, thank you so much for the help", says(r"welcome|glad|pleasure")),
    ),
    (
        Asked("Good evening! I am called Priya.", says(r"\bPriya\b")),
        Asked("please list three colors", names(3, lists_data.ITEMS["colours"])),
        Asked("Who won the world cup in 2018?", refuses(r"capital of (?!countries)")),
        Asked("ok then, which ocean is the largest?", says(r"Pacific")),
        Asked("write me the code for a small website", says(rf"(?=.*{ADMITS}).*(?:program|code|write|do that)")),
        Asked("please count from 3 up to 8", run(3, 4, 5, 6, 7, 8)),
        Asked("What was my name again?", says(r"\bPriya\b")),
        Asked("see you tomorrow then", says(r"bye|soon|tomorrow|welcome|nice day|good night")),
    ),
)


@cache
def _held_out() -> frozenset[str]:
    return frozenset(bare(asked.text) for asked in (*QUESTIONS, *(turn for chat in CHATS for turn in chat)))


def is_held_out(text: str) -> bool:
    """Whether a user's message is one of these, whatever its case and its last stop."""
    return bare(text) in _held_out()


def _numbers(reply: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", reply)]


def _riddles() -> list[str]:
    return smalltalk_jokes.RIDDLES.splitlines()
