"""The folders of nnU-Net, and the files that semidice adds to them.

RAW/DATASET/ratersTr/RATER/CASE.*    the mask of one rater; a case that the rater did not look at has none
            semidice.json            where the dataset came from, and the patient of each case
PREPROCESSED/DATASET/semidice_raters/CONFIGURATION/CASE_seg.b2nd   see `raters`
                     semidice_trainers/NAME.json                   options of a trainer, see `options`
RESULTS/DATASET/SemidiceTrainer_NAME__PLANS__CONFIGURATION/        written by nnU-Net
                                                          fold_K.txt   its messages, with --on
"""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from ..data.manifest import Record
from ..limits import read_bytes
from ..paths import write_text

TRAINER_PREFIX = "SemidiceTrainer_"
# the folder in which nnU-Net looks for our trainers: its variable nnUNet_extTrainer
TRAINERS = Path(__file__).parent / "trainers"
_DATASET_NAME = re.compile(r"Dataset\d{3}_[A-Za-z0-9_-]+")


class ExportRecord(Record):
    """The content of semidice.json: the prepared dataset, and the patient of each case."""

    dataset: str
    manifest_sha256: str
    raters: tuple[str, ...] = Field(min_length=1)
    patients: dict[str, str] = Field(min_length=1)


@dataclass(frozen=True)
class NnunetFolders:
    """nnU-Net's three folders, as its environment variables name them."""

    raw: Path
    preprocessed: Path
    results: Path

    @classmethod
    def of(cls, work: Path | None) -> "NnunetFolders":
        """Folders in `work`, or those of nnU-Net's environment variables if it is None."""
        if work is not None:
            return cls(work / "raw", work / "preprocessed", work / "results")
        names = ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results")
        missing = [name for name in names if not os.environ.get(name)]
        if missing:
            raise ValueError(
                f"nnU-Net's folders are not set ({', '.join(missing)}): name a folder for all of them with "
                "--work, or set the environment variables as nnU-Net's documentation says"
            )
        return cls(*(Path(os.environ[name]) for name in names))

    def environment(self) -> dict[str, str]:
        """Environment variables for nnU-Net's commands, with the path of our trainers."""
        # nnU-Net's own spelling
        others = os.environ.get("nnUNet_extTrainer", "").split(os.pathsep)  # noqa: SIM112
        others = [path for path in others if path]
        return {
            "nnUNet_raw": str(self.raw.absolute()),
            "nnUNet_preprocessed": str(self.preprocessed.absolute()),
            "nnUNet_results": str(self.results.absolute()),
            "nnUNet_extTrainer": os.pathsep.join(dict.fromkeys([str(TRAINERS), *others])),
        }

    def dataset(self, name: str) -> "NnunetDataset":
        """One dataset of nnU-Net; a ValueError if the name does not follow nnU-Net's pattern."""
        if not _DATASET_NAME.fullmatch(name):
            raise ValueError(
                f"nnU-Net needs a name such as Dataset101_Nodules, with three digits; got {name!r}"
            )
        return NnunetDataset(self, name)


@dataclass(frozen=True)
class NnunetDataset:
    """The folders of one dataset."""

    folders: NnunetFolders
    name: str

    @property
    def raw(self) -> Path:
        return self.folders.raw / self.name

    @property
    def raters(self) -> Path:
        """One folder per rater, with masks named as in labelsTr."""
        return self.raw / "ratersTr"

    @property
    def record(self) -> Path:
        return self.raw / "semidice.json"

    @property
    def preprocessed(self) -> Path:
        return self.folders.preprocessed / self.name

    @property
    def splits(self) -> Path:
        """nnU-Net's own file of training and held-out cases of each fold."""
        return self.preprocessed / "splits_final.json"

    def results(self, trainer: str, plans: str, configuration: str) -> Path:
        return self.folders.results / self.name / f"{trainer}__{plans}__{configuration}"

    def read_record(self) -> ExportRecord:
        """What `export` wrote; a ValueError if this dataset was not made by it."""
        try:
            return ExportRecord.model_validate_json(read_bytes(self.record))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{self.record} is missing or damaged ({type(error).__name__}): write the dataset with "
                "`semidice nnunet export`"
            ) from error

    def write_record(self, record: ExportRecord) -> None:
        write_text(self.record, json.dumps(record.model_dump(), indent=1) + "\n")


def rater_segmentations(preprocessed: Path, data_identifier: str) -> Path:
    """The folder of `CASE_seg.b2nd` with all raters, for one preprocessed configuration."""
    return preprocessed / "semidice_raters" / data_identifier


def trainer_options_file(preprocessed: Path, trainer: str) -> Path:
    """The options of a trainer class `SemidiceTrainer_NAME`."""
    return preprocessed / "semidice_trainers" / f"{trainer.removeprefix(TRAINER_PREFIX)}.json"
