"""Surface distances in mm compared with their definition and MONAI, and the conventions for empty masks."""

import math

import numpy as np
import pytest
import torch
from scipy import ndimage

from semidice.metrics import hausdorff_error_mm, surface_dice_score


def surface_distances(mask, reference, spacing):
    """Distances in mm of each mask's surface voxels to the other mask's surface, from all pairs."""
    points = []
    for region in (mask, reference):
        inner = ndimage.binary_erosion(region)
        points.append(np.argwhere(region & ~inner) * np.asarray(spacing))
    between = np.linalg.norm(points[0][:, None] - points[1][None], axis=-1)
    return between.min(1), between.min(0)


def blob(shape, centre, radius):
    grid = np.indices(shape)
    return sum((g - c) ** 2 for g, c in zip(grid, centre, strict=True)) <= radius**2


CASES = {
    "2D": ((24, 20), (10, 9), (13, 11), (0.7, 1.3)),
    "3D": ((12, 16, 14), (5, 8, 7), (6, 9, 8), (2.5, 0.8, 0.8)),
}


@pytest.mark.parametrize("name", CASES)
def test_both_metrics_equal_their_definition_in_millimetres(name):
    shape, first, second, spacing = CASES[name]
    mask, reference = blob(shape, first, 4), blob(shape, second, 3.3)
    to_reference, to_mask = surface_distances(mask, reference, spacing)
    prob, target = (torch.from_numpy(region).float()[None, None] for region in (mask, reference))
    hd95 = hausdorff_error_mm(prob, target, spacing_mm=spacing).item()
    assert hd95 == pytest.approx(max(np.percentile(to_reference, 95), np.percentile(to_mask, 95)), abs=1e-4)
    largest = hausdorff_error_mm(prob, target, spacing_mm=spacing, percentile=100.0).item()
    assert largest == pytest.approx(max(to_reference.max(), to_mask.max()), abs=1e-4)
    for tolerance in (0.0, 1.0, 2.0):
        share = np.concatenate([to_reference, to_mask]) <= tolerance
        score = surface_dice_score(prob, target, spacing_mm=spacing, tolerance_mm=tolerance).item()
        assert score == pytest.approx(share.mean(), abs=1e-5)


def test_two_single_voxels_have_the_distance_computed_by_hand():
    prob, target = torch.zeros(1, 1, 8, 8), torch.zeros(1, 1, 8, 8)
    prob[..., 2, 2], target[..., 2, 5] = 1, 1
    assert hausdorff_error_mm(prob, target, spacing_mm=(1.0, 0.5)).item() == pytest.approx(1.5)
    assert surface_dice_score(prob, target, spacing_mm=(1.0, 0.5), tolerance_mm=1.4).item() == 0
    assert surface_dice_score(prob, target, spacing_mm=(1.0, 0.5), tolerance_mm=1.5).item() == 1
    assert hausdorff_error_mm(prob, prob, spacing_mm=(1.0, 0.5)).item() == 0


def test_a_missed_class_costs_the_diagonal_and_two_empty_masks_are_perfect():
    nothing, something = torch.zeros(1, 1, 4, 13), torch.zeros(1, 1, 4, 13)
    something[..., 1, 1] = 1
    # sides of (4 - 1) x 4 = 12 mm and (13 - 1) x 0.75 = 9 mm have a diagonal of 15 mm
    for pair in ((nothing, something), (something, nothing)):
        assert hausdorff_error_mm(*pair, spacing_mm=(4, 0.75)).item() == pytest.approx(15)
        assert surface_dice_score(*pair, spacing_mm=(4, 0.75)).item() == 0
    assert hausdorff_error_mm(nothing, nothing, spacing_mm=(4, 0.75)).item() == 0
    assert surface_dice_score(nothing, nothing, spacing_mm=(4, 0.75)).item() == 1
    assert surface_dice_score(nothing, nothing, spacing_mm=(4, 0.75), empty=math.nan).isnan().all()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.*always_return_as_numpy:FutureWarning")
@pytest.mark.parametrize("shape", [(40, 33), (12, 25, 31)])
def test_both_scores_equal_monai_on_ragged_masks_with_spacing(shape):
    monai_metrics = pytest.importorskip("monai.metrics")
    draw = np.random.default_rng(len(shape))
    spacing = tuple(draw.uniform(0.5, 3, len(shape)).tolist())
    for smooth in (0.7, 2.0):
        noise = [ndimage.gaussian_filter(draw.normal(size=shape), smooth) for _ in range(2)]
        pair = [torch.from_numpy(each > 0)[None, None] for each in noise]
        distance = hausdorff_error_mm(pair[0], pair[1].float(), spacing_mm=spacing)
        options = {"include_background": True, "spacing": spacing}
        expected = monai_metrics.compute_hausdorff_distance(*pair, percentile=95, **options)
        torch.testing.assert_close(distance, expected.float(), rtol=0, atol=1e-5)
        for tolerance in (0.0, spacing[0], 2.0):
            share = surface_dice_score(pair[0], pair[1].float(), spacing_mm=spacing, tolerance_mm=tolerance)
            expected = monai_metrics.compute_surface_dice(*pair, [tolerance], **options)
            torch.testing.assert_close(share, expected.float(), rtol=0, atol=1e-6)


def test_classes_cases_and_spacings_are_separate_and_ignored_voxels_are_background():
    target = torch.zeros(2, 8, 8, dtype=torch.long)
    target[:, 1:4, 1:4], target[:, 5:7, 5:7] = 1, 2
    prob = torch.nn.functional.one_hot(target, 3).movedim(-1, 1).float()
    prob[1] = prob[1].roll(1, 1)
    spacing = torch.tensor([[1.0, 1.0], [3.0, 1.0]])
    distance = hausdorff_error_mm(prob, target, spacing_mm=spacing)
    assert distance.shape == (2, 3)
    assert distance[0].tolist() == [0, 0, 0]
    assert distance[1, 1].item() == pytest.approx(3)
    valid = torch.ones(2, 8, 8, dtype=torch.bool)
    valid[:, 4:] = False
    masked = hausdorff_error_mm(prob, target, spacing_mm=(1.0, 1.0), valid=valid)
    assert masked[0].tolist() == [0, 0, 0]
