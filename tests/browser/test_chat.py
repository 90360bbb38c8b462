"""The chat page in a real browser, on scripted answers: turns, thinking, tools, settings, history."""

import json
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.browser.fake_server import FakeServer, Reply, called, delta, serving, told
from tests.support.daemon import wait_for

TOOLS = '[{"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}]'


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with serving(FakeServer()) as server:
        yield server


@pytest.fixture
def chat(open_page: Callable[..., Page], fake: FakeServer) -> Page:
    page = open_page(fake.url)
    expect(page.locator("#model")).to_have_value("fake")
    return page


def say(page: Page, text: str) -> None:
    page.fill("#input", text)
    page.press("#input", "Enter")


def finished(page: Page, number: int = 1) -> None:
    """Wait until that many answers have their figures."""
    expect(page.locator(".assistant .acts")).to_have_count(number)


def roles(body: dict) -> list[str]:
    return [message["role"] for message in body["messages"]]


# rule: Endpoints: The chat page streams, stops, tries again, keeps its chats in the browser, and waits for a server
#     that starts
def test_an_answer_grows_while_it_streams_and_ends_with_its_figures(chat, fake):
    chunks = told("Lima is the **capital** of Peru.")
    reply = Reply(chunks[:4], rest=chunks[4:], is_held=True)
    fake.replies = [reply]
    say(chat, "What is the capital of Peru?")
    answer = chat.locator(".assistant .text")
    expect(answer).to_have_text("Lima is the")
    reply.is_held = False
    finished(chat)
    expect(answer).to_have_text("Lima is the capital of Peru.")
    expect(answer.locator("strong")).to_have_text("capital")
    expect(chat.locator(".figures")).to_have_text("TTFT 41 ms · 125 tok/s · 8 tokens · 32 of 40 prompt tokens cached")
    expect(chat.locator("#said")).to_contain_text("Lima is the capital of Peru.")
    assert fake.requests[0]["messages"] == [{"role": "user", "content": "What is the capital of Peru?"}]
    assert fake.requests[0]["model"] == "fake"
    expect(chat).to_have_title("What is the capital of Peru? · Quire")


def test_the_next_turn_brings_what_was_said(chat, fake):
    fake.replies = [Reply(told("Lima."))]
    say(chat, "Capital of Peru?")
    finished(chat)
    say(chat, "Sure?")
    finished(chat, 2)
    assert [message["content"] for message in fake.requests[1]["messages"]] == ["Capital of Peru?", "Lima.", "Sure?"]


def test_shift_enter_is_a_new_line(chat, fake):
    fake.replies = [Reply(told("Yes."))]
    chat.fill("#input", "one")
    chat.press("#input", "Shift+Enter")
    chat.locator("#input").press_sequentially("two")
    chat.press("#input", "Enter")
    finished(chat)
    assert fake.requests[0]["messages"][0]["content"] == "one\ntwo"


# rule: Endpoints: The chat page streams, stops, tries again, keeps its chats in the browser, and waits for a server
#     that starts
@pytest.mark.parametrize("way", ["button", "escape"])
def test_stopping_ends_the_request_and_keeps_what_came(chat, fake, way):
    fake.replies = [Reply(told("So far so good")[:-2], is_held=True)]
    say(chat, "Tell me more")
    expect(chat.locator(".assistant .text")).to_have_text("So far so good")
    if way == "button":
        chat.get_by_role("button", name="Stop").click()
    else:
        chat.keyboard.press("Escape")
    finished(chat)
    expect(chat.locator(".figures")).to_contain_text("stopped")
    expect(chat.locator(".assistant .text")).to_have_text("So far so good")
    wait_for(lambda: fake.num_left == 1, timeout_s=60, what="the stream's end at the server")
    expect(chat.get_by_role("button", name="Send")).to_be_visible()


# rule: Endpoints: Markup that a model writes does not run, and text shown of a growing answer is not taken back
def test_markup_in_an_answer_is_shown_and_not_run(chat, fake):
    text = "<script>window.hacked=1</script> <img src=x onerror='window.hacked=1'>"
    fake.replies = [Reply(told(text, size=1), pause_s=0)]
    asked = []
    chat.on("request", lambda request: asked.append(request.url))
    say(chat, text)
    finished(chat)
    expect(chat.locator(".assistant .text")).to_have_text(text)
    expect(chat.locator(".bubble")).to_have_text(text)
    assert chat.evaluate("() => [window.hacked, document.querySelectorAll('main script, main img').length]") == [
        None,
        0,
    ]
    assert all(url.startswith(fake.url) for url in asked)


def test_a_code_block_is_copied_by_its_button(open_page, fake):
    page = open_page(fake.url, permissions=["clipboard-read", "clipboard-write"])
    fake.replies = [Reply(told("Here:\n\n```python\nprint(1)\nprint(2)\n```\n"))]
    say(page, "Code, please")
    finished(page)
    page.locator(".code").get_by_role("button", name="Copy").click()
    expect(page.locator(".code .copy")).to_contain_text("Copied")
    assert page.evaluate("() => navigator.clipboard.readText()") == "print(1)\nprint(2)"


def test_thinking_is_open_while_it_lasts_and_folds_when_the_answer_begins(chat, fake):
    thoughts = [delta(reasoning_content="Peru lies in "), delta(reasoning_content="South America.")]
    fake.replies = [Reply([delta(role="assistant", content=""), *thoughts], is_held=True)]
    say(chat, "Capital of Peru?")
    folded = chat.locator(".thinking")
    expect(folded).to_have_attribute("open", "")
    expect(folded.locator(".thoughts")).to_have_text("Peru lies in South America.")
    chat.keyboard.press("Escape")
    finished(chat)
    fake.replies = [Reply(told("Lima.", thoughts="Peru lies in South America."))]
    chat.get_by_role("button", name="Answer again").click()
    expect(chat.locator(".assistant .text")).to_have_text("Lima.")
    finished(chat)
    assert folded.get_attribute("open") is None
    expect(folded.locator(".thoughts")).to_be_hidden()
    folded.locator("summary").click()
    expect(folded.locator(".thoughts")).to_have_text("Peru lies in South America.")
    say(chat, "Sure?")
    finished(chat, 2)
    assert fake.requests[-1]["messages"][1]["reasoning_content"] == "Peru lies in South America."


def test_a_tool_call_is_shown_and_its_result_can_be_typed(chat, fake):
    chat.click("#settings-button")
    chat.fill("#tools", TOOLS)
    chat.get_by_role("button", name="Done").click()
    fake.replies = [Reply(called("get_weather", '{"city":"Lima"}')), Reply(told("It is 21 degrees."))]
    say(chat, "Weather in Lima?")
    expect(chat.locator(".call-name")).to_have_text("get_weather")
    expect(chat.locator(".call code")).to_have_text('{\n  "city": "Lima"\n}')
    assert fake.requests[0]["tools"] == [{"type": "function", "function": json.loads(TOOLS)[0]}]
    chat.get_by_label("Result of get_weather").fill('{"temperature": 21}')
    chat.get_by_role("button", name="Send the result").click()
    finished(chat, 2)
    call, result = fake.requests[1]["messages"][1:]
    assert call["tool_calls"][0] == {
        "id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Lima"}'},
    }  # fmt: skip
    assert result == {"role": "tool", "tool_call_id": "call_1", "content": '{"temperature": 21}'}
    expect(chat.locator("form.results")).to_have_count(0)
    expect(chat.locator(".tool summary")).to_have_text("Result of get_weather")


def test_an_edited_message_is_answered_anew_and_an_answer_can_be_had_again(chat, fake):
    fake.replies = [Reply(told("Lima.")), Reply(told("Quito.")), Reply(told("Quito, I said."))]
    say(chat, "Capital of Peru?")
    finished(chat)
    chat.locator(".user").hover()
    chat.get_by_role("button", name="Edit the message").click()
    chat.get_by_label("Edit the message").fill("Capital of Ecuador?")
    chat.keyboard.press("Enter")
    expect(chat.locator(".assistant .text")).to_have_text("Quito.")
    finished(chat)
    expect(chat.locator(".chat")).to_have_text(["Capital of Ecuador?"])
    chat.get_by_role("button", name="Answer again").click()
    expect(chat.locator(".assistant .text")).to_have_text("Quito, I said.")
    assert [message["content"] for message in fake.requests[2]["messages"]] == ["Capital of Ecuador?"]
    finished(chat)
    say(chat, "Sure?")
    finished(chat, 2)
    expect(chat.get_by_role("button", name="Answer again")).to_have_count(1)  # the last: what follows is not lost


def test_the_buttons_of_an_edit_are_whole_words_on_a_phone(open_page, fake):
    fake.replies = [Reply(told("Lima."))]
    page = open_page(fake.url, viewport={"width": 390, "height": 844})
    say(page, "Capital of Peru?")
    finished(page)
    page.locator(".user").hover()
    page.get_by_role("button", name="Edit the message").click()
    for name in ("Cancel", "Send"):
        box = page.locator("form.edit").get_by_role("button", name=name).bounding_box()
        assert box["height"] < 45, name  # one line


# rule: Endpoints: The chat page streams, stops, tries again, keeps its chats in the browser, and waits for a server
#     that starts
def test_chats_survive_a_reload_and_can_be_deleted(chat, fake):
    fake.replies = [Reply(told("Lima, **of course**."))]
    say(chat, "Capital of Peru?")
    finished(chat)
    chat.get_by_role("button", name="New chat").click()
    expect(chat.locator("#welcome")).to_be_visible()
    say(chat, "Another one")
    finished(chat)
    expect(chat.locator(".chat")).to_have_text(["Another one", "Capital of Peru?"])
    chat.reload()
    expect(chat.locator(".bubble")).to_have_text("Another one")
    chat.locator(".chat", has_text="Peru").click()
    expect(chat.locator(".assistant .text strong")).to_have_text("of course")
    expect(chat.locator(".figures")).to_contain_text("125 tok/s")
    chat.locator("#chats li", has_text="Peru").hover()
    chat.get_by_role("button", name="Delete: Capital of Peru?").click()
    expect(chat.locator(".chat")).to_have_text(["Another one"])
    with chat.expect_download() as download:
        chat.get_by_role("button", name="Export").click()
    kept = json.loads(download.value.path().read_text())["chats"]
    assert [one["title"] for one in kept] == ["Another one"]
    chat.get_by_role("button", name="Clear").click()
    chat.get_by_role("button", name="Delete 1 chat?").click()
    expect(chat.locator(".chat")).to_have_count(0)
    assert chat.evaluate("() => Object.keys(localStorage).filter((key) => key.includes(':chat:'))") == []


def test_an_answer_under_way_survives_a_reload_as_far_as_it_came(chat, fake):
    fake.replies = [Reply(told("Half of an ans")[:-2], is_held=True)]
    say(chat, "Hello")
    expect(chat.locator(".assistant .text")).to_have_text("Half of an ans")
    chat.reload()
    expect(chat.locator(".assistant .text")).to_have_text("Half of an ans")


def test_settings_go_into_the_request_and_stay(chat, fake):
    fake.replies = [Reply(told("Aye."))]
    values = {"temperature": 0.5, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "max_tokens": 64, "seed": 7}
    chat.click("#settings-button")
    chat.fill("#system", "You are a pirate.")
    for name, value in values.items():
        chat.fill(f"#{name}", str(value))
    chat.select_option("#reasoning_effort", "none")
    expect(chat.locator("#thinking-note")).to_be_visible()  # as the rendering's headers say
    chat.get_by_role("button", name="Done").click()
    chat.select_option("#model", "other")
    chat.reload()
    say(chat, "Hello")
    finished(chat)
    body = fake.requests[0]
    assert {name: body[name] for name in values} == values
    assert (body["reasoning_effort"], body["model"]) == ("none", "other")
    assert body["messages"][0] == {"role": "system", "content": "You are a pirate."}
    chat.click("#settings-button")
    chat.get_by_role("button", name="Reset").click()
    chat.keyboard.press("Escape")
    say(chat, "Again")
    finished(chat, 2)
    assert not set(values) & set(fake.requests[1])
    assert roles(fake.requests[1])[0] == "user"


def test_settings_out_of_bounds_are_said_and_not_sent(chat, fake):
    fake.replies = [Reply(told("Yes."))]
    chat.click("#settings-button")
    chat.fill("#temperature", "3")
    chat.fill("#tools", "[{]")
    expect(chat.locator("#tools-note")).to_contain_text("The tools are not JSON")
    chat.get_by_role("button", name="Done").click()
    expect(chat.locator("#settings")).to_be_visible()
    chat.keyboard.press("Escape")
    say(chat, "Hello")
    finished(chat)
    assert not {"temperature", "tools"} & set(fake.requests[0])


def test_a_long_chat_follows_its_end_unless_the_reader_goes_up(chat, fake):
    chunks = told("line\n\n" * 400, size=12)
    reply = Reply(chunks[:100], rest=chunks[100:], is_held=True, pause_s=0.03)
    fake.replies = [reply]
    say(chat, "Go on")
    chat.wait_for_function("() => document.querySelectorAll('.text p').length > 60")
    below = (
        "() => { const p = document.querySelector('#scroll'); return p.scrollHeight - p.scrollTop - p.clientHeight; }"
    )
    assert chat.evaluate(below) < 100
    chat.locator("#scroll").hover()
    chat.mouse.wheel(0, -800)
    chat.wait_for_function(f"() => ({below})() > 700")
    seen = "() => document.querySelectorAll('.text p').length"
    number = chat.evaluate(seen)
    reply.is_held = False
    chat.wait_for_function(f"() => ({seen})() > {number + 40}")
    assert chat.evaluate(below) > 1500  # what was added since lies below
    chat.get_by_role("button", name="To the end").click()
    expect(chat.get_by_role("button", name="To the end")).to_be_hidden()


def test_what_is_opened_stays_open_in_the_next_turn(chat, fake):
    fake.replies = [Reply(told("Lima.", thoughts="Peru lies in South America."))]
    say(chat, "Capital of Peru?")
    finished(chat)
    chat.locator(".thinking summary").click()
    say(chat, "Sure?")
    finished(chat, 2)
    expect(chat.locator(".thoughts").first).to_be_visible()


def test_fields_without_effect_are_named(chat, fake):
    fake.replies = [Reply(told("Yes."), headers={"x-quire-ignored": "reasoning_effort"})]
    say(chat, "Hello")
    finished(chat)
    expect(chat.locator(".figures")).to_contain_text("without effect here: reasoning_effort")
