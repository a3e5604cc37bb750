"""`semidice prepare`: raw scans become a dataset of arrays and a manifest.

OUT is no dataset until all scans are finished: only then does it have a manifest.json. A finished scan has an
entry OUT/.scans/SCAN.json, which is its later line in the manifest, and is written after its arrays. A
command that was stopped continues: a scan is kept if its raw files and its arrays still have the SHA-256 of
its entry, and if the options are the same. A finished dataset is never changed: it is compared with what
would be prepared now. The same raw files and options give the same bytes, for any number of threads.

Threads suffice for volumes, because decompressing, scaling and hashing release the interpreter.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError
from rich.console import Console

from ..console import counting_bar, say
from ..errors import CannotWriteError, UserError, first_problem, listing, message, read_record, writing
from ..locks import locked
from ..paths import DatasetFolder, atomic_write, check_name, file_hash, write_text
from .convert import StoredScan, convert_scan
from .intensities import pooled_mean_std, stored_mean_std
from .manifest import Kind, Manifest, PrepareOptions, Record, Scan, manifest_text, read_manifest
from .phantom import PhantomOptions
from .sources import find_datasets
from .sources.files import read_header
from .sources.raw import RawDataset, RawScan, ScanArrays, natural_order

OnScan = Callable[[str], object]

# of the files of a scan: for less, threads mostly wait for each other
_MIN_BYTES = 2**18


class PrepareError(UserError):
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
    """

    path: Path
    manifest: Manifest
    already: bool = False
    num_continued: int = 0
    without_foreground: tuple[str, ...] = ()

    @property
    def num_cases(self) -> int:
        return sum(scan.num_cases for scan in self.manifest.scans)


class _Entry(Record):
    """What is kept of a finished scan until all are finished.

    made_from: everything besides the content of its files that the scan depends on.
    scan: its entry in the manifest; None if no slice became a case.
    """

    made_from: str
    inputs: dict[str, str]
    scan: Scan | None


def run_prepare(
    source: str,
    raw_dir: Path,
    out_dir: Path,
    *,
    console: Console,
    tasks: Sequence[str] = (),
    phantom: PhantomOptions | None = None,
    overrides: Mapping[str, Any] | None = None,
    skip_bad: bool = False,
    workers: int | None = None,
) -> list[Prepared]:
    """Prepare every dataset that the source finds in `raw_dir`, and print a summary.

    A problem does not stop the other datasets: a PrepareError at the end holds all problems.
    tasks: names of the QUBIQ datasets to prepare, all if empty. Other options: see `prepare_dataset`.
    """
    prepared: list[Prepared] = []
    problems: list[str] = []
    advice: list[str] = []
    with counting_bar(console, doing="preparing", unit="scans") as progress:
        bar = progress.add_task(f"{source}: looking through its files", total=None)
        datasets = find_datasets(
            source,
            raw_dir,
            tasks=tasks,
            phantom=phantom,
            on_file=lambda done, total: progress.update(bar, completed=done, total=total),
        )
        progress.reset(bar, total=sum(len(raw.scans) for raw in datasets))
        for raw in datasets:
            progress.update(bar, description=raw.name or source)
            try:
                dataset = prepare_dataset(
                    raw,
                    out_dir / raw.name,
                    overrides=overrides,
                    skip_bad=skip_bad,
                    workers=workers,
                    on_scan=lambda _: progress.advance(bar),
                )
                prepared.append(dataset)
                _print_summary(dataset, raw, progress.console)
            except PrepareError as error:
                problems += [f"{raw.name}: {problem}" if raw.name else problem for problem in error.problems]
                advice.append(error.advice)
            except KeyboardInterrupt:
                say(progress.console, "stopped; the finished scans are kept: the same command continues")
                raise
    if advice:
        raise PrepareError(problems, "\n".join(dict.fromkeys(advice)))
    return prepared


def _print_summary(prepared: Prepared, raw: RawDataset, console: Console) -> None:
    manifest, path = prepared.manifest, prepared.path
    shapes = sorted({" x ".join(map(str, scan.shape)) for scan in manifest.scans})
    size = shapes[0] if len(shapes) == 1 else f"{len(shapes)} sizes"
    lines = [
        f"{path}: {_count(prepared.num_cases, 'case')} of "
        f"{_count(len({scan.patient for scan in manifest.scans}), 'patient')}, "
        f"{_count(len(manifest.raters), 'rater')}, {size}, classes {', '.join(manifest.class_names)}"
    ]
    lines += raw.notes
    cut = [scan for scan in manifest.scans if scan.slices is not None]
    if cut:
        kept = ", those with foreground" if manifest.options.slices == "foreground" else ""
        lines.append(
            f"{_count(len(cut), 'volume')} {'was' if len(cut) == 1 else 'were'} cut into "
            f"{_count(prepared.num_cases, 'slice')}{kept}: networks see slices, and scores are of whole "
            "volumes"
        )
    if prepared.already:
        lines.append("it was prepared already, with these options and from these files: nothing was changed")
    if prepared.num_continued:
        lines.append(f"{_count(prepared.num_continued, 'scan')} had been finished by an earlier run")
    if prepared.without_foreground:
        names = listing(prepared.without_foreground, "scan")
        lines.append(f"left out, because no slice has foreground: {names}")
    no_size = [scan.name for scan in manifest.scans if scan.affine is not None and scan.spacing_mm is None]
    if no_size:
        lines.append(
            f"warning: the header of {listing(no_size, 'scan')} has no voxel size: distances and volumes "
            "will be in voxels; to have mm and ml, write the size into the header and prepare again"
        )
    lines += [f"warning: {text}" for text in manifest.warnings]
    if manifest.options.size and any(len(scan.shape) == 3 for scan in manifest.scans):
        lines.append("size was not applied: volumes keep their size unless --slices cuts them into slices")
    if raw.num_unlabelled:
        lines.append(f"left out, because they have no mask: {_count(raw.num_unlabelled, 'scan')}")
    lines += [f"left out: {problem}" for problem in manifest.left_out]
    for line in [*lines, f"next: semidice check {path}"]:
        say(console, line)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def prepare_dataset(
    raw: RawDataset,
    out: Path,
    *,
    overrides: Mapping[str, Any] | None = None,
    skip_bad: bool = False,
    workers: int | None = None,
    on_scan: OnScan = lambda name: None,
) -> Prepared:
    """Prepare one dataset in the folder `out`; a PrepareError holds the problems of all scans.

    overrides: options that replace those of the source. skip_bad: leave out the scans that have problems.
    workers: number of threads, None for one per CPU if the files are large; 0 or 1 uses this thread.
    on_scan(name) is called when a scan is done.
    """
    scans = sorted(raw.scans, key=lambda scan: natural_order(scan.name))
    if not scans:
        raise PrepareError(raw.problems, f"no scan in {raw.root} can be prepared")
    raw = replace(raw, scans=tuple(scans), options=_options(raw, overrides or {}))
    folder = DatasetFolder(Path(out))
    try:
        if _is_finished(raw, folder):
            return _verified(raw, folder, workers, on_scan)
        with locked(folder, "semidice prepare"):
            prepared = _prepared(raw, folder, workers, on_scan, skip_bad=skip_bad)
            # nobody writes to a finished dataset
            folder.lock.unlink(missing_ok=True)
            return prepared
    except PrepareError:
        raise
    except UserError as error:
        raise PrepareError([str(error)]) from error


def _options(raw: RawDataset, overrides: Mapping[str, Any]) -> PrepareOptions:
    """The options to use; 8-bit pictures keep their bits if all images are such, and there is no window."""
    try:
        options = PrepareOptions.model_validate(raw.options.model_dump() | dict(overrides))
    except ValidationError as error:
        raise PrepareError([first_problem(error)]) from error
    files = [] if raw.source == "dicom" else [path for scan in raw.scans for path in scan.image]
    keeps_bytes = options.window is None and bool(files) and all(map(_may_have_8_bits, files))
    return options.model_copy(update={"keep_bytes": keeps_bytes})


def _may_have_8_bits(path: Path) -> bool:
    try:
        return read_header(path).is_byte_picture
    except UserError:
        # reported when the scan is read
        return True


def _is_finished(raw: RawDataset, folder: DatasetFolder) -> bool:
    """Whether the folder has a manifest; a PrepareError if no dataset can be written there."""
    out = folder.path
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
    folder.check_links()
    own = (folder.entries, *(out / kind for kind in ("images", "masks", "truth")))
    has_entries = folder.entries.is_dir() and not folder.entries.is_symlink()
    if not folder.manifest.is_file() and folder.other_files(own if has_entries else ()):
        raise PrepareError(
            [f"{out} contains files that `prepare` did not write"], "remove it, or choose another folder"
        )
    return folder.manifest.is_file()


def _prepared(
    raw: RawDataset, folder: DatasetFolder, workers: int | None, on_scan: OnScan, *, skip_bad: bool
) -> Prepared:
    """Prepare the scans that are not finished, and write the manifest."""
    with writing(folder.path):
        folder.entries.mkdir(exist_ok=True)
    entries: dict[str, _Entry] = {}
    problems: dict[str, str] = {}
    num_continued = 0
    for scan, outcome in _each(partial(_entry, raw, folder), raw.scans, workers):
        if isinstance(outcome, str):
            problems[scan.name] = f"{scan.name}: {outcome}"
        else:
            entries[scan.name], is_kept = outcome
            num_continued += is_kept
        on_scan(scan.name)
    for name, text in _shared_images(raw, entries):
        problems[name] = text
        del entries[name]
    left_out = (*raw.problems, *(problems[scan.name] for scan in raw.scans if scan.name in problems))
    if not entries:
        raise PrepareError(left_out, f"no scan in {raw.root} can be prepared")
    if left_out and not skip_bad:
        raise PrepareError(
            left_out,
            f"{_count(len(left_out), 'problem')}: correct the files and run the same command again (the "
            f"finished scans are kept in {folder.path}), or leave out the scans with problems by --skip-bad",
        )
    named = {scan.name: entries[scan.name].scan for scan in raw.scans if scan.name in entries}
    scans = tuple(scan for scan in named.values() if scan is not None)
    if not scans:
        raise UserError(f"no scan in {raw.root} has foreground, so there is no case: use --slices all")
    numbers = pooled_mean_std(scans)._asdict()
    raw_folder = "" if raw.made_with else str(raw.root.resolve())
    manifest = Manifest(scans=scans, left_out=left_out, raw_folder=raw_folder, **numbers, **_identity(raw))
    _finish(folder, manifest)
    empty = tuple(name for name, scan in named.items() if scan is None)
    return Prepared(folder.path, manifest, num_continued=num_continued, without_foreground=empty)


def _each(
    task: Callable[[RawScan], Any], scans: Sequence[RawScan], workers: int | None
) -> Iterator[tuple[RawScan, Any]]:
    """Pairs of a scan and its result, in the order in which they finish."""
    if workers is None:
        workers = _num_threads(scans)
    if min(workers, len(scans)) <= 1:
        yield from ((scan, task(scan)) for scan in scans)
        return
    with ThreadPoolExecutor(workers) as pool:
        running = {pool.submit(task, scan): scan for scan in scans}
        try:
            for future in as_completed(running):
                yield running[future], future.result()
        finally:
            # after Ctrl-C or a full disk: the running scans are finished, and no more are started
            pool.shutdown(cancel_futures=True)


def _num_threads(scans: Sequence[RawScan]) -> int:
    """One per CPU of this process; 1 for small files, which threads prepare no faster than one."""
    files = (*scans[0].image, *scans[0].masks.values())
    if sum(path.stat().st_size for path in files if path.is_file()) < _MIN_BYTES:
        return 1
    # a scheduler or a container may have limited the CPUs
    has_affinity = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1


def _entry(raw: RawDataset, folder: DatasetFolder, scan: RawScan) -> tuple[_Entry, bool] | str:
    """The entry of a scan, and whether an earlier run finished it; or the problem of its files."""
    try:
        check_name(scan.name)
        kept = _kept_entry(raw, folder, scan)
        if kept is not None:
            return kept, True
        arrays, stored = _read_and_convert(raw, scan)
        return _write(raw, folder, scan, arrays, stored), False
    except CannotWriteError:
        raise
    # one bad file must not stop the other scans
    except (UserError, OSError, MemoryError) as error:
        return _reason(error)


def _reason(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "there is not enough memory: use fewer --workers"
    if isinstance(error, OSError) and error.filename is not None:
        return f"cannot read {error.filename}: {error.strerror}"
    return message(error) or str(error)


def _kept_entry(raw: RawDataset, folder: DatasetFolder, scan: RawScan) -> _Entry | None:
    """The entry of a scan that an earlier run finished, if nothing has changed since."""
    # an entry or an array that is missing or damaged
    with suppress(OSError, UserError):
        entry = read_record(folder.entry(scan.name), _Entry)
        if entry.made_from != _made_from(raw, scan) or entry.inputs != _input_hashes(raw.root, scan):
            return None
        return None if _changed_array(folder, entry.scan) else entry
    return None


def _changed_array(folder: DatasetFolder, scan: Scan | None) -> Path | None:
    """The first array of a scan that is not the file that was prepared."""
    if scan is None:
        return None
    paths = {folder.array(kind, scan.name): digest for kind, digest in scan.arrays.items()}
    return next((path for path, digest in paths.items() if file_hash(path) != digest), None)


def _input_hashes(root: Path, scan: RawScan) -> dict[str, str]:
    """SHA-256 of a scan's files by their path in the raw folder."""
    return {_relative(root, path): file_hash(path) for path in (*scan.image, *scan.masks.values())}


def _relative(root: Path, path: Path) -> str:
    return path.relative_to(root).as_posix()


def _made_from(raw: RawDataset, scan: RawScan) -> str:
    """What a scan depends on, without the content of its files and without the folder they are in."""
    files = {rater: _relative(raw.root, path) for rater, path in scan.masks.items()}
    image = [_relative(raw.root, path) for path in scan.image]
    return json.dumps([scan.name, scan.patient, image, files, _identity(raw)], default=list)


def _read_and_convert(raw: RawDataset, scan: RawScan) -> tuple[ScanArrays, StoredScan | None]:
    arrays = raw.read(raw, scan)
    try:
        return arrays, convert_scan(arrays, raw)
    except UserError as error:
        # the conversion does not know the name of the file
        files = ", ".join(map(str, scan.image)) or "its image"
        if raw.source == "dicom":
            files = f"series in {scan.image[0].parent}"
        raise UserError(f"{files}: {error}") from error


def _write(
    raw: RawDataset, folder: DatasetFolder, scan: RawScan, arrays: ScanArrays, stored: StoredScan | None
) -> _Entry:
    """Write the arrays of a scan, then its entry."""
    inputs = dict(sorted(arrays.inputs.items()))
    in_manifest = None
    if stored is not None:
        of_kind: dict[Kind, np.ndarray | None] = {
            "images": stored.images,
            "masks": stored.masks,
            "truth": stored.truth,
        }
        digests: dict[Kind, str] = {}
        for kind, array in of_kind.items():
            if array is not None:
                with atomic_write(folder.array(kind, scan.name), durable=False) as temp_path:
                    with temp_path.open("wb") as file:
                        np.save(file, np.ascontiguousarray(array), allow_pickle=False)
                    digests[kind] = file_hash(temp_path)
        affine = arrays.affine
        in_manifest = Scan(
            name=scan.name,
            patient=scan.patient,
            slices=stored.slices,
            shape=stored.grid.shape,
            spacing_mm=stored.grid.spacing_mm,
            thickness_mm=stored.thickness_mm,
            affine=None if affine is None else tuple(tuple(map(float, row)) for row in affine),
            orientation=arrays.orientation,
            raw_shape=arrays.grid.shape,
            raters=arrays.raters,
            drawn=stored.drawn,
            limits=stored.limits,
            inputs=inputs,
            arrays=digests,
            num_bytes={kind: folder.array(kind, scan.name).stat().st_size for kind in digests},
            **stored_mean_std(stored.images)._asdict(),
        )
    entry = _Entry(made_from=_made_from(raw, scan), inputs=inputs, scan=in_manifest)
    with atomic_write(folder.entry(scan.name), durable=False) as temp_path:
        temp_path.write_text(entry.model_dump_json(), encoding="utf-8")
    return entry


def _shared_images(raw: RawDataset, entries: Mapping[str, _Entry]) -> Iterator[tuple[str, str]]:
    """Scans with the image of another patient, and the message: they would leak between folds."""
    first: dict[tuple[str, ...], RawScan] = {}
    for scan in raw.scans:
        if not scan.image or scan.name not in entries:
            continue
        digests = tuple(entries[scan.name].inputs[_relative(raw.root, path)] for path in scan.image)
        other = first.setdefault(digests, scan)
        if other.patient != scan.patient:
            yield (
                scan.name,
                f"{scan.name}: {scan.image[0]} (patient {scan.patient}) is the same image as "
                f"{other.image[0]} (patient {other.patient}), which would leak between "
                "folds: remove one, or give both one patient",
            )


def _finish(folder: DatasetFolder, manifest: Manifest) -> None:
    """Remove arrays of scans that no longer exist, write the manifest, and remove the entries."""
    arrays = {folder.array(kind, scan.name) for scan in manifest.scans for kind in scan.arrays}
    with writing(folder.path):
        for kind in ("images", "masks", "truth"):
            for path in (folder.path / kind).glob("*.npy"):
                if path not in arrays:
                    path.unlink()
            with suppress(OSError):
                (folder.path / kind).rmdir()
        # the arrays first: a manifest promises that they are complete
        getattr(os, "sync", lambda: None)()
        write_text(folder.manifest, manifest_text(manifest))
    shutil.rmtree(folder.entries, ignore_errors=True)


def _verified(raw: RawDataset, folder: DatasetFolder, workers: int | None, on_scan: OnScan) -> Prepared:
    """The dataset in `folder`, if it is what would be prepared now; otherwise a PrepareError."""
    advice = f"{folder.path} was not changed: remove it, or choose another folder"
    try:
        manifest = read_manifest(folder.path)
    except UserError as error:
        raise PrepareError([str(error)], advice) from error
    before, now = _flat(manifest.model_dump(mode="json", include=set(_identity(raw)))), _flat(_identity(raw))
    problems = [
        f"{name} was {before.get(name, 'not given')} and is now {now.get(name, 'not given')}"
        for name in before | now
        if before.get(name) != now.get(name)
    ]
    if not problems:
        known = {scan.name: scan for scan in manifest.scans}
        gone = known.keys() - {scan.name for scan in raw.scans}
        problems = [f"{name} is in {folder.path}, but no longer in {raw.root}" for name in sorted(gone)]
        # left out as the image of another patient, and can be read
        shared = "is the same image as"
        left_out = {text.partition(": ")[0] for text in manifest.left_out if shared in text}
        scans = [scan for scan in raw.scans if scan.name not in left_out]
        for scan, problem in _each(lambda scan: _difference(raw, folder, scan, known), scans, workers):
            problems += [f"{scan.name}: {problem}"] if problem else []
            on_scan(scan.name)
    if problems:
        raise PrepareError(problems, advice)
    shutil.rmtree(folder.entries, ignore_errors=True)
    return Prepared(folder.path, manifest, already=True)


def _difference(raw: RawDataset, folder: DatasetFolder, raw_scan: RawScan, known: Mapping[str, Scan]) -> str:
    """How a scan of a finished dataset differs from what would be prepared now; "" if it does not."""
    scan = known.get(raw_scan.name)
    try:
        if scan is None:
            with suppress(UserError, OSError):
                if _read_and_convert(raw, raw_scan)[1] is not None:
                    return "it is not in the dataset, but can be prepared now"
            return ""
        if scan.patient != raw_scan.patient:
            return f"the patient was {scan.patient} and is now {raw_scan.patient}"
        inputs = _input_hashes(raw.root, raw_scan)
        for name in sorted(inputs.keys() | scan.inputs.keys()):
            if inputs.get(name) != scan.inputs.get(name):
                return f"{name} was changed, added or removed since"
        changed = _changed_array(folder, scan)
        return f"{changed.relative_to(folder.path)} is not the file that was prepared" if changed else ""
    except (UserError, OSError, MemoryError) as error:
        return _reason(error)


def _identity(raw: RawDataset) -> dict[str, Any]:
    """Everything a dataset depends on besides its raw files, as JSON values and fields of the manifest."""
    class_of = None if raw.class_of is None else {str(key): raw.class_of[key] for key in sorted(raw.class_of)}
    return {
        "source": raw.source,
        "class_names": list(raw.class_names),
        "raters": list(raw.raters),
        "channels": list(raw.channels),
        "options": raw.options.model_dump(mode="json"),
        "class_of": class_of,
        "made_with": None if raw.made_with is None else dict(raw.made_with),
    }


def _flat(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by their keys; the keys of nested records are joined with a dot."""
    flat: dict[str, Any] = {}
    for key, value in record.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
