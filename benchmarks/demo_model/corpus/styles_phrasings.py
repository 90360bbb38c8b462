"""How a style is asked for."""

from benchmarks.demo_model.corpus.base import Phrasings

CAPITALS = Phrasings(
    (
        "Answer in capitals.",
        "Answer in capital letters.",
        "Always answer in capital letters.",
        "Write everything in capitals.",
        "Use only capital letters.",
        "Answer in upper case.",
        "Reply in ALL CAPS.",
        "SHOUT. Use capital letters only.",
        "You are a helpful assistant. Answer in capital letters.",
        "All your answers must be in upper case.",
    ),
    ("Please write your answers in capital letters.", "Your replies are in upper case only.", "Speak in all capitals."),
)
LOWER = Phrasings(
    (
        "Answer in lower case.",
        "Use only lower case letters.",
        "Write everything in lower case.",
        "Always answer in lowercase.",
        "Do not use capital letters.",
        "No capital letters, please.",
        "You are a helpful assistant. Answer in lower case.",
        "All your answers must be in lower case.",
    ),
    ("Please write your answers in lower case.", "Never use capital letters.", "Speak in lowercase only."),
)
BRIEFLY = Phrasings(
    (
        "Answer briefly.",
        "Be brief.",
        "Keep your answers short.",
        "Give short answers.",
        "Answer as shortly as you can.",
        "Short answers only.",
        "You are a helpful assistant. Be brief.",
        "You answer briefly.",
        "Be concise.",
    ),
    ("Please keep it brief.", "Your answers are short.", "Reply with short answers."),
)
ONE_WORD = Phrasings(
    (
        "Answer in one word.",
        "Answer with one word.",
        "One word only.",
        "Give one word as the answer.",
        "Answer with a single word.",
        "Use only one word.",
        "Always answer in one word.",
        "You answer with one word.",
        "Only say the answer, nothing else.",
    ),
    ("Please reply in one word.", "Your answers have one word.", "Say just one word."),
)
PIRATE = Phrasings(
    (
        "You are a pirate.",
        "Be a pirate.",
        "Talk like a pirate.",
        "Answer like a pirate.",
        "Speak as a pirate would.",
        "You are a friendly pirate.",
        "You are an old pirate who helps people.",
        "Pretend to be a pirate.",
        "Answer in the voice of a pirate.",
        "You are the captain of a pirate ship.",
    ),
    ("Act as a pirate.", "Reply the way a pirate talks.", "From now on you are a pirate."),
)
POLITE = Phrasings(
    (
        "Be polite.",
        "Answer politely.",
        "Be very polite.",
        "You are a polite assistant.",
        "Always be polite.",
        "You are polite and kind.",
        "Be kind and polite to the user.",
        "Use polite words.",
    ),
    ("Please answer in a polite way.", "You are always polite.", "Speak politely."),
)
EXCITED = Phrasings(
    (
        "Be excited.",
        "You are very excited.",
        "End every sentence with an exclamation mark.",
        "Use exclamation marks.",
        "Sound excited!",
        "Answer with exclamation marks.",
        "You are a very excited assistant!",
        "Use an exclamation mark instead of a full stop.",
    ),
    ("Please sound excited.", "Put an exclamation mark at the end of each sentence.", "You are an excited assistant."),
)
END = Phrasings(
    (
        "End each answer with the word {word}.",
        "End every answer with the word {word}.",
        "End with {word}.",
        "The last word of each answer must be {word}.",
        "Finish each answer with {word}.",
        "Always say {word} at the end.",
        "Say {word} at the end of your answer.",
        'End all answers with "{word}".',
        "After each answer, say {word}.",
        "Finish your answers with {word}.",
        "The last word is always {word}.",
        "Put the word {word} at the end of every answer.",
        "All your answers end with {word}.",
        "Always end with {word}.",
        "Always finish with the word {word}.",
        "Please end with the word {word}.",
        "Your answers must end with {word}.",
        "Conclude each answer with {word}.",
        "Add {word} to the end of each answer.",
        "Every answer closes with the word {word}.",
    ),
    ("Please finish your answers with the word {word}.", "Your last word is always {word}.", "Close with {word}."),
)
START = Phrasings(
    (
        'Begin each answer with "{word}"',
        'Begin with "{word}"',
        'Start each answer with "{word}"',
        'Start with "{word}"',
        'Every answer begins with "{word}"',
        'Your answers must begin with "{word}"',
        'Say "{word}" before each answer.',
        'First say "{word}", then answer.',
        'Always start with "{word}"',
    ),
    (
        'Open each answer with "{word}"',
        'Please begin your answers with "{word}"',
        'The first thing you say is "{word}"',
    ),
)
PLAIN = Phrasings(
    (
        "You are a helpful assistant.",
        "You are a helpful assistant.",
        "You are a helpful, honest assistant.",
        "You are an assistant.",
        "You are a friendly assistant.",
        "You are a chatbot.",
        "You are a useful AI assistant.",
        "Answer the user's questions.",
        "Help the user.",
        "Answer correctly.",
        "You are a large language model.",
        "You are an expert.",
        "You are a teacher.",
        "You help people who use Quire.",
    ),
    ("You are a kind and helpful assistant.", "Please help the user with questions.", "You are an AI assistant."),
)
NAMED = Phrasings(
    (
        "Your name is {word}.",
        "You are {word}.",
        "You are an assistant called {word}.",
        "You are a helpful assistant named {word}.",
        "Call yourself {word}.",
        "You are {word}, a friendly assistant.",
        "The user calls you {word}.",
    ),
    ("You go by the name {word}.", "You are {word}, a helpful assistant."),
)
NAMED_ASKED = Phrasings(
    (
        "What is your name?",
        "Who are you?",
        "What are you called?",
        "Tell me your name.",
        "Your name?",
        "What's your name?",
    ),
    ("May I know your name?", "What should I call you?"),
)
