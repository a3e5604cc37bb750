"""The built site in a real browser: links, search, messages, formulas, accessibility, screens, themes."""

import functools
import threading
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest
from browser import Watched, axe_violations, open_browser

SITE = Path(__file__).parents[2] / "build" / "site"
# one page of each kind
KINDS = {
    "landing": "index.html",
    "chooser": "choose.html",
    "examples": "examples/index.html",
    "example": "examples/plot_04_calibrate_teacher.html",
    "api": "reference/losses.html",
    "commands": "reference/commands.html",
    "theory": "theory.html",
    "report": "example_report.html",
}

pytestmark = pytest.mark.site


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def address():
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(SITE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def chromium():
    with open_browser() as browser:
        yield browser


def problems(watched):
    """What the console got, but for the log of the theme."""
    return [message for message in watched.messages if not message.startswith("log: [PST]")]


class Links(HTMLParser):
    """Targets of links and sources of a page, and the names that a link can point to."""

    def __init__(self, text):
        super().__init__()
        self.targets, self.names = [], {""}
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.names |= {found[key] for key in ("id", "name") if found.get(key)}
        self.targets += [found[key] for key in ("href", "src") if found.get(key)]


def broken_links(site):
    """Links inside of the site whose file or place does not exist."""
    # the theme keeps a template in _static
    paths = [path for path in site.rglob("*.html") if "_static" not in path.parts]
    pages = {path.resolve(): Links(path.read_text(encoding="utf-8")) for path in paths}
    broken = []
    for path, links in pages.items():
        for target in links.targets:
            if target.startswith(("http:", "https:", "mailto:", "data:", "javascript:")):
                continue
            file, anchor = urldefrag(unquote(target).partition("?")[0])
            goal = (path.parent / file).resolve() if file else path
            known = pages.get(goal)
            if not goal.exists() or (known is not None and anchor not in known.names):
                broken.append(f"{path.relative_to(site.resolve())}: {target}")
    return broken


def test_every_link_inside_the_site_leads_somewhere():
    assert len(list(SITE.rglob("*.html"))) > 40
    assert broken_links(SITE) == []


def test_a_broken_link_is_found(tmp_path):
    (tmp_path / "a.html").write_text(
        '<p id="x"><a href="b.html#y">b</a><a href="c.html">c</a><img src="d.png">'
    )
    (tmp_path / "b.html").write_text('<a href="a.html#x">a</a><a href="https://example.org">out</a>')
    assert broken_links(tmp_path) == ["a.html: b.html#y", "a.html: c.html", "a.html: d.png"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("name", KINDS)
def test_a_page_has_no_messages_asks_nobody_else_and_fits(chromium, address, name, width, scheme):
    watched = Watched(chromium, width=width, color_scheme=scheme)
    watched.page.goto(f"{address}/{KINDS[name]}", wait_until="networkidle")
    assert problems(watched) == []
    assert [url for url in watched.requests if not url.startswith(address)] == []
    assert watched.page.evaluate("document.documentElement.scrollWidth") <= width
    assert watched.page.evaluate("document.documentElement.dataset.theme") == scheme
    watched.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("name", ["landing", "chooser", "examples", "commands"])
def test_axe_finds_nothing_serious(chromium, address, name, width, scheme):
    watched = Watched(chromium, width=width, color_scheme=scheme)
    watched.page.goto(f"{address}/{KINDS[name]}", wait_until="networkidle")
    assert axe_violations(watched.page, impacts=("serious", "critical")) == []
    watched.close()


@pytest.mark.parametrize(
    ("words", "page"),
    [("isotonic", "calibration.html"), ("mean_label", "reference/labels.html"), ("STAPLE", "labels.html")],
)
def test_the_search_finds_a_page(chromium, address, words, page):
    watched = Watched(chromium)
    watched.page.goto(f"{address}/search.html?q={words}")
    watched.page.wait_for_selector(f"#search-results a[href*='{page}']", timeout=20_000)
    watched.page.goto(f"{address}/search.html?q=qqqxyzzy")
    watched.page.wait_for_selector("#search-results .search-summary")
    watched.page.wait_for_function("!document.querySelector('#search-results li')")
    assert problems(watched) == []
    watched.close()


def test_formulas_are_drawn(chromium, address):
    watched = Watched(chromium)
    watched.page.goto(f"{address}/theory.html", wait_until="networkidle")
    watched.page.wait_for_selector("mjx-container")
    assert watched.page.locator("mjx-container").count() > 100
    assert watched.page.locator("mjx-merror").count() == 0
    assert "\\lVert" not in watched.page.locator("article").inner_text()
    watched.close()


def test_every_example_has_a_picture():
    examples = sorted((SITE / "examples").glob("plot_*.html"))
    assert len(examples) >= 10
    for path in examples:
        assert "_images/sphx_glr_plot_" in path.read_text(), path.name


def test_the_report_in_the_site_is_a_report(chromium, address):
    watched = Watched(chromium)
    watched.page.goto(f"{address}/example_report/report.html")
    watched.page.wait_for_selector("#stage .picture")
    assert watched.page.locator("#case-table tbody tr").count() == 30
    watched.close()
