"""Names and words that tools, JSON and styles are about. NEW_… are those that training never names there.

Words that a list does not have are drawn as well (`word`, `person`, `city`), so that what was said must be copied, and
cannot be remembered.
"""

import random
import re
from pathlib import Path

from benchmarks.demo_model.corpus.base import HeldOut

_COINED = 0.5  # of all draws; a list of a hundred names would be learned by heart
_ONSETS, _VOWELS, _ENDS = (
    "b br c ch d dr f fl g gl h j k kl l m n p pl qu r s sh st t tr v w z".split(),
    "aeiou",
    "lmnrstx",
)
_TEXTS = ("quire_limits.txt", "quire_terms.txt", "quire_use.txt")


def items(text: str) -> list[str]:
    """Return what stands between | and line ends, or if there is no |, between spaces."""
    return [item for item in text.replace("\n", "|").split("|") if item] if "|" in text else text.split()


CITIES = items("""\
Paris|London|Berlin|Madrid|Rome|Vienna|Oslo|Dublin|Athens|Lisbon|Warsaw|Prague|Helsinki|Brussels|Amsterdam
Munich|Hamburg|Cologne|Milan|Naples|Venice|Barcelona|Seville|Porto|Lyon|Nice|Geneva|Zurich|Basel|Krakow|Kyiv
Riga|Tallinn|Moscow|Istanbul|Ankara|Cairo|Tunis|Lagos|Nairobi|Accra|Dakar|Cape Town|Tokyo|Osaka|Kyoto|Seoul
Beijing|Shanghai|Hong Kong|Singapore|Bangkok|Hanoi|Jakarta|Manila|Delhi|Mumbai|Chennai|Karachi|Dhaka|Kabul
Tehran|Baghdad|Doha|Dubai|Sydney|Melbourne|Perth|Auckland|Wellington|Toronto|Montreal|Ottawa|New York|Boston
Chicago|Seattle|Denver|Dallas|Houston|Miami|Atlanta|Los Angeles|San Francisco|San Diego|Phoenix|Las Vegas
Portland|Detroit|Havana|Mexico City|Bogota|Lima|Quito|Santiago|Buenos Aires|Montevideo|Sao Paulo|Brasilia
Caracas|Richmond|Albany|Austin|Salem""")
NEW_CITIES = items("""\
Bern|Stockholm|Copenhagen|Budapest|Bucharest|Glasgow|Florence|Valencia|Rabat|Kigali|Nagoya|Busan|Taipei|Brisbane
Vancouver|Philadelphia|Nashville|Cancun|Medellin|Reykjavik""")

PEOPLE = items("""\
Ada Adam Alice Amir Anna Bella Ben Carla Carlos Chen Clara Daniel David Diana Elena Emil Emma Eva Felix Fatima
Finn George Grace Hana Hugo Ines Ivan Jack Jana Joan John Julia Karim Kate Kenji Lara Leo Lena Lisa Lucas Luis
Maria Mark Martha Max Maya Mia Mila Nadia Nina Noah Nora Olga Oliver Omar Oscar Paul Peter Priya Raj Rosa Ruth
Sam Sara Simon Sofia Tara Theo Tina Tom Uma Vera Victor Yara Yuki Zoe""")
NEW_PEOPLE = items("Agnes Boris Cora Dario Edith Farid Gita Henrik Iris Jonas Klara Ludwig Miriam Nils Petra Rania")

WORDS = items("""\
apple banana cherry lemon melon peach plum grape bread butter cheese honey sugar coffee tea milk water river
ocean lake hill valley forest tree flower garden cloud storm rain snow wind sun moon star planet comet rocket
robot engine wheel bridge tower castle house window door table chair lamp clock mirror carpet pillow blanket
button needle thread paper pencil book letter stamp ticket wallet basket bottle hammer ladder bucket shovel
anchor sailor captain pirate king queen dragon tiger lion zebra monkey rabbit turtle eagle falcon pigeon salmon
whale dolphin spider beetle guitar piano violin trumpet drum march waltz tango""")
NEW_WORDS = (
    "mango walnut cactus pebble lantern saddle magnet compass kettle badger otter parrot flute cello meadow".split()
)

COLOURS = items("red blue green yellow black white brown orange purple pink grey")
CURRENCIES = {"EUR": "euros", "USD": "dollars", "GBP": "pounds", "JPY": "yen", "CHF": "francs"}
LANGUAGES = items("French German Spanish Italian Dutch Polish Japanese Korean Swedish Turkish Greek Arabic")
DAYS = items("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
NEW_STARTS = ("Right.", "Gladly!", "Here:", "Indeed,")  # that an answer may have to begin with
JOBS = items("teacher nurse doctor baker farmer pilot painter singer lawyer driver gardener engineer writer")


def word(rng: random.Random, held_out: HeldOut) -> str:
    """Return a word: new, of the list, of the texts about Quire, or coined."""
    return _drawn(rng, held_out, WORDS, NEW_WORDS)


def person(rng: random.Random, held_out: HeldOut) -> str:
    """Return a first name."""
    return _drawn(rng, held_out, PEOPLE, NEW_PEOPLE)


def city(rng: random.Random, held_out: HeldOut) -> str:
    """Return a city, some of two words."""
    return _drawn(rng, held_out, CITIES, NEW_CITIES)


def coined(rng: random.Random) -> str:
    """Return an ordinary word of the texts, or one that is none: of two real ones, or such as "bralomi"."""
    draw = rng.random()
    if draw < 0.35:
        return rng.choice(_ORDINARY)
    if draw < 0.7:
        first, last = rng.choice(_REAL), rng.choice(_REAL)
        made = first[: rng.randint(2, 5)] + last[-rng.randint(2, 4) :]
    else:
        syllables = [rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(rng.choice((1, 2, 2, 3)))]
        made = "".join(syllables) + rng.choice(("", "", *_ENDS))
    return made if made not in _NEW else coined(rng)


def _drawn(rng: random.Random, held_out: HeldOut, seen: list[str], new: list[str]) -> str:
    if held_out == "pair":
        return rng.choice(new)
    if held_out == "phrasing" or rng.random() >= _COINED:
        return rng.choice(seen)
    made = coined(rng)
    if seen[0][0].isupper():
        made = made.capitalize()
        if " " in "".join(seen) and rng.random() < 0.1:
            made += " " + coined(rng).capitalize()
    return made


def listed(items: list[str]) -> str:
    """Return "a, b and c"."""
    return " and ".join((", ".join(items[:-1]), items[-1])) if len(items) > 1 else items[0]


_NEW = {one.lower().rstrip(".!:,") for one in (*NEW_CITIES, *NEW_PEOPLE, *NEW_WORDS, *NEW_STARTS)}
_ORDINARY = sorted(
    {
        one
        for name in _TEXTS
        for one in re.findall(r"\b[a-z]{4,9}\b", (Path(__file__).parent / name).read_text(encoding="utf-8"))
    }
    - _NEW
)
_REAL = [*_ORDINARY, *(one.lower() for one in (*CITIES, *PEOPLE, *WORDS) if one.isalpha())]
