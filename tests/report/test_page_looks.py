"""The report page in a real browser: no messages, no requests; themes, phones, print and keyboard."""

import re
from itertools import pairwise

import pytest
from browser import axe_violations, column, column_titles, find_chromium, open_browser, open_page, press
from decision_files import write_decision_files
from pages import NAMES, build, embedded
from prepared import make_prepared
from synthetic_runs import write_runs


def test_the_page_writes_nothing_to_the_console_and_requests_nothing(chromium, built, classes):
    for path in (built.out, classes.out):
        watched = open_page(chromium, path)
        watched.page.mouse.wheel(0, 4000)
        press(watched.page, "ArrowRight", "ArrowDown", "z", "o", "d", "End", "Home")
        for select in watched.page.locator("select").all():
            if select.is_visible():
                select.select_option(index=0)
        watched.page.emulate_media(color_scheme="dark")
        assert watched.messages == []
        assert watched.requests == [path.as_uri()]
        watched.close()


def test_a_request_by_a_page_is_recorded_and_its_security_policy_blocks_it(chromium, built, tmp_path):
    text = built.out.read_text(encoding="utf-8")
    external_image = '<img src="http://127.0.0.1:9/pixel.png">'
    (tmp_path / "loose.html").write_text(
        re.sub("<meta http-equiv.*?>", "", text) + external_image, encoding="utf-8"
    )
    watched = open_page(chromium, tmp_path / "loose.html")
    assert "http://127.0.0.1:9/pixel.png" in watched.requests
    watched.close()
    (tmp_path / "strict.html").write_text(text + external_image, encoding="utf-8")
    watched = open_page(chromium, tmp_path / "strict.html")
    assert any("Content Security Policy" in message for message in watched.messages)
    watched.close()


def test_names_are_never_read_as_html(chromium, tmp_path):
    hostile = "</script><img src=x onerror=alert(1)> & $x_1$ 'a'"
    dataset = make_prepared(tmp_path / "data", num_cases=6, cases_per_patient=1)
    styles = {hostile: (1.0, 0.0, 0.3, "mean", "min"), "_plain": (2.0, 0.5, 0.8, "mean", "min")}
    runs = write_runs(dataset, tmp_path / "runs", methods=styles, metrics=["dice_score"])
    build(runs, dataset, tmp_path / "report.html", title=hostile, figures=True)
    watched = open_page(chromium, tmp_path / "report.html")
    assert watched.page.title() == hostile
    assert watched.page.locator("h1").text_content() == hostile
    assert column_titles(watched.page)[-3:-1] == [hostile, "_plain"]
    assert watched.page.locator("img").count() == 0
    assert watched.messages == []
    watched.close()


def test_the_dark_theme_follows_the_system_until_the_button_is_pressed(chromium, built):
    watched = open_page(chromium, built.out, color_scheme="dark")
    page = watched.page
    button = page.locator("#theme")

    def wait_for_theme(colour, other):
        # the page is told of the system's change a moment later
        page.wait_for_function("c => getComputedStyle(document.body).backgroundColor === c", arg=colour)
        # the button names the theme that it switches to
        assert button.text_content() == other

    light, dark = "rgb(255, 255, 255)", "rgb(20, 23, 26)"
    wait_for_theme(dark, "Light theme")
    page.emulate_media(color_scheme="light")
    wait_for_theme(light, "Dark theme")
    button.click()
    wait_for_theme(dark, "Light theme")
    page.reload()
    wait_for_theme(dark, "Light theme")
    page.emulate_media(color_scheme="dark")
    button.click()
    wait_for_theme(light, "Dark theme")
    watched.close()


# Visible texts whose contrast with their background is below 4.5 (3 for large text): WCAG 2.1, AA.
LOW_CONTRAST = """() => {
  const rgba = (text) => [...text.match(/[\\d.]+/g).map(Number), 1].slice(0, 4);
  const light = ([r, g, b]) => [r, g, b].map((part) => part / 255)
    .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
    .reduce((sum, part, at) => sum + part * [0.2126, 0.7152, 0.0722][at], 0);
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const colour = rgba(getComputedStyle(at).backgroundColor);
      if (colour[3] === 1) return colour;
    }
    return [255, 255, 255, 1];
  };
  const low = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !node.checkVisibility()) continue;
    if (node.closest("script, :disabled, .hidden")) continue;
    const style = getComputedStyle(node);
    const ink = node.closest("svg") ? style.fill : style.color;
    const [a, b] = [light(rgba(ink)), light(behind(node))].sort((x, y) => y - x);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < (large ? 3 : 4.5)) low.push(`${walker.currentNode.data} ${ratio.toFixed(2)}`);
  }
  return low;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_has_enough_contrast(chromium, built, scheme):
    watched = open_page(chromium, built.out, color_scheme=scheme)
    assert watched.page.evaluate(LOW_CONTRAST) == []
    watched.page.add_style_tag(content=".facts { color: #777d83 !important; background: #888 }")
    assert len(watched.page.evaluate(LOW_CONTRAST)) == 1
    watched.close()


def test_every_control_has_a_name_and_shows_its_focus(opened):
    nameless = """() => [...document.querySelectorAll(
      'button, select, input, [role=img], [role=region], nav, section, table')]
      .filter((node) => !(node.labels?.length || node.matches('[aria-label], [aria-labelledby]')
        || node.textContent.trim() && node.matches('button') || node.querySelector(':scope > caption')))
      .map((node) => node.outerHTML.slice(0, 80))"""
    assert opened.evaluate(nameless) == []
    assert opened.evaluate("[...document.querySelectorAll('th')].filter((cell) => !cell.scope).length") == 0
    order = opened.evaluate(
        "[...document.querySelectorAll('h1, h2, h3')].map((node) => Number(node.tagName[1]))"
    )
    assert order[0] == 1
    assert all(below <= above + 1 for above, below in pairwise(order))
    assert opened.evaluate("document.documentElement.lang") == "en"
    focused = set()
    for _ in range(72):
        opened.keyboard.press("Tab")
        name, outline = opened.evaluate(
            "(at => [at.id || at.className, getComputedStyle(at).outlineStyle])(document.activeElement)"
        )
        assert outline == "solid", name
        focused.add(name)
    assert {"theme", "filter-text", "viewer", "opacity", "outlines", "zoom", "volume-method"} <= focused


# the names that `semidice compare DATASET labels` gives, and three more
MANY = (
    *("majority", "random", "uniform", "weighted", "smoothing", "majority_sdl", "uniform_sdl"),
    *("Dice-weighted + DML1", "uniform + DML2", "distilled from Dice-weighted + DML1"),
)


def page_of(num_methods, root):
    """A page of the first methods."""
    dataset = make_prepared(root / "data", num_cases=6, size=(24, 24), cases_per_patient=1)
    styles = {
        name: (1 + 0.2 * number, 0.1, 0.5, "mean", "min") for number, name in enumerate(MANY[:num_methods])
    }
    metrics = ("dice_score", "binarized_dice_score", "calibration_error", "brier_error")
    runs = write_runs(dataset, root / "runs", methods=styles, metrics=metrics)
    for run in runs.values():
        write_decision_files(dataset, run)
    build(runs, dataset, root / "report.html")
    return root / "report.html"


@pytest.fixture(scope="module")
def seven(tmp_path_factory):
    return page_of(7, tmp_path_factory.mktemp("seven"))


@pytest.fixture(scope="module")
def ten(tmp_path_factory):
    return page_of(10, tmp_path_factory.mktemp("ten"))


@pytest.fixture(params=["seven", "ten"])
def many(request):
    """A page of seven or ten methods."""
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
def test_axe_finds_no_violation(chromium, seven, ten, classes, width, scheme):
    # fewer methods differ from ten in the number of rows only, so one look at them is enough
    others = [seven] if (width, scheme) == (400, "dark") else []
    for path in (ten, classes.out, *others):
        watched = open_page(chromium, path, width=width, color_scheme=scheme)
        assert axe_violations(watched.page) == []
        watched.close()


def test_axe_finds_the_violations_of_a_bad_page(chromium, tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<html><body><img src='data:,'><button></button>"
        "<p style='color: #aaa; background: #fff'>pale</p></body></html>"
    )
    watched = open_page(chromium, bad)
    found = {name for name, _ in axe_violations(watched.page)}
    assert {"image-alt", "button-name", "color-contrast", "html-has-lang", "document-title"} <= found
    watched.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 700, 1000, 1400, 1600])
def test_a_page_of_many_methods_fits_and_its_tables_are_not_clipped_on_a_laptop(
    chromium, many, width, scheme
):
    watched = open_page(chromium, many, width=width, color_scheme=scheme)
    assert watched.page.evaluate("document.documentElement.scrollWidth") == width
    clipped = watched.page.evaluate(
        """() => [...document.querySelectorAll('.scroll')].filter((box) => box.checkVisibility())
        .filter((box) => box.scrollWidth > box.clientWidth + 1).map((box) => [box.getAttribute('aria-label'),
          box.matches('.more'), getComputedStyle(box.querySelector('tbody th')).position])"""
    )
    if width >= 1400:
        assert clipped == []
    # a table that is wider than the screen shows that it continues, and keeps the names in view
    for name, has_shadow, names in clipped:
        assert has_shadow, name
        assert names == "sticky" or name.startswith("Options"), name
    assert watched.page.evaluate(LOW_CONTRAST) == []
    assert watched.messages == []
    watched.close()


def test_no_two_of_ten_methods_share_their_colour_or_marker(many):
    methods = embedded(many)["methods"]
    for key in ("colour", "on_light", "on_dark", "marker"):
        assert len({method[key] for method in methods}) == len(methods)


def test_every_marker_is_drawn_and_differs(chromium, many):
    watched = open_page(chromium, many)
    drawn = watched.page.eval_on_selector_all(
        ".means .key .marker", "paths => paths.map((path) => path.getAttribute('d'))"
    )
    assert None not in drawn
    assert not any("NaN" in path or "undefined" in path for path in drawn)
    assert len(set(drawn)) == len(drawn) == len(embedded(many)["methods"])
    watched.close()


def test_abbreviations_of_losses_are_spelled_out(chromium, many, built):
    words = {"SDL": "soft Dice loss", "DML1": "Dice semimetric loss, first form"}
    for path, names in ((many, ["SDL"]), (built.out, ["SDL", "DML1"])):
        watched = open_page(chromium, path)
        text = watched.page.locator("#answer").text_content()
        for name in names:
            assert words[name] in text
        watched.close()


@pytest.mark.parametrize("width", [320, 375, 768])
def test_a_narrow_screen_needs_no_horizontal_scrolling(chromium, built, classes, width):
    for path in (built.out, classes.out):
        watched = open_page(chromium, path, width=width, height=800)
        assert watched.page.evaluate("document.documentElement.scrollWidth") == width
        chart = watched.page.locator("#distribution-chart svg").bounding_box()
        assert chart["width"] <= width
        assert watched.page.locator("#stage .picture").bounding_box()["width"] > 0.35 * width
        watched.close()


def test_the_printed_page_is_light_and_has_no_controls(chromium, built):
    # the width of A4 without its margins
    watched = open_page(chromium, built.out, color_scheme="dark", width=718)
    watched.page.emulate_media(media="print", color_scheme="dark")
    assert watched.page.evaluate("document.documentElement.scrollWidth") == 718
    assert watched.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    for selector in ("nav", "#theme", "#case-filter", "#viewer-keys"):
        assert not watched.page.locator(selector).first.is_visible()
    assert watched.page.locator("#stage .picture").is_visible()
    assert watched.page.pdf().startswith(b"%PDF")
    watched.close()


def test_a_long_case_table_shows_200_rows_until_the_button_is_pressed(chromium, tmp_path):
    dataset = make_prepared(tmp_path / "data", num_cases=230, size=(8, 8), cases_per_patient=1)
    runs = write_runs(dataset, tmp_path / "runs", methods=NAMES[:1], metrics=["dice_score"])
    build(runs, dataset, tmp_path / "report.html", max_cases=2)
    watched = open_page(chromium, tmp_path / "report.html")
    assert len(column(watched.page, 0)) == 200
    watched.page.get_by_role("button", name="Show all 230 rows").click()
    assert len(column(watched.page, 0)) == 230
    assert watched.page.locator("#case-table .link").count() == 2
    assert "Images of 2 of 230 cases" in watched.page.locator("#browser").text_content()
    watched.close()


def test_without_a_browser_the_tests_say_how_to_install_one(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PLAYWRIGHT_BROWSERS_PATH", str(tmp_path))
    assert find_chromium() is None
    with (
        pytest.raises(pytest.skip.Exception, match="needs a Chromium: apt-get install chromium"),
        open_browser(),
    ):
        pass
    shell = tmp_path / "chromium_headless_shell-1200" / "chrome-linux" / "headless_shell"
    shell.parent.mkdir(parents=True)
    shell.touch()
    assert find_chromium() == shell
