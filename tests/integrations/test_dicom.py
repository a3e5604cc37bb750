"""DICOM series and segmentations: ITK, pydicom and highdicom are the references. `make test-integrations`."""

import csv
import io
import shutil
from functools import partial

import nibabel
import numpy as np
import pytest
from rich.console import Console
from start import refused, semidice
from trained import make_run

pytestmark = pytest.mark.integrations
pydicom = pytest.importorskip("pydicom", reason="needs pydicom: make test-integrations")
highdicom = pytest.importorskip("highdicom", reason="needs highdicom: make test-integrations")

import SimpleITK  # noqa: E402
from dicom_trees import (  # noqa: E402
    MR,
    ORIGIN,
    SPACE,
    SPACING,
    STRAIGHT,
    TURNED,
    affine_of,
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
from raw_trees import read_scan  # noqa: E402

from semidice.data.dataset import Dataset  # noqa: E402
from semidice.data.prepare import prepare_dataset, run_prepare  # noqa: E402
from semidice.data.sources import find_datasets  # noqa: E402
from semidice.data.sources.dicom_files import read_series  # noqa: E402
from semidice.data.sources.files import read_image  # noqa: E402
from semidice.prediction.command import run_predict  # noqa: E402
from semidice.prediction.options import PredictOptions  # noqa: E402

RLE = "1.2.840.10008.1.2.5"


def new_console():
    return Console(file=io.StringIO(), width=300)


def only_scan(root):
    (dataset,) = find_datasets("dicom", root)
    assert dataset.problems == ()
    (scan,) = dataset.scans
    return read_scan(dataset, scan)


# --- series ---


@pytest.mark.parametrize("directions", [TURNED, STRAIGHT, STRAIGHT[::-1], -TURNED], ids=str)
def test_a_series_equals_the_nifti_that_itk_writes_of_it(tmp_path, directions):
    image, _ = new_volume()
    write_series(tmp_path / "in", series_datasets(image, directions=directions, RescaleSlope=0.5))
    files = SimpleITK.ImageSeriesReader.GetGDCMSeriesFileNames(str(tmp_path / "in"))
    SimpleITK.WriteImage(SimpleITK.ReadImage(files), tmp_path / "itk.nii.gz")
    ours = read_series(sorted((tmp_path / "in").iterdir()))
    itk = read_image(tmp_path / "itk.nii.gz", num_axes=3)
    np.testing.assert_array_equal(ours.values, itk.values)
    assert ours.grid.spacing_mm == pytest.approx(itk.grid.spacing_mm, rel=1e-6)
    # a NIfTI has float32
    np.testing.assert_allclose(ours.affine, itk.affine, rtol=1e-6, atol=1e-4)
    np.testing.assert_allclose(ours.affine, affine_of(directions), atol=1e-6)


def test_a_prepared_series_equals_the_same_scan_prepared_from_nifti(tmp_path):
    write_tree(tmp_path / "dicom", patients=["P1"])
    image, masks = new_volume()
    for name, values in {"images": image, "raters/Ada Dr": masks[0], "raters/Bob Dr": masks[1]}.items():
        (tmp_path / "nifti" / name).mkdir(parents=True)
        nibabel.save(nibabel.Nifti1Image(values, affine_of()), tmp_path / "nifti" / name / "case.nii.gz")
    prepared = []
    for source, folder in (("dicom", "dicom"), ("folder", "nifti")):
        (raw,) = find_datasets(source, tmp_path / folder)
        prepare_dataset(raw, tmp_path / f"{folder}_out", workers=1)
        prepared.append(Dataset(tmp_path / f"{folder}_out"))
    dicom, nifti = prepared
    assert len(dicom.cases) == len(nifti.cases) == SPACE[2]
    for number in range(len(dicom.cases)):
        np.testing.assert_array_equal(dicom.image(number), nifti.image(number))
        np.testing.assert_array_equal(dicom.masks(number), nifti.masks(number))
    of_dicom, of_nifti = dicom.manifest.scans[0], nifti.manifest.scans[0]
    assert of_dicom.voxel_mm == pytest.approx(of_nifti.voxel_mm)
    np.testing.assert_allclose(of_dicom.affine, of_nifti.affine, atol=1e-4)
    assert dicom.manifest.raters == nifti.manifest.raters


def test_frames_of_an_enhanced_series_are_sorted_and_have_their_own_rescale(tmp_path):
    image, masks = new_volume()
    order = [3, 0, 5, 1, 4, 2]
    dataset = enhanced(image, order)
    save(dataset, tmp_path / "one")
    save(segmentation([dataset], masks[0][:, :, order]), tmp_path / "seg")
    arrays = only_scan(tmp_path)
    np.testing.assert_array_equal(arrays.image[0], image)
    np.testing.assert_array_equal(arrays.masks[0], masks[0])
    np.testing.assert_allclose(arrays.affine, affine_of(), atol=1e-6)


def test_hounsfield_units_do_not_depend_on_how_values_are_shown_or_compressed(tmp_path):
    image, _ = new_volume()
    for folder, changes in {"shown": {"PhotometricInterpretation": "MONOCHROME1"}, "rle": {}}.items():
        datasets = series_datasets(image, **changes)
        if folder == "rle":
            for dataset in datasets:
                dataset.compress(RLE)
        paths = write_series(tmp_path / folder, datasets)
        np.testing.assert_array_equal(read_series(paths).values[0], image)


def test_a_single_slice_has_the_thickness_of_its_header(tmp_path):
    image, masks = new_volume()
    datasets = series_datasets(image[:, :, 3:4])
    write_series(tmp_path, datasets)
    save(segmentation(datasets, masks[0][:, :, 3:4]), tmp_path / "seg")
    arrays = only_scan(tmp_path)
    assert arrays.image.shape == (1, *SPACE[:2], 1)
    assert arrays.grid.spacing_mm == SPACING
    for path in tmp_path.glob("IM*"):
        dataset = pydicom.dcmread(path)
        del dataset.SliceThickness
        dataset.save_as(path)
    assert only_scan(tmp_path).grid.spacing_mm is None


# --- segmentations, raters, patients, classes ---


def test_segmentations_equal_the_drawn_masks_and_patients_and_raters_are_named(tmp_path):
    raw = write_tree(tmp_path / "raw", patients=["P1", "P2", "P1"], num_classes=3)
    (raw / "scan1" / "Bob.dcm").unlink()
    image = series_datasets(new_volume(7)[0], PatientID="P3", SeriesInstanceUID="1.2.3.99")
    write_series(raw / "unrated", image)
    (raw / "notes.txt").write_text("nothing")
    (raw / "empty").write_bytes(b"")
    index = slice_dataset(np.zeros((2, 2)), ORIGIN, SOPClassUID="1.2.840.10008.1.3.10")
    del index.SOPClassUID, index.SOPInstanceUID
    save(index, raw / "DICOMDIR")
    console = new_console()
    (manifest,) = run_prepare("dicom", raw, tmp_path / "out", workers=1, console=console)
    printed = console.file.getvalue()
    assert "raters are named by ContentCreatorName: Ada Dr, Bob Dr" in printed
    assert "left out, because they have no mask: 1 scan" in printed
    assert manifest.class_names == ("background", "part 1", "part 2")
    assert manifest.channels == ("CT",)
    assert sorted(scan.patient for scan in manifest.scans) == ["P1", "P1", "P2"]
    assert all(scan.name.startswith(f"{scan.patient}_") for scan in manifest.scans)
    assert "Doe" not in (tmp_path / "out" / "manifest.json").read_text() + printed
    (dataset,) = find_datasets("dicom", raw)
    by_folder = {scan.image[0].parts[-3]: read_scan(dataset, scan) for scan in dataset.scans}
    assert by_folder["scan1"].raters == ("Ada Dr",)
    for number in range(3):
        hu, masks = new_volume(number, num_classes=3)
        np.testing.assert_array_equal(by_folder[f"scan{number}"].image[0], hu)
        np.testing.assert_array_equal(
            by_folder[f"scan{number}"].masks, masks[: len(by_folder[f"scan{number}"].raters)]
        )
    assert semidice("check", tmp_path / "out").code == 0


def test_a_fractional_segmentation_is_decided_as_by_majority_and_absent_slices_are_background(tmp_path):
    image, masks = new_volume(num_classes=3)
    shares = np.zeros((2, *SPACE))
    shares[0][masks[0] == 1] = 0.7
    shares[1][masks[0] == 1] = 0.3
    shares[1][masks[0] == 2] = 0.52
    shares[:, :, :, 4:] = 0
    datasets = series_datasets(image)
    write_series(tmp_path, datasets)
    drawn = segmentation(datasets, shares, kind="FRACTIONAL", labels=["a", "b"])
    assert drawn.NumberOfFrames < 2 * SPACE[2]
    save(drawn, tmp_path / "seg")
    expected = masks[0].copy()
    expected[:, :, 4:] = 0
    np.testing.assert_array_equal(only_scan(tmp_path).masks[0], expected)


@pytest.mark.parametrize(
    ("creators", "descriptions", "origin"),
    [
        (("Ada^A", "Bob"), ("x", "x"), "ContentCreatorName: Ada A, Bob"),
        (("Tool", "Tool"), ("second", "first"), "SeriesDescription: first, second"),
        (("Ada", None), (None, "x"), "folder: one, two"),
    ],
)
def test_raters_are_named_by_the_first_element_that_tells_them_apart(
    tmp_path, creators, descriptions, origin
):
    image, masks = new_volume()
    datasets = series_datasets(image)
    write_series(tmp_path / "images", datasets)
    for folder, mask, creator, description in zip(("one", "two"), masks, creators, descriptions, strict=True):
        drawn = segmentation(datasets, mask, creator=creator, description=description)
        save(drawn, tmp_path / folder / "seg.dcm")
    (dataset,) = find_datasets("dicom", tmp_path)
    assert dataset.notes == (f"raters are named by {origin}",)


def test_a_segmentation_without_a_referenced_series_is_matched_by_its_source_images(tmp_path):
    def forget(drawn):
        del drawn.ReferencedSeriesSequence

    write_tree(tmp_path, change=forget)
    (dataset,) = find_datasets("dicom", tmp_path)
    assert dataset.problems == ()
    assert [len(scan.masks) for scan in dataset.scans] == [2, 2]


def test_classes_csv_gives_labels_of_one_structure_one_class(tmp_path):
    raw = tmp_path / "raw"
    image, masks = new_volume()
    datasets = series_datasets(image)
    write_series(raw, datasets)
    for creator, label, mask in zip(("A", "B"), ("nodule", "Lesion 1"), masks, strict=True):
        save(segmentation(datasets, mask, creator=creator, labels=[label]), raw / creator)
    assert "rater 'A' never draws 'Lesion 1' of rater 'B', who never draws 'nodule'" in problem_of(raw)
    (raw / "classes.csv").write_text("label,name\nnodule,nodule\n")
    assert "has no row for label 'Lesion 1' of" in problem_of(raw)
    (raw / "classes.csv").write_text("label,name\nnodule,lesion\nLesion 1,lesion\n")
    (dataset,) = find_datasets("dicom", raw)
    assert dataset.class_names == ("background", "lesion")
    np.testing.assert_array_equal(read_scan(dataset, dataset.scans[0]).masks, masks)


# --- predict ---


@pytest.fixture(scope="module", params=[2, 3], ids=["2 classes", "3 classes"])
def run(request, tmp_path_factory):
    """An untrained run on prepared DICOM series."""
    root = tmp_path_factory.mktemp("run")
    write_tree(root / "raw", patients=["P1", "P2"], num_classes=request.param)
    run_prepare("dicom", root / "raw", root / "data", workers=1, console=new_console())
    return make_run(root / "run", Dataset(root / "data"), scored=False)


def predict(run, inputs, out, **options):
    run_predict(run.path, inputs, out, PredictOptions(device="cpu", **options), console=new_console())


def read_back(path):
    """A segmentation as highdicom reads it, and its values (segments, columns, rows, slices)."""
    found = highdicom.seg.segread(path)
    is_fractional = found.SegmentationType == "FRACTIONAL"
    options = {"rescale_fractional": True} if is_fractional else {}
    volume = found.get_volume(combine_segments=False, **options)
    # highdicom's axes are slices, rows, columns, segments, in LPS
    affine, values = np.diag([-1.0, -1, 1, 1]) @ volume.affine[:, [2, 1, 0, 3]], volume.array.T
    if affine[:3, 2] @ affine_of()[:3, 2] < 0:
        # it sorts slices in the other direction
        affine[:3, 3] += (values.shape[-1] - 1) * affine[:3, 2]
        affine[:3, 2] *= -1
        values = values[..., ::-1]
    return found, values, affine


@pytest.mark.parametrize("is_enhanced", [False, True], ids=["slices", "frames"])
def test_the_segmentations_of_a_predicted_series_equal_the_prediction_of_its_nifti(
    run, tmp_path, is_enhanced
):
    image, _ = new_volume(5)
    datasets = [enhanced(image, [3, 0, 5, 1, 4, 2])] if is_enhanced else series_datasets(image)
    write_series(tmp_path / "in" / "deep", datasets)
    nibabel.save(nibabel.Nifti1Image(image, affine_of()), tmp_path / "case.nii.gz")
    out = tmp_path / "out"
    predict(run, [tmp_path / "in"], out / "dicom", uncertainty=True)
    predict(run, [tmp_path / "case.nii.gz"], out / "nifti", uncertainty=True)
    names = sorted(path.name for path in (out / "dicom").glob("P1_*"))
    stem = names[0].removesuffix("_mask.dcm")
    assert names == [f"{stem}_{part}" for part in ("mask.dcm", "prob.dcm", "uncertainty.nii.gz")]
    prob = np.asarray(nibabel.load(out / "nifti" / "case_prob.nii.gz").dataobj)
    prob = prob[None] if prob.ndim == 3 else np.moveaxis(prob, -1, 0)[1:]
    mask = np.asarray(nibabel.load(out / "nifti" / "case_mask.nii.gz").dataobj)

    fractional, shares, affine = read_back(out / "dicom" / f"{stem}_prob.dcm")
    assert fractional.SegmentationFractionalType == "PROBABILITY"
    # half a step of rounding
    np.testing.assert_allclose(shares, prob, rtol=0, atol=0.5 / 255 + 1e-6)
    np.testing.assert_allclose(affine, affine_of(), atol=1e-4)
    binary, drawn, affine = read_back(out / "dicom" / f"{stem}_mask.dcm")
    np.testing.assert_allclose(affine, affine_of(), atol=1e-4)
    assert mask.any()
    for number in range(1, len(drawn) + 1):
        np.testing.assert_array_equal(drawn[number - 1], mask == number)
    for found in (fractional, binary):
        assert found.ReferencedSeriesSequence[0].SeriesInstanceUID == datasets[0].SeriesInstanceUID
        assert found.PatientID == "P1"
        assert found.StudyInstanceUID == datasets[0].StudyInstanceUID
        assert found.FrameOfReferenceUID == datasets[0].FrameOfReferenceUID
        labels = [item.SegmentLabel for item in found.SegmentSequence]
        assert labels == (["nodule"] if len(drawn) == 1 else ["part 1", "part 2"])
    uncertain = [
        nibabel.load(path)
        for path in (out / "dicom" / f"{stem}_uncertainty.nii.gz", out / "nifti" / "case_uncertainty.nii.gz")
    ]
    np.testing.assert_array_equal(*(np.asarray(each.dataobj) for each in uncertain))
    np.testing.assert_allclose(*(each.affine for each in uncertain), atol=1e-4)
    tables = [(out / kind / "volumes.csv").read_text().splitlines() for kind in ("dicom", "nifti")]
    rows = [list(csv.DictReader(table)) for table in tables]
    for ours, theirs in zip(*rows, strict=True):
        assert ours["case"] == stem
        assert float(ours["expected_ml"]) == pytest.approx(float(theirs["expected_ml"]), rel=1e-5)


def test_each_source_image_is_referenced_by_the_frame_at_its_position(run, tmp_path):
    datasets = series_datasets(new_volume(5)[0])
    write_series(tmp_path / "in", datasets)
    predict(run, [tmp_path / "in"], tmp_path / "out")
    position_of = {each.SOPInstanceUID: list(each.ImagePositionPatient) for each in datasets}
    found = pydicom.dcmread(next((tmp_path / "out").glob("*_prob.dcm")))
    assert len(found.PerFrameFunctionalGroupsSequence) >= len(datasets)
    for frame in found.PerFrameFunctionalGroupsSequence:
        source = frame.DerivationImageSequence[0].SourceImageSequence[0].ReferencedSOPInstanceUID
        assert frame.PlanePositionSequence[0].ImagePositionPatient == pytest.approx(position_of[source])


def test_a_predicted_mask_can_be_prepared_as_the_mask_of_a_rater(run, tmp_path):
    datasets = series_datasets(new_volume(5)[0])
    write_series(tmp_path / "raw" / "in", datasets)
    predict(run, [tmp_path / "raw"], tmp_path / "out")
    (path,) = (tmp_path / "out").glob("*_mask.dcm")
    shutil.copy(path, tmp_path / "raw")
    arrays = only_scan(tmp_path / "raw")
    _, drawn, _ = read_back(path)
    np.testing.assert_array_equal(
        arrays.masks[0], (drawn * np.arange(1, len(drawn) + 1)[:, None, None, None]).sum(0)
    )


def test_one_file_selects_its_series(run, tmp_path):
    for number in range(2):
        datasets = series_datasets(new_volume(number)[0], SeriesInstanceUID=f"1.2.3.4.{number + 50}")
        paths = write_series(tmp_path / "in" / str(number), datasets)
    predict(run, [paths[2]], tmp_path / "out")
    assert len([*(tmp_path / "out").glob("*.dcm")]) == 2


def test_an_empty_mask_is_written(run, tmp_path):
    write_series(tmp_path / "in", series_datasets(new_volume(5)[0]))
    predict(run, [tmp_path / "in"], tmp_path / "out", decide="threshold:0.999999")
    _, drawn, _ = read_back(next((tmp_path / "out").glob("*_mask.dcm")))
    assert drawn.shape[1:] == SPACE
    assert not drawn.any()


def test_an_anonymised_series_can_be_predicted(run, tmp_path):
    datasets = series_datasets(new_volume(5)[0])
    for dataset in datasets:
        for name in ("PatientName", "PatientBirthDate", "PatientSex", "AccessionNumber", "PatientID"):
            delattr(dataset, name)
    write_series(tmp_path / "in", datasets)
    predict(run, [tmp_path / "in"], tmp_path / "out")
    (path,) = (tmp_path / "out").glob("series_*_prob.dcm")
    assert pydicom.dcmread(path).PatientID in (None, "")


def test_inputs_that_cannot_be_predicted_are_named(run, tmp_path):
    write_series(tmp_path / "mr", series_datasets(new_volume()[0], SOPClassUID=MR, Modality="MR"))
    work = partial(predict, run, [tmp_path / "mr"], tmp_path / "out")
    refused(work, "is MR, but the run was trained on CT")
    nibabel.save(nibabel.Nifti1Image(np.eye(4), np.eye(4)), tmp_path / "mr" / "case.nii.gz")
    refused(work, "has both DICOM files and case.nii.gz")
