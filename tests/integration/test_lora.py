"""Adapters in a real daemon: each answers by its own name, through the real client, beside the model and each other."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from server.config.model_source import DEMO_FOLDER, DEMO_NAME
from server.text.tokenizer import load_tokenizer
from tests.integration.test_bad_start import start_fails
from tests.support.daemon import Daemon
from tests.support.lora_adapters import ATTENTION, MLP, adapter_config, make_tensors, modules, save_adapter, save_merged

PROMPT = "A quire is a gathering of"
QUESTION = "What is a quire?"
NUM_TOKENS = 16
NAMES = [DEMO_NAME, "loud", "team/quiet"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """By name: the demo model, and the demo model with each adapter merged into it; the adapters lie beside."""
    root = tmp_path_factory.mktemp("adapters")
    merged = [DEMO_FOLDER]
    for name, names, rank, alpha in (("loud", ATTENTION + MLP, 8, 32), ("quiet", ("self_attn.v_proj",), 3, 24)):
        tensors = make_tensors(DEMO_FOLDER, dict.fromkeys(modules(names, range(6)), rank), seed=rank)
        targets = [module.rpartition(".")[2] for module in names]
        save_adapter(root / name, tensors, adapter_config(r=rank, lora_alpha=alpha, target_modules=targets))
        merged.append(save_merged(root / f"{name}-merged", DEMO_FOLDER, tensors, alpha / rank))
    return merged


@pytest.fixture(scope="module")
def expected(folders: list[Path]) -> dict[str, str]:
    """By name: what transformers goes on with after the prompt."""
    tokenizer = load_tokenizer(DEMO_FOLDER)
    prompt = tokenizer.encode(PROMPT)
    texts = {}
    for name, folder in zip(NAMES, folders, strict=True):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        out = model.generate(torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None)
        texts[name] = tokenizer.decode(out[0, len(prompt) :].tolist())
    assert len(set(texts.values())) == 3
    return texts


@pytest.fixture(scope="module")
def client(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    root = folders[1].parent
    flags = ("--lora", f"loud={root / 'loud'}", "--lora", f"team/quiet={root / 'quiet'}", "--device", "cpu")
    with (
        Daemon(*flags, folder=tmp_path_factory.mktemp("daemon")) as daemon,
        openai.OpenAI(base_url=f"{daemon.wait_ready().base_url}/v1", api_key="x", max_retries=0, timeout=60) as client,
    ):
        assert "loud, team/quiet (" in daemon.log
        yield client


def complete(client: openai.OpenAI, name: str) -> str:
    options = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "extra_body": {"ignore_eos": True}}
    return client.completions.create(model=name, prompt=PROMPT, **options).choices[0].text


# rule: Endpoints: An adapter is a model by its name, and answers as the model with its weights merged
def test_each_name_gives_its_own_text_also_side_by_side(client: openai.OpenAI, expected: dict[str, str]) -> None:
    for name in NAMES:
        assert complete(client, name) == expected[name]
    with ThreadPoolExecutor(12) as pool:
        names = NAMES * 4
        texts = list(pool.map(lambda name: complete(client, name), names))
    assert texts == [expected[name] for name in names]


def test_adapters_are_models_of_the_list(client: openai.OpenAI) -> None:
    cards = {card.id: card.model_dump() for card in client.models.list()}
    assert list(cards) == NAMES
    assert [cards[name]["parent"] for name in NAMES] == [None, DEMO_NAME, DEMO_NAME]
    assert client.models.retrieve("team/quiet").id == "team/quiet"


def test_chats_responses_and_streams_take_the_name(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    chats = {
        name: client.chat.completions.create(model=name, messages=messages, temperature=0, max_tokens=NUM_TOKENS)
        for name in NAMES
    }
    assert [chat.model for chat in chats.values()] == NAMES
    assert len({chat.choices[0].message.content for chat in chats.values()}) == 3
    for name, chat in chats.items():
        stream = client.chat.completions.create(
            model=name, messages=messages, temperature=0, max_tokens=NUM_TOKENS, stream=True
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == chat.choices[0].message.content
        response = client.responses.create(model=name, input=QUESTION, temperature=0, max_output_tokens=NUM_TOKENS)
        assert response.output_text == chat.choices[0].message.content
        body = {"model": name, "messages": messages, "temperature": 0, "max_tokens": NUM_TOKENS}
        message = httpx.post(f"{client.base_url}messages", json=body, timeout=60).json()
        assert message["content"][0]["text"] == chat.choices[0].message.content


def test_cached_prefixes_are_not_shared(client: openai.OpenAI) -> None:
    prompt, counts = "Pages " * 60, []
    for name in [*NAMES, *NAMES]:
        reply = client.completions.create(model=name, prompt=prompt, max_tokens=1)
        counts.append(reply.usage.prompt_tokens_details.cached_tokens > 0)
    assert counts == [False] * 3 + [True] * 3


@pytest.mark.full
def test_a_start_with_an_adapter_that_cannot_be_served_says_why(folders: list[Path], tmp_path: Path) -> None:
    folder = folders[1].parent / "loud"
    assert start_fails("--port", "0", "--lora", f"a={tmp_path / 'none'}")[0] == 2
    assert start_fails("--port", "0", "--lora", f"{DEMO_NAME}={folder}")[0] == 2
    code, message = start_fails("--lora", f"a={tmp_path}", "--port", "0")
    assert (code, "adapter_config.json" in message) == (3, True)
    tensors = make_tensors(DEMO_FOLDER, {"model.layers.0.mlp.up_proj": 4})
    broken = save_adapter(tmp_path / "broken", tensors, adapter_config(target_modules=["up_proj"], r=5))
    code, message = start_fails("--lora", f"a={broken}", "--port", "0")
    assert (code, "[4, 320]" in message) == (3, True)
