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


@pytest.mark.parametrize("layout", ["outer", "inner", "flat"])
def test_qubiq_has_the_seven_tasks_of_the_paper_in_every_layout(tmp_path, layout):
    datasets = find_datasets("qubiq", make_qubiq(tmp_path, layout=layout))
    raters = {
        "prostate_task1": 6,
        "prostate_task2": 6,
        "brain_growth": 7,
        "brain_tumor_task1": 3,
        "brain_tumor_task2": 3,
        "brain_tumor_task3": 3,
        "kidney": 3,
    }
    assert {dataset.name: len(dataset.raters) for dataset in datasets} == raters
    assert [dataset.name for dataset in datasets] == list(raters)
    if layout == "flat":
        expected = [f"case0{number}" for number in range(1, 7)]
    else:
        expected = [f"training_case0{number}" for number in range(1, 5)]
        expected += ["validation_case01", "validation_case02"]
    for dataset in datasets:
        assert scan_names(dataset) == expected
        assert [scan.patient for scan in dataset.scans] == expected
        assert dataset.raters == tuple(f"seg{number:02d}" for number in range(1, raters[dataset.name] + 1))


def test_the_names_and_raters_of_qubiq_equal_the_tables_of_the_paper(tmp_path):
    path = SHARED / "paper" / "tables.yaml"
    if not path.exists():
        pytest.skip(f"the paper's tables are not at {path}")
    table = yaml.safe_load(path.read_text())["rater_agreement"]
    datasets = find_datasets("qubiq", make_qubiq(tmp_path))
    num_raters = {dataset.name: len(dataset.raters) for dataset in datasets}
    assert num_raters == {name: row["raters"] for name, row in table.items()}
    assert list(num_raters) == list(table)


def test_only_ct_of_qubiq_has_a_window_and_all_images_get_256_pixels(tmp_path):
    for dataset in find_datasets("qubiq", make_qubiq(tmp_path)):
        assert dataset.options.size == (256, 256)
        assert dataset.options.slices == "none"
        assert dataset.options.window == ((-160, 240) if dataset.name == "kidney" else None)
        assert len(dataset.channels) == (4 if "brain_tumor" in dataset.name else 1)


def test_qubiq_channels_masks_and_spacing_equal_those_read_by_nibabel(tmp_path):
    datasets = {dataset.name: dataset for dataset in find_datasets("qubiq", make_qubiq(tmp_path))}
    case = tmp_path / "training_data_v3_QC" / "brain-tumor" / "Training" / "case02"
    arrays = read_scan(datasets["brain_tumor_task2"], datasets["brain_tumor_task2"].scans[1])
    image = nibabel.load(case / "image.nii.gz")
    assert image.shape == (*SIZE, 4)
    np.testing.assert_array_equal(arrays.image, np.moveaxis(image.get_fdata().astype(np.float32), -1, 0))
    np.testing.assert_array_equal(arrays.affine, image.affine)
    assert arrays.grid.spacing_mm == (0.7, 0.8)
    for rater in (1, 2, 3):
        mask = nibabel.load(case / f"task02_seg0{rater}.nii.gz").get_fdata()
        np.testing.assert_array_equal(arrays.masks[rater - 1], mask)


def test_qubiq_masks_of_255_and_axes_of_length_1_are_read(tmp_path):
    datasets = {dataset.name: dataset for dataset in find_datasets("qubiq", make_qubiq(tmp_path))}
    for name in ("prostate_task1", "brain_growth", "kidney"):
        arrays = read_scan(datasets[name], datasets[name].scans[0])
        assert arrays.image.shape == (1, *SIZE)
        assert arrays.masks.shape[1:] == SIZE
        assert np.unique(arrays.masks).tolist() == [0, 1]


def test_a_qubiq_rater_without_a_file_is_absent_and_a_rater_with_an_empty_mask_is_present(tmp_path):
    datasets = {dataset.name: dataset for dataset in find_datasets("qubiq", make_qubiq(tmp_path))}
    raters = [
        read_scan(datasets[name], datasets[name].scans[0])
        for name in ("brain_tumor_task1", "brain_tumor_task2")
    ]
    assert raters[0].raters == ("seg01", "seg03")
    assert raters[1].raters == ("seg01", "seg02", "seg03")
    assert raters[1].masks.any(axis=(1, 2)).tolist() == [True, False, True]
    assert datasets["brain_tumor_task1"].raters == ("seg01", "seg02", "seg03")


def test_qubiq_tasks_can_be_chosen_and_unknown_tasks_are_reported(tmp_path):
    make_qubiq(tmp_path, datasets=["kidney", "prostate"])
    chosen = find_datasets("qubiq", tmp_path, tasks=["kidney", "prostate_task2"])
    assert [dataset.name for dataset in chosen] == ["prostate_task2", "kidney"]
    tasks = ["kidney", "brain_growth"]
    refused(lambda: find_datasets("qubiq", tmp_path, tasks=tasks), "brain_growth", "choose", "kidney")
    make_lits(tmp_path / "lits")
    refused(lambda: find_datasets("lits", tmp_path / "lits", tasks=["kidney"]), "leave out --task", "kidney")


@pytest.mark.parametrize("subfolder", ["kidney", "kidney/Training"])
def test_qubiq_is_found_if_the_raw_folder_is_inside_a_dataset(tmp_path, subfolder):
    make_qubiq(tmp_path, datasets=["kidney"], layout="inner")
    dataset = find_only_dataset("qubiq", tmp_path / subfolder)
    assert dataset.name == "kidney"
    assert len(dataset.scans) == (6 if subfolder == "kidney" else 4)


def test_incomplete_or_ambiguous_qubiq_cases_are_reported_and_other_cases_are_kept(tmp_path):
    folder = make_qubiq(tmp_path, datasets=["brain-tumor"], layout="flat") / "brain-tumor"
    (folder / "case01" / "image.nii.gz").unlink()
    shutil.copy(folder / "case02" / "image.nii.gz", folder / "case02" / "image.nii")
    for path in (folder / "case03").glob("task02*"):
        path.unlink()
    for path in (folder / "case04").glob("task*"):
        path.unlink()
    first, second, third = find_datasets("qubiq", tmp_path)
    assert scan_names(first) == scan_names(third) == ["case03", "case05", "case06"]
    assert scan_names(second) == ["case05", "case06"]
    for dataset, missing in ((first, 1), (second, 2), (third, 1)):
        assert any("case01" in problem and "has no image" in problem for problem in dataset.problems)
        assert any("case02" in problem and "two files" in problem for problem in dataset.problems)
        assert sum("of any rater" in problem for problem in dataset.problems) == missing
    assert any("case03" in text and "no mask task02_segNN.nii.gz" in text for text in second.problems)


def test_qubiq_test_cases_without_masks_are_skipped(tmp_path):
    make_qubiq(tmp_path, datasets=["kidney"])
    image, _ = ellipsoids(0, SIZE)
    write_nifti(tmp_path / "QUBIQ21_test" / "kidney" / "case01" / "image.nii.gz", image)
    dataset = find_only_dataset("qubiq", tmp_path)
    assert len(dataset.scans) == 6
    assert dataset.num_unlabelled == 1


def test_the_same_qubiq_case_in_two_copies_is_reported(tmp_path):
    make_qubiq(tmp_path / "first", datasets=["kidney"], layout="inner")
    make_qubiq(tmp_path / "second", datasets=["kidney"], layout="inner")
    (dataset,) = find_datasets("qubiq", tmp_path)
    assert dataset.scans == ()
    assert len(dataset.problems) == 6
    assert "first/kidney/Training/case01/image.nii.gz" in dataset.problems[0]
    assert "second/kidney/Training/case01/image.nii.gz" in dataset.problems[0]


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
    for scan in dataset.scans:
        assert read_scan(dataset, scan).masks.shape == (2, DEPTH, *SIZE)


def test_lits_has_the_class_tumour_and_its_volumes_are_in_natural_order(tmp_path):
    dataset = find_only_dataset("lits", make_lits(tmp_path))
    assert scan_names(dataset) == ["volume-0", "volume-1", "volume-2", "volume-3", "volume-10"]
    options = dataset.options
    assert (options.window, options.size, options.slices, options.slice_axis) == (
        (-60, 140),
        (512, 512),
        "foreground",
        2,
    )
    arrays = read_scan(dataset, dataset.scans[1])
    mask = nibabel.load(tmp_path / "Training Batch 2" / "segmentation-1.nii").get_fdata()
    assert set(np.unique(mask)) == {0, 1, 2}
    np.testing.assert_array_equal(arrays.masks[0], mask == 2)
    assert arrays.image.shape == (1, *SIZE, DEPTH)
    assert dataset.class_names == ("background", "tumour")


def test_kits_has_its_slices_first_and_counts_cases_without_a_segmentation(tmp_path):
    dataset = find_only_dataset("kits", make_kits(tmp_path, num_unlabelled=2))
    assert scan_names(dataset) == [f"case_0000{number}" for number in range(5)]
    assert dataset.num_unlabelled == 2
    options = dataset.options
    assert (options.window, options.size, options.slices, options.slice_axis) == (
        (-200, 300),
        (512, 512),
        "foreground",
        0,
    )
    arrays = read_scan(dataset, dataset.scans[0])
    assert arrays.image.shape == (1, DEPTH, *SIZE)
    assert arrays.grid.spacing_mm == (2.5, 0.7, 0.8)
    assert np.unique(arrays.masks).tolist() == [0, 1]


def test_kits_without_any_segmentation_is_refused(tmp_path):
    make_kits(tmp_path, num_cases=0, num_unlabelled=3)
    refused(lambda: find_datasets("kits", tmp_path), "3 cases", "none has a mask")


def test_a_lits_file_without_its_volume_or_mask_or_in_two_formats_is_reported(tmp_path):
    make_lits(tmp_path)
    (tmp_path / "Training Batch 2" / "segmentation-1.nii").unlink()
    (tmp_path / "Training Batch 1" / "volume-2.nii.gz").unlink()
    shutil.copy(tmp_path / "Training Batch 2" / "volume-3.nii", tmp_path / "volume-3.nii.gz")
    (dataset,) = find_datasets("lits", tmp_path)
    assert scan_names(dataset) == ["volume-0", "volume-10"]
    text = "\n".join(dataset.problems)
    assert len(dataset.problems) == 3
    assert "volume-1.nii has no mask segmentation-1.nii next to it" in text
    assert "segmentation-2.nii.gz has no image volume-2.nii" in text
    assert "case 'volume-3' has two files" in text


def test_a_kits_segmentation_without_its_image_is_reported(tmp_path):
    make_kits(tmp_path)
    (tmp_path / "case_00002" / "imaging.nii.gz").unlink()
    (problem,) = find_problems("kits", tmp_path)
    assert "case_00002/segmentation.nii.gz has no image" in problem


def test_reading_a_lits_mask_reports_an_unknown_label(tmp_path):
    dataset = find_only_dataset("lits", make_lits(tmp_path))
    mask = dataset.scans[0].masks["reference"]
    write_nifti(mask, np.full((*SIZE, DEPTH), 3, dtype=np.uint8))
    refused(lambda: read_scan(dataset, dataset.scans[0]), "segmentation-0.nii.gz", "3", "0, 1, 2")
