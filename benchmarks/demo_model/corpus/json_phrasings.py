"""How JSON is asked for."""

from benchmarks.demo_model.corpus.base import Phrasings

CAPITAL = Phrasings(
    ("What is the capital of {place}?", "Tell me the capital of {place}.", "Give me {place} and its capital.",
     "Name the capital of {place} as data.", "Capital of {place} as data, please.",
     "I need a record of {place}.", "Write a record of {place} with its capital.",
     "{place} and its capital, please."),
    ("Make a record for {place}.", "Tell me about {place} as data."),
)  # fmt: skip
SUM = Phrasings(
    ("What is {a} + {b}?", "{a} + {b}", "How much is {a} plus {b}?", "Add {a} and {b}.", "{a} + {b} = ?",
     "Calculate {a} + {b}."),
    ("Work out {a} + {b} for me.", "Give me {a} + {b}."),
)  # fmt: skip
CAPITAL_LIST = Phrasings(
    ("List the capitals of {places} as a JSON list.", "Give me the capitals of {places} as a JSON array.",
     "The capitals of {places} as a JSON list, please.", "Write the capitals of {places} as a JSON array of strings.",
     "Answer with a JSON list: the capitals of {places}.", "JSON list of the capitals of {places}."),
    ("Return the capitals of {places} as a JSON array.", "I want a JSON list with the capitals of {places}."),
)  # fmt: skip
CAPITAL_MAP = Phrasings(
    ("Give me {places} and their capitals as one JSON object.", "Map {places} to their capitals in JSON.",
     "A JSON object from country to capital for {places}.",
     "Write a JSON object that maps {places} to their capitals.",
     "Answer with a JSON object of {places} and their capitals.", "JSON object: {places} with their capitals."),
    ("Return a JSON object with {places} and the capital of each.",
     "I want {places} with their capitals as a JSON object."),
)  # fmt: skip
PEOPLE_TOLD = (
    ("{name} is {age} years old and lives in {city}.", ("name", "age", "city")),
    ("{name}, {age}, lives in {city}.", ("name", "age", "city")),
    ("My name is {name}. I am {age} and I live in {city}.", ("name", "age", "city")),
    ("My friend {name} from {city} is {age} years old.", ("name", "age", "city")),
    ("{name} is a {job} in {city}.", ("name", "job", "city")),
    ("{name} works as a {job} and is {age} years old.", ("name", "job", "age")),
    ("In {city} lives a {job} called {name}, who is {age}.", ("name", "job", "city", "age")),
    ("I met {name} in {city}. {name} is {age}.", ("name", "city", "age")),
)
THINGS_TOLD = (
    ("A {colour} {item} costs {price} {currency}.", ("colour", "item", "money")),
    ("The {item} costs {price} {currency}.", ("item", "money")),
    ("I bought {count} of the {colour} {item} on {day}.", ("count", "colour", "item", "day")),
    ("On {day} we need a {colour} {item}.", ("day", "colour", "item")),
    ("The {item} is {colour} and costs {price}.", ("item", "colour", "price")),
    ("Please send the {item} on {day}.", ("item", "day")),
)
EXTRACT = Phrasings(
    ("{sentence}", "Extract the data: {sentence}", "Text: {sentence}", "Read this: {sentence}",
     "Take the facts from this text: {sentence}", "Turn this into JSON: {sentence}", "Parse: {sentence}"),
    ("Get the facts out of this: {sentence}", "Convert this sentence: {sentence}"),
)  # fmt: skip
WITH_KEYS = Phrasings(
    ("Answer as JSON with keys {keys}.", "Answer as JSON with the keys {keys}.", "Reply in JSON with {keys}.",
     "Give JSON with the keys {keys}.", "Use JSON with the keys {keys}.", "As JSON with keys {keys}, please.",
     "Only JSON, with {keys}.", "Write a JSON object with {keys}.", "JSON keys: {keys}.",
     "Return a JSON object with the keys {keys}."),
    ("Format the answer as JSON with {keys} as keys.", "I want a JSON object that has {keys}.",
     "Your answer is JSON with the keys {keys}."),
)  # fmt: skip
ALWAYS = Phrasings(
    ("You answer in JSON only, with the keys {keys}.", "Always answer as JSON with the keys {keys}.",
     "Answer with a JSON object with {keys} and nothing else.", "Output JSON with the keys {keys}. No other text.",
     "You are an API. Reply with JSON that has the keys {keys}.", "Extract {keys} as JSON."),
    ("Respond only with JSON that has {keys}.", "Every answer is one JSON object with the keys {keys}."),
)  # fmt: skip
SCHEMA = Phrasings(
    ("Answer as JSON with this schema: {schema}", "Answer in JSON that fits this schema: {schema}",
     "Use this JSON schema: {schema}", "The answer must fit the schema {schema}",
     "Schema: {schema} Answer with JSON only.",
     "Reply with JSON like this schema says: {schema}"),
    ("Follow this JSON schema: {schema}", "Your answer has to match this schema: {schema}"),
)  # fmt: skip
NESTED = Phrasings(
    ("Answer as JSON with an object {outer} that has the keys {keys}.", "As JSON: {outer} is an object with {keys}.",
     "Give JSON with the key {outer}, an object with {keys}.", "JSON with {outer}, which holds {keys}.",
     "Use a nested JSON object: {outer} with {keys}.", "Put {keys} into an object {outer} in JSON."),
    ("Write nested JSON, {outer} with the keys {keys}.", "I want JSON where {outer} holds {keys}."),
)  # fmt: skip
LIST = Phrasings(
    ("Write {words} as a JSON list.", "Give me a JSON list of {words}.", "Turn this into a JSON array: {words}",
     "{words} as a JSON array, please.", "Make a JSON list: {words}", "JSON list of strings: {words}",
     "As a JSON list: {words}", "Answer with a JSON array of {words}."),
    ("Return {words} as a JSON array.", "Please put {words} into a JSON list."),
)  # fmt: skip
LIST_KEY = Phrasings(
    ("Write {words} as JSON with the key {key}.", "Give me JSON with a list {key} of {words}.",
     "JSON with the key {key}, a list of {words}.", "Make a JSON object with the list {key}: {words}",
     "Put {words} into a JSON list called {key}.", "Answer as JSON: {key} is the list of {words}."),
    ("Return a JSON object whose key {key} lists {words}.", "I want JSON where {key} is a list with {words}."),
)  # fmt: skip
NUMBERS = Phrasings(
    ("Write the numbers {numbers} as a JSON list.", "Give me a JSON list of the numbers {numbers}.",
     "Numbers as a JSON array: {numbers}", "Make a JSON array of the numbers {numbers}.",
     "JSON list of numbers: {numbers}", "The numbers {numbers} as JSON, please."),
    ("Return the numbers {numbers} as a JSON array.", "Please put the numbers {numbers} into a JSON list."),
)  # fmt: skip
SORTED = Phrasings(
    ("Sort {numbers} and answer as a JSON list.", "Write {numbers} in order as a JSON list.",
     "A sorted JSON list of {numbers}, please.", "Give me {numbers} sorted, as JSON.",
     "Sort these numbers into a JSON array: {numbers}", "JSON list of {numbers}, the smallest first."),
    ("Return {numbers} as a sorted JSON array.", "Please sort {numbers} into a JSON list."),
)  # fmt: skip
INVENTED = Phrasings(
    ("Make up {thing}.", "Invent {thing}.", "Give me {thing}.", "Describe {thing}.", "Create {thing}.",
     "Generate {thing}.",
     "Write {thing}.", "I need {thing}.", "An example of {thing}, please.", "Give me an example of {thing}.",
     "Tell me about {thing}.", "Make a record of {thing}.", "Think of {thing}."),
    ("Come up with {thing}.", "Let me have {thing}."),
)  # fmt: skip
KINDS = Phrasings(
    ("Give me a JSON list of {n} {things}.", "A JSON array of {n} {things}.", "List {n} {things} as JSON.",
     "Name {n} {things} as a JSON list.", "Write {n} {things} as a JSON array.", "{n} {things} as JSON, please.",
     "Return {n} {things} in a JSON list.", "JSON list with {n} {things}",
     "List {n} {things}. Answer with a JSON array only."),
    ("Please put {n} {things} into a JSON array.", "I want {n} {things} as a JSON list."),
)  # fmt: skip
KINDS_KEY = Phrasings(
    ("Give me JSON with the key {key}, a list of {n} {things}.", "JSON object with {key}: {n} {things}.",
     "List {n} {things} as JSON with the key {key}.", "Answer as JSON: {key} is a list of {n} {things}.",
     "Put {n} {things} into a JSON list called {key}."),
    ("Return a JSON object whose key {key} lists {n} {things}.",),
)  # fmt: skip
