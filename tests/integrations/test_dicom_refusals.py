"""DICOM files that would be misread: the message of `semidice prepare dicom`. `make test-integrations`."""

from contextlib import suppress

import numpy as np
import pytest
from typer.testing import CliRunner

pytestmark = pytest.mark.integrations
pydicom = pytest.importorskip("pydicom", reason="needs pydicom: make test-integrations")
pytest.importorskip("highdicom", reason="needs highdicom: make test-integrations")

from dicom_trees import (  # noqa: E402
    MR,
    ORIGIN,
    TURNED,
    new_volume,
    problem_of,
    save,
    segmentation,
    series_datasets,
    slice_dataset,
    write_series,
    write_tree,
)
from raw_trees import read_scan  # noqa: E402

from semidice.cli import app  # noqa: E402
from semidice.data.sources import find_datasets  # noqa: E402
from semidice.prediction.inputs import find_inputs  # noqa: E402
from semidice.runs.run import DatasetFacts  # noqa: E402


def with_series(change=lambda datasets: None, **options):
    """A tree with one series, changed after it was drawn on."""

    def make(root):
        image, masks = new_volume()
        datasets = series_datasets(image, **options)
        for name, mask in zip(("A", "B"), masks, strict=True):
            save(segmentation(datasets, mask, creator=name), root / name / "seg.dcm")
        change(datasets)
        write_series(root / "images", datasets)

    return make


def with_segmentation(change):
    """A tree with one series, and a segmentation that was changed."""

    def make(root):
        image, masks = new_volume()
        datasets = series_datasets(image)
        write_series(root / "images", datasets)
        drawn = segmentation(datasets, masks[0], creator="A")
        changed = change(drawn, datasets, masks)
        save(drawn if changed is None else changed, root / "seg.dcm")

    return make


def set_all(**elements):
    def change(datasets):
        for dataset in datasets:
            for name, value in elements.items():
                if value is None:
                    delattr(dataset, name)
                else:
                    setattr(dataset, name, value)

    return change


def move_first(datasets):
    position = np.array(datasets[2].ImagePositionPatient, dtype=float)
    datasets[2].ImagePositionPatient = (position + 0.8 * np.cross(*TURNED)).round(6).tolist()


def drop_two(datasets):
    del datasets[2:4]


def double_first(datasets):
    datasets.append(slice_dataset(new_volume()[0][:, :, 0].T, ORIGIN))


def turn_first(datasets):
    set_all(ImageOrientationPatient=[1, 0, 0, 0, 1, 0])(datasets[:1])


def crop_first(datasets):
    datasets[0] = slice_dataset(np.ones((8, 9)), ORIGIN)


def rename_first(datasets):
    set_all(PatientID="P2")(datasets[:1])


def of_another_series(drawn, *_):
    drawn.ReferencedSeriesSequence[0].SeriesInstanceUID = "1.2.9"


def of_another_segment(drawn, *_):
    drawn.SegmentSequence[0].SegmentNumber = 7


def moved_by(vector):
    def change(drawn, _, __):
        for frame in drawn.PerFrameFunctionalGroupsSequence:
            plane = frame.PlanePositionSequence[0]
            plane.ImagePositionPatient = (
                (np.array(plane.ImagePositionPatient, dtype=float) + vector).round(6).tolist()
            )

    return change


def cropped(_, datasets, masks):
    return segmentation(series_datasets(new_volume()[0][:32]), masks[0][:32], creator="A")


def overlapping(_, datasets, masks):
    return segmentation(datasets, np.stack([masks[0], masks[0]]), creator="A", labels=["organ", "tumour"])


def bad_fraction(_, datasets, masks):
    drawn = segmentation(datasets, masks[:1] * 0.9, kind="FRACTIONAL", max_fractional_value=10)
    drawn.MaximumFractionalValue = 5
    return drawn


def two_labels(root):
    image, masks = new_volume()
    datasets = series_datasets(image)
    write_series(root / "images", datasets)
    for label, mask in zip(("Nodule", "nodule"), masks, strict=True):
        save(
            segmentation(datasets, mask, creator=f"rater {mask.sum()}", labels=[label]), root / f"{label}.dcm"
        )


def two_patients(root):
    write_tree(root, patients=["P1", "p1"])


def same_raters(root):
    image, masks = new_volume()
    datasets = series_datasets(image)
    write_series(root / "images", datasets)
    for number, mask in enumerate(masks):
        save(segmentation(datasets, mask, creator="Ada"), root / f"{number}.dcm")


def two_modalities(root):
    with_series(PatientID="P1")(root / "ct")
    make = with_series(SOPClassUID=MR, Modality="MR", PatientID="P1", SeriesInstanceUID="1.2.3.77")
    make(root / "mr")


REFUSED = {
    # a series that is not one volume, whose geometry or values would be guessed
    "missing slices": (with_series(drop_two), "away from its place", "missing"),
    "uneven slices": (with_series(move_first), "away from its place", "not evenly spaced"),
    "gantry tilt": (with_series(shear=0.5), "away from its place", "tilted gantry"),
    "doubled slices": (with_series(double_first), "away from its place", "doubled"),
    "two orientations": (with_series(turn_first), "different orientations", "one volume"),
    "two sizes": (with_series(crop_first), "columns and rows"),
    "no rescale": (with_series(set_all(RescaleSlope=None)), "CT without RescaleSlope"),
    "bad spacing": (with_series(set_all(PixelSpacing=[0, 1])), "PixelSpacing", "above 0"),
    "inverted MR": (with_series(SOPClassUID=MR, PhotometricInterpretation="MONOCHROME1"), "MONOCHROME1"),
    "lookup table": (with_series(set_all(ModalityLUTSequence=[pydicom.Dataset()])), "modality lookup table"),
    # patients that would be in several folds
    "no patient": (with_series(PatientID=""), "has no PatientID", "several folds"),
    "two patients": (with_series(rename_first), "differ in PatientID"),
    "two spellings of a patient": (two_patients, "'P1' and 'p1'", "spelling"),
    "CT and MR": (two_modalities, "a folder of its own"),
    # masks that belong to something else
    "raters not told apart": (same_raters, "segmentations of one series", "ContentCreatorName"),
    "shifted": (with_segmentation(moved_by(0.4 * TURNED[0])), "0.4 mm apart"),
    "between slices": (with_segmentation(moved_by(1.25 * np.cross(*TURNED))), "slices 0 to 5", "resample it"),
    "cropped": (with_segmentation(cropped), "32 columns", "36 and 40"),
    "overlapping": (with_segmentation(overlapping), "two classes", "one class"),
    "unknown series": (with_segmentation(of_another_series), "seg.dcm must refer to one"),
    "unknown segment": (with_segmentation(of_another_segment), "segment 1", "not describe"),
    "bad fraction": (with_segmentation(bad_fraction), "holds 9", "MaximumFractionalValue is 5"),
    "two spellings of a label": (two_labels, "'Nodule'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_would_be_misread_is_refused(tmp_path, name):
    make, *words = REFUSED[name]
    make(tmp_path / "raw")
    problem = problem_of(tmp_path / "raw")
    assert all(word in problem for word in words), problem


def test_the_position_of_masks_cannot_be_ignored(tmp_path):
    with_series()(tmp_path / "raw")
    command = ["prepare", "dicom", str(tmp_path / "raw"), str(tmp_path / "out"), "--ignore-placement"]
    assert "leave out --ignore-placement" in CliRunner().invoke(app, [*command, "--workers", "1"]).output


def test_without_the_package_one_line_says_what_to_install(tmp_path, monkeypatch):
    with_series()(tmp_path / "raw")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'semidice\[dicom\]'"):
        find_datasets("dicom", tmp_path / "raw")
    with pytest.raises(ImportError, match=r"pip install 'semidice\[dicom\]'"):
        find_inputs([tmp_path / "raw"], tmp_path / "out", facts=DatasetFacts.model_construct())


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_file_is_read_or_refused_and_nothing_else_happens(tmp_path, seed):
    with_series()(tmp_path)
    rng = np.random.default_rng(seed)
    paths = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    path = paths[rng.integers(len(paths))]
    content = bytearray(path.read_bytes())
    # mostly the header, which decides how the rest is read
    for position in rng.integers(132, min(len(content), 3000), size=rng.integers(1, 12)):
        content[position] = rng.integers(256)
    path.write_bytes(content[: rng.integers(132, len(content)) if seed % 4 == 0 else None])
    with suppress(ValueError):
        for dataset in find_datasets("dicom", tmp_path):
            for scan in dataset.scans:
                read_scan(dataset, scan)
