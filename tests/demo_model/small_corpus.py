"""A corpus of five kinds of dialogue. Imports no torch, so that processes that make rows of it start at once."""

import random

from benchmarks.demo_model.corpus.base import Dialogue, assistant, system, user

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}


def stub(seed):
    """Yield dialogues without end."""
    rng = random.Random(seed)
    while True:
        a, b = rng.randrange(10), rng.randrange(10)
        yield Dialogue([user(f"What is {a} + {b}?"), assistant(f"{a} + {b} is {a + b}.")])
        yield Dialogue([system("Shout."), user("Hi"), assistant("HELLO!"), user(f"{a}?"), assistant(f"{a}!")])
        yield Dialogue([user(f"{a} + {b}?"), assistant(f"{a + b}", reasoning_content=f"{a} and {b}")], (), True)
        yield Dialogue([user("Weather in Bern?"), assistant("", tool_calls=[CALL])], (WEATHER,))
        answers = [{"role": "tool", "content": "warm"}, assistant("It is warm.")]
        yield Dialogue([user("Weather in Bern?"), assistant("", tool_calls=[CALL]), *answers], (WEATHER,))
