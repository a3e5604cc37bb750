"""The stamp of a fold: which predictions it has, so that what was fitted to them knows when they change.

Whoever writes the predictions of a fold writes its stamp afterwards. Rules, intervals and calibrators carry
the digest of the stamps that they were fitted to, and are refused when it no longer fits. A stamp holds no
path, no time and no random number: a run may be moved.
"""

import hashlib
import json
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from ..errors import UserError, read_json, reading
from ..paths import FoldFolder, write_text

RETRAIN = "remove the folder of the fold and train it again with `semidice train --resume`"


@dataclass(frozen=True)
class FoldStamp:
    """identity: of recipe, folds and dataset, see `run.FoldRun`. predictions: CRC-32 of each case's array."""

    identity: str
    fold: int
    predictions: Mapping[str, int]

    @classmethod
    def of(cls, folder: FoldFolder, identity: str, fold: int) -> "FoldStamp":
        """The stamp of the stored predictions, from the directories of their files."""
        checksums = {}
        for path in sorted(folder.predictions.glob("*.npz")):
            with reading(path, RETRAIN), zipfile.ZipFile(path) as archive:
                (stored,) = archive.infolist()
                checksums[path.stem] = stored.CRC
        return cls(identity, fold, checksums)

    @classmethod
    def read(cls, folder: FoldFolder) -> "FoldStamp":
        with reading(folder.stamp, RETRAIN):
            return cls(**read_json(folder.stamp))

    def write(self, folder: FoldFolder) -> None:
        write_text(folder.stamp, json.dumps(asdict(self), indent=1) + "\n")

    def check(self, folder: FoldFolder) -> None:
        """A UserError that names the first case whose stored prediction is not the stamped one."""
        found = FoldStamp.of(folder, self.identity, self.fold).predictions
        for case in sorted(found.keys() | self.predictions.keys()):
            if found.get(case) != self.predictions.get(case):
                raise UserError(f"{folder.prediction(case)} was added, removed or changed since; {RETRAIN}")


def digest_of(stamps: Iterable[FoldStamp]) -> str:
    """SHA-256 of stamps in the order of their folds: what a fit is of."""
    ordered = sorted(stamps, key=lambda stamp: stamp.fold)
    return hashlib.sha256(json.dumps([asdict(stamp) for stamp in ordered]).encode()).hexdigest()
