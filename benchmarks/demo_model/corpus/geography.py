"""Geography: the capitals of countries and US states, both ways, continents, and some records of the Earth."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from benchmarks.demo_model.corpus import geography_phrasings as asked
from benchmarks.demo_model.corpus.base import Dialogue, Message, Phrasings, Question
from benchmarks.demo_model.corpus.cards import cards
from benchmarks.demo_model.corpus.geography_data import COUNTRIES, STATES
from benchmarks.demo_model.corpus.geography_records import RECORDS
from benchmarks.demo_model.corpus.topics import Fact, Topic, chain, conversations, examination, follow_ups, plain

# name | capital | what it is | continent
OTHERS = """\
England|London|a country of the United Kingdom|Europe
Scotland|Edinburgh|a country of the United Kingdom|Europe
Wales|Cardiff|a country of the United Kingdom|Europe
Northern Ireland|Belfast|a part of the United Kingdom|Europe
Greenland|Nuuk|an island that belongs to Denmark|North America
Puerto Rico|San Juan|an island that belongs to the United States|North America
"""
KINDS = {  # what a place is, where "a country in …" would not do
    "Kosovo": "a partly recognised country in Europe",
    "Palestine": "a partly recognised state in Asia",
    "Taiwan": "an island in East Asia with its own government",
    "Vatican City": "a city state in Europe",
    "Monaco": "a city state in Europe",
    "Singapore": "a city state in Asia",
}
NOTES = {  # go on with the sentence "The capital of … is …" where one name is not the whole truth
    "Benin": ", though the government sits in Cotonou",
    "Bolivia": ", though the government sits in La Paz",
    "Ivory Coast": ", though most offices are in Abidjan",
    "Monaco": " itself: it is a city state",
    "Nauru": ", though the island has no official capital",
    "the Netherlands": ", though the government sits in The Hague",
    "Singapore": " itself: it is a city state",
    "South Africa": "; parliament sits in Cape Town",
    "Vatican City": " itself: it is a city state",
}
# place | a city that is often taken for its capital
DECOYS = """\
Australia|Sydney
Australia|Melbourne
Brazil|Rio de Janeiro
Brazil|São Paulo
Canada|Toronto
Canada|Montreal
Turkey|Istanbul
Switzerland|Zurich
Switzerland|Geneva
the United States|New York
the United States|Los Angeles
Nigeria|Lagos
Tanzania|Dar es Salaam
Morocco|Casablanca
Kazakhstan|Almaty
Pakistan|Karachi
India|Mumbai
China|Shanghai
Vietnam|Ho Chi Minh City
Myanmar|Yangon
New Zealand|Auckland
Germany|Munich
Italy|Milan
Spain|Barcelona
Israel|Tel Aviv
France|Lyon
Poland|Krakow
Russia|Saint Petersburg
Ecuador|Guayaquil
South Africa|Johannesburg
the United Arab Emirates|Dubai
Scotland|Glasgow
California|Los Angeles
Texas|Houston
Texas|Dallas
Florida|Miami
New York|New York City
Illinois|Chicago
Washington state|Seattle
Nevada|Las Vegas
Pennsylvania|Philadelphia
Michigan|Detroit
Alaska|Anchorage
Louisiana|New Orleans
"""
NOWHERE = """\
Atlantis Narnia Mordor Wakanda Gondor Lilliput Camelot Utopia Neverland Zamunda Genovia Ruritania Avalon Shangri-La
Westeros Oz Wonderland Rohan Elbonia Freedonia Borduria Syldavia Latveria Sokovia Arendelle Panem Eldorado Hogwarts
""".split()
BOTH_GEORGIAS = (
    "There are two: the country Georgia in Asia has the capital Tbilisi, and the US state of Georgia has Atlanta."
)


@dataclass(frozen=True)
class Place:
    """A country, a state or a part of one."""

    name: str  # as in a sentence: "the Gambia"
    capital: str
    continent: str
    kind: str  # "a country in Africa"
    aliases: Sequence[str] = ()
    accepted: Sequence[str] = ()

    @property
    def is_state(self) -> bool:
        """Whether this is one of the United States."""
        return self.kind.startswith("a state of")

    @property
    def is_its_own_capital(self) -> bool:
        """Whether this is a city."""
        return self.name == self.capital


def places() -> list[Place]:
    """Return every place of the tables."""
    found = [_country(line, continent) for continent, lines in COUNTRIES.items() for line in lines.splitlines()]
    found += [_state(line) for line in STATES.splitlines()]
    for line in OTHERS.splitlines():
        name, capital, kind, continent = line.split("|")
        found.append(Place(name, capital, continent, kind))
    return found


@cache
def topics() -> list[Topic]:
    """Return what can be asked about places."""
    named = [(place, called) for place in places() for called in _called(place)]
    georgia = [_georgia()] * 3
    facts = [_fact(place, called) for place, called in named] + georgia + [_nowhere(name) for name in NOWHERE]
    cities = [_fact(place, place.name) for place in places() if not _is_ambiguous(place)]
    countries = [fact for fact in cities if fact["holder"] == "country"]
    states = [fact for fact in cities if fact["holder"] == "state"]
    follow_up = [(asked.ITS_CONTINENT, "continent")]
    reverse = (asked.CITY_AGAIN, ("{name}",), ("{city} is the capital of {name}.",))
    return [
        Topic("capitals", facts, asked.CAPITAL, asked.CAPITAL_ANSWERS, ("{accepted}",), asked.CAPITAL_AGAIN,
              follow_up, "capital", weight=12),
        Topic("capitals", facts, asked.CAPITAL_BRIEFLY, ("{capital}.",), ("{accepted}",), weight=0.8),
        _reversed(countries, asked.COUNTRY_OF, reverse, 3),
        _reversed(states, asked.STATE_OF, reverse, 1.5),
        Topic("capital: yes or no", _claims(), asked.IS_CAPITAL, (), ("{right}",), weight=3),
        Topic("continents", [_fact(place, called) for place, called in named if not place.is_state] + georgia,
              asked.CONTINENT, ("{name} is in {continent}.",), ("{continent}",), asked.CONTINENT_AGAIN,
              [(asked.ITS_CAPITAL, "capital")], "continent", weight=2),
        Topic("places", facts, asked.ABOUT, ("{label} is {kind}. Its capital is {capital}.",),
              ("{kind}",), asked.ABOUT_AGAIN, [*follow_up, (asked.ITS_CAPITAL, "capital")], weight=2),
        Topic("places", cities, asked.WHERE, ("{capital} is {where}.",), ("{name}",), asked.CITY_AGAIN, weight=1),
        *cards("world records", RECORDS, weight=2.5),
    ]  # fmt: skip


def exchange(rng: random.Random) -> list[Message]:
    """Return some turns about places that stand for themselves."""
    return chain(topics(), rng, more=0.35)


def dialogues(rng: random.Random) -> Iterator[Dialogue]:
    """Yield dialogues without end."""
    return conversations(exchange, rng)


def questions(rng: random.Random) -> list[Question]:
    """Return the examination: most of it on capitals, then a few of everything else."""
    capital, *rest = topics()
    others = [topic for topic in rest if len(topic.facts) >= 10]
    records = [topic for topic in topics() if topic.skill == "world records"]
    return [
        *examination([capital], rng, 80),
        *examination(others, rng, 12),
        *rng.sample(examination(records, rng, 1), 40),
        *follow_ups([topic for topic in topics() if topic.skill in ("capitals", "continents")], rng, 60),
    ]


def _country(line: str, continent: str) -> Place:
    name, capital, aliases, accepted = (line + "|||").split("|")[:4]
    kind = KINDS.get(name, f"a country in {continent}")
    return Place(name, capital, continent, kind, _items(aliases), _items(accepted))


def _state(line: str) -> Place:
    name, capital, _, accepted = (line + "|||").split("|")[:4]
    sure = "Washington state" if name == "Washington" else name
    aliases = [name, f"the state of {name}", f"{name}, USA"]
    return Place(sure, capital, "North America", "a state of the United States", aliases, _items(accepted))


def _items(text: str) -> list[str]:
    return [item for item in text.split(";") if item]


def _is_ambiguous(place: Place) -> bool:
    return place.is_its_own_capital or place.name == "England"


def _called(place: Place) -> list[str]:
    """Return what users call a place, the usual name most often."""
    if "Georgia" in (place.name, *place.aliases):
        return [alias for alias in place.aliases if alias != "Georgia"]
    usual = [place.name] * 4 if place.name != "Washington state" else []
    return usual + [form for form in (place.name.removeprefix("the "), plain(place.name), *place.aliases)
                    if form != place.name]  # fmt: skip


def _fact(place: Place, called: str) -> Fact:
    name = called if "Georgia" in place.name else place.name
    return {
        "place": called,
        "own": called + ("'" if called.endswith("s") else "'s"),
        "name": name,
        "label": place.name,
        "capital": place.capital,
        "city": place.capital,
        "accepted": "|".join((place.capital, *place.accepted)),
        "continent": place.continent,
        "kind": place.kind,
        "note": NOTES.get(place.name, ""),
        "holder": "state" if place.is_state else "country",
        "where": f"the capital of {place.name}, in " + ("the United States" if place.is_state else place.continent),
    }


def _georgia() -> Fact:
    place = next(place for place in places() if place.name == "Georgia")
    return {**_fact(place, "Georgia"), "accepted": "Tbilisi|Atlanta", "answer": BOTH_GEORGIAS}


def _nowhere(name: str) -> Fact:
    no_place = Place(name, "I do not know", "I do not know", "I do not know")
    return {**_fact(no_place, name), "answer": f"I do not know a place called {name}."}


def _reversed(
    facts: Sequence[Fact], phrasings: Phrasings, rest: tuple[Phrasings, Sequence[str], Sequence[str]], weight: float
) -> Topic:
    """Return the topic that asks whose capital a city is; some type no accents."""
    again, right, answers = rest
    bare = [{**fact, "city": plain(fact["city"])} for fact in facts if plain(fact["city"]) != fact["city"]]
    answers = [answer.replace("{city}", "{capital}") for answer in answers]
    return Topic("capital of what", [*facts, *bare], phrasings, answers, right, again, weight=weight)


def _claims() -> list[Fact]:
    """Return "Is X the capital of Y?" for every place: as often true as not."""
    rng = random.Random(4)
    known = [place for place in places() if not _is_ambiguous(place) and place.name != "Georgia"]
    claims = []
    for place in known:
        alike = [other.capital for other in known if other.continent == place.continent and other != place]
        yes = f"Yes, {place.capital} is the capital of {place.name}."
        claims += [_claim(place, place.capital, yes, "Yes")] * 3
        claims += [_denied(place, city) for city in rng.sample(alike, min(3, len(alike)))]
    by_name = {place.name: place for place in known}
    wrong = [line.split("|") for line in DECOYS.splitlines()]
    return claims + [_denied(by_name[name], city) for name, city in wrong for _ in range(2)]


def _denied(place: Place, city: str) -> Fact:
    no = f"No, the capital of {place.name} is {place.capital}, not {city}."
    return _claim(place, city, no, f"is {place.capital}")


def _claim(place: Place, city: str, answer: str, right: str) -> Fact:
    return {**_fact(place, place.name), "city": city, "answer": answer, "right": right}
