"""The Triton kernel of `kde.kernel_mean` computes the same values as the definition in float64.

Without a GPU it runs on the CPU, in Triton's interpreter. On a GPU (`make test-gpu`) it is compiled.
"""

import itertools

import pytest
import torch

from semidice import use_kernels
from semidice.calibration import kde
from semidice.calibration.kde import MIN_PROB, Keys, kernel_mean

pytest.importorskip("triton")
from semidice.kernels.kde import FEW_TILE, MANY_TILE, kernel_mean_triton

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
pytestmark = pytest.mark.gpu if ON_GPU else []
BANDWIDTHS = (5e-5, 1e-3, 1e-2, 1e-1)
# TOLERANCE is what the kernel promises. Measured errors are far smaller: up to 5e-6 for at most four classes
# at bandwidth 5e-5, and up to 1e-6 otherwise; most tests use MARGIN.
TOLERANCE = 1e-4
MARGIN = 1e-5


def simplex(num, num_classes, *, seed=0, sharpness=8.0):
    """Probabilities (num, C) from the middle of the simplex to its corners, some exactly 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    scale = sharpness * torch.rand(num, 1, generator=generator)
    prob = torch.softmax(scale * torch.randn(num, num_classes, generator=generator), dim=1)
    corners = torch.randint(num_classes, (len(prob[::7]),), generator=generator)
    prob[::7] = torch.eye(num_classes)[corners]
    return prob


def random_inputs(num_points, num_keys, num_classes, **options):
    """Points (1, C, n), keys (1, K, C) and hard labels (1, K, C)."""
    points = simplex(num_points, num_classes, **options).t().unsqueeze(0)
    keys = simplex(num_keys, num_classes, seed=2).unsqueeze(0)
    label = torch.eye(num_classes)[torch.randint(num_classes, (1, num_keys))]
    return points.to(DEVICE), keys.to(DEVICE), label.to(DEVICE)


def by_kernel(points, keys, label, *, weight=None, **options):
    return kernel_mean_triton(points, keys, label, weight=weight, smallest_prob=MIN_PROB, **options)


def by_definition(points, keys, label, *, weight=None, **options):
    """In float64, which no kernel takes."""
    return kernel_mean(points.double(), Keys(keys, label, weight), **options)


def largest_error(points, keys, label, *, bandwidth, weight=None, region=None):
    """Largest difference between kernel and definition in float64; also checks dtype, shape and sums."""
    options = {"bandwidth": bandwidth, "weight": weight, "region": region}
    actual = by_kernel(points, keys, label, **options)
    assert actual.dtype == torch.float32
    assert actual.shape == points.shape
    if label.is_floating_point() and points.dtype == torch.float32:
        torch.testing.assert_close(actual.sum(1), torch.ones_like(actual[:, 0]))
    expected = by_definition(points, keys, label, **options)
    return float((actual - expected).abs().max())


# tiles for few, many and very many classes; the most classes are slow in the interpreter
@pytest.mark.parametrize(
    ("num_classes", "bandwidth"),
    [*itertools.product([2, 3, 4, 5, 14, 64, 67], BANDWIDTHS), (256, min(BANDWIDTHS))],
)
def test_the_kernel_equals_the_definition_for_every_bandwidth_and_number_of_classes(num_classes, bandwidth):
    num_points = 150 if num_classes < 64 else 65
    assert largest_error(*random_inputs(num_points, 70, num_classes), bandwidth=bandwidth) < MARGIN


@pytest.mark.parametrize("num_classes", [2, 3, 4, 14])
@pytest.mark.parametrize("spread", [0.3, 1e-2, 1e-4])
@pytest.mark.parametrize("bandwidth", [5e-5, 1e-2])
def test_keys_far_from_all_points_or_close_together_are_accurate(num_classes, spread, bandwidth):
    points, _, label = random_inputs(200, 300, num_classes, sharpness=60.0)
    keys = torch.softmax(spread * torch.randn(1, 300, num_classes), dim=-1).to(DEVICE)
    # the worst case: energies of 4e5, each a sum of products with float32 remainders of up to 400
    assert largest_error(points, keys, label, bandwidth=bandwidth) < TOLERANCE / 2


@pytest.mark.parametrize("num_classes", [2, 3, 4])
def test_a_tie_between_keys_in_the_corners_is_accurate(num_classes):
    """Two classes have equal, tiny probabilities and a key each; float32 logarithms are wrong by 1e-2."""
    tiny = torch.logspace(-6.9, -0.4, 400, dtype=torch.float64)
    points = torch.full((400, num_classes), 1e-7, dtype=torch.float64)
    points[:, 0], points[:, 1] = tiny, tiny * (1 + 1e-4 * torch.randn(400))
    points[:, -1] += 1 - points.sum(1)
    keys, label = torch.eye(num_classes).unsqueeze(0), torch.eye(num_classes).unsqueeze(0)
    points = points.float().t().unsqueeze(0)
    assert largest_error(points.to(DEVICE), keys.to(DEVICE), label.to(DEVICE), bandwidth=5e-5) < TOLERANCE / 2


@pytest.mark.parametrize("num_classes", [2, 3, 4, 7])
def test_sizes_close_to_a_block_equal_the_definition(num_classes):
    tile = FEW_TILE if num_classes <= 4 else MANY_TILE
    points = (1, tile.point_block - 1, tile.point_block, tile.point_block + 1, 97)
    keys = (1, tile.key_block - 1, tile.key_block, tile.key_block + 1, 2 * tile.key_block + 3)
    # a program has one block of points and all blocks of keys, so each size is tested with one of the other
    for num_points, num_keys in {(size, keys[-1]) for size in points} | {(points[3], size) for size in keys}:
        assert largest_error(*random_inputs(num_points, num_keys, num_classes), bandwidth=0.01) < MARGIN


@pytest.mark.parametrize("num_classes", [3, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_all_dtypes_layouts_and_soft_labels_equal_the_definition(num_classes, dtype):
    images = torch.stack([simplex(35, num_classes, seed=s) for s in range(3)]).to(DEVICE, dtype)
    keys = torch.stack([simplex(40, num_classes, seed=9 + s) for s in range(3)]).to(DEVICE, dtype)
    label = torch.stack([simplex(40, num_classes, seed=19 + s) for s in range(3)]).to(DEVICE, dtype)
    # channels last, and every second point
    for points in (images.transpose(1, 2), images.transpose(1, 2).contiguous()[..., ::2]):
        for num_sets in (1, 3):
            error = largest_error(points, keys[:num_sets], label[:num_sets], bandwidth=0.02)
            assert error < MARGIN


@pytest.mark.parametrize("num_classes", [3, 6])
def test_integer_labels_weights_and_masks_equal_the_definition(num_classes):
    points, keys, label = random_inputs(50, 60, num_classes)
    keys = torch.cat([keys, keys.flip(1)])
    label = torch.cat([label, label]).to(torch.uint8)
    points = torch.cat([points, points.flip(2)])
    weight = 100 * torch.rand(2, 60, device=DEVICE)
    weight[:, ::4] = 0
    for weights in (weight, weight > 30, weight[:1].expand(2, 60)):
        assert largest_error(points, keys, label, bandwidth=0.02, weight=weights) < MARGIN


@pytest.mark.parametrize("num_classes", [2, 3, 6])
def test_a_point_is_unchanged_if_all_keys_have_weight_zero(num_classes):
    points, keys, label = random_inputs(40, 33, num_classes)
    batch = torch.cat([points, points]), torch.cat([keys, keys]), torch.cat([label, label])
    weight = torch.ones(2, 33, device=DEVICE)
    weight[1] = 0
    result = by_kernel(*batch, bandwidth=0.02, weight=weight)
    assert torch.equal(result[1:], points)
    assert not torch.equal(result[:1], points)


@pytest.mark.parametrize("num_classes", [3, 6])
def test_points_outside_the_region_are_unchanged(num_classes):
    points, keys, label = random_inputs(400, 50, num_classes)
    region = torch.zeros(1, 400, dtype=torch.bool, device=DEVICE)
    region[0, 130:200:3] = True
    assert largest_error(points, keys, label, bandwidth=0.02, region=region) < MARGIN
    result = by_kernel(points, keys, label, bandwidth=0.02, region=region)
    outside = ~region.unsqueeze(1).expand_as(points)
    assert torch.equal(result[outside], points[outside])


@pytest.mark.parametrize("num_classes", [3, 6])
def test_a_nan_affects_only_its_own_point(num_classes):
    points, keys, label = random_inputs(40, 33, num_classes)
    points[0, 1, 7] = float("nan")
    result = by_kernel(points, keys, label, bandwidth=0.02)
    assert result[0, :, 7].isnan().all()
    assert result.isnan().sum() == num_classes


def test_the_kernel_is_used_where_it_is_exact_and_nowhere_else(monkeypatch):
    calls = []
    fused_applies = kde.fused_applies
    monkeypatch.setattr("semidice.kernels.kde.kernel_mean_triton", lambda p, *_, **__: calls.append(p) or p)
    # everything that the kernels ask for but the device
    monkeypatch.setattr(kde, "fused_applies", lambda points, label: points.dtype != torch.float64)
    points, keys, label = random_inputs(20, 20, 3)
    keys = Keys(keys, label)
    kernel_mean(points, keys, bandwidth=1e-3)
    kernel_mean(points.bfloat16(), keys, bandwidth=1e-3)
    assert len(calls) == 2
    kernel_mean(points.double(), keys, bandwidth=1e-3)
    kernel_mean(points, keys, bandwidth=1e-7)
    kernel_mean(points, keys, bandwidth=1e-3, leave_one_out=True)
    kernel_mean(points.clone().requires_grad_(), keys, bandwidth=1e-3)
    *many, many_labels = random_inputs(3, 3, 257)
    kernel_mean(many[0], Keys(many[1], many_labels), bandwidth=1e-3)
    assert len(calls) == 2
    assert fused_applies(points, label) == ON_GPU
    use_kernels(False)
    try:
        assert not fused_applies(points, label)
    finally:
        use_kernels(True)


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("num_classes", [3, 14])
def test_a_captured_call_equals_the_eager_one_bit_for_bit(num_classes):
    points, keys, label = random_inputs(5000, 300, num_classes)
    keys = Keys(keys, label)
    eager = kernel_mean(points, keys, bandwidth=1e-3)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernel_mean(points, keys, bandwidth=1e-3)
    captured.zero_()
    graph.replay()
    assert torch.equal(captured, eager)


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("num_classes", [2, 3, 4, 14, 64, 200])
@pytest.mark.parametrize("bandwidth", BANDWIDTHS)
def test_full_size_images_on_a_gpu_equal_the_definition(num_classes, bandwidth):
    points, keys, label = random_inputs(512 * 512 + 1, 1024, num_classes)
    assert largest_error(points, keys, label, bandwidth=bandwidth) < MARGIN
