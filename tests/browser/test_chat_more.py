"""What stands around an answer on the chat page: formulas and colours, words, blocks, code, files, search, keys."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.browser.fake_server import Chunk, FakeServer, Reply, delta, told
from tests.browser.test_chat import chat, fake, finished, say

__all__ = ["chat", "fake"]
FORMULAS = r"""The sum \(\sum_{k=1}^n k\) costs $5 or $6, and $e^{i\pi} = -1$.

\[
\int_0^1 x^2\,dx = \frac{1}{3} \\
\]

```python
def f(x):
    return x + 1
```
"""


def with_words(tokens: list[tuple[str, float, dict[str, float]]]) -> list[Chunk]:
    """Return the chunks of an answer of which each token has its log-probability and those of others."""
    chunks: list[Chunk] = []
    for text, logprob, others in tokens:
        tops = [
            {"token": one, "logprob": p, "bytes": list(one.encode())} for one, p in {text: logprob, **others}.items()
        ]
        entry = {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": tops}
        chunks.append(delta(content=text))
        chunks[-1]["choices"][0]["logprobs"] = {"content": [entry]}
    return [*chunks, delta("stop")]


def drop(page: Page, name: str, content: str) -> None:
    page.evaluate(
        """([name, content]) => {
            const data = new DataTransfer();
            data.items.add(new File([content], name));
            const event = new DragEvent("drop", { dataTransfer: data, bubbles: true });
            document.querySelector("#stage").dispatchEvent(event);
        }""",
        [name, content],
    )


def test_formulas_are_drawn_and_code_is_coloured_by_libraries_fetched_only_then(chat, fake):
    asked: list[str] = []
    chat.on("request", lambda request: asked.append(request.url))
    fake.replies = [Reply(told("Plain.")), Reply(told(FORMULAS))]
    say(chat, "Plain")
    finished(chat)
    assert not [url for url in asked if "vendor" in url]
    say(chat, "Formulas")
    finished(chat, 2)
    text = chat.locator(".assistant .text").last
    expect(text.locator("math")).to_have_count(3)
    expect(text.locator("p").first).to_contain_text("costs $5 or $6")
    expect(text.locator(".c-keyword")).to_have_text(["def", "return"])
    expect(text.locator("code")).to_have_text("def f(x):\n    return x + 1")
    assert sorted(url.rsplit("/", 1)[-1] for url in asked if "vendor" in url) == ["highlight.js", "temml.js"]
    assert all(url.startswith(fake.url) for url in asked)


def test_a_words_probability_and_what_else_it_could_have_been_is_under_the_pointer(chat, fake):
    sure = ("The **cap", -0.0001, {})
    unsure = ("ital** is", -1.2, {" city": -0.9})
    fake.replies = [Reply(with_words([sure, unsure, (" Lima", -0.3, {" Quito": -2.0})]))]
    say(chat, "Capital?")
    finished(chat)
    assert (fake.requests[0]["logprobs"], fake.requests[0]["top_logprobs"]) == (True, 5)
    box = chat.evaluate(
        """() => {
            const node = document.querySelector(".text p").lastChild;
            const range = new Range();
            range.setStart(node, node.data.indexOf("Lima"));
            range.setEnd(node, node.data.length);
            return range.getBoundingClientRect().toJSON();
        }"""
    )
    chat.mouse.move(box["x"] + 6, box["y"] + 8)
    tip = chat.locator("#word")
    expect(tip).to_contain_text("␣Lima 74.1 %")
    expect(tip.locator("li")).to_have_text(["␣Lima74.1 %", "␣Quito13.5 %"])
    chat.mouse.move(5, 400)
    expect(tip).to_be_hidden()
    marks = chat.get_by_role("button", name="Mark the words")
    marks.click()
    expect(marks).to_have_attribute("aria-pressed", "true")
    assert chat.evaluate("() => [...CSS.highlights.get('doubtful')].map(String)") == ["ital", "is"]
    chat.keyboard.press("ArrowRight")
    chat.keyboard.press("ArrowRight")
    expect(tip).to_contain_text("ital** is 30.1 %")
    chat.keyboard.press("Escape")
    expect(tip).to_be_hidden()
    expect(marks).to_have_attribute("aria-pressed", "false")


def test_a_server_without_probabilities_is_asked_again_without_them(chat, fake):
    refusal = {"message": "logprobs are not served.", "code": "unsupported", "param": "top_logprobs"}
    fake.replies = [Reply(status=400, error=refusal), Reply(told("Lima."))]
    say(chat, "Capital?")
    finished(chat)
    expect(chat.locator(".assistant .text")).to_have_text("Lima.")
    assert ["logprobs" in body for body in fake.requests] == [True, False]
    expect(chat.get_by_role("button", name="Mark the words")).to_have_count(0)


def test_a_cut_answer_goes_on_where_it_ended(chat, fake):
    fake.replies = [Reply(told("One, two", finish="length")), Reply(told(", three."))]
    say(chat, "Count")
    finished(chat)
    chat.get_by_role("button", name="Go on with the answer").click()
    expect(chat.locator(".assistant .text")).to_have_text("One, two, three.")
    finished(chat)
    body = fake.requests[1]
    assert body["continue_final_message"] is True
    assert body["messages"][-1] == {"role": "assistant", "content": "One, two"}
    expect(chat.get_by_role("button", name="Go on with the answer")).to_have_count(0)
    expect(chat.locator(".figures")).to_contain_text("· 4 tokens")  # of both requests


@pytest.mark.parametrize("language", ["curl", "Python", "JavaScript"])
def test_a_request_is_had_as_code(open_page: Callable[..., Page], fake: FakeServer, language: str):
    page = open_page(fake.url, permissions=["clipboard-read", "clipboard-write"])
    page.click("#settings-button")
    page.fill("#top_k", "20")
    page.keyboard.press("Escape")
    fake.replies = [Reply(told("Lima."))]
    say(page, 'What\'s "up"?\nTrue')
    finished(page)
    page.get_by_role("button", name="The request as code").click()
    page.get_by_role("button", name=language).click()
    page.locator("#request-copy").click()
    expect(page.locator("#request-copy")).to_contain_text("Copied")
    code = page.evaluate("() => navigator.clipboard.readText()")
    wanted = {"model": "fake", "messages": [{"role": "user", "content": 'What\'s "up"?\nTrue'}], "top_k": 20}
    if language == "curl":
        data = code[code.index("-d '") + 4 : -1].replace("'\\''", "'")
        assert json.loads(data) == wanted
        assert f"curl {fake.url}v1/chat/completions" in code
    elif language == "Python":
        del wanted["top_k"]
        assert _called(code, fake.url) == {**wanted, "extra_body": {"top_k": 20}}
    else:
        body = code[code.index("JSON.stringify(") + len("JSON.stringify(") : code.index("),\n});")]
        assert json.loads(body) == wanted


def _called(code: str, url: str) -> dict[str, Any]:
    """Run the Python with a client that only notes its arguments, and return them."""
    given: dict[str, Any] = {}
    call = code.replace("from openai import OpenAI  # pip install openai", "").rsplit("print(", 1)[0]

    class Client:
        def __init__(self, base_url: str, api_key: str) -> None:
            assert (base_url, api_key) == (f"{url}v1", "none")
            self.chat = self.completions = self

        def create(self, **arguments: Any) -> None:
            given.update(arguments)

    exec(call, {"OpenAI": Client})
    return given


def test_files_and_long_pastes_go_before_the_message(chat, fake):
    fake.replies = [Reply(told("Six."))]
    drop(chat, "sum.csv", "a,b\n1,2\n```\n")
    expect(chat.locator("#chips .name")).to_have_text(["sum.csv"])
    drop(chat, "photo.png", "\x00PNG")
    expect(chat.locator("#note")).to_contain_text("photo.png is no text")
    drop(chat, "large.txt", "x" * 300_000)
    expect(chat.locator("#note")).to_contain_text("large.txt has 293 KiB; a file may have 256 KiB")
    chat.evaluate(
        """() => {
            const data = new DataTransfer();
            data.setData("text/plain", "pasted ".repeat(600));
            const event = new ClipboardEvent("paste", { clipboardData: data, bubbles: true });
            document.querySelector("#input").dispatchEvent(event);
        }"""
    )
    expect(chat.locator("#chips .name")).to_have_text(["sum.csv", "Pasted text"])
    chat.get_by_role("button", name="Remove Pasted text").click()
    say(chat, "Sum it")
    finished(chat)
    content = "sum.csv:\n````\na,b\n1,2\n```\n````\n\nSum it"
    assert fake.requests[0]["messages"] == [{"role": "user", "content": content}]
    expect(chat.locator("#chips")).to_be_hidden()
    expect(chat.locator(".user .chip .name")).to_have_text("sum.csv")
    chat.reload()
    expect(chat.locator(".user .chip .name")).to_have_text("sum.csv")
    expect(chat.locator(".bubble")).to_have_text("Sum it")


def test_the_end_of_an_answer_stays_in_sight_when_a_file_makes_the_box_grow(chat, fake):
    fake.replies = [Reply(told("\n\n".join(f"Line {number}." for number in range(60)), size=40))]
    say(chat, "Lines")
    finished(chat)
    drop(chat, "sum.csv", "a,b\n")
    expect(chat.locator("#chips .name")).to_have_text(["sum.csv"])
    expect(chat.locator(".figures")).to_be_in_viewport()
    box, figures = chat.locator("#composer").bounding_box(), chat.locator(".figures").bounding_box()
    assert figures["y"] + figures["height"] <= box["y"]


def test_a_wide_table_does_not_squeeze_a_sentence_to_a_word_a_line(chat, fake):
    head = "|".join(f"column {number}" for number in range(9))
    cells = "|".join(["some more words"] * 8 + ["a sentence that goes on for quite a while"])
    fake.replies = [Reply(told(f"|{head}|\n|{'---|' * 9}\n|{cells}|\n", size=40))]
    say(chat, "Table")
    finished(chat)
    assert chat.locator("td").last.bounding_box()["width"] >= 160
    assert chat.locator(".table").evaluate("(node) => node.scrollWidth > node.clientWidth")


def test_chats_are_found_by_their_titles_and_their_words(chat, fake):
    fake.replies = [Reply(told("Lima, by the Rímac.")), Reply(told("Quito."))]
    for text in ("Capital of Peru?", "Capital of Ecuador?"):
        chat.get_by_role("button", name="New chat").click()
        say(chat, text)
        finished(chat)
    chat.keyboard.press("Control+k")
    expect(chat.locator("#search")).to_be_focused()
    chat.keyboard.type("rímac")
    expect(chat.locator(".chat")).to_have_count(1)
    expect(chat.locator(".chat .line")).to_have_text("Lima, by the Rímac.")
    chat.keyboard.press("Enter")
    expect(chat.locator(".bubble")).to_have_text("Capital of Peru?")
    chat.fill("#search", "nothing like it")
    expect(chat.locator("#no-chats")).to_have_text("No chat has these words.")
    chat.locator("#search").press("Escape")
    expect(chat.locator(".chat")).to_have_count(2)


def test_keys_do_what_their_list_says(open_page: Callable[..., Page], fake: FakeServer):
    page = open_page(fake.url, permissions=["clipboard-read", "clipboard-write"])
    fake.replies = [Reply(told("Lima."))]
    say(page, "Capital of Peru?")
    finished(page)
    page.keyboard.press("Control+Shift+Y")
    expect(page.locator("#said")).to_contain_text("Copied")
    assert page.evaluate("() => navigator.clipboard.readText()") == "Lima."
    page.keyboard.press("ArrowUp")
    expect(page.get_by_label("Edit the message")).to_have_value("Capital of Peru?")
    page.keyboard.press("Escape")
    page.locator("#input").blur()
    page.keyboard.press("?")
    expect(page.locator("#shortcuts")).to_be_visible()
    expect(page.locator("#shortcut-list dt")).to_have_count(10)
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    expect(page.locator("#input")).to_be_focused()
    expect(page.locator("#input")).to_have_value("")
    page.keyboard.type("what? 1/2")
    expect(page.locator("#input")).to_have_value("what? 1/2")
    page.keyboard.press("Control+,")
    expect(page.locator("#settings")).to_be_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("Control+Shift+O")
    expect(page.locator("#welcome")).to_be_visible()


def test_an_answers_blocks_light_up_and_those_of_a_shared_prefix_are_hatched(daemon, open_page):
    page = open_page(f"{daemon.base_url}/")
    question = "A quire is a gathering of leaves, folded once and sewn through the fold. " * 3
    say(page, question)
    finished(page)
    page.click("#new")
    say(page, question)
    finished(page, 1)
    strip = page.locator(".strip")
    expect(strip.locator(".own .shared").first).to_be_visible()
    shared, new = strip.locator(".own .shared").count(), strip.locator(".own .new").count()
    usage = page.locator(".figures").inner_text()
    cached = int(usage.split(" of ")[0].rsplit(" ", 1)[-1])
    assert shared == cached // 16 > 2
    assert new >= 1
    expect(page.locator(".blocks .hint")).to_contain_text(f"{shared} blocks of {shared + new} found in the KV cache")


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_in_either_theme_on_a_phone_or_a_desk(open_page, fake, scheme, width):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = open_page(fake.url, color_scheme=scheme, viewport={"width": width, "height": 844})

    def check() -> None:
        found = axe.run(page).response["violations"]
        assert [(one["id"], [node["target"] for node in one["nodes"]]) for one in found] == []

    check()
    fake.replies = [Reply(told(FORMULAS + "\n| a | b |\n|---|---|\n| 1 | 2 |\n", thoughts="Hm.", finish="length"))]
    drop(page, "notes.md", "some text\n")
    say(page, "Formulas")
    finished(page)
    expect(page.locator("math")).to_have_count(3)
    expect(page.locator(".c-keyword")).to_have_count(2)
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    check()
    page.get_by_role("button", name="The request as code").click()
    check()
    page.keyboard.press("Escape")
    page.click("#settings-button")
    check()
