"""The chat page on a real daemon with the demo model."""

import os
import re
import signal

import pytest
from playwright.sync_api import expect

from tests.browser.test_chat import finished, say
from tests.support.daemon import wait_for


def test_a_newcomer_clicks_a_question_and_gets_an_answer(daemon, open_page):
    asked = []
    page = open_page("about:blank")
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{daemon.base_url}/")
    expect(page.locator("#welcome-text")).to_contain_text("demo model, 8 million parameters")
    page.get_by_role("button", name="What is the capital of Peru?").click()
    finished(page)
    expect(page.locator(".assistant .text")).to_contain_text("Lima")
    expect(page.locator(".figures")).to_have_text(
        re.compile(r"TTFT .+ · [\d.]+ tok/s · \d+ tokens · \d+ of \d+ prompt tokens cached")
    )
    say(page, "What is the capital of France?")
    finished(page, 2)
    expect(page.locator(".assistant .text").last).to_contain_text("Paris")
    assert all(url.startswith((daemon.base_url, "blob:")) for url in asked)


def test_the_strip_shows_the_cache_filling_and_leads_to_its_page(daemon, open_page):
    page = open_page(f"{daemon.base_url}/")
    strip = page.locator("#kv")
    expect(strip).to_contain_text("KV cache")
    page.click("#settings-button")
    page.fill("#max_tokens", "1500")
    page.keyboard.press("Escape")
    say(page, "Tell me a long story about a cat, a dog and a ship, and another about the sea.")
    expect(page.locator("#kv-text")).to_have_text(re.compile(r"^[1-9]\d* / "))
    finished(page)
    expect(page.locator("#kv-text")).to_have_text(re.compile(r"^0 / "), timeout=60_000)
    strip.click()
    expect(page).to_have_url(f"{daemon.base_url}/kv")


def test_stopping_frees_the_engine(daemon, open_page):
    page = open_page(f"{daemon.base_url}/")
    page.click("#settings-button")
    page.fill("#tools", "[]")
    page.fill("#temperature", "2")
    page.keyboard.press("Escape")
    for _ in range(5):  # an answer may end by itself before the button is found
        say(page, "Tell me a long story.")
        page.locator("#send.stop").click()
        expect(page.locator("#send.stop")).to_have_count(0)
        if " abort " in daemon.log:
            break
        page.wait_for_timeout(300)
    wait_for(
        lambda: " 499 " in daemon.log or " abort " in daemon.log, timeout_s=60, what="an aborted request in the log"
    )
    wait_for(lambda: daemon.metrics()["quire_num_requests_running"] == 0, timeout_s=60, what="an idle engine")


def test_two_tabs_share_a_prefix_in_sight_until_both_are_stopped(daemon, open_page):
    cache = open_page(f"{daemon.base_url}/kv")
    expect(cache.locator("#requests")).to_contain_text("No requests now")
    first = open_page(f"{daemon.base_url}/")
    tabs = [first, first.context.new_page()]
    tabs[1].goto(f"{daemon.base_url}/")
    for tab in tabs:
        tab.route("**/v1/chat/completions", _ask_for_a_long_answer)
        say(tab, "A quire is a gathering of leaves, folded once and sewn through the fold. " * 6)
        expect(tab.locator(".assistant .text").last).not_to_be_empty()
    rows = cache.locator("#requests tr[data-key]")
    expect(rows).to_have_count(2)
    expect(cache.locator("#shared")).to_have_text(re.compile(r"^[1-9]\d*$"))
    expect(rows.nth(0).locator("td").nth(3)).to_have_text(cache.locator("#shared").inner_text())
    expect(rows.nth(1).locator("td").nth(3)).to_have_text(cache.locator("#shared").inner_text())
    for tab in tabs:
        tab.locator("#send.stop").click()
    expect(rows).to_have_count(0)
    expect(cache.locator("#shared")).to_have_text("0")
    expect(cache.locator("#occupancy")).to_have_text("0.0%")


def _ask_for_a_long_answer(route):
    """Let an answer last until it is stopped: the page has no such setting."""
    route.continue_(post_data={**route.request.post_data_json, "ignore_eos": True, "max_tokens": 1500})


def test_thinking_can_be_switched_on_where_the_template_has_a_switch(daemon, open_page):
    page = open_page(f"{daemon.base_url}/")
    page.click("#settings-button")
    page.select_option("#reasoning_effort", "medium")
    page.fill("#temperature", "0")
    page.wait_for_timeout(300)
    expect(page.locator("#thinking-note")).to_be_hidden()
    page.keyboard.press("Escape")
    say(page, "What is the capital of Peru?")
    finished(page)
    expect(page.locator(".thinking summary")).to_contain_text("Thought")
    assert page.locator(".thinking").get_attribute("open") is None
    expect(page.locator(".assistant .text")).to_contain_text("Lima")


@pytest.mark.parametrize("max_replays", [0, 2])
def test_an_engine_dies_under_an_answer(start, open_page, max_replays):
    """The answer goes on with the next engine; without replays the page says so, and the turn can be tried again."""
    daemon = start("--max-replays", str(max_replays)).wait_ready()
    page = open_page(f"{daemon.base_url}/")
    expect(page.locator("#model")).to_have_value("quire-demo")
    os.kill(daemon.child("engine.process"), signal.SIGSTOP)  # so that the answer does not end first
    say(page, "What is the capital of Peru?")
    page.wait_for_timeout(1500)
    os.kill(daemon.child("engine.process"), signal.SIGKILL)
    if not max_replays:
        expect(page.get_by_role("alert")).to_contain_text("engine", timeout=60_000)
        page.get_by_role("button", name="Try again").click()
    expect(page.locator(".assistant .text")).to_contain_text("Lima", timeout=60_000)


def test_the_example_tool_is_called_and_its_result_read(daemon, open_page):
    page = open_page(f"{daemon.base_url}/")
    page.click("#settings-button")
    page.get_by_role("button", name="Put in an example").click()
    expect(page.locator("#tools-note")).to_contain_text("1 tool")
    page.fill("#temperature", "0")
    page.get_by_role("button", name="Done").click()
    say(page, "What is the weather in Paris?")
    expect(page.locator(".call-name")).to_have_text("get_weather")
    expect(page.locator(".call code")).to_have_text('{\n  "city": "Paris"\n}')
    page.get_by_label("Result of get_weather").fill('{"temperature": 21, "sky": "sunny"}')
    page.keyboard.press("Enter")
    finished(page, 2)
    expect(page.locator(".assistant .text").last).to_contain_text("21")


# rule: Endpoints: The chat page streams, stops, tries again, keeps its chats in the browser, and waits for a server
#     that starts
@pytest.mark.parametrize("path", ["/quire/", "/quire"])
def test_behind_a_prefix_and_with_a_key(start, open_page, path):
    daemon = start("--root-path", "/quire", "--api-key", "secret").wait_ready()
    page = open_page(f"{daemon.base_url}{path}")
    page.locator("#key").fill("secret")
    page.keyboard.press("Enter")
    expect(page.locator("#model")).to_have_value("quire-demo")
    say(page, "What is the capital of Peru?")
    finished(page)
    expect(page.locator(".assistant .text")).to_contain_text("Lima")
    page.locator("#kv").click()
    expect(page).to_have_url(f"{daemon.base_url}/quire/kv")


def test_on_a_phone_nothing_is_wider_than_the_screen(daemon, open_page):
    page = open_page(f"{daemon.base_url}/", viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    page.click("#settings-button")
    page.fill("#max_tokens", "32")  # to such words the demo model writes 512, which takes a busy machine 20 seconds
    page.keyboard.press("Escape")
    say(page, "What is the capital of Peru? " + "A long word: " + "x" * 200)
    finished(page)
    assert page.evaluate("() => document.documentElement.scrollWidth") == 360
    assert page.locator("#side").is_hidden()
    page.get_by_role("button", name="Chats").click()
    expect(page.locator("#side")).to_be_visible()
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("#side")).to_be_hidden()
    expect(page.locator("#welcome")).to_be_visible()
