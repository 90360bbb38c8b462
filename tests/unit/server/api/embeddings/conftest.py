"""An embedding model's folder, and an app on it."""

import pytest
from tokenizers import processors

from tests.support.embedding_folder import write_embedding_files
from tests.unit.server.conftest import Harness, train_byte_level, write_model_folder

EMBEDDINGS = "/v1/embeddings"
TEXTS = ["Hello, world!", "Schöne Grüße", "fox"]


@pytest.fixture(scope="session")
def embedder(tmp_path_factory):
    """A model folder of an embedding model, whose tokenizer ends each text with its end token."""
    tokenizer = train_byte_level()
    end = tokenizer.token_to_id("<|endoftext|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", end)]
    )
    folder = write_model_folder(tmp_path_factory.mktemp("embedder"), tokenizer=tokenizer)
    write_embedding_files(folder)
    return folder


@pytest.fixture
def app(harness, embedder):
    def make(**engine):
        return harness(folder=embedder, engine=engine)

    return make


def embed(app: Harness, **fields: object):
    return app.post(EMBEDDINGS, {"model": "tiny", "input": TEXTS, **fields})
