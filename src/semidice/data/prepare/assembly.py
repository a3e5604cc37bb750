"""Builds the manifest from the records of the scans, and compares an existing one with what is wanted now."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from fractions import Fraction
from typing import Any

from ..manifest import Manifest
from ..sources.raw import RawDataset
from .scan import FinishedScan

_ABSENT = "not given"


def dataset_identity(raw: RawDataset) -> dict[str, Any]:
    """Everything a dataset depends on besides its raw files, as JSON values."""
    used = raw.options.model_dump(mode="json")
    if not raw.options.ignore_placement:
        # manifests from before this option do not have it
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


def assembled_manifest(raw: RawDataset, records: Sequence[FinishedScan], left_out: Sequence[str]) -> Manifest:
    """The manifest of the scans that became cases; a ValueError if there is none, or a channel is constant.

    left_out: problems of scans that were left out; they are stored with the options.
    """
    records = [record for record in records if record.scan is not None]
    scans = tuple(record.scan for record in records if record.scan is not None)
    if not scans:
        raise ValueError(f"no scan in {raw.root} has foreground, so there is no case: use --slices all")
    mean, std = _moments(records)
    identity = dataset_identity(raw)
    if left_out:
        identity["options"]["left_out"] = list(left_out)
    return Manifest(mean=mean, std=std, scans=scans, **identity)


def _moments(records: Sequence[FinishedScan]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel over all cases, rounded only at the end."""
    count = sum(record.count for record in records)
    means, deviations = [], []
    for channel in range(len(records[0].total)):
        mean = sum(Fraction(record.total[channel], record.levels) for record in records) / count
        square = sum(Fraction(record.squares[channel], record.levels**2) for record in records) / count
        variance = square - mean * mean
        if not variance:
            raise ValueError(f"channel {channel + 1} has the same value in all cases: it has no contrast")
        means.append(float(mean))
        deviations.append(float(variance) ** 0.5)
    return tuple(means), tuple(deviations)


def differences(manifest: Manifest, identity: Mapping[str, Any]) -> list[str]:
    """One message for each option or description that differs from the manifest."""
    previous = manifest.model_dump(mode="json", include=set(identity))
    previous["options"].pop("left_out", None)
    before, now = _flat(previous), _flat(identity)
    return [
        f"{name.removeprefix('options.')} was {before.get(name, _ABSENT)} and is now {now.get(name, _ABSENT)}"
        for name in before | now
        if before.get(name) != now.get(name)
    ]


def _flat(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by their keys; the keys of nested records are joined with a dot."""
    flat: dict[str, Any] = {}
    for key, value in record.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
