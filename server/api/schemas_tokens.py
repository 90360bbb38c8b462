"""Bodies of /tokenize and /detokenize, strict as in server/api/schemas.py. Imports pydantic.

The names are vLLM's; `content`, `add_special` and `with_pieces` are llama.cpp's.
"""

from typing import Annotated

from pydantic import BaseModel, Field

from server.api.schemas import STRICT, Json, Label, TokenId

MAX_DETOKENIZE = 2**20  # ids; a body has room for no more than about twice as many


class TokenizeBody(BaseModel):
    """POST /tokenize: exactly one of prompt, content and messages."""

    model_config = STRICT

    model: Label | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None  # default true
    return_token_strs: bool | None = None
    # as for a chat completion
    messages: Json = None
    tools: Json = None
    tool_choice: Json = None
    chat_template_kwargs: Json = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    # llama.cpp
    content: str | None = None
    add_special: bool | None = None  # default false
    with_pieces: bool | None = None

    def chat_fields(self) -> dict[str, Json]:
        """Return what a ChatBody is made of."""
        names = ("messages", "tools", "tool_choice", "chat_template_kwargs", "add_generation_prompt")
        return self.model_dump(include={"model", "continue_final_message", *names}, exclude_none=True)


class DetokenizeBody(BaseModel):
    """POST /detokenize."""

    model_config = STRICT

    model: Label | None = None
    tokens: Annotated[list[TokenId], Field(max_length=MAX_DETOKENIZE)]
