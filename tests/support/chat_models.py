"""Models that call tools and reason, for tests: any template, tags of the tokenizer, and what the model answers."""

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from tokenizers import AddedToken

from tests.support import templates
from tests.support.fakes import READY
from tests.unit.server.conftest import Harness, train_byte_level, write_model_folder

ROOMY = msgspec.structs.replace(READY, max_model_len=8192)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
NOW_CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
ANSWER = f"<think>\nI need it.\n</think>\n\nLet me see.\n{CALL}\n{NOW_CALL}"


class ChatModels:
    """Makes harnesses, all in one folder."""

    def __init__(self, harness: Callable[..., Harness], folder: Path) -> None:
        self._harness = harness
        self._folder = folder

    def __call__(
        self,
        text: str = ANSWER,
        *,
        template: str = templates.QWEN3_LIKE,
        special: Sequence[str] = (),
        added: Sequence[str] = (),
        tokens_per_delta: int = 1,
    ) -> Harness:
        """`special`, `added`: tags that are tokens, special ones or not."""
        tokenizer = train_byte_level()
        tokenizer.add_tokens([AddedToken(tag, special=True) for tag in special])
        tokenizer.add_tokens([AddedToken(tag, special=False) for tag in added])
        write_model_folder(self._folder, chat_template=template, tokenizer=tokenizer)
        return self._harness(text, folder=self._folder, engine={"ready": ROOMY, "tokens_per_delta": tokens_per_delta})


def prompt_of(app: Harness) -> str:
    """The last prompt that the engine got, as text."""
    return app.tokenizer.decode(app.client.submitted[-1].prompt_token_ids, skip_special_tokens=False)
