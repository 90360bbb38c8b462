"""/docs in a real Chromium: every endpoint with its fields, and an example that can be sent."""

import pytest
from playwright.sync_api import expect

from tests.support.daemon import Daemon


def of(page, id_):
    return page.locator(f"#{id_}")


def test_every_endpoint_is_there_with_its_fields_and_what_they_mean(daemon, open_page):
    page = open_page(f"{daemon.base_url}/docs")
    document = page.evaluate("fetch('openapi.json').then((reply) => reply.json())")
    expect(page.locator(".endpoint")).to_have_count(sum(len(ways) for ways in document["paths"].values()))
    row = of(page, "post-v1-chat-completions").locator("tr", has=page.get_by_text("temperature", exact=True))
    expect(row).to_contain_text("How freely tokens are drawn")
    expect(row).to_contain_text("≤ 2")
    expect(row.locator("td").first).not_to_contain_text("required")
    first = of(page, "post-v1-chat-completions").locator(".fields tbody tr").first
    expect(first).to_contain_text("messagesrequired")
    empty = page.locator(".fields td:nth-child(3), .schema td:nth-child(3)").evaluate_all(
        "(cells) => cells.filter((cell) => !cell.textContent).length"
    )
    assert empty == 0
    hrefs = page.locator("main a[href^='#']").evaluate_all(
        "(links) => links.map((a) => a.getAttribute('href').slice(1))"
    )
    assert page.evaluate("(ids) => ids.filter((id) => !document.getElementById(id))", hrefs) == []


def test_contents_are_found_by_path_and_by_field(daemon, open_page):
    page = open_page(f"{daemon.base_url}/docs")
    page.fill("#search", "thinking_token_budget")
    expect(page.locator("#list a:visible")).to_have_text(
        ["POST/v1/chat/completions", "POST/v1/chat/completions/render"]
    )
    page.locator("#list a:visible").first.click()
    assert page.evaluate("location.hash") == "#post-v1-chat-completions"


def test_an_example_is_sent_and_its_answer_shown(daemon, open_page):
    page = open_page(f"{daemon.base_url}/docs", permissions=["clipboard-read", "clipboard-write"])
    chat = of(page, "post-v1-chat-completions")
    chat.get_by_role("button", name="Send").click()
    expect(chat.locator(".status")).to_contain_text("200 OK")
    expect(chat.locator(".result pre")).to_contain_text("Lima")
    chat.get_by_role("button", name="Stream").click()
    chat.get_by_role("button", name="Send").click()
    expect(chat.locator(".result pre")).to_contain_text("data: [DONE]")
    chat.locator("textarea").fill('{"messages": []}')
    chat.get_by_role("button", name="Send").click()
    expect(chat.locator(".status.bad")).to_contain_text("400")
    chat.get_by_role("button", name="Copy as curl").click()
    assert page.evaluate("navigator.clipboard.readText()") == (
        f"curl '{daemon.base_url}/v1/chat/completions' \\\n  -H 'Content-Type: application/json' \\\n"
        "  -d '{\"messages\": []}'"
    )
    model = of(page, "get-v1-models-model_id")
    model.get_by_role("button", name="Send").click()
    expect(model.locator(".status.bad")).to_have_text("model_id is missing.")
    model.get_by_role("textbox", name="model_id").fill("quire-demo")
    model.get_by_role("button", name="Send").click()
    expect(model.locator(".result pre")).to_contain_text('"max_model_len": 2048')


def test_a_request_to_try_is_whole_in_sight_on_a_phone(daemon, open_page):
    page = open_page(f"{daemon.base_url}/docs", viewport={"width": 390, "height": 844})
    expect(page.locator(".schema").first).to_be_attached()
    hidden = page.locator(".try textarea").evaluate_all(
        "(areas) => areas.filter((area) => area.scrollHeight > area.clientHeight + 1).map((area) => area.ariaLabel)"
    )
    assert hidden == []


def test_with_a_key_the_page_asks_for_it_and_never_writes_it_out(start, open_page, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("secret-of-the-test")
    daemon: Daemon = start("--api-key-file", str(keys))
    daemon.wait_ready()
    page = open_page(f"{daemon.base_url}/docs")
    expect(page.locator("#operations")).to_contain_text("Give an API key")
    page.fill("#key", "secret-of-the-test")
    page.press("#key", "Enter")
    chat = of(page, "post-v1-chat-completions")
    chat.get_by_role("button", name="Send").click()
    expect(chat.locator(".result pre")).to_contain_text("Lima")
    models = of(page, "get-v1-models").locator("pre").first
    expect(models).to_contain_text("$QUIRE_API_KEY")
    assert "secret-of-the-test" not in page.inner_text("body")


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_in_either_theme_on_a_phone_or_a_desk(daemon, open_page, scheme, width):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = open_page(f"{daemon.base_url}/docs", color_scheme=scheme, viewport={"width": width, "height": 844})
    expect(page.locator(".schema").first).to_be_attached()
    models = of(page, "get-v1-models")
    models.get_by_role("button", name="Send").click()
    expect(models.locator(".status")).to_contain_text("200")
    found = axe.run(page).response["violations"]
    assert [(one["id"], [node["target"] for node in one["nodes"]]) for one in found] == []
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
