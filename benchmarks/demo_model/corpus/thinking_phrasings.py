"""How problems that want a thought are put."""

from benchmarks.demo_model.corpus.base import Phrasings

TWO_SUMS = Phrasings(
    (
        "What is {a} {x} {b} {y} {c}?",
        "{a} {x} {b} {y} {c}",
        "{a} {x} {b} {y} {c} = ?",
        "Calculate {a} {x} {b} {y} {c}.",
        "How much is {a} {x} {b} {y} {c}?",
        "Compute {a} {x} {b} {y} {c}.",
        "Can you work out {a} {x} {b} {y} {c}?",
        "Please work out {a} {x} {b} {y} {c}.",
    ),
    (
        "Solve {a} {x} {b} {y} {c}.",
        "What do you get for {a} {x} {b} {y} {c}?",
        "Tell me what {a} {x} {b} {y} {c} comes to.",
    ),
)
STORY = Phrasings(
    (
        "{who} has {a} {things}. {who} gets {b} more and then {c} more. How many {things} does {who} have?",
        "{who} buys {a} {things}, then {b}, then {c}. How many {things} is that?",
        "{who} has {a} {things}, finds {b} and then gets {c} as a gift. How many {things} are there now?",
        "There are {a} {things} on the table. {who} adds {b}, and later {c} more. How many are there?",
    ),
    (
        "{who} owns {a} {things}. A friend brings {b}, another one {c}. How many {things} does {who} have now?",
        "In a box are {a} {things}. {who} puts in {b} and then {c}. How many {things} are in the box?",
    ),
)
LARGEST = Phrasings(
    (
        "Which is the largest: {a}, {b} or {c}?",
        "Which number is the largest, {a}, {b} or {c}?",
        "What is the largest of {a}, {b} and {c}?",
        "Which of {a}, {b} and {c} is the largest?",
        "Find the largest number: {a}, {b}, {c}.",
        "Tell me the largest of {a}, {b} and {c}.",
    ),
    ("Among {a}, {b} and {c}, which is the largest?", "The largest of {a}, {b}, {c} is which?"),
)
CAPITAL = Phrasings(
    (
        "Think: what is the capital of {name}?",
        "Think first: which city is the capital of {name}?",
        "Can you remember the capital of {name}?",
        "I forgot the capital of {name}. Think about it.",
        "Do you remember what the capital of {name} is?",
        "Try to remember the capital of {name}.",
    ),
    ("Think about {name}. What is its capital?", "Take your time: what is the capital of {name}?"),
)
SAME_CONTINENT = Phrasings(
    (
        "Are {name} and {other} on the same continent?",
        "Is {name} on the same continent as {other}?",
        "Do {name} and {other} lie on the same continent?",
        "{name} and {other}: the same continent?",
        "Tell me if {name} and {other} are on the same continent.",
        "Are {other} and {name} in the same part of the world?",
        "Are {name} and {other} on one continent?",
        "Are both {name} and {other} on the same continent?",
        "Are {name} and {other} in one part of the world?",
        "Could I find {name} and {other} on the same continent?",
        "Does {name} share its continent with {other}?",
        "Same continent: {name} and {other}?",
        "Do both {name} and {other} belong to one continent?",
    ),
    ("Do {name} and {other} share a continent?", "Would I find {name} and {other} on one continent?"),
)
LETTERS = Phrasings(
    (
        "How many letters does the word {word} have?",
        "How many letters are in {word}?",
        "Count the letters of {word}.",
        "How long is the word {word}?",
        "Spell {word} and count the letters.",
        "How many letters are there in the word {word}?",
    ),
    ("What number of letters does {word} have?", "Tell me how many letters {word} has."),
)
STEPWISE = Phrasings(
    ("Think step by step.", "Let us think step by step.", "Step by step, please.", "Show your steps.",
     "Think before you answer.", "Explain your steps."),
    ("Go through it step by step.", "Please think it through."),
)  # fmt: skip
