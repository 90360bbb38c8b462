"""The chat page where something fails: refusals, broken streams, keys, a server that still starts or is gone."""

from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.browser.fake_server import FakeServer, Reply, serving, told
from tests.browser.test_chat import finished, say

TOO_LONG = {"message": "The prompt has 5000 tokens; the context is 4096.", "code": "context_length_exceeded"}
DIED = {"message": "The engine died; it is being restarted.", "code": "engine_dead"}


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with serving(FakeServer()) as server:
        yield server


@pytest.fixture
def chat(open_page: Callable[..., Page], fake: FakeServer) -> Page:
    page = open_page(fake.url)
    expect(page.locator("#model")).to_have_value("fake")
    return page


# rule: Endpoints: The chat page streams, stops, tries again, keeps its chats in the browser, and waits for a server
#     that starts
@pytest.mark.parametrize(
    ("reply", "sentence", "kept"),
    [
        (Reply(status=400, error=TOO_LONG), f"{TOO_LONG['message']} Begin a new chat, or shorten this one.", ""),
        (
            Reply(status=429, error={"message": "The queue is full."}, headers={"retry-after": "3"}),
            "The queue is full. It asks to wait 3 s.", "",
        ),
        (Reply(status=502, error=None), "The server answers 502 Bad Gateway.", ""),
        (Reply(told("Half an")[:-2], error=DIED), "The engine died; it is being restarted.", "Half an"),
        (
            Reply(told("Half an")[:-2], is_cut=True, pause_s=0.1),
            "The connection broke off before the answer was whole.", "Half an",
        ),
    ],
)  # fmt: skip
def test_an_error_is_a_sentence_and_can_be_tried_again(chat, fake, reply, sentence, kept):
    fake.replies = [reply, Reply(told("Now it works."))]
    say(chat, "Hello")
    expect(chat.get_by_role("alert")).to_contain_text(sentence)
    expect(chat.locator(".assistant .text")).to_have_text(kept)
    chat.get_by_role("button", name="Try again").click()
    expect(chat.locator(".assistant .text")).to_have_text("Now it works.")
    finished(chat)
    expect(chat.get_by_role("alert")).to_have_count(0)
    assert fake.requests[0]["messages"] == fake.requests[1]["messages"]


def test_a_turn_that_failed_is_not_told_to_the_model(chat, fake):
    fake.replies = [Reply(status=400, error=TOO_LONG), Reply(told("Yes."))]
    say(chat, "far too long")
    expect(chat.get_by_role("alert")).to_be_visible()
    say(chat, "short")
    finished(chat, 2)
    assert fake.requests[1]["messages"] == [{"role": "user", "content": "short"}]


def test_an_error_survives_a_reload(chat, fake):
    fake.replies = [Reply(status=400, error=TOO_LONG)]
    say(chat, "far too long")
    expect(chat.get_by_role("alert")).to_be_visible()
    chat.reload()
    expect(chat.get_by_role("alert")).to_contain_text("The prompt has 5000 tokens")


# rule: Endpoints: The chat page streams, stops, tries again, keeps its chats in the browser, and waits for a server
#     that starts
def test_a_server_that_starts_is_waited_for_with_its_stage(open_page, fake):
    fake.stage, fake.done = "weights", 0.25
    fake.replies = [Reply(told("Here I am."))]
    page = open_page(fake.url)
    banner = page.locator("#banner")
    expect(banner).to_contain_text("Loading the weights … 25 %")
    expect(banner.locator("progress")).to_have_js_property("value", 0.25)
    expect(page.locator("#model")).to_have_value("fake")  # the name is known before
    say(page, "Hello")
    expect(page.locator(".waiting")).to_contain_text("Waiting for the server")
    fake.done = 0.75
    expect(banner).to_contain_text("75 %")
    fake.stage, fake.done = "self_test", 0.0
    expect(banner).to_contain_text("Testing itself")
    fake.stage, fake.done = "ready", 1.0
    expect(page.locator(".assistant .text")).to_have_text("Here I am.")
    expect(banner).to_be_hidden()
    finished(page)
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("#welcome-text")).to_contain_text("4,096 tokens")  # the context only now


def test_waiting_for_a_start_can_be_stopped(open_page, fake):
    fake.stage, fake.done = "weights", 0.25
    page = open_page(fake.url)
    say(page, "Hello")
    expect(page.locator(".waiting")).to_be_visible()
    page.keyboard.press("Escape")
    finished(page)
    expect(page.locator(".figures")).to_have_text("stopped")


def test_a_key_is_asked_for_kept_in_the_tab_and_sent(open_page):
    with serving(FakeServer(key="secret")) as fake:
        fake.replies = [Reply(told("Welcome."))]
        page = open_page(fake.url)
        dialog = page.locator("#key-dialog")
        expect(dialog).to_be_visible()
        page.get_by_label("API key", exact=True).fill("wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#key-note")).to_have_text("The server does not know this key.")
        page.get_by_label("API key", exact=True).fill("secret")
        page.keyboard.press("Enter")
        expect(page.locator("#model")).to_have_value("fake")
        expect(dialog).to_be_hidden()
        say(page, "Hello")
        expect(page.locator(".assistant .text")).to_have_text("Welcome.")
        assert "secret" not in page.evaluate("() => JSON.stringify(localStorage)")
        page.reload()
        expect(page.locator("#model")).to_have_value("fake")
        expect(dialog).to_be_hidden()


def test_a_key_that_is_asked_for_in_mid_chat_lets_the_turn_go_on(open_page):
    with serving(FakeServer(key="secret")) as fake:
        fake.replies = [Reply(told("Welcome."))]
        page = open_page(fake.url)
        page.get_by_label("API key", exact=True).fill("secret")
        page.keyboard.press("Enter")
        expect(page.locator("#model")).to_have_value("fake")
        page.evaluate("() => sessionStorage.clear()")
        say(page, "Hello")
        page.get_by_label("API key", exact=True).fill("secret")
        page.keyboard.press("Enter")
        expect(page.locator(".assistant .text")).to_have_text("Welcome.")


def test_a_server_that_is_gone_is_said_and_found_again(chat, fake):
    fake.replies = [Reply(told("Back."))]
    chat.context.set_offline(True)
    say(chat, "Hello")
    expect(chat.get_by_role("alert")).to_contain_text("The server does not answer.")
    expect(chat.locator("#banner")).to_contain_text("trying again")
    chat.context.set_offline(False)
    expect(chat.locator("#banner")).to_be_hidden()
    chat.get_by_role("button", name="Try again").click()
    expect(chat.locator(".assistant .text")).to_have_text("Back.")
