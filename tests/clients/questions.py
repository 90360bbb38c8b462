"""What every client asks the demo model, greedily, and what it knows."""

from typing import Any

import pydantic

MODEL = "quire-demo"
CAPITAL, PARIS = "What is the capital of France?", "Paris"
FOLLOW_UP, MADRID = "And of Spain?", "Madrid"
WEATHER = "What is the weather in Paris?"
PERSON = (
    "Take the facts from this text: George is 34 years old and lives in Madrid. Use JSON with the keys name, age, city."
)
REPORT = '{"temperature": 18, "condition": "sunny"}'  # what the weather tool says

WEATHER_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "The city"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER_FUNCTION: dict[str, Any] = {
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "parameters": WEATHER_PARAMETERS,
}
WEATHER_TOOL: dict[str, Any] = {"type": "function", "function": WEATHER_FUNCTION}


class Person(pydantic.BaseModel):
    """Whom PERSON is about."""

    name: str
    age: int
    city: str


GEORGE = Person(name="George", age=34, city="Madrid")


def get_weather(city: str) -> str:
    """Get the weather of a city."""
    assert city == PARIS
    return REPORT


def uses_report(text: str | None) -> bool:
    """Tell if an answer says what the tool said."""
    return text is not None and "18" in text and "sunny" in text
