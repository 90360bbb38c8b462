"""/kv in a real Chromium: what clients do is seen, by pointer, finger and keyboard, and no text of theirs is shown."""

import os
import signal
import time

import pytest

from tests.browser.large_pool import NUM_REQUESTS, HybridClient, LargePoolClient
from tests.support.daemon import Daemon, wait_for
from tests.support.fakes import FakeLauncherChannel
from tests.unit.server.conftest import Harness, serving, write_model_folder

expect = pytest.importorskip("playwright.sync_api").expect
PROMPT = "A quire is a gathering of leaves, folded once and sewn through the fold. " * 6
LIVE = "Live · step"

# How many pixels of the map have the colour of a request's row.
LOOK = """(key) => {
  const row = [...document.querySelectorAll("#requests tbody tr")].find((one) => one.dataset.key === key);
  const probe = document.createElement("canvas").getContext("2d");
  probe.fillStyle = row.querySelector("i").style.background;
  probe.fillRect(0, 0, 1, 1);
  const wanted = [...probe.getImageData(0, 0, 1, 1).data].join();
  const map = document.getElementById("blocks");
  const cells = map.getContext("2d").getImageData(0, 0, map.width, map.height).data;
  let found = 0;
  for (let i = 0; i < cells.length; i += 4) found += [...cells.slice(i, i + 4)].join() === wanted;
  return found;
}"""


def live(open_page, url, **settings):
    page = open_page(f"{url}/kv", **settings)
    expect(page.locator("#status-text")).to_contain_text(LIVE)
    return page


def snapshot_of(page):
    """Return what the page's server says now."""
    return page.evaluate("fetch('kv/snapshot').then((reply) => reply.json())")


def row_of(page, id_):
    return page.locator(f'tr[data-key="{id_}#0"]')


def point_at(page, block):
    """Move the keyboard's cursor to a block: to the first, then to it."""
    page.locator("#blocks").focus()
    page.keyboard.press("Shift+Home")
    for _ in range(block - 1):
        page.keyboard.press("ArrowRight")
    expect(page.locator("#tip")).to_contain_text(f"Block {block:,}")


def test_blocks_appear_with_a_request_and_are_free_when_it_ends(daemon, generate, open_page):
    page = live(open_page, daemon.base_url)
    expect(page.locator("#requests")).to_contain_text("No requests now")
    stream, id_ = generate(PROMPT)
    expect(row_of(page, id_)).to_contain_text("running")
    expect(page.locator("#running")).to_have_text("1")
    wait_for(lambda: page.evaluate(LOOK, f"{id_}#0") > 50, timeout_s=60, what="its colour on the map")
    held = int(row_of(page, id_).locator("td").nth(2).inner_text())
    assert held > 2
    stream.close()
    expect(row_of(page, id_)).to_have_count(0)
    expect(page.locator("#occupancy")).to_have_text("0.0%")
    assert snapshot_of(page)["pool"]["num_cached"] > 0
    assert PROMPT[:12] not in page.content()


def test_a_prefix_of_two_requests_is_seen_to_be_shared(daemon, generate, open_page):
    page = live(open_page, daemon.base_url)
    _, first = generate(PROMPT + "One.")
    _, second = generate(PROMPT + "Another one.")
    expect(row_of(page, second)).to_have_count(1)
    expect(page.locator("#shared")).not_to_have_text("0")
    expect(page.locator("#saved")).to_contain_text("saves")
    tables = {row["id"]: row["runs"] for row in snapshot_of(page)["requests"]}
    block = tables[first][0]
    point_at(page, block)
    expect(page.locator("#tip")).to_contain_text("shared by 2")
    expect(page.locator("#tip")).to_contain_text("tokens 0 to 15")
    expect(page.locator("#said")).to_contain_text("shared by 2")
    marked = page.locator("tr.pointed")
    expect(marked).to_have_count(2)


def test_keys_alone_reach_everything(daemon, generate, open_page):
    page = live(open_page, daemon.base_url)
    _, first = generate(PROMPT + "Again.")
    _, second = generate(PROMPT + "Again and again.")
    expect(row_of(page, second)).to_have_count(1)
    block = next(row["runs"][0] for row in snapshot_of(page)["requests"] if row["id"] == first)
    point_at(page, block)
    highlighted = page.locator('tr[aria-selected="true"]')
    seen = []
    for _ in range(2):
        page.keyboard.press("Enter")
        expect(highlighted).to_have_count(1)
        seen.append(highlighted.get_attribute("data-key"))
    assert {key.partition("#")[0] for key in seen} == {first, second}
    expect(page.locator("#chosen")).to_contain_text("highlighted")
    page.keyboard.press("Escape")
    expect(highlighted).to_have_count(0)
    expect(page.locator("#tip")).to_be_hidden()
    for _ in range(
        1 + 9 + 1
    ):  # the button of the trial, the heads of the columns, then the rows, of which one is a stop
        page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.tagName") == "TR"
    page.keyboard.press("ArrowDown")
    focused = page.evaluate("document.activeElement.dataset.key")
    page.keyboard.press("Enter")
    expect(highlighted).to_have_attribute("data-key", focused)
    page.wait_for_timeout(600)  # two snapshots later it is still there
    assert page.evaluate("document.activeElement.dataset.key") == focused
    assert highlighted.get_attribute("data-key") == focused


def test_a_click_highlights_and_columns_sort(daemon, generate, open_page):
    page = live(open_page, daemon.base_url)
    ids = [generate(PROMPT * size)[1] for size in (1, 3, 2)]
    for id_ in ids:
        expect(row_of(page, id_)).to_have_count(1)
    order = "[...document.querySelectorAll('#requests tbody tr')].map((row) => row.dataset.key.split('#')[0])"
    page.get_by_role("button", name="Blocks").click()
    assert page.evaluate(order) == [ids[1], ids[2], ids[0]]
    expect(page.locator("th", has_text="Blocks")).to_have_attribute("aria-sort", "descending")
    page.get_by_role("button", name="Blocks").click()
    assert page.evaluate(order) == [ids[0], ids[2], ids[1]]
    row_of(page, ids[2]).click()
    expect(row_of(page, ids[2])).to_have_attribute("aria-selected", "true")
    row_of(page, ids[2]).click()
    expect(row_of(page, ids[2])).to_have_attribute("aria-selected", "false")


# rule: Endpoints: The KV page is public and empty, runs its own script alone, and its data need the key
def test_a_server_with_keys_asks_for_one_and_keeps_it_in_the_tab(start, open_page, tmp_path):
    (tmp_path / "keys").write_text("the-right-key\nanother-key\n")
    daemon: Daemon = start("--api-key-file", str(tmp_path / "keys"), "--root-path", "/llm").wait_ready()
    page = open_page(f"{daemon.base_url}/llm/kv")
    field = page.get_by_label("API key")
    expect(field).to_be_focused()
    expect(page.locator("#main")).to_be_hidden()
    field.fill("a-wrong-key")
    field.press("Enter")
    expect(page.locator("#key-note")).to_have_text("That key was not accepted.")
    field.fill("the-right-key")
    page.get_by_role("button", name="Show the cache").click()
    expect(page.locator("#status-text")).to_contain_text(LIVE)
    expect(page.locator("#main")).to_be_visible()
    page.reload()
    expect(page.locator("#status-text")).to_contain_text(LIVE)
    assert page.url == f"{daemon.base_url}/llm/kv"
    assert page.context.cookies() == []
    stranger = page.context.new_page()  # another tab
    stranger.goto(f"{daemon.base_url}/llm/kv")
    expect(stranger.get_by_label("API key")).to_be_visible()
    assert "the-right-key" not in daemon.log


def test_an_engine_that_dies_and_a_server_that_ends_are_told(start, open_page):
    daemon: Daemon = start("--drain-timeout", "10").wait_ready()
    page = live(open_page, daemon.base_url)
    os.kill(daemon.child("engine.process"), signal.SIGKILL)
    expect(page.locator("#notice")).to_contain_text("Engine")
    expect(page.locator("#status-text")).to_contain_text(LIVE, timeout=60_000)
    expect(page.locator("#notice")).to_be_hidden()
    daemon.process.send_signal(signal.SIGTERM)
    expect(page.locator("#status")).to_have_attribute("data-kind", "offline")
    assert daemon.process.wait(8) == 0
    expect(page.locator("#status-text")).to_have_text("The server does not answer")
    page.goto("about:blank")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_follow_the_system_until_somebody_says_otherwise(daemon, open_page, scheme):
    page = live(open_page, daemon.base_url, color_scheme=scheme)
    theme = "document.documentElement.dataset.theme"
    assert page.evaluate(theme) == scheme
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.emulate_media(color_scheme="dark" if scheme == "light" else "light")
    page.wait_for_function(f"() => {theme} !== '{scheme}'")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != ground
    toggle = page.locator("#theme")
    for wanted in ("light", "dark"):
        toggle.click()
        assert page.evaluate(theme) == wanted
    page.reload()
    page.wait_for_function(f"() => {theme} === 'dark'")


def test_it_fits_a_phone_and_a_finger(daemon, generate, open_page):
    phone = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True, "device_scale_factor": 3}
    page = live(open_page, daemon.base_url, **phone)
    _, id_ = generate(PROMPT)
    expect(row_of(page, id_)).to_have_count(1)
    assert page.evaluate("document.scrollingElement.scrollWidth <= innerWidth")
    assert page.evaluate(
        "document.querySelector('.scroll').scrollWidth <= document.querySelector('.scroll').clientWidth"
    )
    page.locator("#blocks").tap(position={"x": 7, "y": 7})
    expect(page.locator("#tip")).to_contain_text("Block 1")
    box = page.locator("#tip").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 360


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Serve 40,000 blocks and 500 requests that change four times a second."""
    client = LargePoolClient()
    app = Harness(write_model_folder(tmp_path_factory.mktemp("model")), client, FakeLauncherChannel())
    with serving(app.app) as url:
        yield url, client


def test_a_large_pool_is_drawn_sorted_and_pointed_at(large, open_page):
    url, _ = large
    page = live(open_page, url)
    expect(page.locator("#requests tbody tr")).to_have_count(NUM_REQUESTS)
    expect(page.locator("#shared")).to_have_text("300")
    map_ = page.locator("#blocks").bounding_box()
    assert map_["height"] < 620
    page.locator("#blocks").hover(position={"x": 5, "y": 5})
    expect(page.locator("#tip")).to_contain_text("Block")
    page.get_by_role("button", name="Age").click()  # ascending
    expect(page.locator("#requests tbody tr").first).to_have_attribute("data-key", "chatcmpl-0000000000000000#0")
    page.locator(".scroll").evaluate("(scroll) => scroll.scrollTo(0, 1e6)")
    cells = page.locator("#requests tbody tr").last.locator("td")
    expect(cells.nth(2)).not_to_have_text("")
    first = page.locator("#status-text").inner_text()
    expect(page.locator("#status-text")).not_to_have_text(first)


def test_a_hidden_or_paused_page_asks_for_nothing(large, open_page):
    url, client = large
    page = live(open_page, url)

    def is_quiet():
        before = client.num_kv_asks
        time.sleep(0.8)
        return client.num_kv_asks == before

    wait_for(lambda: not is_quiet(), timeout_s=60, what="a page that asks")
    page.get_by_role("button", name="Pause").click()
    expect(page.locator("#status-text")).to_have_text("Paused")
    wait_for(is_quiet, timeout_s=60, what="a page that asks for nothing")
    page.get_by_role("button", name="Resume").click()
    expect(page.locator("#status-text")).to_contain_text(LIVE)
    hide = "(isHidden) => { Object.defineProperty(document, 'hidden', { value: isHidden, configurable: true });"
    hide += " document.dispatchEvent(new Event('visibilitychange')); }"
    page.evaluate(hide, True)
    wait_for(is_quiet, timeout_s=60, what="a page that asks for nothing")
    page.evaluate(hide, False)
    wait_for(lambda: not is_quiet(), timeout_s=60, what="a page in sight")


def test_the_time_line_fills_and_can_be_read(large, open_page):
    url, _ = large
    page = live(open_page, url)
    page.wait_for_timeout(1500)
    assert "now" in page.locator("#timeline").get_attribute("aria-label")
    box = page.locator("#timeline").bounding_box()
    page.mouse.move(box["x"] + box["width"] - 16, box["y"] + 40)
    expect(page.locator("#then")).to_contain_text("500 running")


def test_states_are_shown_of_models_that_have_them_alone(large, open_page, tmp_path):
    app = Harness(write_model_folder(tmp_path / "model"), HybridClient(), FakeLauncherChannel())
    with serving(app.app) as url:
        page = live(open_page, url)
        expect(page.locator("#states-tile")).to_contain_text("2 live")
        expect(page.locator("#saved-states")).to_have_text("2 saved, 6.0 MiB")
        expect(page.get_by_role("button", name="Saved states")).to_be_visible()
        expect(row_of(page, "chatcmpl-aa").locator("td.states")).to_have_text("16 → 32")
        expect(row_of(page, "chatcmpl-aa").locator("td").nth(6)).to_have_attribute(
            "title", "what follows was overwritten"
        )
        point_at(page, 4)
        expect(page.locator("#tip")).to_contain_text("live state, page 2 of 3")
        point_at(page, 7)
        expect(page.locator("#tip")).to_contain_text("tokens 16 to 31")
    page = live(open_page, large[0])
    expect(page.locator("#states-tile")).to_be_hidden()
    expect(page.get_by_role("button", name="Saved states")).to_be_hidden()


def test_what_moves_stands_still_for_who_wants_it(daemon, open_page):
    page = live(open_page, daemon.base_url, reduced_motion="reduce")
    assert page.evaluate("getComputedStyle(document.querySelector('.bar i')).transitionDuration") == "0s"
