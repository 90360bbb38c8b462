"""Prompts that can share cached blocks have one key, others have their own."""

import json

from hypothesis import given
from hypothesis import strategies as st

from deploy.ray.prompt_key import KEY_BYTES, prompt_key

LONG = "All of the report. " * (KEY_BYTES // 10)


def key(**body: object) -> str:
    return prompt_key(json.dumps(body).encode())


def chat(*contents: str, system: str = "You are Quire.", **more: object) -> str:
    roles = ["user", "assistant"] * len(contents)
    turns = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    return key(model="m", messages=[{"role": "system", "content": system}, *turns], **more)


def test_the_turns_of_a_chat_stay_together() -> None:
    assert chat("Hi") == chat("Hi", "Hello!", "How are you?") == chat("Hi", temperature=0.5, stream=True)


def test_chats_with_one_short_system_prompt_are_spread() -> None:
    assert len({chat(f"Question {i}") for i in range(20)}) == 20


def test_questions_about_one_long_document_stay_together() -> None:
    assert chat("What?", system=LONG) == chat("When?", system=LONG)
    assert chat(LONG + "What?") == chat(LONG + "When?")
    assert key(prompt=LONG + "a") == key(prompt=LONG + "b") != key(prompt="a" + LONG)


def test_every_api_has_keys() -> None:
    assert key(input="Hi") != key(input="Ho")
    assert key(input=[{"role": "user", "content": "Hi"}]) == key(
        input=[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    )
    user = [{"role": "user", "content": "Hi"}]
    assert key(system="a", messages=user) != key(system="b", messages=user)
    assert key(instructions="a", input="x") != key(instructions="b", input="x")
    assert key(prompt=[1, 2, 3]) != key(prompt=[1, 2, 4])


def test_another_model_has_another_cache() -> None:
    assert key(model="a", prompt="Hi") != key(model="b", prompt="Hi")


def test_prompt_cache_key_decides_where_a_client_gives_one() -> None:
    assert chat("Hi", prompt_cache_key="team") == chat("Ho", prompt_cache_key="team") != chat("Hi")


def test_what_has_no_prompt_has_no_key() -> None:
    for body in (
        b"",
        b"{}",
        b"[]",
        b"no json",
        b'{"model":"m"}',
        b'{"messages":',
        b"\xff\xfe",
        b'{"prompt_cache_key":3}',
    ):
        assert prompt_key(body) == ""


@given(
    st.one_of(
        st.binary(),
        st.recursive(
            st.none() | st.text(),
            lambda inner: (
                st.lists(inner)
                | st.dictionaries(st.sampled_from(["messages", "input", "role", "prompt", "system"]), inner)
            ),
        ).map(lambda v: json.dumps(v).encode()),
    )
)
def test_any_body_has_a_key_or_none_and_always_the_same(body: bytes) -> None:
    found = prompt_key(body)
    assert found == prompt_key(body)
    assert found == "" or found.startswith("prompt-")
    found.encode("ascii")
