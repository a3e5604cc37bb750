"""The manifest put together from the records of a dataset's scans, and how a finished one differs from it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from fractions import Fraction
from typing import Any

from .manifest import Manifest
from .options import PrepareOptions
from .raw import RawDataset
from .scan_job import FinishedScan

_ABSENT = "not given"


def dataset_identity(raw: RawDataset, options: PrepareOptions) -> dict[str, Any]:
    """What a dataset depends on besides its raw files, as JSON holds it."""
    used = options.model_dump(mode="json")
    if not options.ignore_placement:
        # as in datasets from before there was a choice
        del used["ignore_placement"]
    if raw.class_of_value is not None:
        used["class_of_value"] = {str(value): label for value, label in sorted(raw.class_of_value.items())}
    if raw.phantom is not None:
        used["phantom"] = asdict(raw.phantom) | {"size": list(raw.phantom.size)}
    return {
        "source": raw.source,
        "class_names": list(raw.class_names),
        "raters": list(raw.raters),
        "channels": list(raw.channels),
        "options": used,
    }


def assembled_manifest(
    raw: RawDataset, options: PrepareOptions, records: Sequence[FinishedScan], left_out: Sequence[str]
) -> Manifest:
    """The manifest of the scans that became cases; a ValueError where they do not make one dataset.

    left_out: problems of scans that were skipped; they are kept with the options.
    """
    records = [record for record in records if record.scan is not None]
    scans = tuple(record.scan for record in records if record.scan is not None)
    if not scans:
        raise ValueError(f"no scan in {raw.root} holds foreground, so there is no case: try --slices all")
    mean, std = _moments(records)
    identity = dataset_identity(raw, options)
    if left_out:
        identity["options"]["left_out"] = list(left_out)
    return Manifest(mean=mean, std=std, scans=scans, **identity)


def _moments(records: Sequence[FinishedScan]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel over all stored values, exact until they are rounded."""
    count = sum(record.count for record in records)
    means, deviations = [], []
    for channel in range(len(records[0].total)):
        mean = sum(Fraction(record.total[channel], record.levels) for record in records) / count
        square = sum(Fraction(record.squares[channel], record.levels**2) for record in records) / count
        variance = square - mean * mean
        if not variance:
            raise ValueError(f"channel {channel + 1} has the same value in all cases: it shows nothing")
        means.append(float(mean))
        deviations.append(float(variance) ** 0.5)
    return tuple(means), tuple(deviations)


def differences(manifest: Manifest, identity: Mapping[str, Any]) -> list[str]:
    """Each option or description that is not the manifest's, in words."""
    was = manifest.model_dump(mode="json", include=set(identity))
    was["options"].pop("left_out", None)
    before, now = _flat(was), _flat(identity)
    return [
        f"{name.removeprefix('options.')} was {before.get(name, _ABSENT)} and is now {now.get(name, _ABSENT)}"
        for name in before | now
        if before.get(name) != now.get(name)
    ]


def _flat(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by their keys, those of a record in a record joined with a dot."""
    flat: dict[str, Any] = {}
    for key, value in record.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
