"""Surface distances in mm compared with their definition, and the conventions for empty masks."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from scipy import ndimage

from semidice.metrics import hausdorff_error_mm, surface_dice_score

pytest.importorskip("monai.metrics")


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
        assert hausdorff_error_mm(*pair, spacing_mm=(4, 0.75), missed=math.inf).item() == math.inf
        assert surface_dice_score(*pair, spacing_mm=(4, 0.75)).item() == 0
    assert hausdorff_error_mm(nothing, nothing, spacing_mm=(4, 0.75)).item() == 0
    assert surface_dice_score(nothing, nothing, spacing_mm=(4, 0.75)).item() == 1
    assert surface_dice_score(nothing, nothing, spacing_mm=(4, 0.75), empty=math.nan).isnan().all()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.*always_return_as_numpy:FutureWarning")
def test_monai_gives_nan_or_infinity_if_a_mask_is_empty():
    monai_metrics = pytest.importorskip("monai.metrics")
    nothing, something = torch.zeros(1, 1, 6, 6), torch.ones(1, 1, 6, 6)
    distance_to_empty = monai_metrics.compute_hausdorff_distance(
        nothing, something, include_background=True, percentile=95
    )
    assert not distance_to_empty.isfinite().any()
    empty_dice = monai_metrics.compute_surface_dice(nothing, nothing, [1.0], include_background=True)
    assert empty_dice.isnan().all()


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
    valid[1] = False
    assert hausdorff_error_mm(prob, target, spacing_mm=(1.0, 1.0), valid=valid)[1].isnan().all()


def test_the_error_names_wrong_input():
    prob = torch.zeros(1, 1, 4, 4)
    with pytest.raises(ValueError, match="spacing_mm needs 2 positive sides"):
        hausdorff_error_mm(prob, prob, spacing_mm=(1, 1, 1))
    with pytest.raises(ValueError, match="needs a hard target"):
        hausdorff_error_mm(prob, torch.full_like(prob, 0.3), spacing_mm=(1, 1))
    with pytest.raises(ValueError, match="tolerance_mm must be 0 mm or more; got -1"):
        surface_dice_score(prob, prob, spacing_mm=(1, 1), tolerance_mm=-1.0)
    with pytest.raises(ValueError, match="images or volumes"):
        hausdorff_error_mm(torch.zeros(1, 1, 4), torch.zeros(1, 1, 4), spacing_mm=(1,))


def test_without_monai_the_error_says_what_to_install():
    code = (
        "import sys; sys.modules['monai.metrics'] = None\n"
        "import torch\nfrom semidice.metrics import hausdorff_error_mm\n"
        "hausdorff_error_mm(torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, 4, 4), spacing_mm=(1, 1))"
    )
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert completed.stderr.strip().splitlines()[-1] == (
        "ModuleNotFoundError: surface distances need MONAI: pip install 'semidice[monai]'"
    )
