"""GET /: a page for browsers, which loads nothing from elsewhere; for programs, what this server is."""

import base64
import gzip
import re
from hashlib import sha256

import pytest

from server.config.api_keys import read_key_hashes
from tests.support.daemon import ROOT
from tests.unit.server.conftest import check_error

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
HASHES = read_key_hashes(["secret-one"], file=None, environment={})


# rule: Endpoints: `/` is a page for browsers: public, empty, no loads from other hosts, under 60 kB compressed
def test_a_browser_gets_a_page(harness):
    page = harness().request("GET", "/", headers=BROWSER)
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["cache-control"] == "no-cache"
    assert "accept" in page.headers["vary"].split(", ")
    assert page.text.startswith("<!doctype html>")
    head = harness().request("HEAD", "/", headers=BROWSER)
    assert (head.status_code, head.content) == (200, b"")


# rule: Endpoints: `/` answers everybody: programs get name, version and links as JSON
@pytest.mark.parametrize(
    "accept", [None, "*/*", "application/json", "text/plain", "text/htmlx", "application/xhtml+xml"]
)
@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("keys", [[], HASHES], ids=["open", "with-keys"])
def test_what_does_not_ask_for_html_gets_name_version_and_links(harness, accept, method, keys):
    app = harness(api_key_hashes=keys)
    reply = app.request(method, "/", headers={} if accept is None else {"accept": accept})
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "application/json"
    assert "accept" in reply.headers["vary"].split(", ")
    if method == "GET":
        assert reply.json()["name"] == "Quire"
        assert reply.json()["version"] == app.get("/version").json()["version"]
        assert reply.json()["links"]["api"] == "/v1"
    else:
        assert reply.content == b""


def test_every_link_of_the_root_leads_somewhere(harness):
    app = harness()
    for name, path in app.get("/").json()["links"].items():
        assert name == "api" or app.get(path).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_other_methods_are_a_405(harness, method):
    reply = harness().request(method, "/", headers=BROWSER)
    check_error(reply, 405, "method_not_allowed")
    assert reply.headers["allow"] == "GET, HEAD"


# rule: Endpoints: `/` is a page for browsers: public, empty, no loads from other hosts, under 60 kB compressed
def test_the_page_runs_its_own_script_and_loads_nothing_from_other_hosts(harness):
    page = harness().request("GET", "/", headers=BROWSER)
    policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for tag, name in (("script", "script-src"), ("style", "style-src")):
        bodies = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", page.text, re.DOTALL)
        assert len(bodies) == 1
        assert policy[name].split()[-1] == f"'sha256-{base64.b64encode(sha256(bodies[0].encode()).digest()).decode()}'"
    assert all(re.fullmatch(r"'sha256-[\w+/]+='", source) for source in policy["script-src"].split())
    markup = re.sub(r"<(script|style).*?</\1>", "", page.text, flags=re.DOTALL)
    assert set(re.findall(r'(?:src|href|action)="([^":]*)', markup)) == {"data", "?", "kv", "docs"}
    assert not re.search(r"@import|url\(", page.text.split("</style>")[0])
    assert page.text.count("</script>") == page.text.count("<script") == 1  # a tag in the script would end it early
    assert "innerHTML" not in page.text.split("class Markdown")[1]


# rule: Endpoints: `/` is a page for browsers: public, empty, no loads from other hosts, under 60 kB compressed
def test_it_is_small_on_the_wire(harness):
    packed = harness().request("GET", "/", headers=BROWSER | {"accept-encoding": "gzip"})
    plain = harness().request("GET", "/", headers=BROWSER | {"accept-encoding": "identity"})
    refused = harness().request("GET", "/", headers=BROWSER | {"accept-encoding": "gzip;q=0"})
    assert packed.headers["content-encoding"] == "gzip"
    assert int(packed.headers["content-length"]) < 60_000
    assert "content-encoding" not in plain.headers
    assert "content-encoding" not in refused.headers
    assert packed.text == plain.text == refused.text
    assert len(gzip.compress(plain.content)) < 60_000


# rule: Endpoints: `/` is a page for browsers: public, empty, no loads from other hosts, under 60 kB compressed
def test_with_keys_set_the_empty_shell_needs_none_and_its_data_do(harness):
    app = harness(api_key_hashes=HASHES)
    assert app.request("GET", "/", headers=BROWSER).status_code == 200
    check_error(app.request("POST", "/", headers=BROWSER), 401, "invalid_api_key")
    check_error(app.request("GET", "/v1/models", headers=BROWSER), 401, "invalid_api_key")


@pytest.mark.parametrize("path", ["/", "/quire/", "/quire"])
def test_behind_a_prefix_the_page_is_there_with_and_without_it(harness, path):
    app = harness(root_path="/quire", api_key_hashes=HASHES)
    assert app.request("GET", path, headers=BROWSER).status_code == 200
    assert app.request("GET", path).json()["links"]["models"] == "/quire/v1/models"


# rule: Endpoints: `/` is a page for browsers: public, empty, no loads from other hosts, under 60 kB compressed
@pytest.mark.parametrize("name", ["highlight", "temml"])
def test_libraries_that_few_answers_need_come_apart_and_only_with_the_hash_that_the_page_names(harness, name):
    app = harness(api_key_hashes=HASHES)
    reply = app.request("GET", f"/vendor/{name}.js")
    assert (reply.status_code, reply.headers["content-type"]) == (200, "text/javascript; charset=utf-8")
    digest = base64.b64encode(sha256(reply.content).digest()).decode()
    assert f"'sha256-{digest}'" in app.request("GET", "/", headers=BROWSER).headers["content-security-policy"]
    packed = app.request("GET", f"/vendor/{name}.js", headers={"accept-encoding": "gzip"})
    assert packed.headers["content-encoding"] == "gzip"
    assert packed.content == reply.content
    again = app.request("GET", f"/vendor/{name}.js", headers={"if-none-match": reply.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_vendored_libraries_are_as_published_and_have_their_licence():
    folder = ROOT / "server" / "pages" / "chat" / "vendor"
    sums = dict(reversed(line.split()) for line in (folder / "SHA256SUMS").read_text(encoding="utf-8").splitlines())
    assert set(sums) == {path.name for path in folder.glob("*.js")}
    for name, digest in sums.items():
        text = (folder / name).read_bytes()
        assert sha256(text).hexdigest() == digest, name
        assert not re.search(rb"\beval\(|new Function\(", text), name  # the page's policy forbids both
        assert (folder / name).with_suffix(".LICENSE").is_file()
