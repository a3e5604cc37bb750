"""`semidice prepare`: raw scans become a dataset of arrays and a manifest.

OUT is no dataset until all scans are finished: only then does it have a manifest.json. A finished scan has an
entry OUT/.scans/SCAN.json, which is its later line in the manifest, and is written after its arrays. A
command that was stopped continues: a scan is kept if its raw files and its arrays still have the SHA-256 of
its entry, and if the options are the same. A finished dataset is never changed: it is compared with what
would be prepared now. The same raw files and options give the same bytes, for any number of workers.
"""

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError
from rich.console import Console

from ..console import progress_bar, say
from ..errors import CannotWriteError, UserError, first_problem, listing, message, read_record, writing
from ..locks import locked
from ..paths import DatasetFolder, atomic_write, file_hash, leads_outside, write_text
from ..processes import end_with_parent
from .convert import StoredScan, convert_scan
from .intensities import pooled_mean_std, stored_mean_std
from .manifest import Kind, Manifest, PrepareOptions, Scan, manifest_text, read_manifest
from .phantom import PhantomOptions
from .sources import find_datasets
from .sources.raw import RawDataset, RawScan, ScanArrays, natural_order

OnScan = Callable[[str], object]

# of the files of a scan
_LARGE_BYTES = 2**18
# a small scan takes milliseconds, the start of a process seconds
_MANY_SCANS = 2000


def run_prepare(
    source: str,
    raw_dir: Path | PhantomOptions,
    out_dir: Path,
    *,
    console: Console,
    tasks: Sequence[str] = (),
    overrides: Mapping[str, Any] | None = None,
    skip_bad: bool = False,
    workers: int | None = None,
) -> list[Manifest]:
    """Prepare every dataset that the source finds in `raw_dir`, and print a summary.

    A problem does not stop the other datasets: a UserError at the end holds all problems.
    tasks: names of the QUBIQ datasets to prepare, all if empty. Other options: see `prepare_dataset`.
    """
    prepared, problems = [], []
    with progress_bar(console, f"looking through the files of {source}", "files") as bar:
        datasets = find_datasets(source, raw_dir, tasks=tasks, on_file=bar.to)
    num_scans = sum(len(raw.scans) for raw in datasets)
    with progress_bar(console, "preparing", "scans", total=num_scans) as bar:
        for raw in datasets:
            bar.name = f"preparing {raw.name or source}"
            out = out_dir / raw.name
            already = DatasetFolder(out).manifest.is_file()
            try:
                manifest = prepare_dataset(
                    raw,
                    out,
                    overrides=overrides,
                    skip_bad=skip_bad,
                    workers=workers,
                    on_scan=lambda _: bar.advance(),
                )
            except CannotWriteError:
                raise
            except UserError as error:
                problems.append(f"{raw.name}:\n{error}" if raw.name else str(error))
                continue
            except KeyboardInterrupt:
                say(console, "stopped; the finished scans are kept: the same command continues")
                raise
            prepared.append(manifest)
            for line in _summary(manifest, raw, out, already=already):
                say(console, line)
    if problems:
        raise UserError("\n".join(problems))
    return prepared


def _summary(manifest: Manifest, raw: RawDataset, out: Path, *, already: bool) -> Iterator[str]:
    scans, options = manifest.scans, manifest.options
    shapes = sorted({" x ".join(map(str, scan.shape)) for scan in scans})
    num_cases = sum(scan.num_cases for scan in scans)
    yield (
        f"{out}: {_count(num_cases, 'case')} of {_count(len({scan.patient for scan in scans}), 'patient')}, "
        f"{_count(len(manifest.raters), 'rater')}, {shapes[0] if len(shapes) == 1 else 'several sizes'}, "
        f"classes {', '.join(manifest.class_names)}"
    )
    yield from raw.notes
    cut = [scan for scan in scans if scan.slices is not None]
    if cut:
        kept = " with foreground" if options.slices == "foreground" else ""
        yield (
            f"{_count(len(cut), 'volume')} cut into {_count(num_cases, 'slice')}{kept}: networks see slices, "
            "and scores are of whole volumes"
        )
    if already:
        yield "it was prepared already, with these options and from these files: nothing was changed"
    if manifest.without_foreground:
        names = listing(manifest.without_foreground, "scan")
        yield f"left out, because no slice has foreground: {names}"
    yield from (f"warning: {text}" for text in manifest.warnings)
    if options.size and any(len(scan.shape) == 3 for scan in scans):
        yield "size was not applied: volumes keep their size unless --slices cuts them into slices"
    if raw.num_unlabelled:
        yield f"left out, because they have no mask: {_count(raw.num_unlabelled, 'scan')}"
    yield from (f"left out: {problem}" for problem in manifest.left_out)
    yield f"next: semidice check {out}"


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
) -> Manifest:
    """Prepare one dataset in the folder `out`; a UserError holds the problems of all scans, one per line.

    overrides: options that replace those of the source. skip_bad: leave out the scans that have problems.
    workers: threads, or processes for thousands of small scans; None for one per CPU where that pays; 0 or 1
    uses this thread.
    on_scan(name) is called when a scan is done.
    """
    scans = sorted(raw.scans, key=lambda scan: natural_order(scan.name))
    if not scans:
        raise _refusal(raw.problems, f"no scan in {raw.root} can be prepared")
    raw = replace(raw, scans=tuple(scans), options=_options(raw, overrides or {}))
    folder = DatasetFolder(Path(out))
    if any(scan.image for scan in scans) and not leads_outside(raw.root, folder.path):
        raise UserError(f"{out} is in the raw folder {raw.root}, which stays unchanged: choose another one")
    folder.check_links()
    if folder.manifest.is_file():
        return _verified(raw, folder, workers, on_scan)
    own = (folder.entries, *map(folder.path.joinpath, ("images", "masks", "truth")))
    if folder.other_files(own if folder.entries.is_dir() and not folder.entries.is_symlink() else ()):
        raise UserError(f"{out} contains files that `prepare` did not write: remove it, or choose another")
    with locked(folder, "semidice prepare"):
        return _prepared(raw, folder, workers, on_scan, skip_bad=skip_bad)


def _refusal(problems: Sequence[str], advice: str) -> UserError:
    return UserError("\n".join([*problems, advice]))


def _options(raw: RawDataset, overrides: Mapping[str, Any]) -> PrepareOptions:
    """The options to use; a window takes the place of keeping bytes."""
    try:
        options = PrepareOptions.model_validate(raw.options.model_dump() | dict(overrides))
    except ValidationError as error:
        raise UserError(first_problem(error)) from error
    return options.model_copy(update={"keep_bytes": options.keep_bytes and options.window is None})


def _prepared(
    raw: RawDataset, folder: DatasetFolder, workers: int | None, on_scan: OnScan, *, skip_bad: bool
) -> Manifest:
    """Prepare the scans that are not finished, and write the manifest."""
    identity = json.dumps(_identity(raw))
    if not folder.identity.is_file() or folder.identity.read_text(encoding="utf-8") != identity:
        # nothing that was prepared with other options is kept
        with writing(folder.path):
            shutil.rmtree(folder.entries, ignore_errors=True)
        write_text(folder.identity, identity)
    scans: dict[str, Scan] = {}
    problems: dict[str, str] = {}
    # without the scans, which would be sent to a process with each of them
    task = partial(_kept_or_written, replace(raw, scans=()), folder)
    for raw_scan, outcome in _each(task, [(scan,) for scan in raw.scans], workers):
        if isinstance(outcome, Scan):
            scans[raw_scan.name] = outcome
        else:
            problems[raw_scan.name] = f"{raw_scan.name}: {outcome}"
        on_scan(raw_scan.name)
    for name, text in _shared_images(raw, scans):
        problems[name] = text
        del scans[name]
    left_out = (*raw.problems, *(problems[scan.name] for scan in raw.scans if scan.name in problems))
    if not scans:
        raise _refusal(left_out, f"no scan in {raw.root} can be prepared")
    if left_out and not skip_bad:
        raise _refusal(
            left_out,
            f"{_count(len(left_out), 'problem')}: correct the files and run the same command again (the "
            f"finished scans are kept in {folder.path}), or leave out the scans with problems by --skip-bad",
        )
    ordered = [scans[scan.name] for scan in raw.scans if scan.name in scans]
    with_cases = tuple(scan for scan in ordered if scan.num_cases)
    if not with_cases:
        raise UserError(f"no scan in {raw.root} has foreground, so there is no case: use --slices all")
    manifest = Manifest(
        scans=with_cases,
        without_foreground=tuple(scan.name for scan in ordered if not scan.num_cases),
        left_out=left_out,
        raw_folder="" if raw.made_with else str(raw.root.resolve()),
        **pooled_mean_std(with_cases)._asdict(),
        **_identity(raw),
    )
    _finish(folder, manifest)
    return manifest


def _each(
    task: Callable[..., Any], calls: Sequence[tuple[RawScan, *tuple[Any, ...]]], workers: int | None
) -> Iterator[tuple[RawScan, Any]]:
    """Pairs of a scan, which is the first argument of a call, and its result; the first finished comes first.

    The task, its arguments and results must pickle.
    """
    pool = _pool([scan for scan, *_ in calls], workers)
    if pool is None:
        yield from ((call[0], task(*call)) for call in calls)
        return
    with pool:
        running = {pool.submit(task, *call): call[0] for call in calls}
        try:
            for future in as_completed(running):
                yield running[future], future.result()
        except BrokenProcessPool as error:
            raise UserError("a process was killed, maybe for its memory: use fewer --workers") from error
        finally:
            # after Ctrl-C or a full disk: the running scans are finished, and no more are started
            pool.shutdown(cancel_futures=True)


def _pool(scans: Sequence[RawScan], workers: int | None) -> Executor | None:
    """Threads for large files, because unpacking, scaling and hashing release the interpreter.

    Threads of small files wait for each other: many get processes, which take seconds to start, and few none.
    """
    if not scans:
        return None
    is_large = sum(path.stat().st_size for path in scans[0].files if path.is_file()) >= _LARGE_BYTES
    is_many = len(scans) >= _MANY_SCANS
    # a scheduler or a container may have limited the CPUs
    has_affinity = hasattr(os, "sched_getaffinity")
    num_cpus = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    number = min(num_cpus if workers is None else workers, len(scans))
    if number <= 1 or not (is_large or is_many or workers):
        return None
    if not is_many or is_large:
        return ThreadPoolExecutor(number)
    # spawn, because a fork of a process with torch's threads may hang
    return ProcessPoolExecutor(number, mp_context=get_context("spawn"), initializer=_start_process)


def _start_process() -> None:
    # the terminal sends Ctrl-C to all processes of the command; only the main one reacts
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()


def _kept_or_written(raw: RawDataset, folder: DatasetFolder, raw_scan: RawScan) -> Scan | str:
    """The scan that an earlier run has finished, or that is prepared now; or the problem of its files."""
    entry = folder.entry(raw_scan.name)
    # an entry that is missing or damaged
    with suppress(UserError):
        kept = read_record(entry, Scan)
        if not _difference(raw, folder, raw_scan, kept):
            return kept
    try:
        arrays, stored = _read_and_convert(raw, raw_scan)
    # one bad file must not stop the other scans
    except (UserError, MemoryError) as error:
        return message(error) or ""
    digests: dict[Kind, str] = {}
    for kind, array in stored.arrays.items():
        with atomic_write(folder.array(kind, raw_scan.name), durable=False) as temp_path:
            with temp_path.open("wb") as file:
                np.save(file, np.ascontiguousarray(array), allow_pickle=False)
            digests[kind] = file_hash(temp_path)
    affine = arrays.affine
    scan = Scan(
        name=raw_scan.name,
        patient=raw_scan.patient,
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
        inputs=dict(sorted(arrays.inputs.items())),
        arrays=digests,
        num_bytes={kind: folder.array(kind, raw_scan.name).stat().st_size for kind in digests},
        **stored_mean_std(stored.arrays.get("images", ()))._asdict(),
    )
    with atomic_write(entry, durable=False) as temp_path:
        temp_path.write_text(scan.model_dump_json(), encoding="utf-8")
    return scan


def _read_and_convert(raw: RawDataset, scan: RawScan) -> tuple[ScanArrays, StoredScan]:
    arrays = raw.read(raw, scan)
    try:
        return arrays, convert_scan(arrays, raw)
    except UserError as error:
        # the conversion does not know the name of the file
        raise UserError(f"{', '.join(map(str, scan.image[:4])) or 'its image'}: {error}") from error


def _difference(raw: RawDataset, folder: DatasetFolder, raw_scan: RawScan, scan: Scan) -> str:
    """How a finished scan differs from what would be prepared now; "" if it does not."""
    if scan.patient != raw_scan.patient:
        return f"the patient was {scan.patient} and is now {raw_scan.patient}"
    if set(scan.raters) != set(raw_scan.masks) and raw_scan.masks:
        return f"the raters were {', '.join(scan.raters)} and are now {', '.join(raw_scan.masks)}"
    try:
        inputs = {raw.relative(path): file_hash(path) for path in raw_scan.files}
        for name in sorted(inputs.keys() | scan.inputs.keys()):
            if inputs.get(name) != scan.inputs.get(name):
                return f"{name} was changed, added or removed since"
        for kind, digest in scan.arrays.items():
            path = folder.array(kind, scan.name)
            if file_hash(path) != digest:
                return f"{path.relative_to(folder.path)} is not the file that was prepared"
    except OSError as error:
        return f"cannot read {error.filename}: {error.strerror}"
    return ""


def _shared_images(raw: RawDataset, scans: Mapping[str, Scan]) -> Iterator[tuple[str, str]]:
    """Scans with the image of another patient, and the message: they would leak between folds."""
    first: dict[tuple[str, ...], RawScan] = {}
    for scan in raw.scans:
        if not scan.image or scan.name not in scans:
            continue
        digests = tuple(scans[scan.name].inputs[raw.relative(path)] for path in scan.image)
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
        for path in folder.path.glob("*/*.npy"):
            if path not in arrays:
                path.unlink()
        with suppress(OSError):
            (folder.path / "truth").rmdir()
        # the arrays first: a manifest promises that they are complete
        getattr(os, "sync", lambda: None)()
        write_text(folder.manifest, manifest_text(manifest))
    shutil.rmtree(folder.entries, ignore_errors=True)


def _verified(raw: RawDataset, folder: DatasetFolder, workers: int | None, on_scan: OnScan) -> Manifest:
    """The manifest of the dataset in `folder`, if it is what would be prepared now; otherwise a UserError."""
    manifest = read_manifest(folder.path)
    before, now = _identity(manifest), _identity(raw)
    problems = [
        f"{name} was {before[name]} and is now {now[name]}" for name in now if before[name] != now[name]
    ]
    known = {scan.name: scan for scan in manifest.scans}
    if not problems:
        gone = known.keys() - {scan.name for scan in raw.scans}
        problems = [f"{name} is in {folder.path}, but no longer in {raw.root}" for name in sorted(gone)]
        # left out as the image of another patient, and can be read
        shared = {text.partition(": ")[0] for text in manifest.left_out if "is the same image as" in text}
        task = partial(_unlike, replace(raw, scans=()), folder)
        calls = [(scan, known.get(scan.name)) for scan in raw.scans if scan.name not in shared]
        for scan, problem in _each(task, calls, workers):
            problems += [f"{scan.name}: {problem}"] if problem else []
            on_scan(scan.name)
    if problems:
        raise _refusal(problems, f"{folder.path} was not changed: remove it, or choose another folder")
    return manifest


def _unlike(raw: RawDataset, folder: DatasetFolder, raw_scan: RawScan, scan: Scan | None) -> str:
    """How a raw scan differs from that of the finished dataset; "" if it does not."""
    if scan is not None:
        return _difference(raw, folder, raw_scan, scan)
    # without foreground, or left out because of a problem, which may be gone
    with suppress(UserError):
        if _read_and_convert(raw, raw_scan)[1].arrays:
            return "it is not in the dataset, but can be prepared now"
    return ""


def _identity(made: RawDataset | Manifest) -> dict[str, Any]:
    """Everything a dataset depends on besides its raw files: fields of the manifest, as JSON values."""
    names = ("source", "class_names", "raters", "channels", "made_with")
    class_of = made.class_of and {str(key): made.class_of[key] for key in sorted(made.class_of)}
    record = {name: getattr(made, name) for name in names}
    record |= {"class_of": class_of, "options": made.options.model_dump()}
    identity: dict[str, Any] = json.loads(json.dumps(record))
    return identity
