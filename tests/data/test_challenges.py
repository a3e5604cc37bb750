"""QUBIQ, LiTS and KiTS in their published layouts: which scans are found, and which problems are reported."""

import shutil

import nibabel
import numpy as np
import pytest
import yaml
from raw_trees import (
    DEPTH,
    SHARED,
    SIZE,
    ellipsoids,
    find_only_dataset,
    find_problems,
    make_kits,
    make_lits,
    make_qubiq,
    read_scan,
    scan_names,
    write_nifti,
)
from start import refused

from semidice.data.sources import find_datasets

RATERS = {
    "prostate_task1": 6,
    "prostate_task2": 6,
    "brain_growth": 7,
    "brain_tumor_task1": 3,
    "brain_tumor_task2": 3,
    "brain_tumor_task3": 3,
    "kidney": 3,
}


@pytest.mark.parametrize("layout", ["outer", "inner", "flat"])
def test_qubiq_has_the_seven_tasks_of_the_paper_in_every_layout(tmp_path, layout):
    datasets = find_datasets("qubiq", make_qubiq(tmp_path, layout=layout))
    assert [(dataset.name, len(dataset.raters)) for dataset in datasets] == list(RATERS.items())
    expected = [f"training_case0{number}" for number in range(1, 5)] + [
        "validation_case01",
        "validation_case02",
    ]
    if layout == "flat":
        expected = [f"case0{number}" for number in range(1, 7)]
    for dataset in datasets:
        assert scan_names(dataset) == [scan.patient for scan in dataset.scans] == expected
        assert (dataset.options.size, dataset.options.slices) == ((256, 256), "none")
        # only CT has a window
        assert dataset.options.window == ((-160, 240) if dataset.name == "kidney" else None)
        assert len(dataset.channels) == (4 if "brain_tumor" in dataset.name else 1)


def test_the_names_and_raters_of_qubiq_equal_the_tables_of_the_paper():
    path = SHARED / "paper" / "tables.yaml"
    if not path.exists():
        pytest.skip(f"the paper's tables are not at {path}")
    table = yaml.safe_load(path.read_text())["rater_agreement"]
    assert {name: row["raters"] for name, row in table.items()} == RATERS


def test_qubiq_channels_masks_and_raters_equal_those_read_by_nibabel(tmp_path):
    datasets = {dataset.name: dataset for dataset in find_datasets("qubiq", make_qubiq(tmp_path))}
    case = tmp_path / "training_data_v3_QC" / "brain-tumor" / "Training" / "case02"
    arrays = read_scan(datasets["brain_tumor_task2"], datasets["brain_tumor_task2"].scans[1])
    image = nibabel.load(case / "image.nii.gz").get_fdata().astype(np.float32)
    np.testing.assert_array_equal(arrays.image, np.moveaxis(image, -1, 0))
    assert arrays.grid.spacing_mm == (0.7, 0.8)
    for rater in (1, 2, 3):
        mask = nibabel.load(case / f"task02_seg0{rater}.nii.gz").get_fdata()
        np.testing.assert_array_equal(arrays.masks[rater - 1], mask)
    # a rater without a file is absent, one with an empty mask is present
    first, second = (read_scan(datasets[name], datasets[name].scans[0]) for name in list(RATERS)[3:5])
    assert first.raters == ("seg01", "seg03")
    assert second.masks.any(axis=(1, 2)).tolist() == [True, False, True]
    # masks of 255, and axes of length 1
    for name in ("prostate_task1", "brain_growth", "kidney"):
        arrays = read_scan(datasets[name], datasets[name].scans[0])
        assert arrays.image.shape[1:] == arrays.masks.shape[1:] == SIZE
        assert np.unique(arrays.masks).tolist() == [0, 1]


def test_qubiq_tasks_can_be_chosen_and_unknown_tasks_are_reported(tmp_path):
    make_qubiq(tmp_path, datasets=["kidney", "prostate"])
    chosen = find_datasets("qubiq", tmp_path, tasks=["kidney", "prostate_task2"])
    assert [dataset.name for dataset in chosen] == ["prostate_task2", "kidney"]
    tasks = ["kidney", "brain_growth"]
    refused(lambda: find_datasets("qubiq", tmp_path, tasks=tasks), "brain_growth", "choose", "kidney")
    make_lits(tmp_path / "lits")
    refused(lambda: find_datasets("lits", tmp_path / "lits", tasks=["kidney"]), "leave out --task", "kidney")


@pytest.mark.parametrize(("subfolder", "num_scans"), [("kidney", 6), ("kidney/Training", 4)])
def test_qubiq_is_found_if_the_raw_folder_is_inside_a_dataset(tmp_path, subfolder, num_scans):
    make_qubiq(tmp_path, datasets=["kidney"], layout="inner")
    dataset = find_only_dataset("qubiq", tmp_path / subfolder)
    assert (dataset.name, len(dataset.scans)) == ("kidney", num_scans)


def test_incomplete_or_ambiguous_qubiq_cases_are_reported_and_other_cases_are_kept(tmp_path):
    folder = make_qubiq(tmp_path, datasets=["brain-tumor"], layout="flat") / "brain-tumor"
    (folder / "case01" / "image.nii.gz").unlink()
    shutil.copy(folder / "case02" / "image.nii.gz", folder / "case02" / "image.nii")
    for path in (*folder.glob("case03/task02*"), *folder.glob("case04/task*")):
        path.unlink()
    first, second, third = find_datasets("qubiq", tmp_path)
    assert scan_names(first) == scan_names(third) == ["case03", "case05", "case06"]
    assert scan_names(second) == ["case05", "case06"]
    for dataset, missing in ((first, 1), (second, 2), (third, 1)):
        assert any("case01" in problem and "has no image" in problem for problem in dataset.problems)
        assert any("case02" in problem and "two files" in problem for problem in dataset.problems)
        assert sum("of any rater" in problem for problem in dataset.problems) == missing
    assert any("case03" in text and "no mask task02_segNN.nii.gz" in text for text in second.problems)


def test_qubiq_test_cases_are_skipped_and_the_same_case_in_two_copies_is_reported(tmp_path):
    make_qubiq(tmp_path / "one", datasets=["kidney"], layout="inner")
    image, _ = ellipsoids(0, SIZE)
    write_nifti(tmp_path / "one/QUBIQ21_test/kidney/case01/image.nii.gz", image)
    dataset = find_only_dataset("qubiq", tmp_path / "one")
    assert (len(dataset.scans), dataset.num_unlabelled) == (6, 1)
    make_qubiq(tmp_path / "two", datasets=["kidney"], layout="inner")
    (dataset,) = find_datasets("qubiq", tmp_path)
    assert (len(dataset.scans), len(dataset.problems)) == (0, 6)
    for copy in ("one", "two"):
        assert f"{copy}/kidney/Training/case01/image.nii.gz" in dataset.problems[0]


def test_qubiq_pancreas_has_volumes_with_slices_first_and_several_scans_per_patient(tmp_path):
    folder = tmp_path / "training_data_v3_QC" / "pancreatic-lesion"
    for number, case in enumerate(["case1-1", "case1-2", "case2-1", "case10-1"]):
        image, masks = ellipsoids(number, (DEPTH, *SIZE), num_raters=2)
        write_nifti(folder / case / "image.nii.gz", image)
        for rater in (1, 2):
            name = f"task01_seg0{rater}" if number % 2 else f"{case}_seg0{rater}"
            write_nifti(folder / case / f"{name}.nii.gz", masks[rater - 1])
    dataset = find_only_dataset("qubiq", tmp_path)
    assert dataset.name == "pancreatic_lesion"
    assert scan_names(dataset) == [f"training_case{number}" for number in ("1-1", "1-2", "2-1", "10-1")]
    assert [scan.patient for scan in dataset.scans] == [f"training_case{number}" for number in (1, 1, 2, 10)]
    assert (dataset.num_axes, dataset.options.slices, dataset.options.slice_axis) == (3, "all", 0)
    assert read_scan(dataset, dataset.scans[0]).masks.shape == (2, DEPTH, *SIZE)


@pytest.mark.parametrize(
    ("make", "names", "window", "slice_axis", "shape"),
    [
        (make_lits, [f"volume-{n}" for n in (0, 1, 2, 3, 10)], (-60, 140), 2, (*SIZE, DEPTH)),
        (make_kits, [f"case_0000{n}" for n in range(5)], (-200, 300), 0, (DEPTH, *SIZE)),
    ],
)
def test_lits_and_kits_have_the_class_tumour_and_their_own_window_and_slices(
    tmp_path, make, names, window, slice_axis, shape
):
    dataset = find_only_dataset(make.__name__.removeprefix("make_"), make(tmp_path))
    assert scan_names(dataset) == names
    assert dataset.class_names == ("background", "tumour")
    options = dataset.options
    assert (options.window, options.slice_axis) == (window, slice_axis)
    assert (options.size, options.slices) == ((512, 512), "foreground")
    assert dataset.num_unlabelled == (make is make_kits)
    scan = dataset.scans[1]
    mask = nibabel.load(scan.masks["reference"]).get_fdata()
    arrays = read_scan(dataset, scan)
    assert arrays.image.shape == (1, *shape)
    np.testing.assert_array_equal(arrays.masks[0], mask == 2)
    write_nifti(scan.masks["reference"], np.full(shape, 3, dtype=np.uint8))
    refused(lambda: read_scan(dataset, scan), "segmentation", "3", "0, 1, 2")


def test_incomplete_cases_of_lits_and_kits_are_reported(tmp_path):
    lits = make_lits(tmp_path / "lits")
    (lits / "Training Batch 2" / "segmentation-1.nii").unlink()
    (lits / "Training Batch 1" / "volume-2.nii.gz").unlink()
    shutil.copy(lits / "Training Batch 2" / "volume-3.nii", lits / "volume-3.nii.gz")
    (dataset,) = find_datasets("lits", lits)
    assert scan_names(dataset) == ["volume-0", "volume-10"]
    assert len(dataset.problems) == 3
    text = "\n".join(dataset.problems)
    assert "volume-1.nii has no mask segmentation-1.nii next to it" in text
    assert "segmentation-2.nii.gz has no image volume-2.nii" in text
    assert "case 'volume-3' has two files" in text
    (make_kits(tmp_path / "kits") / "case_00002" / "imaging.nii.gz").unlink()
    (problem,) = find_problems("kits", tmp_path / "kits")
    assert "case_00002/segmentation.nii.gz has no image" in problem
    make_kits(tmp_path / "none", num_cases=0, num_unlabelled=3)
    refused(lambda: find_datasets("kits", tmp_path / "none"), "3 cases", "none has a mask")
