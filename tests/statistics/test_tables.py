"""Tables and figures of a comparison show the computed values, correctly marked and escaped."""

import csv
import io
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from case_rows import CaseRow, table_of
from rich.console import Console
from start import refused

from semidice.metrics import ScoreKey, calibration_bins
from semidice.statistics import compare_cases, means_table, pairs_table
from semidice.statistics.tables import baseline_table, number_text, p_text

METHODS = ("uniform_DML1 & 50%", "majority|SDL", "soft")
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def table():
    rng = np.random.default_rng(0)
    base = rng.uniform(0.6, 0.8, 40)
    rows = []
    for method, gain in zip(METHODS, (0.1, 0.0, 0.1), strict=True):
        for case in range(40):
            value = base[case] + gain + 0.02 * rng.standard_normal()
            for metric, score in (("dice_score", value), ("hausdorff_error", 20 * (1 - value))):
                rows.append(CaseRow(f"c{case}", f"p{case // 2}", 0, method, "mean", metric, score))
    return table_of(rows)


@pytest.fixture(scope="module")
def comparisons(table):
    return [compare_cases(table, metric) for metric in ("dice_score", "hausdorff_error")]


def test_markdown_marks_the_best_set_and_names_the_test(comparisons):
    text = means_table(comparisons).markdown()
    lines = text.splitlines()
    assert lines[0] == "| method | dice_score (%) ↑ | hausdorff_error (mm) ↓ |"
    bold = {line.split(" | ")[0].strip("| "): line.count("**") // 2 for line in lines[2:5]}
    assert bold == {METHODS[0]: 2, r"majority\|SDL": 0, "soft": 2}
    mean = comparisons[0].means["mean"].iloc[1]
    assert f"{100 * mean:.2f} [" in lines[3]
    assert (
        "p < 0.05, paired bootstrap and permutation over 40 cases of 20 patients, Holm-corrected over pairs"
        in lines[-1]
    )


def test_a_table_against_a_baseline_has_differences_and_p_values_corrected_for_the_other_methods(table):
    names = ("dice_score", "hausdorff_error")
    found = [compare_cases(table, name, baseline=METHODS[1]) for name in names]
    shown = baseline_table(found, METHODS[1], title="t")
    assert [row[0].text for row in shown.rows] == [METHODS[1], METHODS[0], "soft"]
    pair = found[1].pairs.loc["soft", METHODS[1]]
    assert [cell.text for cell in shown.rows[2][5:]] == [
        number_text(pair.difference, signed=True),
        p_text(pair.p),
    ]
    assert shown.rows[1][2].text.startswith("+")
    marked = [[cell.best for cell in row] for row in shown.rows]
    # both are better than the baseline: Dice is higher, and the distance lower
    assert marked == [[False] * 7, *[[False, False, True, False, False, True, False]] * 2]
    assert "Holm-corrected over methods" in shown.note
    assert shown.rows[0][2].text == "–"


def test_no_name_is_read_as_html(table):
    named = table.assign(method=table["method"].where(table["method"] != "soft", HOSTILE))
    comparison = compare_cases(named, "dice_score")
    for shown in (means_table([comparison]), pairs_table(comparison)):
        assert "<img" not in shown.markdown()
        assert "&lt;img src=x" in shown.markdown()


def test_latex_is_escaped_and_every_row_has_the_same_number_of_cells(comparisons):
    text = means_table(comparisons, intervals=False).latex()
    assert r"uniform\_DML1 \& 50\%" in text
    assert text.count(r"\textbf{") == 4
    body = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert len(body) == 4
    assert {len(re.findall(r"(?<!\\)&", line)) for line in body} == {2}
    assert text.count(r"\begin{tabular}{lrr}") == text.count(r"\end{tabular}") == 1
    assert not re.search(r"[^\x00-\x7f]", text.split("\\toprule")[1])


def test_the_csv_holds_every_digit(comparisons):
    records = list(csv.DictReader(io.StringIO(means_table(comparisons).csv())))
    assert len(records) == 6
    assert [float(record["mean"]) for record in records[:3]] == comparisons[0].means["mean"].tolist()
    assert [record["best"] for record in records[:3]] == ["True", "False", "True"]
    pairs = list(csv.DictReader(io.StringIO(pairs_table(comparisons[0]).csv())))
    assert float(pairs[0]["p"]) == comparisons[0].pairs["p"].iloc[0]
    assert (pairs[0]["first"], pairs[0]["second"], pairs[0]["significant"]) == (*METHODS[:2], "True")


def test_pairs_show_sign_interval_and_all_three_p_values(comparisons):
    table = pairs_table(comparisons[0])
    assert table.header == ("method", "minus", "difference (%)", "corrected p", "single p", "perm. p")
    first = [cell.text for cell in table.rows[0]]
    low, high = 100 * comparisons[0].pairs[["low", "high"]].iloc[0]
    assert first[2].endswith(f"[+{low:.2f}, +{high:.2f}]")
    assert "Intervals and the corrected p are after correction for 3 comparisons" in table.note
    assert first[2].startswith("+")
    assert first[3] == "< 0.001"
    assert [row[2].best for row in table.rows] == [True, False, True]
    assert table.rows[2][2].text.startswith("−")


def test_the_terminal_shows_brackets_stars_and_numbers_in_full(comparisons):
    for table in (means_table(comparisons), pairs_table(comparisons[0])):
        out = Console(file=io.StringIO(), width=80, no_color=True)
        out.print(table)
        text = out.file.getvalue()
        assert "★" in text
        assert "…" not in text
        assert re.search(r"\[[+−]?\d+\.\d\d, [+−]?\d+\.\d\d\]", text)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_narrow_terminal_shows_every_score_and_every_method_in_each_table(comparisons, width):
    names = [f"score_number_{number}_error" for number in range(12)]
    table = means_table([replace(comparisons[0], key=ScoreKey(name, "")) for name in names], intervals=False)
    out = Console(file=io.StringIO(), width=width, no_color=True)
    out.print(table)
    lines = out.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    num_tables = sum("method" in line for line in lines)
    # a column takes twelve characters
    assert num_tables == {60: 3, 80: 2, 120: 2}[width]
    # names are wrapped at thirteen characters
    for name in METHODS:
        assert sum(line.strip().startswith(name.split()[0][:13]) for line in lines) >= num_tables
    words = " ".join(" ".join(lines).replace("★", "").split())
    for row in table.rows:
        assert all(words.count(cell.text) >= len(names) for cell in row[1:])


def test_tables_refuse_comparisons_of_different_methods_or_of_one_method(table, comparisons):
    two_methods = compare_cases(table, "dice_score", methods=METHODS[:2])
    refused(lambda: means_table([*comparisons, two_methods]), "same methods")
    alone = compare_cases(table, "dice_score", methods=METHODS[:1])
    refused(lambda: pairs_table(alone), "two or more methods")


def test_one_method_has_no_marks(table):
    alone = means_table([compare_cases(table, "dice_score", methods=METHODS[:1])])
    assert "**" not in alone.markdown()
    assert alone.note == "Mean over 40 cases of 20 patients."
    assert [record["best"] for record in alone.records] == [None]


def test_the_raters_own_scores_are_the_last_row(comparisons):
    raters = {(ScoreKey("dice_score"), "mean"): 0.876, (ScoreKey("dice_score"), "lesion"): 0.5}
    shown = means_table(comparisons, raters=raters)
    assert [cell.text for cell in shown.rows[-1]] == ["raters", "87.60", "–"]
    assert "raters: their own agreement" in shown.note
    assert len(shown.records) == 6


def test_figures_show_the_computed_values(table, comparisons, tmp_path):
    pytest.importorskip("matplotlib")
    from semidice.report.charts import draw_case_scores, draw_reliability, draw_significance
    from semidice.report.figures import save_figure

    prob = torch.rand(3, 1, 500)
    bins = {
        name: calibration_bins(prob, (torch.rand_like(prob) < prob**power).float(), per_case=False)
        for name, power in (("calibrated", 1.0), ("overconfident", 2.0))
    }
    figures = {
        "reliability": draw_reliability(bins),
        "cases": draw_case_scores(comparisons[0]),
        "significance": draw_significance(comparisons[0]),
    }
    for name, figure in figures.items():
        save_figure(figure, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    upper_axes = figures["reliability"].axes[0]
    means = bins["overconfident"].means()
    filled = means.share > 0
    np.testing.assert_allclose(upper_axes.lines[2].get_ydata(), means.accuracy[filled])
    assert "ECE" in upper_axes.get_legend().texts[1].get_text()
    # the lines differ without colour
    assert len({(line.get_linestyle(), line.get_marker()) for line in upper_axes.lines}) == 3
    cells = [text.get_text() for text in figures["significance"].axes[0].texts]
    assert sum("▲" in cell for cell in cells) == sum("▼" in cell for cell in cells) == 2
    marked = [label.get_text() for label in figures["significance"].axes[0].get_yticklabels()]
    assert marked == [f"{METHODS[0]} ★", METHODS[1], "soft ★"]
    with pytest.raises(ValueError, match="leading axes"):
        draw_reliability({"per case": calibration_bins(prob, prob)})
    with pytest.raises(ValueError, match="1 to 6 methods; got 0"):
        draw_reliability({})
