"""Answers as they are drawn: no markup of a model's ever runs, and what is shown does not change its mind."""

from collections.abc import Callable

import pytest
from playwright.sync_api import Page

from tests.support.daemon import ROOT

PAGE = ROOT / "server" / "pages" / "chat"
ANSWER = """\
Keys and **values** are *kept*, so `one step` is ~~enough~~ all. 2 * 3 is 6.
A second line, __too__, and [a link](https://example.org/a_b?c=1) with &amp; in it.

## A **heading**

| Name | Value |
|:--|--:|
| **a** | `1` |
| b_c | 2<br>3 |

1. First, *then*
2. second:
   - inner `code`
   - more
10. tenth

- [x] done
- [ ] to do

```python
def f(x: int) -> int:
    return x ** 2  # `no` **marks** here

print(f(3))
```

> Quoted **text**
> over two lines

---

Text
---

A last * star, an_underscored_name and <b>no tag</b>.
"""
HOSTILE = """\
<script>window.hacked = 1</script>
<img src=x onerror="window.hacked = 1">
<svg onload="window.hacked = 1"><style>body { display: none }</style>

<iframe src="javascript:window.hacked=1"></iframe>

[one](javascript:window.hacked=1) [two](data:text/html,<script>window.hacked=1</script>) [three](/v1/models)
![image](https://example.org/x.png) <https://example.org/ok> &lt;script&gt; &#60;b&#62;

| <script>window.hacked = 1</script> | b |
|---|---|
| <img src=x onerror=window.hacked=1> | [x](vbscript:x) |

```html"><img src=x onerror=window.hacked=1>
</code></pre><script>window.hacked = 1</script>
```
"""


@pytest.fixture
def drawn(open_page: Callable[..., Page]) -> Page:
    """Return a page with the renderer alone; draw(text, isWhole) shows a text."""
    page = open_page("about:blank")
    page.set_content("<!doctype html>")  # Temml draws no formulas in quirks mode
    libraries = ("vendor/marked.js", "vendor/highlight.js", "vendor/temml.js")
    names = (*libraries, "dom.js", "libraries.js", "colours.js", "math.js", "markdown.js")
    for name in names:
        page.add_script_tag(content=(PAGE / name).read_text(encoding="utf-8"))
    page.evaluate("""() => {
        window.root = element("div");
        document.body.append(root);
        window.markdown = new Markdown(root);
    }""")
    return page


# rule: Endpoints: Markup that a model writes does not run, and text shown of a growing answer is not taken back
def test_markup_of_a_model_is_text(drawn):
    drawn.evaluate("(text) => markdown.show(text, true)", HOSTILE)
    assert drawn.evaluate("() => window.hacked") is None
    dangerous = "script, img, svg:not(button svg), style, iframe, [onerror], [onload]"
    assert drawn.evaluate("(what) => root.querySelectorAll(what).length", dangerous) == 0
    links = drawn.evaluate("() => [...root.querySelectorAll('a')].map((link) => link.href)")
    assert links == ["https://example.org/x.png", "https://example.org/ok"]
    assert all("noopener" in rel for rel in drawn.evaluate("() => [...root.querySelectorAll('a')].map((a) => a.rel)"))
    text = drawn.evaluate("() => root.textContent")
    for shown in (
        "<script>window.hacked = 1</script>",
        '<img src=x onerror="window.hacked = 1">',
        "<b>",
        "</code></pre>",
    ):
        assert shown in text


def test_an_answer_is_drawn_as_what_it_means(drawn):
    drawn.evaluate("(text) => markdown.show(text, true)", ANSWER)
    found = drawn.evaluate("() => [...root.children].map((node) => node.className || node.tagName)")
    assert found == ["P", "H3", "table", "OL", "UL", "code", "BLOCKQUOTE", "HR", "P", "HR", "P"]
    texts = drawn.evaluate(
        """(kinds) => Object.fromEntries(kinds.map(
            (what) => [what, [...root.querySelectorAll(what)].map((node) => node.textContent)]))""",
        ["strong", "em", "td br", "pre code", "li.task input"],
    )
    assert texts["strong"] == ["values", "too", "heading", "a", "text"]
    assert texts["em"] == ["kept", "then"]
    assert len(texts["td br"]) == 1
    assert len(texts["li.task input"]) == 2
    code = "def f(x: int) -> int:\n    return x ** 2  # `no` **marks** here\n\nprint(f(3))"
    assert texts["pre code"] == [code]
    assert "2 * 3 is 6" in drawn.evaluate("() => root.firstChild.textContent")
    assert "with & in it" in drawn.evaluate("() => root.firstChild.textContent")


# rule: Endpoints: Markup that a model writes does not run, and text shown of a growing answer is not taken back
def test_what_is_shown_of_a_growing_answer_does_not_change_its_mind(drawn):
    """After every character, a beginning of the whole is shown: no mark flashes up, no block becomes another."""
    drawn.evaluate("(text) => markdown.show(text, true)", ANSWER)
    whole_text, whole_blocks = drawn.evaluate(
        "() => [root.textContent, [...root.children].map((node) => node.tagName)]"
    )
    drawn.evaluate("() => { root.replaceChildren(); window.markdown = new Markdown(root); }")
    steps = drawn.evaluate(
        """(text) => [...text].map((_, i) => {
            markdown.show(text.slice(0, i + 1), false);
            return [root.textContent, [...root.children].map((node) => node.tagName)];
        })""",
        ANSWER,
    )
    for i, (text, blocks) in enumerate(steps):
        assert blocks == whole_blocks[: len(blocks)], ANSWER[: i + 1]
        assert whole_text.startswith(text), ANSWER[: i + 1]
    lengths = [len(text) for text, _ in steps]
    assert lengths == sorted(lengths)
    assert lengths[-1] > len(whole_text) * 0.99


def test_a_streamed_answer_is_the_whole_one(drawn):
    drawn.evaluate("(text) => markdown.show(text, true)", ANSWER)
    whole = drawn.evaluate("() => root.innerHTML")
    for size in (1, 7, 40):
        grown = drawn.evaluate(
            """([text, size]) => {
                root.replaceChildren();
                const growing = new Markdown(root);
                for (let end = size; end < text.length; end += size) growing.show(text.slice(0, end), false);
                growing.show(text, true);
                return root.innerHTML;
            }""",
            [ANSWER, size],
        )
        assert grown == whole


def test_what_is_selected_in_settled_text_stays_while_more_comes(drawn):
    drawn.evaluate("() => markdown.show('First paragraph.\\n\\nSecond **one** and', false)")
    drawn.evaluate("() => { window.first = root.firstChild; window.bold = root.querySelector('strong'); }")
    drawn.evaluate("() => markdown.show('First paragraph.\\n\\nSecond **one** and more', false)")
    assert drawn.evaluate("() => [first === root.firstChild, bold === root.querySelector('strong')]") == [True, True]


@pytest.mark.parametrize(
    "text",
    ["*a " * 20_000, "_a_" * 10_000, "[" * 30_000, "` " * 20_000, "> " * 3_000 + "a", "**a" * 5_000, "![[" * 9_000],
    ids=["stars", "emphasis", "brackets", "ticks", "quotes", "double stars", "images"],
)
def test_a_model_that_repeats_itself_does_not_break_the_page(drawn, text):
    for is_whole in (False, True):
        drawn.evaluate("([text, isWhole]) => markdown.show(text, isWhole)", [text, is_whole])
    assert drawn.evaluate("() => root.textContent.length") > 0


def test_lists_nested_without_end_are_drawn_as_far_as_they_can_be_read(drawn):
    drawn.evaluate("(text) => markdown.show(text, true)", "".join("  " * i + "- a\n" for i in range(200)))
    assert drawn.evaluate("() => root.textContent.match(/a/g).length") == 200
    assert 10 < drawn.evaluate("() => root.querySelectorAll('ul').length") < 50


FORMULAS = r"""Inline \(a_1 * b_2 * c\) and $x^2 + *y*$, prices $5, $6 and $7.50 each, $n$-th, and \[z\_1\] here.

\[
\begin{aligned} a &= b \\ c &= d_1 \end{aligned}
\]

$$\frac{1}{2}$$

Not math: a_b \* c, `$x$ and \(y\)`, 100$ in one and 2$ more.

```tex
$$ x $$ \[ y
```

- In a list: $\alpha$.

| $a$ | b |
|---|---|
| \(b^2\) | $c$ |

\begin{align}
e &= mc^2
\end{align}
"""


def test_formulas_keep_every_backslash_and_prices_are_no_formulas(drawn):
    drawn.evaluate("(text) => markdown.show(text, true)", FORMULAS)
    sources = drawn.evaluate(
        """() => {
            const seen = [];
            const render = temml.render;
            temml.render = (tex, ...others) => { seen.push(tex); return render(tex, ...others); };
            markdown.again(markdown.blocks.map(({ raw }) => raw).join("\\n\\n"), true);
            temml.render = render;
            return seen;
        }"""
    )
    assert sources == [
        r"a_1 * b_2 * c", "x^2 + *y*", "n", r"z\_1", "\\begin{aligned} a &= b \\\\ c &= d_1 \\end{aligned}",
        r"\frac{1}{2}", r"\alpha", "a", "b^2", "c", "\\begin{align}\ne &= mc^2\n\\end{align}",
    ]  # fmt: skip
    assert drawn.locator("math").count() == len(sources)
    text = drawn.evaluate("() => root.textContent")
    for shown in ("prices $5, $6 and $7.50 each", "a_b * c, $x$ and \\(y\\), 100$ in one and 2$ more", "$$ x $$ \\[ y"):
        assert shown in text
    assert drawn.evaluate("() => root.querySelectorAll('em, strong').length") == 0


def test_a_formula_that_cannot_be_read_stays_as_it_was_written(drawn):
    drawn.evaluate("(text) => markdown.show(text, true)", r"So $\frac{1}$ and \(\href{javascript:x}{y}\).")
    assert drawn.evaluate("() => [...root.querySelectorAll('.math code')].map((one) => one.textContent)")[:1] == [
        r"$\frac{1}$"
    ]
    assert drawn.evaluate("() => root.querySelectorAll('[href]').length") == 0


@pytest.mark.parametrize("size", [1, 7, 40])
def test_a_growing_formula_is_shown_when_it_is_whole(drawn, size):
    drawn.evaluate("(text) => markdown.show(text, true)", FORMULAS)
    whole = drawn.evaluate("() => root.innerHTML")
    grown, halves = drawn.evaluate(
        """([text, size]) => {
            root.replaceChildren();
            const growing = new Markdown(root);
            const halves = [];
            for (let end = size; end < text.length; end += size) {
                growing.show(text.slice(0, end), false);
                const copy = root.cloneNode(true);
                for (const node of copy.querySelectorAll(".math, code")) node.remove();
                if (/\\\\[([\\])a-z]/.test(copy.textContent)) halves.push(copy.textContent);
            }
            growing.show(text, true);
            return [root.innerHTML, halves];
        }""",
        [FORMULAS, size],
    )
    assert grown == whole
    assert halves == []


@pytest.mark.parametrize("text", ["$a " * 20_000, "\\(a " * 20_000, "$$" * 9_000, "\\[\n" * 9_000, "$1.0 " * 9_000])
def test_half_formulas_without_end_do_not_break_the_page(drawn, text):
    for is_whole in (False, True):
        drawn.evaluate("([text, isWhole]) => markdown.show(text, isWhole)", [text, is_whole])
    assert drawn.evaluate("() => root.textContent.length") > 0
