"""Small datasets to prepare, readers that fail, and the hashes of the files of a folder."""

import hashlib
from pathlib import Path
from unittest.mock import patch

from raw_trees import make_folder

from semidice.data.phantom import PhantomOptions
from semidice.data.prepare import prepare_dataset
from semidice.data.sources import find_datasets
from semidice.data.sources.scan import read_scan

PHANTOM = PhantomOptions(num_cases=6, size=(24, 32), num_raters=3)


def file_hashes(folder):
    """SHA-256 of every file of the folder, by relative path."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def phantom_dataset():
    (raw,) = find_datasets("phantom", Path("raw"), phantom=PHANTOM)
    return raw


def folder_dataset(root, **options):
    (raw,) = find_datasets("folder", make_folder(root, **options))
    return raw


def prepare(raw, out, *, reader=read_scan, **options):
    """Prepare in this process; reader replaces the function that reads a scan."""
    with patch("semidice.data.prepare.scan.read_scan", reader):
        return prepare_dataset(raw, out, **({"workers": 1} | options))


def recording_reader(names, reader=read_scan):
    """A reader that adds the name of each scan to `names`."""

    def record(dataset, scan):
        names.append(scan.name)
        return reader(dataset, scan)

    return record


def failing_reader(name, error):
    """A reader that raises `error` for the scan `name`."""

    def fail(dataset, scan):
        if scan.name == name:
            raise error
        return read_scan(dataset, scan)

    return fail
