"""Bodies: any bytes are a JSON object or a MalformedBody, and any JSON object is an answer or an error below 500."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.api.embeddings.schema import EmbeddingBody
from server.api.error_replies import speaks_anthropic
from server.api.messages.schema import MessagesBody
from server.api.responses.schema import ResponsesBody
from server.api.schemas import ChatBody, CompletionBody, TokenizeBody
from server.api.strict_json import parse_json
from server.errors import MalformedBody
from tests.fuzz.conftest import seeds
from tests.fuzz.counts import count
from tests.support.fakes import FakeEngineClient, FakeLauncherChannel
from tests.unit.server.conftest import CHAT, COMPLETIONS, Harness, stream_chunks, write_model_folder

SEEDS = [path.read_bytes() for path in seeds("bodies")]
TEXTS = [path.read_bytes().decode() for path in seeds("texts")]
RESPONSES, ANTHROPIC, EMBEDDINGS = "/v1/responses", "/v1/messages", "/v1/embeddings"
JSON_TYPE = {"content-type": "application/json"}
CODES = ("invalid_parameter", "unsupported_feature", "context_length_exceeded", "malformed_json", "model_not_found")
CODES += ("deadline_exceeded", "invalid_grammar")


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    folder = write_model_folder(tmp_path_factory.mktemp("model"))
    client = FakeEngineClient(script=[*range(50, 70)], tokens_per_delta=3)
    return Harness(folder, client, FakeLauncherChannel(), pooling="mean")


def check(reply) -> None:
    count("requests with a JSON body", [reply.status_code])
    if reply.status_code != 200:
        assert reply.status_code in (400, 404, 408), reply.text
        if not speaks_anthropic(reply.request.url.path):
            assert reply.json()["error"]["code"] in CODES
        assert len(reply.content) < 4096


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, ANTHROPIC, EMBEDDINGS, "/tokenize", "/detokenize"])
@pytest.mark.parametrize("seed", seeds("bodies"), ids=lambda path: path.name)
def test_the_corpus_is_answered(app, seed, path):
    check(app.post(path, content=seed.read_bytes(), headers=JSON_TYPE))


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    data = bytearray(draw(st.sampled_from(SEEDS))[:5000])
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        data[at : at + draw(st.integers(0, 4))] = draw(st.binary(max_size=4))
    return bytes(data)


# rule: Errors: NaN, infinities, numbers too large, lone surrogates are 400
@given(damaged() | st.binary(max_size=40))
def test_what_parses_is_what_the_standard_library_reads(body):
    count("bodies parsed")
    try:
        value = parse_json(body)
    except MalformedBody:
        return
    assert value == json.loads(body, parse_constant=lambda name: pytest.fail(f"{name} was let in"))
    json.dumps(value, ensure_ascii=False).encode()


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(
        [*TEXTS, "user", "assistant", "tool", "auto", "none", "required", "function", "json_object", "text"]
    )
)
WORDS = """role content type text name function arguments parameters properties tool_calls id json regex choice grammar
json_schema schema strict include_usage enable_thinking 5"""
KEYS = st.sampled_from(WORDS.split())
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS | st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool"])},
        optional={
            "content": st.sampled_from(TEXTS) | st.text(max_size=20) | JSON,
            "name": JSON,
            "tool_calls": JSON,
            "tool_call_id": JSON,
            "reasoning_content": JSON,
        },
    ),
    min_size=1,
    max_size=4,
)
RIGHT = {
    "messages": MESSAGES,
    "input": st.sampled_from(TEXTS) | MESSAGES,
    "tokens": st.lists(st.integers(0, 450), max_size=9),
    "prompt": st.sampled_from(TEXTS) | st.lists(st.integers(0, 450), min_size=1, max_size=9),
    "n": st.integers(1, 4),
    "max_tokens": st.integers(1, 30),
    "temperature": st.floats(0, 2),
    "stop": st.lists(st.text(min_size=1, max_size=5), max_size=4),
    "stream": st.booleans(),
    "timeout": st.just(5),
    "tools": st.just([TOOL]) | JSON,
    "logprobs": st.booleans() | st.integers(0, 20),
}


def bodies(model, required: str):
    """Draw bodies of one route: what it needs, and some fields right, wrong or unknown."""
    fields = st.sampled_from(sorted(model.model_fields)).flatmap(
        lambda name: st.tuples(st.just(name), RIGHT.get(name, JSON) | JSON)
    )
    extra = st.lists(fields | st.tuples(st.text(max_size=6), JSON), max_size=5)
    return st.tuples(RIGHT[required] | JSON, extra).map(lambda drawn: {required: drawn[0], **dict(drawn[1])})


def post(app: Harness, path: str, body: dict) -> None:
    reply = app.post(path, content=json.dumps(body).encode(), headers=JSON_TYPE)
    check(reply)
    if reply.status_code == 200 and reply.headers["content-type"].startswith("text/event-stream"):
        if path in (CHAT, COMPLETIONS):
            assert all("error" not in chunk for chunk in stream_chunks(reply.text)), reply.text
        else:
            assert "event: error" not in reply.text


# rule: Errors: An error body is under 4 KB, whatever it quotes
@given(bodies(ChatBody, "messages"))
def test_any_chat_body_is_answered_or_refused(app, body):
    post(app, CHAT, body)


@given(bodies(CompletionBody, "prompt"))
def test_any_completion_body_is_answered_or_refused(app, body):
    post(app, COMPLETIONS, body)


@given(bodies(ResponsesBody, "input"))
def test_any_responses_body_is_answered_or_refused(app, body):
    post(app, RESPONSES, body)


@given(bodies(MessagesBody, "messages"))
def test_any_messages_body_is_answered_or_refused(app, body):
    post(app, ANTHROPIC, {"max_tokens": 9, **body})


@given(bodies(TokenizeBody, "messages") | bodies(TokenizeBody, "prompt"))
def test_any_text_is_tokenized_or_refused(app, body):
    post(app, "/tokenize", body)


@given(bodies(EmbeddingBody, "input"))
def test_any_embeddings_body_is_answered_or_refused(app, body):
    post(app, EMBEDDINGS, body)
