"""Facts about the foreground, on datasets whose foreground is placed by hand."""

import numpy as np
import pytest
from prepared import dataset_with, make_prepared

from semidice.data.foreground import foreground_facts


def test_positions_are_shares_of_the_image_measured_from_its_centre(tmp_path):
    masks = np.zeros((8, 40, 80), dtype=np.uint8)
    # rows 10 and 11 of 40, columns 60 to 63 of 80
    masks[:, 10:12, 60:64] = 1
    facts = foreground_facts(dataset_with(tmp_path / "set", masks))
    expected = (11 / 40 - 0.5, 62 / 80 - 0.5)
    assert facts.offset == pytest.approx(expected)
    assert facts.spread == pytest.approx([abs(share) for share in expected])
    assert facts.deviation == pytest.approx((0, 0), abs=1e-12)
    assert (facts.num_cases, facts.share_empty) == (8, 0)


def test_spread_is_the_root_mean_square_distance_from_the_centre(tmp_path):
    masks = np.zeros((4, 40, 40), dtype=np.uint8)
    for mask, row in zip(masks, (4, 12, 26, 34), strict=True):
        mask[row : row + 2, 19:21] = 1
    facts = foreground_facts(dataset_with(tmp_path / "set", masks))
    rows = np.array([5, 13, 27, 35]) / 40 - 0.5
    assert facts.spread == pytest.approx((np.sqrt((rows**2).mean()), 0), abs=1e-12)


def test_empty_cases_are_counted_and_have_no_position(tmp_path):
    masks = np.zeros((8, 32, 32), dtype=np.uint8)
    masks[:2, 8, 8] = 1
    facts = foreground_facts(dataset_with(tmp_path / "set", masks))
    assert facts.share_empty == 0.75
    assert facts.offset == pytest.approx((8.5 / 32 - 0.5,) * 2)
    empty = foreground_facts(dataset_with(tmp_path / "empty", masks[2:]))
    assert (empty.share_empty, empty.spread) == (1, (0, 0))


def test_the_order_of_two_classes_along_each_axis(tmp_path):
    masks = np.zeros((10, 32, 32), dtype=np.uint8)
    for number, mask in enumerate(masks):
        # class 1 always lies above class 2, and left of it in every second case
        left, right = (4, 20) if number % 2 else (20, 4)
        mask[4:8, left : left + 4] = 1
        mask[20:24, right : right + 4] = 2
    facts = foreground_facts(dataset_with(tmp_path / "set", masks, num_classes=3))
    assert facts.order == (1, 0.5)


def test_one_foreground_class_has_no_order(tmp_path):
    assert foreground_facts(make_prepared(tmp_path / "set")).order == (0.5, 0.5)
