"""The callback in the real Lightning: the page from its first command to its report; two processes."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from case_rows import rows_of, select
from prepared import make_prepared
from start import refused, semidice

from semidice.metrics import soft_dice_score
from semidice.statistics import read_cases

pytestmark = [
    pytest.mark.integrations,
    # Lightning advises on workers and logging intervals, which do not matter for four images
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    # Lightning uses a class that newer releases of torch deprecate
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),
]

PAGE = (Path(__file__).parents[2] / "docs" / "lightning.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", PAGE, flags=re.DOTALL)
MODULE = next(text for language, text in BLOCKS if language == "python")
CLASSES = ["background", "lesion"]
SCORES = ["dice_score", "soft_dice_score"]


def test_the_commands_and_examples_of_the_page_lead_to_a_report_with_the_scores(tmp_path, monkeypatch):
    scope = {}
    monkeypatch.chdir(tmp_path)
    for language, text in BLOCKS:
        if language == "python":
            exec(compile(text, "lightning.md", "exec"), scope)
        for line in text.splitlines() if language == "" else ():
            if line.startswith("semidice "):
                assert semidice(*shlex.split(line)[1:]).code == 0, line
    table = read_cases("cases.csv")
    assert scope["trainer"].global_step == 2
    assert len(table) == 4 * (3 * 3 + 1)
    page = Path("report.html").read_text()
    assert "DML1 in Lightning" in page
    mean = table.pipe(select, metric="dice_score", class_name="mean")["value"].mean()
    assert f"{100 * mean:.2f}" in page
    assert "DML1 in Lightning" in Path("comparison/means.md").read_text()
    assert set(scope["scores"].means()) == {"dice_score"}


@pytest.fixture
def parts(tmp_path):
    """Module and loader of five cases of three patients, and a function that makes a trainer."""
    import lightning
    from torch.utils.data import DataLoader

    from semidice.integrations.lightning import CaseTableCallback

    scope = {}
    exec(compile(MODULE, "lightning.md", "exec"), scope)
    make_prepared(tmp_path / "data", num_cases=5)
    loader = DataLoader(scope["Cases"](tmp_path / "data", range(5)), batch_size=2)

    def trainer(**options):
        options = {"class_names": CLASSES, "method": "net"} | options
        callback = CaseTableCallback(tmp_path / "out" / "cases.csv", SCORES, **options)
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        quiet |= {"enable_model_summary": False, "accelerator": "cpu", "max_epochs": 1}
        return lightning.Trainer(callbacks=[callback], **quiet), callback

    return scope["SoftSegmentation"](torch.nn.Conv2d(1, 2, 3, padding=1)), loader, trainer


def test_the_test_loop_is_scored_on_its_own_and_the_means_can_be_monitored(parts, tmp_path):
    module, loader, make = parts
    trainer, callback = make(stage="test", fold=2)
    trainer.fit(module, loader, loader)
    assert callback.table is None
    logged = trainer.test(module, loader, verbose=False)[0]
    table = read_cases(tmp_path / "out" / "cases.csv")
    assert set(table["fold"]) == {2}
    assert sorted(set(table["patient"])) == ["patient000", "patient001", "patient002"]
    for metric in SCORES:
        mean = table.pipe(select, metric=metric, class_name="mean")["value"].mean()
        assert logged[f"test_{metric}"] == pytest.approx(mean, rel=1e-5)
    batch = next(iter(loader))
    with torch.no_grad():
        prob = module.eval().network(batch["image"]).softmax(1)
    for case, score in zip(batch["case"], soft_dice_score(prob, batch["label"])[:, 1], strict=True):
        rows = table.pipe(select, case=case, metric="soft_dice_score", class_name="lesion")
        assert rows["value"].item() == pytest.approx(float(score), rel=1e-5)


def test_every_validation_writes_the_table_of_the_current_weights_and_the_sanity_check_none(parts):
    module, loader, make = parts
    trainer, callback = make()
    seen = []
    original = callback.scores.update
    callback.scores.update = lambda *batch, **names: (
        seen.append(trainer.global_step),
        original(*batch, **names),
    )
    before = trainer.validate(module, loader, verbose=False)[0]["validate_soft_dice_score"]
    assert seen == [0, 0, 0]
    trainer.fit(module, loader, loader)
    # after three steps; the sanity check would have been at step 0
    assert seen[3:] == [3, 3, 3]
    assert trainer.callback_metrics["validate_soft_dice_score"] != before
    assert len(callback.table) == 5 * 2 * 3


def test_a_step_without_what_the_scores_need_is_refused(parts):
    module, loader, make = parts
    trainer, _ = make()
    module.validation_step = lambda batch: None
    refused(
        lambda: trainer.validate(module, loader, verbose=False), "validation_step", "dict with prob, case"
    )


SCRIPT = """
import sys
from torch.utils.data import DataLoader
from semidice.integrations.lightning import CaseTableCallback
from semidice.networks.small_unet import SmallUNet

folder, devices = sys.argv[1], int(sys.argv[2])
L.seed_everything(0)
table = CaseTableCallback(
    f"{folder}/{devices}.csv", ["soft_dice_score"], class_names=["background", "lesion"], method="net"
)
strategy = L.pytorch.strategies.DDPStrategy(process_group_backend="gloo")
trainer = L.Trainer(
    accelerator="cpu", devices=devices, strategy=strategy, callbacks=[table], logger=False,
    enable_checkpointing=False, enable_progress_bar=False,
)
module = SoftSegmentation(SmallUNet(1, 2, channels=(8, 16)))
trainer.validate(module, DataLoader(Cases(f"{folder}/data", range(5)), batch_size=2))
assert len(table.table) == 5 * 3
"""


def test_two_processes_write_the_table_of_one(tmp_path, start):
    make_prepared(tmp_path / "data", num_cases=5)
    script = tmp_path / "validate.py"
    script.write_text(MODULE + SCRIPT)
    for devices in ("1", "2"):
        done = start(script, tmp_path, devices).end()
        assert done.code == 0, done.err
    one, two = (read_cases(tmp_path / f"{devices}.csv") for devices in ("1", "2"))
    assert [row[:-1] for row in one.pipe(rows_of)] == [row[:-1] for row in two.pipe(rows_of)]
    # the processes have other batches than one process, which may round differently
    np.testing.assert_allclose(two["value"], one["value"], rtol=1e-5)
