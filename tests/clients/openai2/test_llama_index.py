"""llama-index-llms-openai-like."""

import pytest
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

from tests.clients import questions
from tests.clients.questions import CAPITAL, FOLLOW_UP, GEORGE, MADRID, MODEL, PARIS, PERSON, WEATHER, Person


@pytest.fixture
def llm(base_url):
    return OpenAILike(
        model=MODEL, api_base=base_url, api_key="none", temperature=0, max_retries=0, context_window=4096,
        max_tokens=200, is_chat_model=True, is_function_calling_model=True, should_use_structured_outputs=True,
    )  # fmt: skip


def test_chat_whole_and_streamed(llm):
    answer = llm.chat([ChatMessage(CAPITAL)]).message.content
    assert PARIS in answer
    assert "".join(part.delta for part in llm.stream_chat([ChatMessage(CAPITAL)])) == answer


def test_complete(llm):
    assert PARIS in llm.complete(CAPITAL).text


def test_multi_turn(llm):
    first = llm.chat([ChatMessage(CAPITAL)]).message
    assert MADRID in llm.chat([ChatMessage(CAPITAL), first, ChatMessage(FOLLOW_UP)]).message.content


def test_a_tool_is_called(llm):
    tool = FunctionTool.from_defaults(questions.get_weather)
    answer = llm.chat_with_tools([tool], user_msg=WEATHER)
    (call,) = llm.get_tool_calls_from_response(answer)
    assert (call.tool_name, call.tool_kwargs) == ("get_weather", {"city": PARIS})
    assert questions.REPORT in str(llm.predict_and_call([tool], user_msg=WEATHER))


def test_structured_output(llm):
    assert llm.as_structured_llm(Person).chat([ChatMessage(PERSON)]).raw == GEORGE
