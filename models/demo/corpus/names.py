"""Names and words that tools, JSON and styles are about. NEW_… are those that training never names there."""


def items(text: str) -> list[str]:
    """Return what stands between | and line ends, or if there is no |, between spaces."""
    return text.replace("\n", "|").split("|") if "|" in text else text.split()


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
JOBS = items("teacher nurse doctor baker farmer pilot painter singer lawyer driver gardener engineer writer")


def listed(items: list[str]) -> str:
    """Return "a, b and c"."""
    return " and ".join((", ".join(items[:-1]), items[-1])) if len(items) > 1 else items[0]
