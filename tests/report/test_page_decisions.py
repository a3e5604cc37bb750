"""The panels "Which decision?" and "Volume with its interval", and the maps of disagreement."""

import csv
import json
import re

import numpy as np
import pytest
from browser import axe_violations, open_page, press
from case_rows import CaseRow, select, table_of
from decision_files import RULES, write_decision_files
from pages import NAMES, RESAMPLES, build, embedded
from prepared import make_prepared
from start import refused
from synthetic_runs import write_runs

from semidice.report.rules import compare_rules, differences, rules_sentences
from semidice.report.volumes import read_volumes, volumes_sentence
from semidice.runs.predictions import read_prediction
from semidice.statistics import compare_cases, read_cases, write_cases
from semidice.statistics.tables import p_text


@pytest.fixture
def small(tmp_path):
    """A finished run on six images, with decisions and volumes."""
    dataset = make_prepared(tmp_path / "data", num_cases=6, cases_per_patient=1, absent=True)
    (run,) = write_runs(dataset, tmp_path / "runs", methods=NAMES[2:3], metrics=["dice_score"]).values()
    write_decision_files(dataset, run)
    return dataset, run


def page_of(dataset, run, tmp_path, **options):
    report = build({NAMES[2]: run}, dataset, tmp_path / "report.html", **options)
    return report, (tmp_path / "report.html").read_text(encoding="utf-8")


def written(built, name):
    with (built.out.parent / "report_files" / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def step_down(p):
    """Holm's correction, one p-value after the other."""
    corrected, largest = {}, 0.0
    for rank, (name, value) in enumerate(sorted(p.items(), key=lambda item: item[1])):
        largest = max(largest, value * (len(p) - rank))
        corrected[name] = min(1.0, largest)
    return corrected


@pytest.mark.parametrize("metric", ["dice_score", "volume_error"])
def test_every_number_on_rules_equals_the_case_table(built, metric):
    name = metric if metric == "dice_score" else f"{metric}_voxels"
    rows = {(row["method"], row["rule"]): row for row in written(built, f"decisions_{name}.csv")}
    assert set(rows) == {(name, rule) for name in NAMES for rule in RULES}
    for name, run in built.runs.items():
        table = read_cases(run.decisions)
        values = {rule: table.pipe(select, metric=metric, method=rule)["value"].to_numpy() for rule in RULES}
        alone = {
            rule: pair_of(compare_cases(table, metric, methods=["argmax", rule], num_resamples=RESAMPLES)).p
            for rule in RULES[1:]
        }
        for rule, p in step_down(alone).items():
            row = rows[name, rule]
            assert float(row["p"]) == pytest.approx(p, rel=1e-12)
            assert float(row["mean"]) == pytest.approx(values[rule].mean(), rel=1e-12)
            assert float(row["difference"]) == pytest.approx(
                (values[rule] - values["argmax"]).mean(), rel=1e-9
            )
            low, high = float(row["difference_low"]), float(row["difference_high"])
            assert low <= float(row["difference"]) <= high
            assert (p < 0.05) == (low > 0 or high < 0) == (row["significant"] == "True")


def test_the_page_shows_mean_difference_interval_and_p_of_each_rule(chromium, built):
    rows = {(row["method"], row["rule"]): row for row in written(built, "decisions_dice_score.csv")}
    watched = open_page(chromium, built.out)
    page = watched.page
    heads = page.locator(".decision:visible thead th").all_text_contents()
    assert heads == ["method", *RULES]
    for line in page.locator(".decision:visible tbody tr").all():
        name, *cells = [" ".join(text.split()) for text in line.locator("th, td").all_text_contents()]
        for rule, cell in zip(RULES, cells, strict=True):
            row = rows[name, rule]
            assert cell.startswith(f"{100 * float(row['mean']):.2f}")
            assert ("★" in cell) == (row["best"] == "True")
            if rule != "argmax":
                p = p_text(float(row["p"]))
                assert f"{100 * float(row['difference']):+.2f}".replace("-", "−") in cell
                assert cell.endswith(f"p {p}" if p.startswith("<") else f"p = {p}")
                assert ("▲" in cell or "▼" in cell) == (row["significant"] == "True")
    page.select_option("#decision-select", "1")
    assert page.locator(".decision:visible").count() == 1
    assert page.locator(".decision:visible caption").text_content().startswith("volume_error")
    assert watched.messages == []
    watched.close()


def pair_of(comparison):
    """The numbers of the second method minus the first."""
    first, second = comparison.methods
    return comparison.pairs.loc[second, first]


def rules_of(values, *, metric="dice_score"):
    """A table of 12 cases; values: by rule, the score of a case number."""
    return table_of(
        CaseRow(f"c{case}", f"c{case}", 0, rule, "mean", metric, float(score(case)))
        for rule, score in values.items()
        for case in range(12)
    )


def plain(case):
    return 0.7 + 0.01 * case


def test_the_answer_names_what_is_significant_and_what_is_not():
    better = rules_of({"argmax": plain, "fitted": lambda case: plain(case) + 0.02 + 0.001 * (case % 3)})
    same = rules_of({"argmax": plain, "fitted": lambda case: plain(case) + 0.01 * (-1) ** case})
    (score,) = compare_rules({"mean + DML1": better, "majority": same}, num_resamples=500)
    (sentence,) = rules_sentences(score)
    assert re.fullmatch(
        r"The fitted rule raises Dice by 2\.10 points for mean \+ DML1 \(p (= 0\.\d{3}|< 0\.001)\); "
        r"for majority it changes nothing that is significant\.",
        sentence,
    )
    assert score.best == {"mean + DML1": ("fitted",), "majority": ("argmax", "fitted")}
    (score,) = compare_rules({"majority": same}, num_resamples=500)
    assert rules_sentences(score) == ["The fitted rule changes Dice significantly for no method."]


def test_another_rule_is_told_beside_the_fitted_one_only_if_it_changes_something():
    table = rules_of(
        {"argmax": plain, "fitted": plain, "dice": plain, "threshold:0.9": lambda case: plain(case) - 0.1}
    )
    (score,) = compare_rules({"a": table}, num_resamples=500)
    assert score.rules == ("argmax", "fitted", "dice", "threshold:0.9")
    fitted, threshold = rules_sentences(score)
    assert "for no method" in fitted
    assert threshold.startswith("The threshold:0.9 rule lowers Dice by 10.00 points for a (p ")


def test_argmax_is_not_best_if_a_rule_is_better_and_a_worse_rule_is_not():
    table = rules_of(
        {"argmax": plain, "dice": lambda c: plain(c) + 0.03, "nested": lambda c: plain(c) - 0.03}
    )
    (score,) = compare_rules({"a": table}, num_resamples=500)
    assert score.best["a"] == ("dice",)
    changes = differences(score, "a")
    assert (changes["dice"].better, changes["nested"].better) == (True, False)
    assert changes["nested"].significant


def test_an_interval_that_only_the_range_of_the_score_limits_has_no_end():
    # one case of twelve differs
    table = rules_of({"argmax": plain, "dice": lambda case: plain(case) + 0.05 * (case == 3)})
    (score,) = compare_rules({"a": table}, num_resamples=2000)
    change = differences(score, "a")["dice"]
    assert change.high == np.inf
    assert not change.significant


def test_without_files_the_page_has_the_commands_that_write_them(small, tmp_path):
    dataset, run = small
    run.decisions.unlink()
    run.volumes.unlink()
    _, text = page_of(dataset, run, tmp_path)
    assert "<code>semidice evaluate RUN --decide dice --decide fitted</code>" in text
    assert "<code>semidice evaluate RUN --interval 0.9</code>" in text
    assert embedded(tmp_path / "report.html")["volumes"] == []


def test_a_table_of_rules_that_is_not_one_is_named(small, tmp_path):
    dataset, run = small
    table = read_cases(run.decisions)
    write_cases(table.pipe(select, method="fitted"), run.decisions)
    report, _ = page_of(dataset, run, tmp_path)
    assert any("decisions.parquet" in notice and "argmax" in notice for notice in report.notices)
    write_cases(table.assign(case="x" + table["case"]), run.decisions)
    refused(lambda: page_of(dataset, run, tmp_path), "decisions.parquet", "6 cases (xscan000")


def test_names_of_rules_and_raters_are_never_read_as_html(chromium, small, tmp_path):
    dataset, run = small
    hostile = "<img src=x onerror=alert(1)>"
    table = read_cases(run.decisions)
    method = table["method"].where(table["method"] != "fitted", hostile)
    write_cases(table.assign(method=method), run.decisions)
    run.volumes.write_text(run.volumes.read_text().replace("rater rater0", f"rater {hostile}"))
    page_of(dataset, run, tmp_path, figures=True)
    watched = open_page(chromium, tmp_path / "report.html")
    watched.page.click("#volume-details summary")
    assert hostile in watched.page.locator(".decision:visible thead").text_content()
    assert hostile in watched.page.locator("#volume-table thead").text_content()
    assert watched.page.locator("img").count() == 0
    assert watched.messages == []
    watched.close()


def rows_of(run):
    with run.volumes.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def covered_share(rows, low, high):
    shares = []
    for row in rows:
        drawn = [float(value) for name, value in row.items() if name.startswith("rater ") and value]
        shares.append(sum(float(row[low]) <= value <= float(row[high]) for value in drawn) / len(drawn))
    return sum(shares) / len(shares)


def test_coverage_and_width_equal_a_count_over_the_rows(built):
    for record in written(built, "volumes.csv"):
        rows = rows_of(built.runs[record["method"]])
        for kind, low, high in (("nested", "low", "high"), ("conformal", "conformal_low", "conformal_high")):
            width = sum(float(row[high]) - float(row[low]) for row in rows) / len(rows)
            assert float(record[f"width_{kind}"]) == pytest.approx(width)
            assert float(record[f"coverage_{kind}"]) == pytest.approx(covered_share(rows, low, high))
        assert (record["level"], record["unit"], record["num_cases"]) == ("0.9", "voxels", "14")


def test_volumes_of_the_page_are_sorted_and_equal_the_file(classes):
    (run,) = classes.runs.values()
    records = classes.data["volumes"]
    assert [record["class_name"] for record in records] == list(classes.dataset.manifest.class_names[1:])
    for record in records:
        rows = {row["case"]: row for row in rows_of(run) if row["class"] == record["class_name"]}
        assert record["expected"] == sorted(record["expected"])
        for at, name in enumerate(record["names"]):
            for key in ("expected", "low", "high", "conformal_low", "conformal_high"):
                assert record[key][at] == float(rows[name][key])


def test_without_a_correction_the_nested_interval_is_shown(small, tmp_path):
    dataset, run = small
    write_decision_files(dataset, run, corrected=False)
    (volumes,) = read_volumes(run, dataset)
    assert not volumes.is_corrected
    share = covered_share(rows_of(run), "low", "high")
    words = f"The 90 % intervals cover {100 * share:.0f} % of the raters' volumes as they come from"
    assert volumes_sentence({"a": [volumes]}) == f"{words} the probabilities."
    page_of(dataset, run, tmp_path, figures=True)
    assert "| – |" in (tmp_path / "report_files" / "volumes.md").read_text()


def test_a_level_that_the_run_does_not_tell_is_not_invented(small):
    dataset, run = small
    run.decision.write_text(json.dumps({"intervals": {"0.9": {}, "0.5": {}}}))
    assert read_volumes(run, dataset)[0].level is None
    run.decision.unlink()
    (volumes,) = read_volumes(run, dataset)
    assert volumes.level is None
    assert volumes_sentence({"a": [volumes]}).startswith("The intervals cover")


def test_a_column_of_the_level_counts_before_the_file_of_fits(small):
    dataset, run = small
    text = run.volumes.read_text()
    run.volumes.write_text(text.replace(",unit,", ",unit,level,").replace(",voxels,", ",voxels,0.5,"))
    (volumes,) = read_volumes(run, dataset)
    assert volumes.level == 0.5
    run.volumes.write_text(run.volumes.read_text().replace(",0.5,", ",0.6,", 1))
    refused(lambda: read_volumes(run, dataset), str(run.volumes), "different levels", "semidice evaluate")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("case,patient", "patient,case", ["columns case, patient"]),
        ("scan003,patient003", "scan003,patient004", ["scan003", "patient004"]),
        ("scan003,", "scan009,", ["scan009"]),
        ("scan003,patient003", "scan002,patient002", ["line 5", "second row", "scan002"]),
        (",voxels,", ",litres,", ["line 2", "'litres'", "ml or voxels"]),
        (",class1,", ",bone,", ["line 2", "'bone'"]),
        (",LOW,", ",-1,", ["line 2", "'-1'"]),
        (",LOW,", ",nan,", ["line 2", "'nan'"]),
        (",LOW,", ",99999,", ["line 2", "99999"]),
        (",LOW,", ",,", ["line 2", "interval"]),
        (",LOW,", ",1,2,", ["line 2", "cells"]),
    ],
)
def test_a_table_of_volumes_that_would_be_misread_is_refused(small, old, new, words):
    dataset, run = small
    header, first, *others = run.volumes.read_text().splitlines()
    cells = first.split(",")
    low, cells[6] = cells[6], "LOW"
    text = "\n".join([header, ",".join(cells), *others])
    assert old in text
    run.volumes.write_text(text.replace(old, new, 1).replace("LOW", low))
    refused(lambda: read_volumes(run, dataset), str(run.volumes), *words)


def test_tables_and_figures_of_both_panels_lie_next_to_the_page(small, tmp_path):
    dataset, run = small
    report, _ = page_of(dataset, run, tmp_path, figures=True)
    names = {file.name for file in report.files}
    suffixes = (".csv", ".md", ".tex", ".png", ".svg")
    for stem in ("decisions_dice_score", "decisions_volume_error_voxels", "volumes"):
        assert {f"{stem}{suffix}" for suffix in suffixes} <= names


# --- in a browser -----------------------------------------------------------------------------------------


def test_the_chart_of_volumes_has_a_mark_for_every_rater_and_interval(opened, built):
    for number, (name, run) in enumerate(built.runs.items()):
        opened.select_option("#volume-method", str(number))
        rows = rows_of(run)
        drawn = [
            float(row["conformal_low"]) <= float(value) <= float(row["conformal_high"])
            for row in rows
            for column, value in row.items()
            if column.startswith("rater ") and value
        ]
        chart = opened.locator("#volume-chart .scroll svg")
        assert chart.locator(".covered").count() == sum(drawn)
        assert chart.locator(".missed").count() == len(drawn) - sum(drawn)
        assert chart.locator(".nested").count() == chart.locator(".expected").count() == len(rows) == 14
        assert chart.locator(".conformal").count() == 14
        share = covered_share(rows, "conformal_low", "conformal_high")
        label = chart.get_attribute("aria-label")
        assert f"by {name}, sorted" in label
        assert f"nominal 90 %, cover {100 * share:.2f} % of the raters" in label


def test_the_chart_of_volumes_is_read_and_left_by_keyboard(opened, built):
    record = built.data["volumes"][0]
    opened.focus("#volume-chart .scroll")
    tip = opened.locator("#volume-chart .tip")
    for key, at in (("ArrowRight", 0), ("ArrowRight", 1), ("End", 13), ("ArrowRight", 13), ("ArrowLeft", 12)):
        opened.keyboard.press(key)
        assert tip.text_content().startswith(f"{record['names'][at]}: expected ")
    opened.keyboard.press("Enter")
    opened.wait_for_function(
        "name => document.getElementById('case-status').textContent.startsWith(name + ',')",
        arg=record["names"][12],
    )


def test_a_chart_that_is_wider_than_the_page_is_scrolled_and_in_print_shrunk(chromium, tmp_path):
    dataset = make_prepared(tmp_path / "data", num_cases=120, size=(8, 8), cases_per_patient=1)
    (run,) = write_runs(dataset, tmp_path / "runs", methods=NAMES[2:3], metrics=["dice_score"]).values()
    write_decision_files(dataset, run)
    page_of(dataset, run, tmp_path, max_cases=1)
    watched = open_page(chromium, tmp_path / "report.html", width=718)
    page = watched.page
    box = page.locator("#volume-chart .scroll")
    chart = box.locator("svg")
    assert chart.bounding_box()["width"] > 800
    page.wait_for_function("document.querySelector('#volume-chart .scroll').matches('.more')")
    assert page.evaluate("document.documentElement.scrollWidth") == 718
    box.focus()
    page.keyboard.press("End")
    assert page.evaluate("document.querySelector('#volume-chart .scroll').scrollLeft") > 80
    page.emulate_media(media="print")
    # the chart is drawn again in the new width, so it is missing for a moment
    page.wait_for_function(
        "() => { const chart = document.querySelector('#volume-chart .scroll svg');"
        " const width = chart ? chart.getBoundingClientRect().width : 0; return width > 0 && width <= 718; }"
    )
    watched.close()


def test_the_chart_of_volumes_is_also_a_table(chromium, classes):
    watched = open_page(chromium, classes.out)
    page = watched.page
    page.click("#volume-details summary")
    for record in classes.data["volumes"]:
        page.select_option("#volume-class", record["class_name"])
        cells = page.eval_on_selector_all(
            "#volume-table tbody tr", "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))"
        )
        assert [row[0] for row in cells] == record["names"]
        assert [float(row[1]) for row in cells] == pytest.approx(record["expected"], rel=5e-3)
        ends = zip(record["conformal_low"], record["conformal_high"], strict=True)
        for row, (low, high), drawn in zip(cells, ends, record["raters"], strict=True):
            outside = [value is not None and not low <= value <= high for value in drawn]
            assert [cell.endswith("✕") for cell in row[4:]] == outside
    assert axe_violations(page) == []
    watched.close()


def entropy(prob):
    prob = np.asarray(prob, dtype=np.float64)
    bits: np.ndarray = -np.log2(prob, out=np.zeros_like(prob), where=prob > 0)
    return (prob * bits + 0.0).sum(0)


OPACITY = """number => {
  const canvas = document.querySelectorAll('#stage .overlay')[number];
  const { width, height } = canvas;
  const { data } = canvas.getContext('2d').getImageData(0, 0, width, height);
  return Array.from({ length: height }, (_, y) =>
    Array.from({ length: width }, (_, x) => data[(y * width + x) * 4 + 3]));
}"""


def test_disagreement_is_the_entropy_of_the_raters_and_of_the_prediction_side_by_side(opened, built):
    opened.get_by_role("button", name=f"disagreement, {NAMES[0]}").click()
    name = opened.locator("#case-status").text_content().partition(",")[0]
    number = next(at for at, case in enumerate(built.dataset.cases) if case.name == name)
    masks = built.dataset.masks(number)[built.dataset.present[number]]
    fold = next(case["fold"] for case in built.data["cases"] if case["name"] == name)
    raters = entropy(np.stack([(masks == index).mean(0) for index in range(2)]))
    captions = opened.locator("#stage .pair figcaption").all_text_contents()
    assert captions == ["disagreement of the raters", f"disagreement, {NAMES[0]}"]
    # a probability has steps of 1/255 on the page
    own, *_ = shown = [
        np.round(read_prediction(run.fold(fold).prediction(name))[1] * 255) / 255
        for run in built.runs.values()
    ]
    # the overlay is opaque from 0.08 bit on, and its opacity is linear below
    for place, expected in enumerate((raters, entropy([1 - own, own]))):
        np.testing.assert_allclose(
            opened.evaluate(OPACITY, place), 255 * np.minimum(1, expected / 0.08), atol=1
        )
    assert "1 bit" in opened.locator("#legend").text_content()
    picture = opened.locator("#stage .picture").last.bounding_box()
    opened.mouse.move(picture["x"] + picture["width"] / 2, picture["y"] + picture["height"] / 2)
    values = [raters[20, 24], *(entropy([1 - part, part])[20, 24] for part in shown)]
    words = ", ".join(f"{who} {value:.2f}" for who, value in zip(["raters", *NAMES], values, strict=True))
    assert opened.locator("#readout").text_content() == f"row 20, column 24: bits: {words}"


def test_the_key_d_walks_from_the_prediction_over_the_difference_to_the_disagreement(opened):
    opened.locator("#panels .panel").filter(has=opened.get_by_text(NAMES[1], exact=True)).first.click()
    pressed = "#panels .panel[aria-pressed=true] span"
    for words in (f"difference, {NAMES[1]}", f"disagreement, {NAMES[1]}", NAMES[1]):
        press(opened, "d")
        assert opened.locator(pressed).text_content() == words


def test_entropy_of_three_classes_is_up_to_log2_of_three(chromium, classes):
    watched = open_page(chromium, classes.out)
    watched.page.get_by_role("button", name="disagreement of the raters").click()
    assert f"{np.log2(3):.2f} bit" in watched.page.locator("#legend").text_content()
    assert watched.page.locator("#stage .pair").count() == 0
    watched.close()
