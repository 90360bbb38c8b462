"""The tool fields of a chat body, strict. Imports pydantic."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

MAX_TOOLS = 128
TOOL_NAME_PATTERN = r"^[A-Za-z0-9_-]{1,64}$"

_STRICT = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
_CHOICE_SCHEMA = {
    "anyOf": [
        {"type": "string", "enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
            },
            "required": ["type", "function"],
        },
    ]
}

ToolName = Annotated[str, Field(pattern=TOOL_NAME_PATTERN)]
ToolChoice = Annotated[Any, WithJsonSchema(_CHOICE_SCHEMA)]  # checked in tools.py, with better messages than a union's
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class FunctionDefinition(BaseModel):
    """What the model is told of a function. `parameters` is a JSON schema; absent means none."""

    model_config = _STRICT

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """A tool that the model may call."""

    model_config = _STRICT

    type: Literal["function"]
    function: FunctionDefinition
