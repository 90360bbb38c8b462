"""The JSON of /v1/embeddings, as OpenAI has it. Imports msgspec; server/api/objects.py has the other answers."""

import msgspec

from server.api.embeddings.run import EmbeddingRun, to_base64
from server.api.objects import PromptTokensDetails


class EmbeddingUsage(msgspec.Struct):
    """OpenAI's usage object of embeddings, with the tokens that were cached."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Embedding(msgspec.Struct, kw_only=True):
    """One input's embedding: numbers, or little-endian float32s in base64."""

    object: str = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingList(msgspec.Struct, kw_only=True):
    """The whole answer, in the order of the inputs."""

    object: str = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


def encode_answer(run: EmbeddingRun, *, model: str, is_base64: bool) -> bytes:
    """Return the JSON of a run that is over. Numbers are float32s to their last digit. Raises EngineError."""
    stats = run.stats()
    written = [  # one by one, since no other thread runs while msgspec encodes
        msgspec.Raw(
            msgspec.json.encode(Embedding(index=index, embedding=to_base64(vector) if is_base64 else vector.tolist()))
        )
        for index, vector in enumerate(run.vectors())
    ]
    num_tokens = stats.num_prompt_tokens
    usage = EmbeddingUsage(num_tokens, num_tokens, PromptTokensDetails(stats.num_cached_tokens))
    answer = EmbeddingList(data=[], model=model, usage=usage)
    return msgspec.json.encode(msgspec.structs.asdict(answer) | {"data": written})
