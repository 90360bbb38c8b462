"""The body of /v1/embeddings, strict as in server/api/schemas.py. Imports pydantic."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from server.api.schemas import CacheSalt, Label, check_texts_or_ids, texts_or_ids_schema
from server.api.strict_json import StrictModel

MAX_INPUTS = 2048  # OpenAI's
MAX_DIMENSIONS = 2**20  # a bound for arithmetic; the model's hidden size is the real limit


def _input(value: Any) -> list[str] | list[list[int]]:
    return check_texts_or_ids(value, noun="inputs", limit=MAX_INPUTS)


class EmbeddingBody(StrictModel):
    """POST /v1/embeddings."""

    model: Label | None = None
    input: Annotated[Any, BeforeValidator(_input), WithJsonSchema(texts_or_ids_schema(MAX_INPUTS))]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=MAX_DIMENSIONS)] | None = None
    user: Label | None = None
    # beyond OpenAI
    prompt_name: Label | None = None  # sentence-transformers' name for one of the model's own prompts; "": none
    cache_salt: CacheSalt | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    timeout: Annotated[float, Field(gt=0, le=86_400)] | None = None
