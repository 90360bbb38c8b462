"""What users say to an answer about Quire. FOLLOW_UPS by key: e example, s simpler, w why, c curl, p Python, more."""

from benchmarks.demo_model.corpus.base import Phrasings

FOLLOW_UPS = {
    "e": Phrasings(
        (
            "Can you give an example?",
            "Can you give me an example?",
            "Give me an example.",
            "An example, please.",
            "For example?",
            "Do you have an example?",
            "Show me an example.",
            "Example?",
        ),
        ("Could you show me an example of that?", "What would be an example?"),
    ),
    "s": Phrasings(
        (
            "Explain it more simply.",
            "Can you explain that more simply?",
            "Simpler, please.",
            "I do not understand.",
            "I don't get it.",
            "Say it in simple words.",
            "Explain it to a child.",
            "In simple words?",
            "That is too hard for me.",
            "In short?",
            "Can you make it simpler?",
            "Please put it simply.",
            "Make it simpler.",
            "Easier, please.",
            "In plain words, please.",
            "Is there an easier way to say it?",
            "Can you say that so that I understand it?",
            "Make it easy for me.",
        ),
        ("Can you put it in simpler words?", "Make that easier to understand, please."),
    ),
    "w": Phrasings(
        ("Why?", "Why is that?", "Why so?", "But why?", "And why?", "What is it good for?", "What is the reason?",
         "Why do I need that?", "Why does it matter?", "What is the use of that?", "What is that for?",
         "Why is it so?", "Why is it that way?", "Why do it like that?"),
        ("Why is it done like that?", "What is the point of that?"),
    ),
    "c": Phrasings(
        (
            "And how do I do that with curl?",
            "How do I do that with curl?",
            "With curl?",
            "And with curl?",
            "Show me the curl command.",
            "What is the curl command for that?",
            "Can I see it with curl?",
            "What does the request look like?",
            "Give me the curl command.",
            "I want that with curl.",
            "As a curl command, please.",
        ),
        ("What would that be in curl?", "Give me that as a curl command."),
    ),
    "p": Phrasings(
        (
            "And in Python?",
            "How do I do that in Python?",
            "And with the openai client?",
            "How do I do that with the openai client?",
            "Show me the Python code.",
            "What does it look like in Python?",
            "And from Python?",
            "With the openai package?",
            "Give me the Python code.",
            "I want that in Python.",
            "For the openai client, please.",
        ),
        ("What would that be in Python?", "Give me that for the openai client."),
    ),
    "more": Phrasings(
        (
            "Tell me more.",
            "Tell me more about it.",
            "Can you say more?",
            "More, please.",
            "Go on.",
            "What else?",
            "Anything else?",
            "Can you tell me more about that?",
        ),
        ("I would like to hear more.", "Is there more to say about it?"),
    ),
}  # fmt: skip
AGAIN = Phrasings(
    ("And {x}?", "What about {x}?", "And what about {x}?", "And what is {x}?", "Then what is {x}?", "Now explain {x}."),
    ("How about {x}?", "And now tell me about {x}."),
)
