"""Prepares one dataset, which appears as a whole or not at all.

Scans are prepared in parallel into a folder next to the dataset (`paths.UnfinishedDataset`), which is renamed
when the last one is finished. If the command is stopped and started again, it continues after the finished
scans; with other options it starts from the beginning. A finished dataset is never changed: it is compared
with what would be prepared now. The same raw files and options give the same bytes, for any number of
processes.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ... import __version__
from ...limits import read_bytes
from ...locks import FolderLock
from ...paths import DatasetFolder, UnfinishedDataset, force_to_disk, write_text
from ..intensities import pooled_mean_std
from ..manifest import Manifest, PrepareOptions, Scan, manifest_text, read_manifest
from ..sources.raw import RawDataset, RawScan, natural_order
from ..sources.readers import is_8_bit_picture
from .scan import CannotWriteError, FinishedScan, Job, ScanOutcome, prepare_scan, verify_scan, writing
from .workers import WorkerDiedError, Workers

_NUM_FLUSHED = 32

OnScan = Callable[[str], object]


class PrepareError(ValueError):
    """Datasets could not be prepared: all problems, one message each, and advice."""

    def __init__(self, problems: Sequence[str], advice: str = "") -> None:
        super().__init__(tuple(problems), advice)
        self.problems = tuple(problems)
        self.advice = advice

    def __str__(self) -> str:
        return "\n".join(filter(None, [*self.problems, self.advice]))


@dataclass(frozen=True)
class Prepared:
    """A prepared dataset.

    already: it existed before, and is the same as what would be prepared now.
    num_continued: scans that an interrupted run had finished.
    without_foreground: scans without a slice that became a case.
    num_unlabelled: scans without a mask, which were not read. left_out: problems of scans that were left out.
    notes: of the source.
    """

    path: Path
    manifest: Manifest
    already: bool = False
    num_continued: int = 0
    without_foreground: tuple[str, ...] = ()
    num_unlabelled: int = 0
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def num_cases(self) -> int:
        return sum(len(scan.case_names()) for scan in self.manifest.scans)

    @property
    def num_patients(self) -> int:
        return len({scan.patient for scan in self.manifest.scans})


def prepare_dataset(
    raw: RawDataset,
    out: Path,
    *,
    overrides: Mapping[str, Any] | None = None,
    skip_bad: bool = False,
    workers: int | Workers | None = None,
    on_scan: OnScan = lambda name: None,
) -> Prepared:
    """Prepare one dataset in the folder `out`; a PrepareError holds the problems of all scans.

    overrides: options that replace those of the source. skip_bad: leave out the scans that have problems.
    workers: number of processes, None for one per CPU; 0 or 1 uses this process.
    on_scan(name) is called when a scan is done.
    """
    raw = replace(raw, options=_with_overrides(raw.options, overrides or {}))
    scans = sorted(raw.scans, key=lambda scan: natural_order(scan.name))
    _check_scans(raw, scans)
    raw = replace(raw, options=raw.options.model_copy(update={"keep_bytes": _keeps_bytes(raw)}))
    job = Job(replace(raw, scans=(), problems=()), folder=UnfinishedDataset.of(Path(os.path.abspath(out))))
    with contextlib.ExitStack() as stack:
        pool = workers if isinstance(workers, Workers) else stack.enter_context(Workers(workers))
        try:
            if _has_content(raw, out):
                return _verified(job, scans, out, pool, on_scan)
            stack.enter_context(_work_folder(job, out))
            outcomes = _prepare_scans(job, scans, pool, on_scan)
            left_out = _left_out(raw, outcomes, job.folder, skip_bad=skip_bad)
            finished = [outcome.finished for outcome in outcomes.values() if outcome.finished is not None]
            manifest = _manifest_of(job.raw, finished, left_out)
            _move_to(out, job.folder, manifest)
        except PrepareError:
            raise
        except (CannotWriteError, ValueError) as error:
            raise PrepareError([str(error)]) from error
    names = {scan.name for scan in manifest.scans}
    return Prepared(
        path=out,
        manifest=manifest,
        num_continued=sum(outcome.taken_over for outcome in outcomes.values()),
        without_foreground=tuple(
            name for name, outcome in outcomes.items() if name not in names and not outcome.problem
        ),
        num_unlabelled=raw.num_skipped,
        left_out=left_out,
        notes=raw.notes,
    )


def _with_overrides(options: PrepareOptions, overrides: Mapping[str, Any]) -> PrepareOptions:
    try:
        return PrepareOptions.model_validate(options.model_dump() | dict(overrides))
    except ValidationError as error:
        first = error.errors()[0]
        option = ".".join(map(str, first["loc"]))
        raise PrepareError([f"{option}: {first['msg']}" if option else first["msg"]]) from error


def _keeps_bytes(raw: RawDataset) -> bool:
    """Whether the images are stored with their 8 bits: all are 8-bit pictures, and there is no window."""
    files = [path for scan in raw.scans for path in scan.image]
    is_dicom = raw.class_of_label is not None
    return raw.options.window is None and not is_dicom and bool(files) and all(map(_may_be_8_bit, files))


def _may_be_8_bit(path: Path) -> bool:
    try:
        return is_8_bit_picture(path)
    except ValueError:
        # reported when the scan is read
        return True


def _check_scans(raw: RawDataset, scans: Sequence[RawScan]) -> None:
    if not scans:
        raise PrepareError(raw.problems, f"no scan in {raw.root} can be prepared")
    first: dict[str, RawScan] = {}
    for scan in scans:
        # some file systems do not distinguish a from A, and would keep only one of the files
        other = first.setdefault(scan.name.casefold(), scan)
        if other is not scan:
            raise PrepareError([f"two scans are named {scan.name} and {other.name}: rename one of them"])


def _has_content(raw: RawDataset, out: Path) -> bool:
    """Whether the folder exists and is not empty; a PrepareError if no dataset can be written there."""
    if out.is_symlink():
        raise PrepareError(
            [f"{out} is a link to {os.readlink(out)}: give the folder itself, or remove the link"]
        )
    if out.exists() and not out.is_dir():
        raise PrepareError([f"{out} is a file: choose another folder, or remove it"])
    has_files = any(scan.image for scan in raw.scans)
    if has_files and out.resolve().is_relative_to(raw.root.resolve()):
        raise PrepareError(
            [f"{out} is in the raw folder {raw.root}, which stays unchanged: choose a folder outside"]
        )
    with writing(out):
        return out.is_dir() and any(out.iterdir())


@contextmanager
def _work_folder(job: Job, out: Path) -> Iterator[None]:
    """Create and lock the folder to work in; remove the content of an earlier run with other options."""
    folder = job.folder
    foreign_files = folder.foreign_files()
    if foreign_files:
        raise PrepareError(
            [f"{foreign_files[0]} was not written by `prepare`, which needs {folder.path} to prepare {out}"],
            "remove it, or choose another folder",
        )
    with writing(out):
        folder.path.mkdir(parents=True, exist_ok=True)
    with _lock(folder):
        description = json.dumps({"semidice": __version__} | _identity(job.raw))
        with writing(folder.job):
            if not folder.job.is_file() or read_bytes(folder.job) != description.encode():
                for path in (folder.records, folder.dataset.path):
                    shutil.rmtree(path, ignore_errors=not path.exists())
                write_text(folder.job, description)
            folder.dataset.path.mkdir(exist_ok=True)
        yield


@contextmanager
def _lock(folder: UnfinishedDataset) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(FolderLock(folder, "semidice prepare"))
        except ValueError as error:
            raise PrepareError([str(error)]) from error
        yield


def _prepare_scans(
    job: Job, scans: Sequence[RawScan], pool: Workers, on_scan: OnScan
) -> dict[str, ScanOutcome]:
    """The outcome of each scan by name, in the order of `scans`."""
    outcomes: dict[str, ScanOutcome] = {}
    try:
        with contextlib.closing(pool.each(partial(prepare_scan, job), scans)) as done:
            for scan, outcome in done:
                outcomes[scan.name] = outcome
                on_scan(scan.name)
                if outcome.cannot_write:
                    raise PrepareError(_problems(outcomes))
    except WorkerDiedError as error:
        names = ", ".join(scan.name for scan in error.items)
        died = f"a process died while it prepared {names}: it ran out of memory, or a library crashed"
        raise PrepareError(
            [*_problems(outcomes), died], "run the same command again with --workers 1: it continues"
        ) from error
    return {scan.name: outcomes[scan.name] for scan in scans}


def _problems(outcomes: Mapping[str, ScanOutcome]) -> list[str]:
    return [outcome.problem for outcome in outcomes.values() if outcome.problem]


def _left_out(
    raw: RawDataset, outcomes: Mapping[str, ScanOutcome], folder: UnfinishedDataset, *, skip_bad: bool
) -> tuple[str, ...]:
    """Problems of the scans to leave out; a PrepareError if none may be left out, or none remains."""
    problems = (*raw.problems, *_problems(outcomes))
    if all(outcome.problem for outcome in outcomes.values()):
        raise PrepareError(problems, f"no scan in {raw.root} can be prepared")
    if problems and not skip_bad:
        count = f"{len(problems)} problem{'' if len(problems) == 1 else 's'}"
        raise PrepareError(
            problems,
            f"{count}: correct the files and run the same command again (the finished scans are kept in "
            f"{folder.path}), or leave out the scans with problems by --skip-bad",
        )
    return problems


def _move_to(out: Path, folder: UnfinishedDataset, manifest: Manifest) -> None:
    """Write the manifest, and move the finished dataset to `out`."""
    dataset = folder.dataset
    arrays = {dataset.array(kind, scan.name) for scan in manifest.scans for kind in scan.arrays}
    with writing(out):
        # remove incomplete files of a killed process, and arrays of scans that no longer exist
        for path in sorted(dataset.path.rglob("*"), reverse=True):
            if path.is_dir():
                with contextlib.suppress(OSError):
                    path.rmdir()
            elif path not in arrays:
                path.unlink()
        # many at once: the disk writes them together, while one after the other each waits for the disk
        with ThreadPoolExecutor(_NUM_FLUSHED) as threads:
            list(threads.map(force_to_disk, arrays))
        write_text(dataset.manifest, manifest_text(manifest))
        dataset.path.rename(out)
    shutil.rmtree(folder.path, ignore_errors=True)


def _verified(job: Job, scans: Sequence[RawScan], out: Path, pool: Workers, on_scan: OnScan) -> Prepared:
    """The dataset in `out`, if it is what would be prepared now; otherwise a PrepareError."""
    advice = f"{out} was not changed: remove it, or choose another folder"
    if not DatasetFolder(out).manifest.is_file():
        raise PrepareError([f"{out} contains files that `prepare` did not write"], advice)
    try:
        manifest = read_manifest(out)
    except ValueError as error:
        raise PrepareError([str(error)], advice) from error
    problems = _differences(manifest, _identity(job.raw))
    if not problems:
        entries = {scan.name: scan for scan in manifest.scans}
        gone = entries.keys() - {scan.name for scan in scans}
        problems = [f"{name} is in {out}, but no longer in {job.raw.root}" for name in sorted(gone)]
        pairs: list[tuple[RawScan, Scan | None]] = [(scan, entries.get(scan.name)) for scan in scans]
        try:
            with contextlib.closing(pool.each(partial(verify_scan, job, DatasetFolder(out)), pairs)) as done:
                for (scan, _), problem in done:
                    on_scan(scan.name)
                    problems += [problem] if problem else []
        except WorkerDiedError as error:
            names = ", ".join(scan.name for scan, _ in error.items)
            raise PrepareError([f"a process died while it compared {names}: try --workers 1"]) from error
    if problems:
        raise PrepareError(problems, advice)
    # an earlier run may have been killed after it moved the dataset
    if not job.folder.dataset.path.exists() and not job.folder.foreign_files():
        shutil.rmtree(job.folder.path, ignore_errors=True)
    return Prepared(out, manifest, already=True, left_out=tuple(manifest.options.get("left_out", ())))


def _identity(raw: RawDataset) -> dict[str, Any]:
    """Everything a dataset depends on besides its raw files, as JSON values."""
    used = raw.options.model_dump(mode="json")
    if not raw.options.ignore_placement:
        # manifests from before this option do not have it
        del used["ignore_placement"]
    if raw.class_of_value is not None:
        used["class_of_value"] = {str(value): label for value, label in sorted(raw.class_of_value.items())}
    if raw.class_of_label is not None:
        used["class_of_label"] = dict(sorted(raw.class_of_label.items()))
    if raw.phantom is not None:
        used["phantom"] = asdict(raw.phantom) | {"size": list(raw.phantom.size)}
    return {
        "source": raw.source,
        "class_names": list(raw.class_names),
        "raters": list(raw.raters),
        "channels": list(raw.channels),
        "options": used,
    }


def _manifest_of(raw: RawDataset, records: Sequence[FinishedScan], left_out: Sequence[str]) -> Manifest:
    """The manifest of the scans that became cases; a ValueError if there is none, or a channel is constant.

    left_out: problems of scans that were left out; they are stored with the options.
    """
    scans = tuple(record.scan for record in records if record.scan is not None)
    if not scans:
        raise ValueError(f"no scan in {raw.root} has foreground, so there is no case: use --slices all")
    identity = _identity(raw)
    if left_out:
        identity["options"]["left_out"] = list(left_out)
    return Manifest(scans=scans, **pooled_mean_std(scans)._asdict(), **identity)


def _differences(manifest: Manifest, identity: Mapping[str, Any]) -> list[str]:
    """One message for each option or description that differs from the manifest."""
    previous = manifest.model_dump(mode="json", include=set(identity))
    previous["options"].pop("left_out", None)
    before, now = _flat(previous), _flat(identity)
    # in a dataset of an older semidice, `verify_scan` looks at the type of each scan's images
    before.setdefault("options.keep_bytes", now["options.keep_bytes"])
    return [
        f"{name.removeprefix('options.')} was {before.get(name, 'not given')} and is now "
        f"{now.get(name, 'not given')}"
        for name in before | now
        if before.get(name) != now.get(name)
    ]


def _flat(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by their keys; the keys of nested records are joined with a dot."""
    flat: dict[str, Any] = {}
    for key, value in record.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
