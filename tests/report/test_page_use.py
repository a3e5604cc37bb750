"""The report page in a real browser: sorting and filtering its table, browsing its images."""

import re
from importlib import resources

import numpy as np
import pytest
from browser import Watched, column, column_titles, open_page, press
from pages import CLASS_OF, NAMES, SHOWN_METRICS, shown

from semidice.runs.predictions import read_prediction
from semidice.statistics.tables import number_text


def status(page):
    return page.locator("#case-status").text_content().partition(",")[0]


def layer(page):
    return page.locator("#stage figcaption").text_content().partition(";")[0]


def test_numbers_written_by_scripts_equal_the_case_tables(opened, built):
    for number, metric in enumerate(SHOWN_METRICS):
        opened.locator("#case-filter .score-select").select_option(str(number))
        values = built.values(metric, CLASS_OF.get(metric, "mean"))
        rows = opened.eval_on_selector_all(
            "#case-table tbody tr", "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))"
        )
        assert len(rows) == 14
        for case, _, _, *cells in rows:
            scores = list(values[case].values())
            spread = max(scores) - min(scores)
            assert cells == [shown(value, metric) for value in (*scores, spread)]
    for _ in range(14):
        case = opened.locator("#case-status").text_content().partition(",")[0]
        rows = opened.eval_on_selector_all(
            "#one-case tbody tr", "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))"
        )
        for metric, (_, *cells) in zip(SHOWN_METRICS, rows, strict=True):
            scores = built.values(metric, CLASS_OF.get(metric, "mean"))[case].values()
            assert cells == [shown(value, metric) for value in scores]
        press(opened, "ArrowRight")
    legend = opened.locator("#reliability .legend li").all_text_contents()
    errors = [record["error"] for record in built.data["reliability"]]
    assert legend == [f"{name}: ECE {100 * error:.2f} %" for name, error in zip(NAMES, errors, strict=True)]


def test_scripts_round_like_python(chromium):
    source = (resources.files("semidice.report.page") / "assets" / "dom.js").read_text(encoding="utf-8")
    function = re.search(r"function fixed\(value\) \{.*?\n\}", source, re.S)[0]
    rng = np.random.default_rng(0)
    values = [*(rng.integers(-800, 800, 500) / 8), *rng.uniform(-100, 100, 500), 0.0, -0.0, -0.001, 1e-9]
    watched = Watched(chromium)
    rounded = watched.page.evaluate(f"values => {{ {function}; return values.map(fixed); }}", values)
    watched.close()
    assert rounded == [number_text(value) for value in values]


def test_the_case_table_is_sorted_by_any_column_in_both_directions_by_mouse_and_keyboard(opened, built):
    dice = built.values("dice_score")
    head = opened.locator("#case-table thead th")
    assert column_titles(opened) == ["case", "patient", "fold", *NAMES, "highest minus lowest"]
    for number, method in enumerate(NAMES, start=3):
        expected = [shown(value, "dice_score") for value in sorted(row[method] for row in dice.values())]
        head.nth(number).get_by_role("button").click()
        assert column(opened, number) == expected
        assert head.nth(number).get_attribute("aria-sort") == "ascending"
        opened.keyboard.press("Enter")
        assert column(opened, number) == expected[::-1]
        assert head.nth(number).get_attribute("aria-sort") == "descending"
    head.nth(0).get_by_role("button").click()
    assert column(opened, 0) == sorted(dice)
    assert head.nth(3).get_attribute("aria-sort") == "none"


def test_the_case_table_is_filtered_by_name_fold_and_value(opened, built):
    opened.fill("#filter-text", "SCAN00")
    assert column(opened, 0) == [f"scan00{number}" for number in range(10)]
    assert opened.locator("#case-count").text_content() == "10 of 14 cases"
    opened.fill("#filter-text", "patient012")
    assert column(opened, 0) == ["scan012"]
    opened.get_by_role("button", name="Clear").click()
    assert len(column(opened, 0)) == 14
    opened.select_option("#filter-fold", "1")
    folds = {case["name"] for case in built.data["cases"] if case["fold"] == 1}
    assert set(column(opened, 0)) == folds
    opened.select_option("#filter-fold", "")
    dice = built.values("dice_score")
    middle = 100 * float(np.median([value for row in dice.values() for value in row.values()]))
    opened.fill("#filter-to", f"{middle:.6f}")
    expected = {case for case, row in dice.items() if min(row.values()) * 100 <= middle}
    assert 0 < len(expected) < 14
    assert set(column(opened, 0)) == expected
    opened.fill("#filter-from", "101")
    assert column(opened, 0) == []


def test_the_case_table_shows_all_scores_of_a_method_and_saves_the_shown_rows(opened, built, tmp_path):
    opened.select_option("#case-view", "1")
    assert column_titles(opened)[3:] == [score["heading"] for score in built.data["scores"]]
    opened.fill("#filter-text", "scan003")
    with opened.expect_download() as download:
        opened.click("#save-csv")
    download.value.save_as(tmp_path / "cases.csv")
    _, line = (tmp_path / "cases.csv").read_text().splitlines()
    # in percent, as on the page, with all digits
    values = [100 * built.values(m, CLASS_OF.get(m, "mean"))["scan003"][NAMES[1]] for m in SHOWN_METRICS]
    assert [float(cell) for cell in line.split(",")[3:]] == pytest.approx(values, rel=1e-14)


def test_the_saved_table_of_one_score_names_the_score_and_its_unit(opened, built, tmp_path):
    with opened.expect_download() as download:
        opened.click("#save-csv")
    download.value.save_as(tmp_path / "cases.csv")
    head, first, *_ = (tmp_path / "cases.csv").read_text().splitlines()
    heading = built.data["scores"][0]["heading"]
    assert head.split(",")[3:] == [f"{name}: {heading}" for name in (*NAMES, "highest minus lowest")]
    shown_cells = opened.eval_on_selector(
        "#case-table tbody tr", "row => [...row.cells].map((cell) => cell.textContent)"
    )
    assert [f"{float(cell):.2f}" for cell in first.split(",")[3:]] == shown_cells[3:]


def test_choosing_a_score_in_one_section_chooses_it_in_all(opened, built):
    opened.locator("#distributions .score-select").select_option("2")
    assert {select.input_value() for select in opened.locator(".score-select").all()} == {"2"}
    heading = built.data["scores"][2]["heading"]
    assert heading in opened.locator("#distribution-chart svg").get_attribute("aria-label")
    shown_matrix = opened.locator(".matrix:visible")
    assert shown_matrix.count() == 1
    assert shown_matrix.locator("caption").text_content().startswith(heading)
    values = built.values("calibration_error", "all")["scan000"]
    assert column(opened, 3)[0] == shown(values[NAMES[0]], "calibration_error")


def test_clicking_a_point_of_the_chart_or_a_row_of_the_table_shows_its_images(opened):
    dot = opened.locator("#distribution-chart .dots circle").first
    dot.scroll_into_view_if_needed()
    box = dot.bounding_box()
    opened.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    opened.wait_for_function("document.querySelector('.tip').textContent.trim() !== ''")
    tip = opened.locator("#distribution-chart .tip").text_content()
    assert re.match(r"scan\d+: majority \+ SDL \d", tip)
    opened.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    opened.wait_for_function(
        "name => document.getElementById('case-status').textContent.startsWith(name + ',')",
        arg=tip.partition(":")[0],
    )
    opened.get_by_role("button", name="scan005").click()
    opened.wait_for_function("document.getElementById('case-status').textContent.startsWith('scan005,')")
    assert opened.evaluate("document.activeElement.id") == "viewer"


def test_cases_are_ordered_by_worst_best_difference_and_name(opened, built):
    dice = {case: list(row.values()) for case, row in built.values("dice_score").items()}

    def order():
        return [text.split(". ")[1] for text in opened.locator("#case-select option").all_text_contents()]

    by_mean = sorted(dice, key=lambda case: np.mean(dice[case]))
    assert order() == by_mean
    assert status(opened) == by_mean[0]
    opened.select_option("#order", "best")
    opened.wait_for_function(
        "name => document.getElementById('case-status').textContent.startsWith(name)", arg=by_mean[-1]
    )
    assert order() == by_mean[::-1]
    opened.select_option("#order", "differ")
    assert order() == sorted(dice, key=lambda case: -np.ptp(dice[case]))
    opened.select_option("#order", "name")
    assert order() == sorted(dice)
    opened.select_option("#order", "worst")
    opened.select_option("#order-method", "2")
    assert order() == sorted(dice, key=lambda case: dice[case][2])
    # a score for which lower is better
    opened.select_option("#order-method", "")
    opened.locator("#browser .score-select").select_option("2")
    error = {
        case: np.mean(list(row.values())) for case, row in built.values("calibration_error", "all").items()
    }
    assert order() == sorted(error, key=lambda case: -error[case])


def test_keys_change_the_case_and_the_layer(opened):
    cases = [text.split(". ")[1] for text in opened.locator("#case-select option").all_text_contents()]
    press(opened, "ArrowRight")
    assert status(opened) == cases[1]
    press(opened, "ArrowRight", "ArrowRight", "ArrowLeft")
    assert status(opened) == cases[2]
    press(opened, "End")
    assert status(opened) == cases[-1]
    press(opened, "ArrowRight")
    assert status(opened) == cases[-1]
    press(opened, "Home")
    assert status(opened) == cases[0]
    assert layer(opened) == "image and raters"
    press(opened, "ArrowUp")
    assert layer(opened) == "image and raters"
    press(opened, "ArrowDown", "ArrowDown", "ArrowDown")
    assert layer(opened) == NAMES[0]
    press(opened, "d")
    assert layer(opened) == f"difference, {NAMES[0]}"
    assert opened.locator(".panel[aria-pressed=true]").text_content() == f"difference, {NAMES[0]}"
    press(opened, "d", "d")
    assert layer(opened) == NAMES[0]
    assert opened.locator("#stage .outlines").count() == 1
    press(opened, "o")
    assert opened.locator("#stage .outlines").count() == 0
    # arrow keys in a list change the list only, not the layer
    opened.focus("#case-select")
    opened.keyboard.press("ArrowDown")
    opened.wait_for_function(
        "name => document.getElementById('case-status').textContent.startsWith(name)", arg=cases[1]
    )
    assert layer(opened) == NAMES[0]


def test_panels_are_buttons_that_keep_the_focus(opened):
    panel = opened.locator(".panel").nth(2)
    panel.focus()
    opened.keyboard.press("Enter")
    assert layer(opened) == "true probability"
    assert opened.evaluate("document.activeElement.textContent") == "true probability"


def test_the_slider_and_its_keys_set_the_opacity_of_every_overlay(opened):
    press(opened, "ArrowDown")
    opacities = "nodes => [...new Set(nodes.map(node => Number(getComputedStyle(node).opacity)))]"
    assert opened.eval_on_selector_all(".overlay", opacities) == [0.7]
    opened.locator("#opacity").fill("30")
    assert opened.eval_on_selector_all(".overlay", opacities) == [0.3]
    assert opened.locator("#opacity-shown").text_content() == "30 %"
    press(opened, "+", "+", "-")
    assert opened.eval_on_selector_all(".overlay", opacities) == [0.4]
    opened.focus("#opacity")
    opened.keyboard.press("ArrowRight")
    assert opened.locator("#opacity-shown").text_content() == "45 %"
    for _ in range(8):
        opened.keyboard.press("+")
    assert opened.eval_on_selector_all(".overlay", opacities) == [1]


def pixels(page, selector):
    """RGBA of a canvas (height, width, 4)."""
    width, height, values = page.eval_on_selector(
        selector,
        """canvas => [canvas.width, canvas.height,
        [...canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data]]""",
    )
    return np.array(values).reshape(height, width, 4)


def predicted(built, method, case):
    (path,) = built.runs[method].path.glob(f"fold_*/predictions/{case}.npz")
    return read_prediction(path)[1]


def mean_of_raters(built, case):
    (number,) = built.dataset.numbers_of([case])
    return built.dataset.masks(number)[built.dataset.present[number]].mean(0)


def test_overlays_show_the_soft_label_the_prediction_and_their_difference(opened, built):
    for _ in range(3):
        case = status(opened)
        label, prob = mean_of_raters(built, case), predicted(built, NAMES[0], case)
        press(opened, "ArrowDown")
        alpha = pixels(opened, "#stage .overlay")[..., 3]
        np.testing.assert_allclose(alpha, 255 * np.minimum(1, label / 0.08), atol=1)
        press(opened, "ArrowDown", "ArrowDown")
        # half a grey level of the stored probability is 6 levels of opacity
        alpha = pixels(opened, "#stage .overlay")[..., 3]
        np.testing.assert_allclose(alpha, 255 * np.minimum(1, prob / 0.08), atol=7)
        press(opened, "d")
        drawn = pixels(opened, "#stage .overlay")
        difference = prob - label
        np.testing.assert_allclose(drawn[..., 3], 255 * np.minimum(1, 1.5 * abs(difference)), atol=2)
        clear = abs(difference) > 0.1
        assert clear.any()
        # orange where the prediction is too high, blue where it is too low
        np.testing.assert_array_equal((drawn[..., 0] > drawn[..., 2])[clear], (difference > 0)[clear])
        for _ in range(10):
            press(opened, "ArrowUp")
        press(opened, "ArrowRight")


def test_pointing_at_a_pixel_shows_its_probabilities(opened, built):
    case = status(opened)
    label = mean_of_raters(built, case)
    row, column_ = np.unravel_index(label.argmax(), label.shape)
    stage = opened.locator("#stage .picture")
    stage.scroll_into_view_if_needed()
    box = stage.bounding_box()
    opened.mouse.move(
        box["x"] + (column_ + 0.5) * box["width"] / label.shape[1],
        box["y"] + (row + 0.5) * box["height"] / label.shape[0],
    )
    opened.wait_for_function("document.getElementById('readout').textContent.startsWith('row')")
    words = opened.locator("#readout").text_content()
    assert words.startswith(f"row {row}, column {column_}: soft label {label[row, column_]:.2f}, true ")
    for method in NAMES:
        read = float(re.search(rf"{re.escape(method)} (\d\.\d\d)", words)[1])
        assert read == pytest.approx(predicted(built, method, case)[row, column_], abs=0.5 / 255 + 0.005)


def test_the_outline_of_each_rater_encloses_the_mask(opened, built):
    for _ in range(4):
        case = status(opened)
        (number,) = built.dataset.numbers_of([case])
        masks = built.dataset.masks(number)
        drawn = [mask for mask, looked in zip(masks, built.dataset.present[number], strict=True) if looked]
        drawn = [mask for mask in drawn if mask.any()]
        paths = opened.eval_on_selector_all("#stage .rater", "nodes => nodes.map(n => n.getAttribute('d'))")
        assert len(paths) == len(drawn)
        for path, mask in zip(paths, drawn, strict=True):
            assert enclosed(path) == mask.sum()
        press(opened, "ArrowRight")


def enclosed(path):
    """Area of a path by the shoelace formula; holes are subtracted."""
    area = 0
    for loop in path.removesuffix("Z").split("Z"):
        points = np.array([[int(n) for n in point.split()] for point in re.split("[ML]", loop)[1:]])
        x, y = points.T
        area += (x * np.roll(y, -1) - np.roll(x, -1) * y).sum() / 2
    return area


def test_the_zoom_contains_every_mask_and_every_probable_pixel(opened, built):
    full = pixels(opened, "#stage .grey")
    assert full.shape[:2] == (40, 48)
    press(opened, "z")
    zoomed = pixels(opened, "#stage .grey")
    assert zoomed.shape[0] < 40
    x, y, width, height = map(int, opened.locator("#stage .outlines").get_attribute("viewBox").split())
    np.testing.assert_array_equal(zoomed, full[y : y + height, x : x + width])
    case = status(opened)
    foreground = mean_of_raters(built, case) > 0
    for method in NAMES:
        foreground |= predicted(built, method, case) > 0.51
    outside = foreground.copy()
    outside[y : y + height, x : x + width] = False
    assert foreground.any()
    assert not outside.any()


def test_classes_and_channels_can_be_chosen(chromium, classes):
    watched = open_page(chromium, classes.out)
    page = watched.page
    press(page, "ArrowDown")
    first, grey = pixels(page, "#stage .overlay"), pixels(page, "#stage .grey")
    page.select_option("#class", "1")
    page.select_option("#channel", "1")
    case = status(page)
    (number,) = classes.dataset.numbers_of([case])
    pictures = classes.data["pictures"]
    picture = next(p for p in pictures if classes.data["cases"][p["case"]]["name"] == case)
    masks = classes.dataset.masks(number)[..., picture["slice_number"]]
    alpha = pixels(page, "#stage .overlay")[..., 3]
    np.testing.assert_allclose(alpha, 255 * np.minimum(1, (masks == 2).mean(0) / 0.08), atol=1)
    assert (pixels(page, "#stage .overlay") != first).any()
    assert pixels(page, "#stage .grey").shape == grey.shape
    assert "slice" in page.locator("#stage figcaption").text_content()
    # a single method cannot be compared
    assert page.locator("#significance").count() == 0
    assert page.locator("#answer .headline").text_content().startswith("One method, uniform + DML1")
    watched.close()
