"""Request fields that constrain an answer's text, strict like server/api/schemas.py. Imports pydantic."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Json = Any

_STRICT = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class JsonSchemaFormat(BaseModel):
    """response_format.json_schema of OpenAI's API. The schema is enforced for every value of `strict`."""

    model_config = _STRICT

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    schema_: Annotated[Json, Field(alias="schema")]
    strict: bool | None = None
    description: Annotated[str, Field(max_length=65_536)] | None = None


class ResponseFormat(BaseModel):
    """response_format; server/structured_output/grammar_spec.py has the list of types."""

    model_config = _STRICT

    type: str
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(BaseModel):
    """structured_outputs, vLLM's extension."""

    model_config = _STRICT

    json_: Annotated[Json, Field(alias="json")] = None  # a schema, or one as a string
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
