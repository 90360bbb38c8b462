"""A daemon that serves an embedding model, through the real client; and one that generates and embeds."""

from pathlib import Path

import numpy as np
import openai
import pytest
import torch
from tokenizers import processors
from transformers import AutoTokenizer, Qwen3Config, Qwen3Model

from tests.support.daemon import Daemon
from tests.support.embedding_folder import PROMPTS, write_embedding_files
from tests.unit.server.conftest import train_byte_level, write_model_folder

TEXTS = ["The quick brown fox.", "Schöne Grüße aus Köln, naïve café. " * 20, "日本語", ""]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder laid out as Qwen3-Embedding's: no head, no prefixes, an end token by the post-processor."""
    tokenizer = train_byte_level()
    end = tokenizer.token_to_id("<|endoftext|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", end)]
    )
    folder = write_model_folder(tmp_path_factory.mktemp("embedder"), tokenizer=tokenizer)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=448,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        initializer_range=0.15,
    )
    Qwen3Model(config).save_pretrained(folder)
    write_embedding_files(folder)
    return folder


def reference(folder: Path, texts: list[str]) -> list[np.ndarray]:
    """Compute embeddings with transformers alone."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), Qwen3Model.from_pretrained(folder).eval()
    with torch.inference_mode():
        hidden = [model(torch.tensor([tokenizer(text)["input_ids"]])).last_hidden_state[0, -1] for text in texts]
    return [torch.nn.functional.normalize(vector, dim=0).numpy() for vector in hidden]


# rule: Endpoints: Embeddings answer in OpenAI's form, as numbers and in base64
def test_the_client_gets_the_embeddings_of_transformers(folder: Path, tmp_path: Path) -> None:
    with Daemon("--device", "cpu", "--max-num-batched-tokens", "100", str(folder), folder=tmp_path) as daemon:
        daemon.wait_ready()
        with openai.OpenAI(base_url=f"{daemon.base_url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            answer = client.embeddings.create(model=folder.name, input=TEXTS)
            for entry, wanted in zip(answer.data, reference(folder, TEXTS), strict=True):
                np.testing.assert_allclose(entry.embedding, wanted, atol=1e-4)
            again = client.embeddings.create(model=folder.name, input=TEXTS)
            assert again.usage.prompt_tokens_details["cached_tokens"] > 0
            for entry, before in zip(again.data, answer.data, strict=True):
                np.testing.assert_allclose(entry.embedding, before.embedding, atol=1e-4)

            short = client.embeddings.create(model=folder.name, input=TEXTS[0], dimensions=32).data[0].embedding
            cut = reference(folder, TEXTS[:1])[0][:32]
            np.testing.assert_allclose(short, cut / np.linalg.norm(cut), atol=1e-4)

            query = client.embeddings.create(model=folder.name, input=TEXTS[0], extra_body={"prompt_name": "query"})
            (wanted,) = reference(folder, [PROMPTS["query"] + TEXTS[0]])
            np.testing.assert_allclose(query.data[0].embedding, wanted, atol=1e-4)

            ids = AutoTokenizer.from_pretrained(folder)(TEXTS[:3])["input_ids"]
            many = client.embeddings.create(model=folder.name, input=ids * 60)  # more than run at once
            assert len(many.data) == 180
            for place, entry in enumerate(many.data):
                np.testing.assert_allclose(entry.embedding, answer.data[place % 3].embedding, atol=1e-4)

            with pytest.raises(openai.BadRequestError, match="no language-model head") as refused:
                client.chat.completions.create(model=folder.name, messages=[{"role": "user", "content": "hi"}])
            assert refused.value.code == "unsupported_feature"
            with pytest.raises(openai.BadRequestError, match="1024") as refused:
                client.embeddings.create(model=folder.name, input="fox " * 3000)
            assert refused.value.code == "context_length_exceeded"
        page = daemon.get("/metrics").text
        assert 'quire_requests_finished_total{finished_reason="stop"' in page


# rule: Fields: Only embedding models and `--pooling` give embeddings; only models with a head give text
def test_the_demo_model_generates_and_embeds_with_pooling(tmp_path: Path) -> None:
    with Daemon("--device", "cpu", "--pooling", "mean", folder=tmp_path) as daemon:
        daemon.wait_ready()
        with openai.OpenAI(base_url=f"{daemon.base_url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            texts = ["What is a quire?", "What is a quire?", "A dog."]
            same, twin, other = (
                entry.embedding for entry in client.embeddings.create(model="quire-demo", input=texts).data
            )
            assert np.dot(same, twin) == pytest.approx(1, abs=1e-5)
            assert np.dot(same, other) < 0.999
            said = client.completions.create(model="quire-demo", prompt="A quire is", max_tokens=4)
            assert said.usage.completion_tokens == 4


def test_a_bare_model_that_does_not_say_how_it_pools_is_refused_at_once(folder: Path, tmp_path: Path) -> None:
    for name in ("modules.json", "1_Pooling/config.json"):
        assert (folder / name).exists()
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in folder.iterdir():
        if file.is_file() and file.name != "modules.json":
            (bare / file.name).symlink_to(file)
    with Daemon("--device", "cpu", str(bare), folder=tmp_path) as daemon:
        assert daemon.process.wait(60) == 3
        assert "--pooling last or mean" in daemon.log
        assert "engine" not in daemon.log
