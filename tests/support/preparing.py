"""Small datasets to prepare, readers that fail, and the hashes of the files of a folder."""

import hashlib
from dataclasses import replace

from raw_trees import make_folder

from semidice.data.phantom import PhantomOptions
from semidice.data.prepare import prepare_dataset
from semidice.data.sources import find_datasets

PHANTOM = PhantomOptions(num_cases=6, size=(24, 32), num_raters=3)


def file_hashes(folder):
    """SHA-256 of every file of the folder but its lock, by relative path."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def phantom_dataset():
    (raw,) = find_datasets("phantom", PHANTOM)
    return raw


def folder_dataset(root, **options):
    (raw,) = find_datasets("folder", make_folder(root, **options))
    return raw


def prepare(raw, out, **options):
    """Prepare in this thread."""
    return prepare_dataset(raw, out, **({"workers": 1} | options))


def recording(raw, names):
    """The dataset, whose reader adds the name of each scan to `names`."""

    def record(dataset, scan):
        names.append(scan.name)
        return raw.read(dataset, scan)

    return replace(raw, read=record)


def failing(raw, name, error):
    """The dataset, whose reader raises `error` for the scan `name`."""

    def fail(dataset, scan):
        if scan.name == name:
            raise error
        return raw.read(dataset, scan)

    return replace(raw, read=fail)
