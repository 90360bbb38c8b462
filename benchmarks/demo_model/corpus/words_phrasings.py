"""How words, days, units and colours are asked for."""

from benchmarks.demo_model.corpus.base import Phrasings

OPPOSITE = Phrasings(
    seen=(
        "What is the opposite of {word}?",
        "What is the opposite of {word}?",
        "What's the opposite of {word}?",
        'What is the opposite of "{word}"?',
        "Opposite of {word}?",
        "Name the opposite of {word}.",
        "Tell me the opposite of {word}.",
        "Give me the opposite of {word}.",
        "Do you know the opposite of {word}?",
        "Can you tell me the opposite of {word}?",
        "Which word is the opposite of {word}?",
        "What is the antonym of {word}?",
        "{word}: what is the opposite?",
    ),
    unseen=(
        "Which word means the opposite of {word}?",
        "Please give the opposite of {word}.",
        "The opposite of {word} is what?",
        "I need the opposite of {word}.",
    ),
)
OF_AGAIN = Phrasings(
    seen=("And of {word}?", "And {word}?", "What about {word}?", "How about {word}?", "{word}?", "Now {word}."),
    unseen=("Then {word}?", "And how about {word}?"),
)
SYNONYM = Phrasings(
    seen=(
        "What is another word for {word}?",
        "What is a synonym of {word}?",
        "Give me a synonym for {word}.",
        "Tell me another word for {word}.",
        "Another word for {word}?",
        "Which word means the same as {word}?",
    ),
    unseen=("Name a synonym of {word}.", "How else can I say {word}?"),
)
PLURAL = Phrasings(
    seen=(
        "What is the plural of {word}?",
        "What's the plural of {word}?",
        "Plural of {word}?",
        "Give me the plural of {word}.",
        "Tell me the plural of {word}.",
        "What is the plural form of {word}?",
        "How do you say {word} in the plural?",
        "One {word}, two what?",
    ),
    unseen=("Name the plural of {word}.", "The plural of {word} is what?", "Which is the plural of {word}?"),
)
PAST = Phrasings(
    seen=(
        "What is the past tense of {word}?",
        "What's the past tense of {word}?",
        "Past tense of {word}?",
        "Give me the past tense of {word}.",
        "Tell me the past tense of {word}.",
        "What is the past of {word}?",
        "How do you say {word} in the past?",
        'What is the past tense of "{word}"?',
    ),
    unseen=("Name the past tense of {word}.", "The past tense of {word} is what?", "Put {word} in the past tense."),
)
DEFINITION = Phrasings(
    seen=(
        "What is {thing}?",
        "What is {thing}?",
        "What's {thing}?",
        "Define {word}.",
        "What does {word} mean?",
        'What does the word "{word}" mean?',
        "What is the meaning of {word}?",
        "Explain what {thing} is.",
        "Can you explain what {thing} is?",
        "Tell me what {thing} is.",
        "Do you know what {thing} is?",
        "Please explain the word {word}.",
        "{word}: what is that?",
        "My child asks what {thing} is.",
    ),
    unseen=(
        "How would you define {word}?",
        "Give me a definition of {word}.",
        "In a few words, what is {thing}?",
        "I do not know the word {word}. What does it mean?",
    ),
)
THING_AGAIN = Phrasings(
    seen=("And {thing}?", "What about {thing}?", "And what is {thing}?", "How about {thing}?"),
    unseen=("Then {thing}?",),
)
OF_THING_AGAIN = Phrasings(
    seen=("And {thing}?", "What about {thing}?", "How about {thing}?", "And of {thing}?"),
    unseen=("Then {thing}?",),
)
CALLED = Phrasings(
    seen=(
        "What do you call {definition}?",
        "What do we call {definition}?",
        "What is the word for {definition}?",
        "Which word means {definition}?",
        "What is {definition} called?",
    ),
    unseen=("Name the word for {definition}.",),
)
SOUND = Phrasings(
    seen=(
        "What sound does {thing} make?",
        "Which sound does {thing} make?",
        "What noise does {thing} make?",
        "What does {thing} do when it makes a sound?",
        "How does {thing} sound?",
        "Tell me the sound of {thing}.",
    ),
    unseen=("Which noise comes from {thing}?", "What kind of sound does {thing} make?"),
)
YOUNG = Phrasings(
    seen=(
        "What is a young {word} called?",
        "What is a baby {word} called?",
        "What do you call a young {word}?",
        "What do you call a baby {word}?",
        "What is the young of {thing} called?",
        "Name the young of {thing}.",
    ),
    unseen=("Which word is used for a young {word}?", "How do people call a baby {word}?"),
)
NEXT_LETTER = Phrasings(
    seen=(
        "Which letter comes after {letter}?",
        "What letter comes after {letter}?",
        "What comes after {letter} in the alphabet?",
        "What is the next letter after {letter}?",
        "Which letter follows {letter}?",
    ),
    unseen=("Name the letter after {letter}.",),
)
LETTER_BEFORE = Phrasings(
    seen=(
        "Which letter comes before {letter}?",
        "What letter comes before {letter}?",
        "What comes before {letter} in the alphabet?",
        "Which letter is before {letter}?",
    ),
    unseen=("Name the letter before {letter}.",),
)
FIRST_LETTER = Phrasings(
    seen=(
        "What is the first letter of {word}?",
        "Which letter does {word} start with?",
        "What letter does {word} begin with?",
        "First letter of {word}?",
        'What is the first letter of the word "{word}"?',
    ),
    unseen=("With which letter does {word} begin?", "Name the first letter of {word}."),
)
LAST_LETTER = Phrasings(
    seen=("What is the last letter of {word}?", "Which letter does {word} end with?", "Last letter of {word}?"),
    unseen=("With which letter does {word} end?",),
)
SPELL = Phrasings(
    seen=("How do you spell {word}?", "Spell {word}.", 'Spell the word "{word}".', "Can you spell {word}?"),
    unseen=("Please spell {word} for me.",),
)
RHYME = Phrasings(
    seen=(
        "What rhymes with {word}?",
        "Which word rhymes with {word}?",
        "Give me a rhyme for {word}.",
        "Find a rhyme for {word}.",
        "Tell me a word that rhymes with {word}.",
    ),
    unseen=("Name a word that rhymes with {word}.", "I need a rhyme for {word}."),
)
AFTER = Phrasings(
    seen=(
        "Which {kind} comes after {word}?",
        "What {kind} comes after {word}?",
        "What comes after {word}?",
        "What is the {kind} after {word}?",
        "Which {kind} follows {word}?",
        "After {word} comes which {kind}?",
    ),
    unseen=("Name the {kind} after {word}.", "Which is the next {kind} after {word}?"),
)
BEFORE = Phrasings(
    seen=(
        "Which {kind} comes before {word}?",
        "What {kind} comes before {word}?",
        "What comes before {word}?",
        "What is the {kind} before {word}?",
        "Before {word} comes which {kind}?",
    ),
    unseen=("Name the {kind} before {word}.",),
)
TOMORROW = Phrasings(
    seen=(
        "If today is {word}, what day is tomorrow?",
        "Today is {word}. What day is tomorrow?",
        "It is {word} today. Which day is tomorrow?",
        "What day is tomorrow if today is {word}?",
    ),
    unseen=("Suppose today is {word}. What is tomorrow?",),
)
YESTERDAY = Phrasings(
    seen=(
        "If today is {word}, what day was yesterday?",
        "Today is {word}. What day was yesterday?",
        "It is {word} today. Which day was yesterday?",
        "What day was yesterday if today is {word}?",
    ),
    unseen=("Suppose today is {word}. What was yesterday?",),
)
MONTH_DAYS = Phrasings(
    seen=(
        "How many days are in {word}?",
        "How many days does {word} have?",
        "How many days are there in {word}?",
        "How long is {word}?",
        "{word} has how many days?",
        "Days in {word}?",
    ),
    unseen=("How many days has {word}?", "Number of days in {word}?"),
)
MONTH_PLACE = Phrasings(
    seen=(
        "Which month is number {n}?",
        "What is month number {n}?",
        "Which month is the {nth}?",
        "What is the {nth} month?",
        "What is the {nth} month of the year?",
    ),
    unseen=("Name the {nth} month of the year.",),
)
MONTH_SEASON = Phrasings(
    seen=("In which season is {word}?", "Which season is {word} in?", "What season is it in {word}?"),
    unseen=("To which season does {word} belong?",),
)
UNIT = Phrasings(
    seen=(
        "How many {parts} are in {whole}?",
        "How many {parts} are in {whole}?",
        "How many {parts} are there in {whole}?",
        "How many {parts} in {whole}?",
        "How many {parts} does {whole} have?",
        "How many {parts} has {whole}?",
        "{whole} has how many {parts}?",
        "Tell me how many {parts} are in {whole}.",
        "Do you know how many {parts} are in {whole}?",
        "Can you tell me how many {parts} there are in {whole}?",
        "Number of {parts} in {whole}?",
        "{whole} is how many {parts}?",
        "How many {parts} make up {whole}?",
        "How many {parts} are {whole}?",
        "How many {parts} fit into {whole}?",
        "How many {parts} to {whole}?",
        "What number of {parts} does {whole} have?",
    ),
    unseen=("What is the number of {parts} in {whole}?", "How many {parts} make {whole}?", "{parts} in {whole}?"),
)
PART = Phrasings(
    seen=(
        "How many {parts} does {whole} have?",
        "How many {parts} has {whole}?",
        "How many {parts} are there on {whole}?",
        "{whole} has how many {parts}?",
        "Tell me how many {parts} {whole} has.",
        "Do you know how many {parts} {whole} has?",
        "Number of {parts} of {whole}?",
        "How many {parts} are on {whole}?",
        "What number of {parts} does {whole} have?",
        "Can you tell me how many {parts} {whole} has?",
    ),
    unseen=("What is the number of {parts} of {whole}?", "How many {parts} would {whole} have?"),
)
UNIT_AGAIN = Phrasings(
    seen=("And how many {parts} in {whole}?", "And {parts} in {whole}?", "What about {parts} in {whole}?"),
    unseen=("Then how many {parts} in {whole}?",),
)
MIX = Phrasings(
    seen=(
        "What colour do {a} and {b} make?",
        "What color do {a} and {b} make?",
        "What do you get when you mix {a} and {b}?",
        "What happens when you mix {a} and {b} paint?",
        "Mix {a} and {b}.",
        "{a} and {b} make which colour?",
        "Which colour is {a} mixed with {b}?",
        "What is {a} plus {b} in colours?",
        "What colour is a mix of {a} and {b}?",
        "{a} mixed with {b} gives which colour?",
    ),
    unseen=("If I mix {a} with {b}, which colour do I get?",),
)
COLOUR = Phrasings(
    seen=(
        "What colour is {thing}?",
        "What color is {thing}?",
        "Which colour is {thing}?",
        "What is the colour of {thing}?",
        "What is the color of {thing}?",
        "Colour of {thing}?",
        "Tell me the colour of {thing}.",
        "What colour does {thing} have?",
        "What color does {thing} have?",
        "Is {thing} red or green or what?",
        "What colour is {thing} usually?",
        "Do you know the colour of {thing}?",
        "What colour would {thing} be?",
        "{thing}: which colour?",
        "What is the color of {thing} normally?",
    ),
    unseen=("Which colour does {thing} have?", "Name the colour of {thing}."),
)
