"""Labels by name equal the results of the functions of `semidice.labels`, with tables and without."""

from functools import partial
from typing import get_args

import numpy as np
import pytest
import torch
from prepared import make_prepared
from start import refused

from semidice import labels
from semidice.data.batches import label_making
from semidice.data.batches.label_making import LabelOptions, LabelTables, Maker, Smoothing, smooth_in_space

MAKERS = {name: getattr(labels, f"{name}_label") for name in get_args(Maker) if name != "random"}
SMOOTHERS = {
    "none": lambda label: label,
    "uniform": lambda label: labels.smooth_label(label, eps=0.1),
    "boundary": lambda label: labels.boundary_smooth_label(label, eps=0.5, width=3),
    "spatial": lambda label: labels.spatially_smooth_label(label, sigma=1.0),
}
LAYOUTS = {
    "two classes": {"num_raters": 4},
    "three classes": {"num_raters": 3, "num_classes": 3, "absent": True},
    "one rater": {"num_raters": 1, "num_classes": 5},
    "volumes": {"num_raters": 5, "absent": True, "depth": 5, "sizes": [(8, 11), (13, 9)]},
}


@pytest.fixture(scope="module", params=LAYOUTS.values(), ids=LAYOUTS)
def dataset(request, tmp_path_factory):
    options = {"sizes": [(20, 33), (24, 17), (9, 40)], **request.param}
    return make_prepared(tmp_path_factory.mktemp("data") / "set", num_cases=6, **options)


def label_of_case(dataset, number, options, rater, raters=slice(None)):
    """The label of one case at its own size, by the functions of `semidice.labels`."""
    masks, present = dataset.masks(number)[raters], dataset.present[number][raters]
    maker = partial(MAKERS.get(options.maker, labels.mean_label), num_classes=dataset.num_classes)
    label = maker(masks[[rater]]) if options.maker == "random" else maker(masks, present=present)
    return SMOOTHERS[options.smoothing](label)


@pytest.mark.parametrize("has_tables", [True, False])
@pytest.mark.parametrize("smoothing", get_args(Smoothing))
@pytest.mark.parametrize("maker", get_args(Maker))
def test_labels_equal_the_functions_of_labels_for_each_case(
    dataset, maker, smoothing, has_tables, monkeypatch
):
    options, cases = LabelOptions(maker=maker, smoothing=smoothing), [4, 0, 3, 0]
    if not has_tables:
        monkeypatch.setattr(label_making, "_MAX_BITS", 0)
        if maker == "staple":
            refused(lambda: LabelTables(dataset, cases, options, device="cpu"), "STAPLE", "dice_weighted")
            return
    # each case lies in the corner of a larger space
    space = (13, 13, 13) if dataset.num_axes == 3 else (24, 40)
    masks = torch.zeros(6, len(dataset.manifest.raters), *space, dtype=torch.uint8)
    valid = torch.zeros(6, *space, dtype=torch.bool)
    corners = [tuple(slice(side) for side in case.shape) for case in dataset.cases]
    for number, corner in enumerate(corners):
        masks[(number, slice(None), *corner)] = torch.from_numpy(dataset.masks(number))
        valid[(number, *corner)] = True
    rater = torch.tensor([int(np.flatnonzero(row)[-1]) for row in dataset.present])
    tables = LabelTables(dataset, cases, options, device="cpu")
    assert (tables.tables is not None) is has_tables
    label = smooth_in_space(
        tables(masks[cases], torch.tensor(cases), rater=rater[cases]), options, valid[cases]
    )
    torch.testing.assert_close(label.sum(1), torch.ones(len(cases), *space), atol=1e-6, rtol=0)
    for row, number in enumerate(cases):
        expected = label_of_case(dataset, number, options, int(rater[number]))
        # matrix products of STAPLE and sums of a mean round in another order if the memory layout differs
        np.testing.assert_allclose(label[(row, slice(None), *corners[number])], expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("raters", [(0,), (2, 0), (3, 1)])
def test_label_raters_makes_the_label_of_a_dataset_that_has_only_these_raters(maker, raters, tmp_path):
    dataset = make_prepared(tmp_path / "set", num_cases=3, num_raters=4, size=(24, 24))
    options = LabelOptions(maker=maker, raters=raters)
    expected = label_of_case(dataset, 1, options, 0, raters=sorted(raters))
    assert not np.array_equal(expected, label_of_case(dataset, 1, options, 0))
    masks = torch.from_numpy(dataset.masks(1)).unsqueeze(0)
    label = LabelTables(dataset, range(3), options, device="cpu")(
        masks, torch.tensor([1]), rater=torch.tensor([0])
    )
    np.testing.assert_allclose(label[0], expected, atol=1e-6)


def test_label_raters_are_those_of_them_who_looked_at_the_case(tmp_path):
    dataset = make_prepared(tmp_path / "set", num_cases=6, num_raters=3, absent=True)
    used = LabelTables(dataset, range(6), LabelOptions(raters=(1, 2)), device="cpu").raters
    np.testing.assert_array_equal(used, dataset.present & np.array([False, True, True]))
    name = dataset.cases[int(np.flatnonzero(~dataset.present[:, 1])[0])].name
    only = LabelOptions(raters=(1,))
    refused(lambda: LabelTables(dataset, range(6), only, device="cpu"), name, "label.raters", "rater1")


def test_a_case_with_empty_masks_is_background(tmp_path):
    dataset = make_prepared(tmp_path / "set", num_cases=2, size=(16, 16), num_raters=3)
    path = dataset.folder.array("masks", "scan000")
    np.save(path, np.zeros_like(np.load(path)))
    for maker in MAKERS:
        tables = LabelTables(dataset, [0, 1], LabelOptions(maker=maker), device="cpu")
        empty = torch.zeros(1, 3, 16, 16, dtype=torch.uint8)
        assert (tables(empty, torch.tensor([0]), rater=torch.tensor([0]))[:, 0] == 1).all()


@pytest.mark.parametrize("options", [{"width": 4}, {"eps": 1.5}, {"sigma": 0.0}, {"raters": (1, 1)}])
def test_invalid_options_are_refused_by_name(options):
    refused(lambda: LabelOptions(**options), *options)
