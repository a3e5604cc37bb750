"""Small datasets to prepare, readers that fail, and the bytes of a folder."""

import hashlib
from pathlib import Path
from unittest.mock import patch

from raw_trees import make_folder

from semidice.data.phantom import PhantomOptions
from semidice.data.prepare import prepare_dataset
from semidice.data.sources import find_datasets
from semidice.data.sources.scan import read_scan

PHANTOM = PhantomOptions(num_cases=6, size=(24, 32), num_raters=3)


def files_in(folder):
    """SHA-256 of every file by its path in the folder."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def a_phantom():
    (raw,) = find_datasets("phantom", Path("raw"), phantom=PHANTOM)
    return raw


def a_folder(root, **options):
    (raw,) = find_datasets("folder", make_folder(root, **options))
    return raw


def prepare(raw, out, *, reader=read_scan, **options):
    """Prepare in this process; reader replaces the function that reads a scan."""
    with patch("semidice.data.prepare.scan.read_scan", reader):
        return prepare_dataset(raw, out, **({"workers": 1} | options))


def reads(names, reader=read_scan):
    """A reader that adds the name of each scan to `names`."""

    def noting(dataset, scan):
        names.append(scan.name)
        return reader(dataset, scan)

    return noting


def fails_at(name, error):
    def failing(dataset, scan):
        if scan.name == name:
            raise error
        return read_scan(dataset, scan)

    return failing
