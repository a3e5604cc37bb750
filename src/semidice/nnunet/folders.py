"""The folders of nnU-Net, and what semidice adds to them.

RAW/DATASET/ratersTr/RATER/CASE.*    the mask of one rater; a case that the rater did not look at has none
            dataset.json             `export` adds the key semidice: the prepared dataset and the patients;
                                     nnU-Net copies the file to what it preprocesses, and to its results
PREPROCESSED/DATASET/semidice_raters/CONFIGURATION/CASE_seg.b2nd   see `raters`
RESULTS/DATASET/TRAINER__PLANS__CONFIGURATION/semidice.json        the options of the training
"""

import json
import os
import re
import shlex
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ..errors import UserError, reading
from ..paths import write_text
from .options import TrainerOptions

# the folder in which nnU-Net looks for our trainers: its variable nnUNet_extTrainer
TRAINERS = Path(__file__).parent / "trainers"
OPTIONS = "semidice.json"
_KINDS = ("raw", "preprocessed", "results")


@dataclass(frozen=True)
class Export:
    """The prepared dataset that was exported, and the patient of each case."""

    dataset: str
    manifest_sha256: str
    patients: dict[str, str]


def read_export(folder: Path) -> Export | None:
    """Of the dataset.json in a folder of nnU-Net; None for a dataset that semidice did not write."""
    path = folder / "dataset.json"
    with reading(path, "a raw dataset of nnU-Net is written by `semidice nnunet export`"):
        record = json.loads(path.read_bytes()).get("semidice")
        return None if record is None else Export(**record)


@dataclass(frozen=True)
class NnunetDataset:
    """The folders of one dataset of nnU-Net. work: what holds all of them, if there is such a folder."""

    name: str
    raw: Path
    preprocessed: Path
    results: Path
    work: Path | None = None

    @classmethod
    def find(cls, name: str, work: Path | None) -> "NnunetDataset":
        """Folders in `work`, or in those of nnU-Net's environment variables if it is None."""
        if not re.fullmatch(r"Dataset\d{3}_[A-Za-z0-9_-]+", name):
            raise UserError(
                f"nnU-Net needs a name such as Dataset101_Nodules, with three digits; got {name!r}"
            )
        named = {f"nnUNet_{kind}": kind for kind in _KINDS}
        missing = [variable for variable in named if not os.environ.get(variable)]
        if work is None and missing:
            raise UserError(
                f"nnU-Net's folders are not set ({', '.join(missing)}): name a folder for all of them with "
                "--work, or set the environment variables as nnU-Net's documentation says"
            )
        parents = [Path(os.environ[each]) if work is None else work / kind for each, kind in named.items()]
        raw, preprocessed, results = (parent / name for parent in parents)
        return cls(name, raw, preprocessed, results, work)

    @property
    def raters(self) -> Path:
        """One folder per rater, with masks named as in labelsTr."""
        return self.raw / "ratersTr"

    @property
    def splits(self) -> Path:
        """nnU-Net's own file of training and held-out cases of each fold."""
        return self.preprocessed / "splits_final.json"

    def environment(self) -> dict[str, str]:
        """Environment variables for nnU-Net's commands, with the path of our trainers."""
        # nnU-Net's own spelling
        others = os.environ.get("nnUNet_extTrainer", "").split(os.pathsep)  # noqa: SIM112
        trainers = dict.fromkeys([str(TRAINERS), *filter(None, others)])
        folders = {f"nnUNet_{kind}": str(getattr(self, kind).parent.absolute()) for kind in _KINDS}
        return {**folders, "nnUNet_extTrainer": os.pathsep.join(trainers)}

    def command(self, name: str, *arguments: object) -> str:
        """A command of `semidice nnunet` for this dataset, as it is typed."""
        work = [] if self.work is None else ["--work", self.work]
        return shlex.join(map(str, ["semidice", "nnunet", name, self.name, *arguments, *work]))


@dataclass(frozen=True)
class NnunetTraining:
    """One trainer on one configuration of a dataset: all folds of it have one folder of results."""

    dataset: NnunetDataset
    configuration: str
    trainer: str
    plans: str = "nnUNetPlans"

    @property
    def results(self) -> Path:
        return self.dataset.results / f"{self.trainer}__{self.plans}__{self.configuration}"

    def validation(self, fold: int | str) -> Path:
        """The predictions of a fold's held-out cases."""
        return self.results / f"fold_{fold}" / "validation"

    def is_validated(self, fold: int | str) -> bool:
        """Whether nnU-Net has trained a fold and predicted its held-out cases."""
        return (self.validation(fold) / "summary.json").is_file()


def write_training(training: NnunetTraining, options: TrainerOptions) -> None:
    """Store the options with the results; a UserError if results were made with others or of other data."""
    path, results = training.results / OPTIONS, training.results
    # the default name may also be given
    if any(results.glob("fold_*")) and replace(read_training(results), name=None) != replace(
        options, name=None
    ):
        raise UserError(
            f"{training.trainer} has results with other options, see {path}: choose another name with "
            "--name, or remove its results"
        )
    # nnU-Net writes it when an epoch begins
    if (results / "dataset.json").is_file() and read_export(results) != read_export(
        training.dataset.preprocessed
    ):
        raise UserError(
            f"{results} was trained on what {training.dataset.name} was before it was exported again: remove "
            "these results, or choose another name with --name"
        )
    write_text(path, json.dumps(asdict(options), indent=1) + "\n")


def read_training(results: Path) -> TrainerOptions:
    """The stored options of a training; a UserError names the file."""
    path, advice = results / OPTIONS, "start the training with `semidice nnunet train`"
    with reading(path, advice):
        return TrainerOptions(**json.loads(path.read_bytes()))
