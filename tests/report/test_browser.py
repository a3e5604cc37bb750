"""The report page in a real browser: it loads nothing, hostile names are text, and what one can do there."""

import base64
import io
import re

import numpy as np
import pytest
from browser import axe_violations, open_page
from decision_files import write_decision_files
from pages import NAMES, build
from PIL import Image
from prepared import make_prepared
from synthetic_runs import write_runs

from semidice.runs.predictions import read_prediction
from semidice.statistics import read_cases, write_cases


def use_everything(page):
    """Every choice, range, button and a point of the page."""
    for select in page.locator("select").all():
        if select.is_visible():
            for number in range(select.locator("option").count()):
                select.select_option(index=number)
    for button in page.locator("button:visible").all():
        button.click()
    page.locator("#points [data-case]:visible").first.hover()
    page.fill("#filter", "scan")


def test_the_page_writes_nothing_to_the_console_and_requests_nothing(chromium, built, classes):
    for path in (built.out, classes.out):
        watched = open_page(chromium, path)
        use_everything(watched.page)
        assert watched.messages == []
        assert watched.requests == [path.as_uri()]
        watched.close()


def test_a_request_by_a_page_is_recorded_and_its_security_policy_blocks_it(chromium, built, tmp_path):
    text = built.out.read_text(encoding="utf-8")
    external_image = '<img src="http://127.0.0.1:9/pixel.png">'
    loose = re.sub("<meta http-equiv.*?>", "", text) + external_image
    (tmp_path / "loose.html").write_text(loose, encoding="utf-8")
    watched = open_page(chromium, tmp_path / "loose.html")
    assert "http://127.0.0.1:9/pixel.png" in watched.requests
    watched.close()
    (tmp_path / "strict.html").write_text(text + external_image, encoding="utf-8")
    watched = open_page(chromium, tmp_path / "strict.html")
    assert any("Content Security Policy" in message for message in watched.messages)
    watched.close()


def test_names_are_never_read_as_html(chromium, tmp_path):
    hostile = "</script><img src=x onerror=alert(1)> & $x_1$ 'a' \"b\""
    dataset = make_prepared(tmp_path / "data", num_cases=6, cases_per_patient=1)
    styles = {hostile: (1.0, 0.0, 0.3, "mean", "min"), "_plain": (2.0, 0.5, 0.8, "mean", "min")}
    runs = write_runs(dataset, tmp_path / "runs", methods=styles, metrics=["dice_score"])
    for run in runs.values():
        write_decision_files(dataset, run)
        table = read_cases(run.decisions)
        write_cases(table.assign(method=table["method"].replace("fitted", hostile)), run.decisions)
    build(runs, dataset, tmp_path / "report.html", title=hostile, figures=True)
    watched = open_page(chromium, tmp_path / "report.html")
    page = watched.page
    assert page.title() == page.locator("h1").text_content() == hostile
    heads = page.locator("#cases table:visible thead th").all_text_contents()
    assert [head.strip() for head in heads[3:]] == [hostile, "_plain"]
    assert hostile in page.locator("#decisions tbody:visible").text_content()
    assert page.locator("img:not([src^='data:image/webp'])").count() == 0
    use_everything(page)
    assert watched.messages == []
    watched.close()


@pytest.mark.parametrize("width", [400, 1400])
def test_axe_finds_no_violation_and_nothing_scrolls_sideways(chromium, built, classes, width):
    for path in (built.out, classes.out):
        watched = open_page(chromium, path, width=width)
        assert axe_violations(watched.page) == []
        assert watched.page.evaluate("document.documentElement.scrollWidth") == width
        watched.close()


def test_axe_finds_the_violations_of_a_bad_page(chromium, tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_text("<html><body><img src='data:,'><p style='color: #aaa'>pale</p></body></html>")
    watched = open_page(chromium, bad)
    found = {name for name, _ in axe_violations(watched.page)}
    assert {"image-alt", "color-contrast", "html-has-lang", "document-title"} <= found
    watched.close()


def test_the_printed_page_has_no_controls(chromium, built):
    # the width of A4 without its margins
    watched = open_page(chromium, built.out, width=718)
    watched.page.emulate_media(media="print")
    assert watched.page.evaluate("document.documentElement.scrollWidth") == 718
    for selector in ("nav", "#filter", "#images .controls"):
        assert not watched.page.locator(selector).is_visible()
    assert watched.page.locator("#images img:visible").count() > 0
    assert watched.page.pdf().startswith(b"%PDF")
    watched.close()


def test_without_scripts_every_case_and_score_is_shown(chromium, built):
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(built.out.as_uri())
    assert page.locator("#images .case:visible").count() == 14
    assert page.locator("#cases table:visible").count() == 5
    context.close()


def column(page, number):
    rows = "rows => rows.filter(row => row.checkVisibility()).map(row => row.cells[AT].textContent)"
    return page.eval_on_selector_all("#cases tbody tr", rows.replace("AT", str(number)))


def test_the_case_table_is_sorted_by_any_column_and_filtered(opened, built):
    heads = opened.locator("#cases table:visible thead button")
    heads.nth(3).click()
    values = [float(text) for text in column(opened, 3)]
    assert values == sorted(values, reverse=True)
    heads.nth(3).focus()
    opened.keyboard.press("Enter")
    assert column(opened, 3)[0] == f"{values[-1]:.2f}"
    heads.nth(0).click()
    assert column(opened, 0) == sorted(column(opened, 0), reverse=True)
    opened.fill("#filter", "scan003")
    assert column(opened, 0) == ["scan003"]


def test_one_choice_of_a_score_holds_for_all_sections(opened):
    opened.select_option("#points select", "2")
    for part in ("#points .chart", "#pairs .chart", "#cases table"):
        assert opened.locator(f"{part}:visible").count() == 1
    assert "ECE" in opened.locator("#cases caption:visible").text_content()


def test_a_case_is_followed_through_the_methods_and_a_click_shows_its_images(opened):
    points = opened.locator("#points [data-case='scan005']:visible")
    assert points.count() == len(NAMES)
    points.first.hover()
    assert opened.locator("#points .followed:visible").count() == len(NAMES)
    points.first.click()
    # the browser tells the page of the new address a moment later
    opened.locator("#images .case:visible h3", has_text="scan005").wait_for()


def test_images_are_stepped_through_by_buttons_and_arrow_keys(opened):
    def name():
        return opened.locator("#images .case:visible h3").text_content()

    first = name()
    opened.click("[data-step='1']")
    second = name()
    opened.keyboard.press("ArrowRight")
    third = name()
    assert len({first, second, third}) == 3
    opened.keyboard.press("ArrowLeft")
    assert name() == second
    opened.click("[data-step='-1']")
    assert name() == first
    opened.click("[data-step='-1']")
    assert name() not in (first, second, third)


def layer(page, kind, title):
    """The pixels of a layer of the shown case, as it is stored, and its opacity."""
    image = page.locator(f"#images .case:visible img[alt='{kind} of {title}']")
    assert image.is_visible()
    code = image.get_attribute("src").removeprefix("data:image/webp;base64,")
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(code)))).astype(float), image


def test_layers_show_probability_difference_and_disagreement_at_any_opacity(opened, built):
    name = opened.locator("#images .case:visible h3").text_content()
    (number,) = built.dataset.numbers_of([name])
    (path,) = built.runs[NAMES[1]].path.glob(f"fold_*/predictions/{name}.npz")
    prob = read_prediction(path)
    masks = built.dataset.masks(number)[built.dataset.present[number]]
    label = masks.mean(0)

    def halved(plane):
        return plane.reshape(20, 2, 24, 2).mean((1, 3))

    shown, image = layer(opened, "probability", NAMES[1])
    assert shown.shape == (40, 48, 3)
    # brightness of the colour map rises with the probability
    assert np.corrcoef(shown.sum(2).ravel(), prob[1].ravel())[0, 1] > 0.97
    opened.select_option("[data-sets='layer']", "1")
    difference, _ = layer(opened, "difference", NAMES[1])
    assert difference.shape == (20, 24, 3)
    redness, change = difference[..., 0] - difference[..., 2], halved(prob[1] - label)
    assert redness[change > 0.3].mean() > redness[np.abs(change) < 0.05].mean() + 15
    opened.select_option("[data-sets='layer']", "2")
    entropy = -sum(part * np.log2(np.maximum(part, 1e-9)) for part in map(halved, prob))
    disagreement, _ = layer(opened, "disagreement", NAMES[1])
    assert np.corrcoef(disagreement.sum(2).ravel(), entropy.ravel())[0, 1] > 0.85
    assert layer(opened, "disagreement", "soft label")[1].is_visible()
    opened.select_option("[data-sets='layer']", "0")
    assert layer(opened, "probability", "true probability")[1].is_visible()
    opened.locator("[data-style='--opacity']").fill("0.25")
    assert image.evaluate("each => getComputedStyle(each).opacity") == "0.25"
    opened.select_option("[data-sets='layer']", "none")
    assert opened.locator("#images img:visible").count() == 0


def test_outlines_are_those_of_the_raters_and_of_the_most_probable_class(opened, built):
    name = opened.locator("#images .case:visible h3").text_content()
    (number,) = built.dataset.numbers_of([name])
    panels = opened.locator("#images .case:visible figure")
    present = built.dataset.present[number]
    drawn = [bool(mask.any()) for mask in built.dataset.masks(number)[present]]
    assert panels.first.locator("path").count() == sum(drawn)
    raters = [rater for rater, looked in zip(built.dataset.manifest.raters, present, strict=True) if looked]
    caption = panels.first.locator("figcaption").text_content()
    assert all(rater in caption for rater in raters)
    # the path is filled by the browser and compared with the mask, pixel by pixel
    inside = """path => {
      const [, , width, height] = path.ownerSVGElement.getAttribute("viewBox").split(" ").map(Number);
      const shape = new Path2D(path.getAttribute("d"));
      const context = document.createElement("canvas").getContext("2d");
      return Array.from({ length: height }, (_, y) => Array.from({ length: width },
        (_, x) => context.isPointInPath(shape, x + 0.5, y + 0.5, "evenodd"))) }"""
    (stored,) = built.runs[NAMES[2]].path.glob(f"fold_*/predictions/{name}.npz")
    path = panels.filter(has_text=NAMES[2]).locator("path")
    np.testing.assert_array_equal(path.evaluate(inside), read_prediction(stored).argmax(0) > 0)
    opened.locator("#outlines").uncheck()
    assert opened.locator("#images path:visible").count() == 0


def test_channels_can_be_chosen_and_classes_have_colours(chromium, classes):
    watched = open_page(chromium, classes.out)
    page = watched.page
    picture = page.locator("#images .picture:visible").first
    images = []
    for number in ("0", "1"):
        page.select_option("[data-sets='channel']", number)
        images.append(
            picture.locator(".stack").first.evaluate("each => getComputedStyle(each).backgroundImage")
        )
    assert images[0] != images[1]
    assert all(image.startswith('url("data:image/webp') for image in images)
    for name in classes.dataset.manifest.class_names[1:]:
        assert name in page.locator("#images").text_content()
    watched.close()
