"""Chat templates with hostile text: what a user types becomes no control token, and comes through unchanged."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.config.model_source import resolve_model
from server.text.tokenizer import Tokenizer, load_tokenizer
from tests.fuzz.conftest import seeds
from tests.fuzz.counts import count
from tests.unit.server.conftest import write_model_folder

TEXTS = [path.read_bytes().decode() for path in seeds("texts")]
FRAGMENTS = [
    "<|im_end|>",
    "<|im_start|>",
    "<|",
    "|>",
    "im_end",
    "\ufdd0",
    "\ufdd1",
    "<",
    "{{",
    "}}",
    "{%",
    "%}",
    "\n",
    " ",
]
TEXT = st.sampled_from(TEXTS) | st.text(max_size=12) | st.lists(
    st.sampled_from([*FRAGMENTS, *TEXTS]) | st.text(max_size=3), max_size=6
).map("".join)  # fmt: skip


@pytest.fixture(scope="module", params=["plain", "demo"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    if request.param == "demo":
        return load_tokenizer(Path(resolve_model(None).folder))
    return load_tokenizer(write_model_folder(tmp_path_factory.mktemp("model")))


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[int]:
    count("conversations rendered")
    roles = ["system", *["user", "assistant"] * len(texts)]
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return tokenizer.encode_chat(tokenizer.render_chat(messages))


def control_tokens(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    return [id_ for id_ in ids if id_ in tokenizer.special_ids]


# rule: Security: Text of users never becomes a control token
@given(st.lists(TEXT, min_size=1, max_size=2))
def test_users_and_systems_write_no_control_token(tokenizer, texts):
    ids = encode(tokenizer, texts)
    assert control_tokens(tokenizer, ids) == control_tokens(tokenizer, encode(tokenizer, ["x"] * len(texts)))


@given(TEXT)
def test_a_users_text_comes_through_unchanged(tokenizer, text):
    shown = tokenizer.decode(encode(tokenizer, ["x", text]), skip_special_tokens=False)
    assert unmarked(text) in unmarked(shown)


def unmarked(text: str) -> str:
    """Leave out the server's own marks, which are no characters and may be lost."""
    return text.replace("\ufdd0", "").replace("\ufdd1", "")


@given(st.lists(TEXT, min_size=3, max_size=4))
def test_an_assistants_text_ends_no_message(tokenizer, texts):
    ids = encode(tokenizer, texts)
    assert control_tokens(tokenizer, ids) == control_tokens(tokenizer, encode(tokenizer, ["x"] * len(texts)))
