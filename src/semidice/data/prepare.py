"""`semidice prepare`: raw scans to a prepared dataset that is there as a whole, or not at all.

Scans are prepared in parallel into a folder beside the dataset (`rundir.UnfinishedDataset`), which is renamed
when the last one is done. Stopped at any point and started again, it continues with the scans that are
finished; with other options it begins anew. A finished dataset is never written to: it is compared with what
would be prepared now. The same raw files and options give the same bytes, whatever the number of processes.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .. import __version__
from ..paths import DatasetFolder, UnfinishedDataset, atomic_write, force_to_disk
from .assembly import assembled_manifest, dataset_identity, differences
from .integrity import enumerated
from .listing import natural_order
from .manifest import Manifest, Scan, manifest_text, read_manifest
from .options import PrepareOptions, Slices
from .phantom import PhantomOptions
from .raw import RawDataset, RawScan
from .scan_job import CannotWriteError, Reader, ScanJob, ScanOutcome, prepare_scan, verify_scan, writing
from .sources import find_datasets, read_scan
from .workers import WorkerDiedError, Workers

_NUM_FLUSHED = 32


class PrepareError(ValueError):
    """Everything that kept datasets from being prepared, a message each, and what to do about it."""

    def __init__(self, problems: Sequence[str], advice: str = "") -> None:
        super().__init__(tuple(problems), advice)
        self.problems = tuple(problems)
        self.advice = advice

    def __str__(self) -> str:
        return "\n".join(filter(None, [*self.problems, self.advice]))


@dataclass(frozen=True)
class Prepared:
    """A prepared dataset.

    already: it was there, and is what would be prepared now. num_continued: scans that an interrupted run
    had finished. without_foreground: scans none of whose slices became a case. num_unlabelled: scans without
    any mask, which were not read. left_out: problems of scans that were skipped.
    """

    path: Path
    manifest: Manifest
    already: bool = False
    num_continued: int = 0
    without_foreground: tuple[str, ...] = ()
    num_unlabelled: int = 0
    left_out: tuple[str, ...] = ()

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
    on_scan: Callable[[str], object] = lambda name: None,
    reader: Reader = read_scan,
) -> Prepared:
    """Prepare one dataset in the folder `out`; a PrepareError holds all that is wrong with any of its scans.

    overrides: options instead of the source's own. skip_bad: leave out the scans that have problems.
    workers: processes, one for each CPU if None; 0 or 1 prepares in this one. on_scan is called with the name
    of each scan as it is done. reader: must pickle when there are several processes.
    """
    options = _with_overrides(raw.options, overrides or {})
    scans = sorted(raw.scans, key=lambda scan: natural_order(scan.name))
    _check_scans(raw, scans)
    folder = UnfinishedDataset.of(Path(os.path.abspath(out)))
    job = ScanJob(replace(raw, options=options, scans=(), problems=()), options, folder, reader)
    with contextlib.ExitStack() as stack:
        pool = workers if isinstance(workers, Workers) else stack.enter_context(Workers(workers))
        try:
            if _is_taken(raw, out):
                return _check_finished(job, scans, out, pool, on_scan)
            stack.enter_context(_begun(job, out))
            outcomes = _run(job, scans, pool, on_scan)
            left_out = _left_out(raw, outcomes, folder, skip_bad=skip_bad)
            finished = [outcome.finished for outcome in outcomes.values() if outcome.finished is not None]
            manifest = assembled_manifest(raw, options, finished, left_out)
            _rename_whole(folder, manifest, out)
        except PrepareError:
            raise
        except (CannotWriteError, ValueError) as error:
            raise PrepareError([str(error)]) from error
    kept = {scan.name for scan in manifest.scans}
    return Prepared(
        path=out,
        manifest=manifest,
        num_continued=sum(outcome.taken_over for outcome in outcomes.values()),
        without_foreground=tuple(
            name for name, outcome in outcomes.items() if name not in kept and not outcome.problem
        ),
        num_unlabelled=raw.num_skipped,
        left_out=left_out,
    )


def run_prepare(
    source: str,
    raw_dir: Path,
    out_dir: Path,
    *,
    console: Console,
    tasks: Sequence[str] = (),
    size: tuple[int, int] | Literal["raw"] | None = None,
    window: tuple[float, float] | None = None,
    slices: Slices | None = None,
    ignore_placement: bool = False,
    skip_bad: bool = False,
    workers: int | None = None,
    phantom: PhantomOptions | None = None,
) -> list[Prepared]:
    """Prepare every dataset that the source finds in `raw_dir`, with a progress bar, and print a summary.

    Options that are None are the source's own; size "raw" keeps that of the scans. What is wrong with any
    scan of any dataset comes in one PrepareError at the end; the other datasets are prepared all the same.
    """
    given = {"size": size, "window": window, "slices": slices}
    overrides: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if size == "raw":
        overrides["size"] = None
    if ignore_placement:
        overrides["ignore_placement"] = True
    prepared: list[Prepared] = []
    failed: dict[str, PrepareError] = {}
    columns = (
        TextColumn("preparing {task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Workers(workers) as pool, Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task(f"{source}: looking through its files", total=None)
        datasets = find_datasets(
            source,
            raw_dir,
            tasks=tasks,
            phantom=phantom,
            on_file=lambda done, total: progress.update(bar, completed=done, total=total),
        )
        progress.reset(bar, total=sum(len(raw.scans) for raw in datasets))
        num_before = 0
        for raw in datasets:
            progress.update(bar, description=raw.name or source, completed=num_before)
            try:
                prepared.append(
                    prepare_dataset(
                        raw,
                        out_dir / raw.name,
                        overrides=overrides,
                        skip_bad=skip_bad,
                        workers=pool,
                        on_scan=lambda _: progress.advance(bar),
                    )
                )
            except PrepareError as error:
                failed[raw.name] = error
            except KeyboardInterrupt:
                console.print("stopped; the scans that are finished are kept: the same command continues")
                raise
            num_before += len(raw.scans)
    for dataset in prepared:
        _print_summary(dataset, console)
    if failed:
        raise _together(failed)
    return prepared


def _together(failed: Mapping[str, PrepareError]) -> PrepareError:
    problems = [
        f"{name}: {problem}" if name else problem
        for name, error in failed.items()
        for problem in error.problems
    ]
    return PrepareError(problems, "\n".join(dict.fromkeys(error.advice for error in failed.values())))


def _print_summary(prepared: Prepared, console: Console) -> None:
    manifest, path = prepared.manifest, prepared.path
    shapes = sorted({" x ".join(map(str, scan.shape)) for scan in manifest.scans})
    size = shapes[0] if len(shapes) == 1 else f"{len(shapes)} sizes"
    lines = [
        f"{path}: {_count(prepared.num_cases, 'case')} of {_count(prepared.num_patients, 'patient')}, "
        f"{_count(len(manifest.raters), 'rater')}, {size}, classes {', '.join(manifest.class_names)}"
    ]
    if prepared.already:
        lines.append("it was prepared already, with these options and from these files: nothing was changed")
    if prepared.num_continued:
        lines.append(f"{_count(prepared.num_continued, 'scan')} had been finished by an earlier run")
    if prepared.without_foreground:
        names = enumerated(prepared.without_foreground, "scan")
        lines.append(f"no foreground in any slice, hence no case: {names}")
    if manifest.options.get("size") and any(len(scan.shape) == 3 for scan in manifest.scans):
        lines.append("size was not applied: volumes keep theirs unless they are cut with --slices")
    if prepared.num_unlabelled:
        lines.append(f"no mask, hence not read: {_count(prepared.num_unlabelled, 'scan')}")
    lines += [f"left out: {problem}" for problem in prepared.left_out]
    lines.append(f"next: semidice check {path}")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _with_overrides(options: PrepareOptions, overrides: Mapping[str, Any]) -> PrepareOptions:
    try:
        return PrepareOptions.model_validate(options.model_dump() | dict(overrides))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise PrepareError([f"{where}: {first['msg']}" if where else first["msg"]]) from error


def _check_scans(raw: RawDataset, scans: Sequence[RawScan]) -> None:
    if not scans:
        raise PrepareError(raw.problems, f"no scan in {raw.root} can be prepared")
    first: dict[str, RawScan] = {}
    for scan in scans:
        # a disk that does not tell a from A would keep only one of them
        other = first.setdefault(scan.name.casefold(), scan)
        if other is not scan:
            raise PrepareError([f"two scans are named {scan.name} and {other.name}: rename one of them"])


def _is_taken(raw: RawDataset, out: Path) -> bool:
    """Whether something is in the folder already; a PrepareError where a dataset cannot be."""
    if out.is_symlink():
        raise PrepareError(
            [f"{out} is a link to {os.readlink(out)}: give the folder itself, or remove the link"]
        )
    if out.exists() and not out.is_dir():
        raise PrepareError([f"{out} is a file: choose another folder, or remove it"])
    from_files = any(scan.image for scan in raw.scans)
    if from_files and out.resolve().is_relative_to(raw.root.resolve()):
        raise PrepareError(
            [f"{out} is in the raw folder {raw.root}, which is only read: choose a folder outside"]
        )
    with writing(out):
        return out.is_dir() and any(out.iterdir())


@contextmanager
def _begun(job: ScanJob, out: Path) -> Iterator[None]:
    """The folder to work in, locked; what an earlier run left there stays if it was the same job."""
    folder = job.folder
    foreign_files = folder.foreign_files()
    if foreign_files:
        raise PrepareError(
            [f"{foreign_files[0]} stands where {out} is prepared, and was not made by that"],
            "remove it, or choose another folder",
        )
    with writing(out):
        folder.path.mkdir(parents=True, exist_ok=True)
    with _locked(folder.path):
        wanted = json.dumps({"semidice": __version__} | dataset_identity(job.raw, job.options))
        with writing(folder.job):
            if not folder.job.is_file() or folder.job.read_text(encoding="utf-8") != wanted:
                for left in (folder.records, folder.dataset.path):
                    shutil.rmtree(left, ignore_errors=not left.exists())
                with atomic_write(folder.job) as temp_path:
                    temp_path.write_text(wanted, encoding="utf-8")
            folder.dataset.path.mkdir(exist_ok=True)
        yield


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        import fcntl
    except ImportError:
        # not on Windows
        yield
        return
    # of the folder itself, so that no file is left; it goes with the process, however that ends
    lock = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise PrepareError(
                [f"another `semidice prepare` is at work in {path}: wait until it is done"]
            ) from error
        except OSError:
            # a file system without locks
            pass
        yield
    finally:
        os.close(lock)


def _run(
    job: ScanJob, scans: Sequence[RawScan], pool: Workers, on_scan: Callable[[str], object]
) -> dict[str, ScanOutcome]:
    """What became of each scan, in their order."""
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
    """Problems of the scans to leave out; a PrepareError if none may be."""
    problems = (*raw.problems, *_problems(outcomes))
    if all(outcome.problem for outcome in outcomes.values()):
        raise PrepareError(problems, f"no scan in {raw.root} can be prepared")
    if problems and not skip_bad:
        raise PrepareError(
            problems,
            f"{_count(len(problems), 'problem')}: correct the files and run the same command again (other "
            f"scans are kept in {folder.path}), or leave out what has problems with --skip-bad",
        )
    return problems


def _rename_whole(folder: UnfinishedDataset, manifest: Manifest, out: Path) -> None:
    """Put the manifest to the arrays, and the whole in its place."""
    dataset = folder.dataset
    arrays = {dataset.array(kind, scan.name) for scan in manifest.scans for kind in scan.arrays}
    with writing(out):
        # what a killed process left half-written, and arrays of scans that are no longer there
        for path in sorted(dataset.path.rglob("*"), reverse=True):
            if path.is_dir():
                with contextlib.suppress(OSError):
                    path.rmdir()
            elif path not in arrays:
                path.unlink()
        # many at once: a disk takes them together, and one after the other each waits for the whole disk
        with ThreadPoolExecutor(_NUM_FLUSHED) as threads:
            list(threads.map(force_to_disk, arrays))
        with atomic_write(dataset.manifest) as temp_path:
            temp_path.write_text(manifest_text(manifest), encoding="utf-8")
        dataset.path.rename(out)
    shutil.rmtree(folder.path, ignore_errors=True)


def _check_finished(
    job: ScanJob, scans: Sequence[RawScan], out: Path, pool: Workers, on_scan: Callable[[str], object]
) -> Prepared:
    """The dataset in `out`, if it is what would be prepared now; else a PrepareError."""
    advice = f"{out} was left as it is: remove it, or choose another folder"
    if not DatasetFolder(out).manifest.is_file():
        raise PrepareError([f"{out} is not empty, and holds no prepared dataset"], advice)
    try:
        manifest = read_manifest(out)
    except ValueError as error:
        raise PrepareError([str(error)], advice) from error
    problems = differences(manifest, dataset_identity(job.raw, job.options))
    if not problems:
        known = {scan.name: scan for scan in manifest.scans}
        gone = known.keys() - {scan.name for scan in scans}
        problems = [f"{name} is in {out}, but no longer in {job.raw.root}" for name in sorted(gone)]
        pairs: list[tuple[RawScan, Scan | None]] = [(scan, known.get(scan.name)) for scan in scans]
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
    # of a run that was killed after it had put the dataset in its place
    if not job.folder.dataset.path.exists() and not job.folder.foreign_files():
        shutil.rmtree(job.folder.path, ignore_errors=True)
    return Prepared(out, manifest, already=True, left_out=tuple(manifest.options.get("left_out", ())))
