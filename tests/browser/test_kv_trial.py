"""/kv on the demo model: twenty prompts that begin alike, a large pool seen near by, kinds of layers, axe."""

import json
import re
from array import array

import httpx
import pytest
from playwright.sync_api import expect

from engine.interface.kv_snapshot import KvKind, KvRequest, KvSnapshot
from tests.browser.test_kv_page import live
from tests.support.fakes import FakeEngineClient, FakeLauncherChannel
from tests.unit.server.conftest import Harness, serving, write_model_folder


class SparseClient(FakeEngineClient):
    """Answers like an engine with 20,000 blocks, of which two kinds of layers use a few."""

    num_steps: int | None = None  # made since the start; None: one with each snapshot

    async def kv_snapshot(self) -> KvSnapshot:
        self.num_kv_asks += 1
        row = KvRequest("chatcmpl-aa-0", "running", 1, 40, 0, 640, 640, 0, 0, 1.0, 0)
        step_id = self.num_kv_asks if self.num_steps is None else self.num_steps
        return KvSnapshot(
            step_id=step_id, now_s=0.0, cost_s=0.001, num_blocks=20_000, block_size=16,
            bytes_per_block=1 << 20, num_used=40, num_shared=0, num_cached=10, requests=[row], num_unlisted=0,
            runs=array("i", [101, 40]).tobytes(), cached_runs=array("i", [300, 10]).tobytes(), num_queried_tokens=640,
            num_hit_tokens=0, num_evictions=0, num_preemptions=0,
            kinds=[KvKind("full", 30, 6), KvKind("window", 10, 4)],
        )  # fmt: skip


@pytest.fixture
def serve(tmp_path):
    """Return a function that serves an engine client's snapshots and returns the address."""
    opened = []

    def serve_one(client):
        app = Harness(write_model_folder(tmp_path / "model"), client, FakeLauncherChannel())
        opened.append(serving(app.app))
        return opened[-1].__enter__()

    yield serve_one
    for one in opened:
        one.__exit__(None, None, None)


def test_twenty_prompts_with_one_beginning_start_sooner_than_the_first(daemon, open_page):
    page = live(open_page, daemon.base_url)
    go = page.locator("#trial-go")
    go.click()
    expect(go).to_have_text("Send them again", timeout=120_000)
    expect(page.locator("#trial-said")).to_have_text(
        re.compile(r"Time to the first token: .+ for the first, .+ others.*They found 1,024 of 1,0\d\d prompt tokens")
    )
    expect(page.locator("#trial-bars i:not(.wait)")).to_have_count(20)
    titles = page.locator("#trial-bars i").evaluate_all("(bars) => bars.map((bar) => bar.title)")
    assert [title.endswith(" 0 tokens cached") for title in titles] == [True] + 19 * [False]


def test_a_trial_that_cannot_be_had_says_why(serve, open_page):
    page = live(open_page, serve(SparseClient()))
    page.route("**/v1/completions", lambda route: route.fulfill(status=400, json={"error": {"message": "No room."}}))
    page.locator("#trial-go").click()
    expect(page.locator("#trial-said")).to_have_text("No room.")
    expect(page.locator("#trial-said")).to_have_class("wrong")
    expect(page.locator("#trial-go")).to_have_text("Send them again")


def test_a_large_pool_of_which_little_is_used_is_seen_near_by(serve, open_page):
    page = live(open_page, serve(SparseClient()))
    zoom = page.locator("#zoom")
    expect(zoom).to_have_attribute("aria-pressed", "true")
    expect(page.locator("#in-sight")).to_have_text("blocks 101 to 518 are in sight")
    page.locator("#blocks").hover(position={"x": 5, "y": 5})
    expect(page.locator("#tip")).to_contain_text("Block 101")
    zoom.click()
    expect(zoom).to_have_attribute("aria-pressed", "false")
    expect(page.locator("#in-sight")).to_be_empty()
    page.locator("#blocks").focus()
    page.keyboard.press("Shift+End")
    expect(page.locator("#tip")).to_contain_text("Block 20,000")


def test_the_blocks_in_sight_are_named_before_anything_changes(serve, open_page):
    """An idle engine sends one snapshot, and then only that nothing has changed."""
    client = SparseClient()
    client.num_steps = 0
    page = live(open_page, serve(client))
    expect(page.locator("#zoom")).to_have_attribute("aria-pressed", "true")
    expect(page.locator("#in-sight")).to_have_text("blocks 101 to 518 are in sight")
    assert page.locator("#status-text").inner_text() == "Live · step 0"


def test_kinds_of_layers_are_told_apart_where_there_are_several(serve, open_page, daemon):
    page = live(open_page, serve(SparseClient()))
    expect(page.locator("#kind-rows > div")).to_have_text(
        ["Full attention30 held, 6 cached", "Sliding window10 held, 4 cached"]
    )
    page = live(open_page, daemon.base_url)
    expect(page.locator("#kinds")).to_be_hidden()


def test_what_is_behind_the_pool_is_shown_where_the_snapshot_has_it(serve, open_page):
    url = serve(SparseClient())
    answer = httpx.get(f"{url}/kv/snapshot").json()
    counts = {"num_incoming": 2, "num_outgoing": 0, "num_waiting": 1, "num_hit_tokens": 640, "num_evictions": 3}
    host = {"name": "host", "num_blocks": 12, "bytes": 3 << 20, "max_bytes": 12 << 20, "num_errors": 0, **counts}
    answer["tiers"] = [host | {"is_paused": False}, host | {"name": "disk", "num_errors": 1, "is_paused": True}]
    answer["requests"][0] |= {"num_host_blocks": 4, "num_disk_blocks": 0}
    page = open_page("about:blank")
    body = f"event: snapshot\ndata: {json.dumps(answer)}\n\n"
    page.route("**/kv/stream", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    page.goto(f"{url}/kv")
    rows = page.locator("#tier-rows > div")
    expect(rows).to_contain_text(["Host memory3.0 MiB of 12.0 MiB, 12 blocks", "left alone after errors"])
    expect(rows.first).to_contain_text("2 to it · 1 request waits for it · 640 tokens hit · 3 evicted")
    state = page.locator("#requests tr[data-key] td").nth(1)
    expect(state).to_have_attribute("title", "waits for 4 blocks from host memory")


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_in_either_theme_on_a_phone_or_a_desk(serve, open_page, scheme, width):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    url = serve(SparseClient())
    page = live(open_page, url, color_scheme=scheme, viewport={"width": width, "height": 844})
    expect(page.locator("#requests tr[data-key]")).to_have_count(1)
    found = axe.run(page).response["violations"]
    assert [(one["id"], [node["target"] for node in one["nodes"]]) for one in found] == []
