"""The page of methods with several seeds in a real browser: a mark for the mean of each seed."""

import numpy as np
import pytest
from browser import open_page
from pages import NAMES, embedded
from prepared import make_prepared
from rich.console import Console
from synthetic_runs import METRICS, write_runs

from semidice.paths import MethodFolder
from semidice.report.page import PageOptions, run_report
from semidice.statistics import paired, read_cases

SEEDS = (0, 1, 2)


@pytest.fixture(scope="module")
def seeded(tmp_path_factory):
    """The runs of two methods with three seeds, as `compare` writes them, and their page."""
    root = tmp_path_factory.mktemp("seeded")
    dataset = make_prepared(root / "data", num_cases=6, cases_per_patient=1)
    runs = {}
    for seed in SEEDS:
        written = write_runs(
            dataset, root / f"written{seed}", methods=NAMES[:2], metrics=METRICS[:3], seed=seed
        )
        for name, run in written.items():
            target = runs[name, seed] = MethodFolder(root / "runs" / run.path.name).seed(seed)
            target.path.parent.mkdir(parents=True, exist_ok=True)
            run.path.rename(target.path)
            text = target.recipe.read_text()
            assert "\nseed: 0\n" in text
            target.recipe.write_text(text.replace("\nseed: 0\n", f"\nseed: {seed}\n"))
    page = root / "report.html"
    run_report([root / "runs"], page, Console(quiet=True), PageOptions(figures=False, num_resamples=500))
    return runs, page


def test_the_chart_marks_the_mean_of_every_seed_at_its_place(seeded, chromium):
    runs, path = seeded
    watched = open_page(chromium, path)
    marks = watched.page.locator("#distribution-chart path.seed")
    assert marks.count() == len(SEEDS) * 2
    shown = watched.page.eval_on_selector_all(
        "#distribution-chart path.seed", "marks => marks.map(mark => mark.transform.baseVal[0].matrix.e)"
    )
    assert "Triangles: mean of each seed" in watched.page.locator("#distributions").text_content()
    assert watched.messages == []
    watched.close()
    means = [
        read_cases(runs[name, seed].cases).pipe(paired, "dice_score").values.mean()
        for seed in SEEDS
        for name in NAMES[:2]
    ]
    # places are a linear function of the means, up to their rounding to a tenth of a pixel
    slope, offset = np.polyfit(means, shown, 1)
    assert slope > 0
    np.testing.assert_allclose(slope * np.array(means) + offset, shown, atol=0.2)


def test_calibration_and_images_are_of_the_first_seed_and_case_scores_are_means(seeded):
    runs, path = seeded
    data = embedded(path)
    assert [method["name"] for method in data["methods"]] == list(NAMES[:2])
    assert len(data["reliability"]) == 2
    tables = [read_cases(runs[NAMES[1], seed].cases).pipe(paired, "dice_score") for seed in SEEDS]
    expected = dict(zip(tables[0].cases, np.mean([table.values[:, 0] for table in tables], 0), strict=True))
    for case in data["cases"]:
        assert case["values"][0][1] == pytest.approx(expected[case["name"]], rel=1e-12)
