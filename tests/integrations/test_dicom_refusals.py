"""DICOM files that cannot be used: the message of `semidice prepare dicom`. `make test-integrations`."""

import os
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
    enhanced,
    new_volume,
    problem_of,
    save,
    segmentation,
    series_datasets,
    slice_dataset,
    write_series,
    write_tree,
)

from semidice.cli import app  # noqa: E402
from semidice.data.sources import find_datasets  # noqa: E402
from semidice.data.sources.scan import read_scan  # noqa: E402
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


def compress(datasets):
    for dataset in datasets:
        dataset.file_meta.TransferSyntaxUID = "1.2.840.10008.1.2.4.70"
        dataset.PixelData = pydicom.encaps.encapsulate([b"\xff\xd8\xff\xd9"])


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


def deflated(datasets):
    for dataset in datasets:
        dataset.file_meta.TransferSyntaxUID = "1.2.840.10008.1.2.1.99"


def colours(datasets):
    for dataset in datasets:
        dataset.SamplesPerPixel, dataset.PhotometricInterpretation, dataset.PlanarConfiguration = 3, "RGB", 0
        dataset.PixelData = dataset.PixelData * 3


def bad_fraction(_, datasets, masks):
    drawn = segmentation(datasets, masks[:1] * 0.9, kind="FRACTIONAL", max_fractional_value=10)
    drawn.MaximumFractionalValue = 5
    return drawn


def label_map(_, datasets, masks):
    return segmentation(datasets, masks[0], kind="LABELMAP", creator="A")


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


def structure_set(root):
    with_series()(root)
    dataset = slice_dataset(np.zeros((2, 2)), ORIGIN, SOPClassUID="1.2.840.10008.5.1.4.1.1.481.3")
    save(dataset, root / "rt")


def other_image(root):
    with_series(set_all(SOPClassUID="1.2.840.10008.5.1.4.1.1.128"))(root)


def truncated(root):
    with_series()(root)
    path = next((root / "images").iterdir())
    path.write_bytes(path.read_bytes()[:-700])


def cut_in_header(root):
    with_series()(root)
    path = next((root / "images").iterdir())
    path.write_bytes(path.read_bytes()[:140])


def not_dicom(root):
    with_series()(root)
    (root / "slice.dcm").write_bytes(b"text")


def pipe(root):
    with_series()(root)
    os.mkfifo(root / "images" / "pipe")


def broken_link(root):
    with_series()(root)
    (root / "images" / "link").symlink_to(root / "nowhere")


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


def two_enhanced(root):
    image, masks = new_volume()
    dataset = enhanced(image, range(6))
    save(segmentation([dataset], masks[0]), root / "seg.dcm")
    for name in ("a", "b"):
        save(dataset, root / name)


def only_images(root):
    write_series(root, series_datasets(new_volume()[0]))


REFUSED = {
    "missing slices": (
        with_series(lambda datasets: datasets.__delitem__(slice(2, 4))),
        "2 slices are missing: the others are 2.5 mm apart, but there is nothing between",
    ),
    "uneven slices": (with_series(move_first), "not evenly spaced: most are 2.5 mm apart, but not"),
    "gantry tilt": (
        with_series(shear=0.5),
        "shifted sideways, IM0001 by 2.5 mm (a gantry tilted by 11.3 degrees)",
    ),
    "doubled slices": (
        with_series(lambda datasets: datasets.append(slice_dataset(new_volume()[0][:, :, 0].T, ORIGIN))),
        "are at the same position, ",
    ),
    "two orientations": (
        with_series(lambda datasets: set_all(ImageOrientationPatient=[1, 0, 0, 0, 1, 0])(datasets[:1])),
        "have different orientations or pixel sizes: a series must be one volume",
    ),
    "two sizes": (
        with_series(lambda datasets: datasets.__setitem__(0, slice_dataset(np.ones((8, 9)), ORIGIN))),
        "columns and rows",
    ),
    "no rescale": (with_series(set_all(RescaleSlope=None)), "a CT without RescaleSlope and RescaleIntercept"),
    "no position": (
        with_series(set_all(ImagePositionPatient=None)),
        "it has no ImagePositionPatient with 3 numbers",
    ),
    "bad spacing": (
        with_series(set_all(PixelSpacing=[0, 1])),
        "its PixelSpacing is [0.0, 1.0]; two lengths above 0",
    ),
    "inverted MR": (
        with_series(SOPClassUID=MR, PhotometricInterpretation="MONOCHROME1"),
        "it is an MR in MONOCHROME1, where low values are bright",
    ),
    "no decoder": (with_series(compress), "its pixels are compressed as JPEG Lossless, "),
    "deflated": (with_series(deflated), "it is deflated as a whole, which is not supported"),
    "colours": (with_series(colours), "it has 3 values per pixel; 1 is expected"),
    "lookup table": (
        with_series(set_all(ModalityLUTSequence=[pydicom.Dataset()])),
        "it has a modality lookup table, which is not supported",
    ),
    "several multi-frame files": (two_enhanced, "has several frames, so it must be the only file"),
    "huge": (
        with_series(set_all(Rows=65535, Columns=65535)),
        "declares 65535 x 65535 x 6 = 25769017350 values; at most 1073741824 are read",
    ),
    "no contrast": (
        with_series(lambda datasets: [setattr(each, "PixelData", bytes(2 * 36 * 40)) for each in datasets]),
        "is -1024 everywhere: it has no contrast",
    ),
    "truncated": (truncated, "cannot read "),
    "cut in its header": (cut_in_header, "cannot read "),
    "not DICOM": (not_dicom, "slice.dcm is not a DICOM file: it has no DICM at byte 128"),
    "a pipe": (pipe, "is a pipe, which has no end: copy its content to a file"),
    "a broken link": (broken_link, "it, or the file it links to, is missing"),
    "RTSTRUCT": (
        structure_set,
        "is an RT structure set, which is not supported: convert it to a DICOM segmentation",
    ),
    "PET": (other_image, "refers to a series of Positron Emission Tomography Image Storage; only CT and MR"),
    "no patient": (
        with_series(PatientID=""),
        "has no PatientID, so scans of one patient could be in several folds",
    ),
    "two patients": (
        with_series(lambda datasets: set_all(PatientID="P2")(datasets[:1])),
        "differ in PatientID or modality",
    ),
    "CT and MR": (two_modalities, "prepare each from a folder of its own"),
    "no segmentation": (only_images, "1 cases were found, but none has a mask"),
    "raters not told apart": (
        same_raters,
        "are segmentations of one series, and neither ContentCreatorName nor",
    ),
    "shifted": (
        with_segmentation(moved_by(0.4 * TURNED[0])),
        "of its series: voxels are up to 0.4 mm apart, it is moved by",
    ),
    "between slices": (
        with_segmentation(moved_by(1.25 * np.cross(*TURNED))),
        "of its series, which has slices 0 to 5: resample it",
    ),
    "cropped": (with_segmentation(cropped), "it has 32 columns and 40 rows, but its series has 36 and 40"),
    "overlapping": (
        with_segmentation(overlapping),
        "voxels are in segments of two classes: give each voxel one class",
    ),
    "unknown series": (
        with_segmentation(
            lambda drawn, *_: setattr(drawn.ReferencedSeriesSequence[0], "SeriesInstanceUID", "1.2.9")
        ),
        "refers to series 1.2.9, which is not in",
    ),
    "unknown segment": (
        with_segmentation(lambda drawn, *_: setattr(drawn.SegmentSequence[0], "SegmentNumber", 7)),
        "is of segment 1, which it does not describe",
    ),
    "bad fraction": (with_segmentation(bad_fraction), "it holds 9, but its MaximumFractionalValue is 5"),
    "label map": (with_segmentation(label_map), "is a label map segmentation, which is not supported"),
    "two spellings of a label": (two_labels, "'Nodule' ("),
    "two spellings of a patient": (
        two_patients,
        "the PatientIDs 'P1' and 'p1' differ only in their spelling",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_cannot_be_used_is_refused_with_the_reason(tmp_path, name):
    make, message = REFUSED[name]
    make(tmp_path / "raw")
    assert message in problem_of(tmp_path / "raw")


def test_the_position_of_masks_cannot_be_ignored(tmp_path):
    with_series()(tmp_path / "raw")
    command = ["prepare", "dicom", str(tmp_path / "raw"), str(tmp_path / "out"), "--ignore-placement"]
    assert "leave out --ignore-placement" in CliRunner().invoke(app, [*command, "--workers", "1"]).output


def test_a_header_is_read_only_up_to_a_bound(tmp_path, monkeypatch):
    with_series()(tmp_path / "raw")
    monkeypatch.setattr("semidice.data.sources.dicom_series.MAX_DICOM_HEADER_BYTES", 400)
    assert "its header has more than 400 bytes, which is not supported" in problem_of(tmp_path / "raw")


def test_without_the_package_one_line_says_what_to_install(tmp_path, monkeypatch):
    with_series()(tmp_path / "raw")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "needs pydicom; run: pip install 'semidice[dicom]'" in problem_of(tmp_path / "raw")
    with pytest.raises(ModuleNotFoundError, match=r"needs pydicom; run: pip install 'semidice\[dicom\]'"):
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
