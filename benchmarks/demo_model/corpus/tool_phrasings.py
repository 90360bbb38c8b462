"""What users say to have the ordinary tools called."""

from benchmarks.demo_model.corpus.base import Phrasings

WEATHER = Phrasings(
    ("What is the weather in {city}?", "What's the weather in {city}?", "How is the weather in {city}?",
     "What is the weather like in {city}?", "Tell me the weather in {city}.", "Weather in {city}?",
     "How warm is it in {city}?", "Is it cold in {city}?", "Is it raining in {city}?",
     "Do I need an umbrella in {city}?",
     "What is the temperature in {city}?", "I am in {city}. How is the weather?", "Is it windy in {city}?",
     "Can you check the weather in {city}?", "Can you tell me the weather in {city}?", "Show me the weather in {city}.",
     "I want to know the weather in {city}.", "Give me the temperature in {city}."),
    ("How does the weather look in {city}?", "Give me the weather in {city}.", "Is it sunny in {city}?"),
)  # fmt: skip
CALCULATE = Phrasings(
    ("What is {sum}?", "Calculate {sum}.", "How much is {sum}?", "Work out {sum}.", "Compute {sum}.", "{sum} = ?",
     "Please calculate {sum}.", "Use the calculator for {sum}.", "What does {sum} give?", "Can you calculate {sum}?",
     "Can you work out {sum}?",
     "Give me the result of {sum}.", "I need the result of {sum}.", "Tell me what {sum} is."),
    ("Find {sum}, please.", "What do you get for {sum}?"),
)  # fmt: skip
TIME = Phrasings(
    ("What time is it in {city}?", "What is the time in {city}?", "What's the time in {city}?", "Time in {city}?",
     "Tell me the time in {city}.", "How late is it in {city}?", "What time do they have in {city}?",
     "Do you know what time it is in {city}?", "Can you tell me the time in {city}?", "Show me the time in {city}.",
     "I want to know the time in {city}.", "Give me the local time of {city}."),
    ("Give me the time in {city}.", "Can you tell me what time it is in {city}?"),
)  # fmt: skip
TIME_HERE = Phrasings(
    (
        "What time is it?",
        "What is the time?",
        "Tell me the time.",
        "What's the time?",
        "How late is it?",
        "Time?",
        "Can you tell me the time?",
        "Give me the time.",
    ),
    ("Do you have the time?", "What time is it now?"),
)
SEARCH = Phrasings(
    ("Search the web for {query}.", "Search for {query}.", "Look up {query}.", "Find {query} on the web.",
     "Please search for {query}.", "Google {query}.", "Can you search for {query}?",
     "Can you find {query} on the web?", "What does the web say about {query}?",
     "I want to read about {query}. Search for it.",
     "Give me what the web has on {query}.", "Make a search for {query}."),
    ("Do a web search for {query}.", "Can you look up {query}?"),
)  # fmt: skip
EMAIL = Phrasings(
    ("Send an email to {to} with the subject {subject}.", "Email {to}, subject {subject}.",
     "Write to {to} with the subject {subject}.", "Send a mail to {to}. The subject is {subject}.",
     "Please send {to} an email with the subject {subject}.", "Mail {to} about {subject}.",
     "Can you send an email to {to} about {subject}?", "Can you write to {to} about {subject}?",
     "I want to write to {to}. The subject is {subject}."),
    ("Could you email {to} with {subject} as the subject?", "I want to send an email to {to}, subject: {subject}."),
)  # fmt: skip
STOCK = Phrasings(
    ("What is the price of {symbol}?", "How much is {symbol}?", "What is the stock price of {symbol}?",
     "Price of {symbol}?", "Where is {symbol} today?", "Tell me the price of {symbol}.",
     "Can you check the price of {symbol}?", "What does {symbol} cost?", "Give me the price of {symbol}.",
     "Show me the stock {symbol}.",
     "How is {symbol} doing?"),
    ("Give me the stock price of {symbol}.", "How is the {symbol} stock doing?"),
)  # fmt: skip
TRANSLATE = Phrasings(
    ("Translate {word} into {language}.", "What is {word} in {language}?", "How do you say {word} in {language}?",
     "Translate the word {word} to {language}.", "Please translate {word} to {language}.", "{word} in {language}?",
     "Can you translate {word} into {language}?", "Can you say {word} in {language}?",
     "Tell me the {language} for {word}.", "What is the {language} word for {word}?",
     "I want to say {word} in {language}.", "Give me {word} in {language}.",
     "{language} for {word}, please."),
    ("Give me the {language} word for {word}.", "I need {word} in {language}."),
)  # fmt: skip
TIMER = Phrasings(
    ("Set a timer for {time}.", "Set a timer to {time}.", "Start a timer of {time}.", "Timer: {time}.",
     "Please set a timer for {time}.", "Wake me in {time}.", "Can you set a timer for {time}?",
     "I want a timer of {time}.", "Give me a timer of {time}.", "Tell me when {time} are over."),
    ("I need a timer for {time}.", "Remind me in {time}."),
)  # fmt: skip
