"""Prepare: raw scans become a dataset of arrays and a manifest.

command     every dataset of a source, with a progress bar and a summary
dataset     one dataset: its scans over processes, then the manifest
scan        one scan: read, convert, write
convert     intensities, slices, sizes, bit planes
workers     tasks over processes
"""

from .command import PrepareRequest, run_prepare
from .dataset import Prepared, PrepareError, prepare_dataset

__all__ = ["PrepareError", "PrepareRequest", "Prepared", "prepare_dataset", "run_prepare"]
