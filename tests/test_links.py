"""Links between the repository's Markdown pages: every relative link leads to a file, every anchor to a heading.

And the path of a request, as architecture.md has it: each file has the functions that are named beside it.
"""

import re
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"")
_EXTERNAL = re.compile(r"[a-z][a-z0-9+.-]*:|//")


def pages() -> list[Path]:
    """Return every Markdown page that git tracks, or would."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found = [ROOT / name for name in listed.stdout.splitlines()]
    found = found or [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")]
    return [path for path in found if path.exists()]


@cache
def anchors(page: Path) -> frozenset[str]:
    """Return the anchors of a page: GitHub's for its headings, and the ids that it sets itself."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    found = set(re.findall(r"<a id=\"([^\"]+)\"", text))
    counts: dict[str, int] = {}
    for heading in re.findall(r"(?m)^#{1,6} (.*)$", text):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w -]", "", words).strip().lower().replace(" ", "-")
        count = counts[slug] = counts.get(slug, -1) + 1
        found.add(f"{slug}-{count}" if count else slug)
    return frozenset(found)


def faults(page: Path) -> list[str]:
    """Return a line for each dead link of a page."""
    text = re.sub(r"`[^`\n]*`", "", _FENCE.sub("", page.read_text(encoding="utf-8")))
    found = []
    for link in (first or second for first, second in _LINK.findall(text)):
        if _EXTERNAL.match(link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        if not target.exists():
            found.append(f"{page.relative_to(ROOT)}: {link}: no such file")
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            found.append(f"{page.relative_to(ROOT)}: {link}: no such heading")
    return found


def test_every_relative_link_leads_to_a_file_and_a_heading() -> None:
    found = pages()
    assert ROOT / "README.md" in found
    dead = [fault for page in sorted(found) for fault in faults(page)]
    assert not dead, "\n" + "\n".join(dead)


def test_every_function_on_the_path_of_a_request_is_in_its_file() -> None:
    page = (ROOT / "docs/explanation/architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"(?m)^\| \d+ \| `([^`]+)` \| ([^|]+) \|", page)
    assert rows
    for path, functions in rows:
        source = (ROOT / path).read_text(encoding="utf-8")
        for name in re.findall(r"[\w.]+", functions):
            for part in name.split("."):
                assert re.search(rf"(?m)^ *(?:async def|def|class) {part}\b", source), f"{path} has no {name}"
