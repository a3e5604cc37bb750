"""Labels by name equal the results of the functions of `semidice.labels`, with tables and without."""

from typing import get_args

import numpy as np
import pytest
import torch
from prepared import make_prepared
from pydantic import ValidationError

from semidice.data.batches import label_making
from semidice.data.batches.label_making import (
    LabelOptions,
    LabelTables,
    Maker,
    Smoothing,
    make_labels,
    smooth_in_space,
)
from semidice.labels import (
    boundary_smooth_label,
    dice_weighted_label,
    majority_label,
    mean_label,
    smooth_label,
    spatially_smooth_label,
    staple_label,
)

MAKERS = {
    "majority": majority_label,
    "mean": mean_label,
    "dice_weighted": dice_weighted_label,
    "staple": staple_label,
}
SMOOTHERS = {
    "none": lambda label: label,
    "uniform": lambda label: smooth_label(label, eps=0.1),
    "boundary": lambda label: boundary_smooth_label(label, eps=0.5, width=3),
    "spatial": lambda label: spatially_smooth_label(label, sigma=1.0),
}
every_maker = pytest.mark.parametrize("maker", get_args(Maker))
every_smoothing = pytest.mark.parametrize("smoothing", get_args(Smoothing))


def label_of_case(dataset, number, maker, smoothing, rater, raters=slice(None)):
    """The label of one case at its own size, by the functions of `semidice.labels`."""
    masks, present = dataset.masks(number)[raters], dataset.present[number][raters]
    if maker == "random":
        label = mean_label(masks[rater : rater + 1], num_classes=dataset.num_classes)
    else:
        label = MAKERS[maker](masks, num_classes=dataset.num_classes, present=present)
    return SMOOTHERS[smoothing](label)


def pad_masks(dataset, space):
    """Class maps of all cases in the corner of `space`, and flags of the voxels inside the cases."""
    masks = torch.zeros(len(dataset), len(dataset.manifest.raters), *space, dtype=torch.uint8)
    valid = torch.zeros(len(dataset), *space, dtype=torch.bool)
    for number, case in enumerate(dataset.cases):
        corner = tuple(slice(side) for side in case.shape)
        masks[(number, slice(None), *corner)] = torch.from_numpy(dataset.masks(number))
        valid[(number, *corner)] = True
    return masks, valid


@pytest.fixture(
    scope="module",
    params=[
        {"num_raters": 4},
        {"num_raters": 3, "num_classes": 3, "absent": True},
        {"num_raters": 1, "num_classes": 5},
        {"num_raters": 5, "absent": True, "depth": 5, "sizes": [(8, 11), (13, 9)]},
    ],
    ids=["two classes", "three classes", "one rater", "volumes"],
)
def dataset(request, tmp_path_factory):
    options = {"sizes": [(20, 33), (24, 17), (9, 40)], **request.param}
    return make_prepared(tmp_path_factory.mktemp("data") / "set", num_cases=6, **options)


@every_maker
@every_smoothing
def test_labels_from_tables_equal_the_functions_of_labels_for_each_case(dataset, maker, smoothing):
    options = LabelOptions(maker=maker, smoothing=smoothing)
    space = (8, 16, 16) if len(dataset.cases[0].shape) == 3 else (24, 40)
    masks, valid = pad_masks(dataset, space)
    rater = torch.tensor([int(np.flatnonzero(row)[-1]) for row in dataset.present])
    cases = [4, 0, 3, 0]
    tables = LabelTables(dataset, cases, options, device="cpu")
    assert tables.tables is not None
    label = tables(masks[cases], torch.tensor(cases), rater=rater[cases])
    label = smooth_in_space(label, options, valid[cases])
    torch.testing.assert_close(label.sum(1), torch.ones(len(cases), *space), atol=1e-6, rtol=0)
    for row, number in enumerate(cases):
        corner = (row, slice(None), *(slice(side) for side in dataset.cases[number].shape))
        expected = label_of_case(dataset, number, maker, smoothing, int(rater[number]))
        # STAPLE's matrix products round in another order if the memory layout differs
        tolerance = 1e-6 if maker == "staple" else 0
        np.testing.assert_allclose(label[corner].numpy(), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("maker", [maker for maker in get_args(Maker) if maker != "staple"])
@every_smoothing
def test_labels_without_tables_equal_labels_from_tables(dataset, maker, smoothing, monkeypatch):
    options = LabelOptions(maker=maker, smoothing=smoothing)
    masks, _ = pad_masks(dataset, (13, 13, 13) if len(dataset.cases[0].shape) == 3 else (24, 40))
    case = torch.arange(len(dataset))
    rater = torch.from_numpy(dataset.present.argmax(1))
    tables = LabelTables(dataset, range(len(dataset)), options, device="cpu")
    monkeypatch.setattr(label_making, "_MAX_BITS", 0)
    direct = LabelTables(dataset, range(len(dataset)), options, device="cpu")
    assert direct.tables is None
    assert torch.equal(direct(masks, case, rater=rater), tables(masks, case, rater=rater))


@every_maker
def test_make_labels_equals_the_functions_of_labels(dataset, maker):
    number = 1
    masks = torch.from_numpy(dataset.masks(number)).unsqueeze(0)
    present = torch.from_numpy(dataset.present[number : number + 1])
    rater = torch.tensor([int(dataset.present[number].argmax())])
    label = make_labels(
        masks, present, LabelOptions(maker=maker), num_classes=dataset.num_classes, rater=rater
    )
    expected = label_of_case(dataset, number, maker, "none", int(rater))
    np.testing.assert_array_equal(label[0].numpy(), expected)


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("raters", [[0], [2, 0], [3, 1]])
def test_label_raters_makes_the_label_of_a_dataset_that_has_only_these_raters(
    maker, raters, tmp_path, monkeypatch
):
    dataset = make_prepared(tmp_path / "set", num_cases=3, num_raters=4, size=(24, 24))
    options = LabelOptions(maker=maker, raters=raters)
    masks, case = torch.from_numpy(dataset.masks(1)).unsqueeze(0), torch.tensor([1])
    expected = label_of_case(dataset, 1, maker, "none", 0, raters=sorted(raters))
    assert not np.array_equal(expected, label_of_case(dataset, 1, maker, "none", 0))
    tables = LabelTables(dataset, range(3), options, device="cpu")
    np.testing.assert_allclose(tables(masks, case, rater=torch.zeros(1).long())[0], expected, atol=1e-6)
    if maker != "staple":
        monkeypatch.setattr(label_making, "_MAX_BITS", 0)
        direct = LabelTables(dataset, range(3), options, device="cpu")
        np.testing.assert_allclose(direct(masks, case, rater=torch.zeros(1).long())[0], expected, atol=1e-6)


def test_label_raters_are_those_of_them_who_looked_at_the_case(tmp_path):
    dataset = make_prepared(tmp_path / "set", num_cases=6, num_raters=3, absent=True)
    options = LabelOptions(raters=[1, 2])
    used = LabelTables(dataset, range(6), options, device="cpu").raters
    np.testing.assert_array_equal(used, dataset.present & np.array([False, True, True]))
    assert set(used.sum(1).tolist()) == {1, 2}
    absent = int(np.flatnonzero(~dataset.present[:, 1])[0])
    message = rf"case {dataset.cases[absent].name} has no mask of label\.raters \(rater1\), nor have 0 others"
    with pytest.raises(ValueError, match=message):
        LabelTables(dataset, range(6), LabelOptions(raters=[1]), device="cpu")


def test_a_case_with_empty_masks_is_background(tmp_path):
    dataset = make_prepared(tmp_path / "set", num_cases=2, size=(16, 16), num_raters=3)
    path = dataset.folder.array("masks", "scan000")
    np.save(path, np.zeros_like(np.load(path)))
    for maker in MAKERS:
        tables = LabelTables(dataset, [0, 1], LabelOptions(maker=maker), device="cpu")
        empty = torch.zeros(1, 3, 16, 16, dtype=torch.uint8)
        label = tables(empty, torch.tensor([0]), rater=torch.tensor([0]))
        assert (label[:, 0] == 1).all()


def test_staple_of_too_many_raters_and_classes_is_refused_with_advice(tmp_path):
    dataset = make_prepared(tmp_path / "set", num_cases=2, size=(8, 8), num_raters=6, num_classes=4)
    with pytest.raises(
        ValueError, match=r"6 raters and 4 classes .* 4096 columns.*label\.maker=dice_weighted"
    ):
        LabelTables(dataset, [0], LabelOptions(maker="staple"), device="cpu")


def test_random_without_a_rater_is_refused():
    masks = torch.zeros(1, 2, 4, 4, dtype=torch.uint8)
    with pytest.raises(ValueError, match="needs rater"):
        make_labels(masks, torch.ones(1, 2, dtype=torch.bool), LabelOptions(maker="random"), num_classes=2)


def test_invalid_options_are_refused():
    for options, message in (
        ({"maker": "mode"}, "maker"),
        ({"width": 4}, "width must be odd"),
        ({"eps": 1.5}, "eps"),
        ({"sigma": 0}, "sigma"),
        ({"smooth": "none"}, "smooth"),
    ):
        with pytest.raises(ValidationError, match=message):
            LabelOptions(**options)
    assert all(field.description for field in LabelOptions.model_fields.values())
