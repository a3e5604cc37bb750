"""Kernel density recalibration compared with SciPy's Dirichlet and Beta densities, and edge cases."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats

from semidice.calibration.keypoints import sample_keys, take_keys
from semidice.calibration.recalibration import choose_bandwidth, kde_calibration_error, kde_recalibrate
from semidice.data.phantom import make_phantom

NUM_CLASSES = (2, 3, 14, 200)
BANDWIDTHS = (5e-5, 1e-3, 1e-2, 1e-1)


def simplex(num, num_classes, *, seed=0, sharpness=8.0):
    """Points between the middle and the corners, some with exact zeros and ones."""
    generator = torch.Generator().manual_seed(seed)
    scale = sharpness * torch.rand(num, 1, generator=generator)
    prob = torch.softmax(scale * torch.randn(num, num_classes, generator=generator), dim=1)
    corners = torch.randint(num_classes, (len(prob[::7]),), generator=generator)
    prob[::7] = torch.eye(num_classes)[corners]
    return prob


def labels(num, num_classes, seed=1):
    return torch.randint(num_classes, (num,), generator=torch.Generator().manual_seed(seed))


def oracle(prob, key_prob, key_target, bandwidth, weight=None):
    """The estimate in float64 from the stored numbers, by SciPy's log-gamma and softmax."""
    point, key = (np.maximum(array.double().numpy(), 1e-7) for array in (prob, key_prob))
    alpha = key / key.sum(1, keepdims=True) / bandwidth
    score = np.log(point) @ alpha.T - special.gammaln(alpha + 1).sum(1)
    if weight is not None:
        score = score + np.log(weight.double().numpy())
    label = np.eye(prob.shape[1])[key_target.numpy()] if key_target.ndim == 1 else key_target.double().numpy()
    return torch.from_numpy(special.softmax(score, axis=1) @ label)


@pytest.mark.parametrize("num_classes", NUM_CLASSES)
@pytest.mark.parametrize("bandwidth", BANDWIDTHS)
@pytest.mark.parametrize("method", ["auto", "reference"])
def test_float32_agrees_with_a_float64_oracle(num_classes, bandwidth, method):
    prob, keys, target = (
        simplex(500, num_classes),
        simplex(300, num_classes, seed=2),
        labels(300, num_classes),
    )
    result = kde_recalibrate(prob, keys, target, bandwidth=bandwidth, method=method)
    assert result.dtype == torch.float32
    # auto may use attention in float32; the reference rounds a float64 result once
    tolerance = 1e-4 if method == "auto" else 1e-6
    expected = oracle(prob, keys, target, bandwidth)
    torch.testing.assert_close(result.double(), expected, atol=tolerance, rtol=0)
    torch.testing.assert_close(result.sum(1), torch.ones(500))


@pytest.mark.parametrize("num_classes", NUM_CLASSES)
def test_keys_far_from_every_pixel_or_packed_together_stay_exact(num_classes):
    corners = simplex(200, num_classes, sharpness=60.0)
    for spread in (0.3, 0.01):
        keys = torch.softmax(spread * torch.randn(300, num_classes), dim=1)
        target = labels(300, num_classes)
        for bandwidth in (5e-5, 0.005 * num_classes**0.5):
            result = kde_recalibrate(corners, keys, target, bandwidth=bandwidth)
            expected = oracle(corners, keys, target, bandwidth)
            # the second bandwidth is the smallest for which auto uses float32 attention
            torch.testing.assert_close(result.double(), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("num_classes", [2, 5])
@pytest.mark.parametrize("bandwidth", BANDWIDTHS)
def test_float64_attention_is_exact_at_every_bandwidth(num_classes, bandwidth):
    prob, keys, target = (
        simplex(99, num_classes).double(),
        simplex(50, num_classes, seed=2),
        labels(50, num_classes),
    )
    result = kde_recalibrate(prob, keys, target, bandwidth=bandwidth, method="attention")
    # a score of 16 / h = 3e5 has an absolute error of about 1e-10 in float64
    torch.testing.assert_close(result, oracle(prob, keys, target, bandwidth), atol=1e-8, rtol=0)


def test_float32_attention_alone_is_not_exact_at_small_bandwidths():
    """The reason for the reference: without it, the tolerance above would not hold."""
    prob, keys, target = simplex(500, 14), simplex(300, 14, seed=2), labels(300, 14)
    result = kde_recalibrate(prob, keys, target, bandwidth=5e-5, method="attention")
    assert (result - oracle(prob, keys, target, 5e-5)).abs().max() > 1e-4


def test_the_estimate_is_a_ratio_of_dirichlet_densities():
    prob, keys, target = (torch.full((1, 3), 1 / 3), simplex(7, 3, sharpness=1.0)[1:], labels(6, 3))
    density = [stats.dirichlet(k.double().numpy() / 0.1 + 1).pdf(np.full(3, 1 / 3)) for k in keys]
    expected = np.array(density) @ np.eye(3)[target.numpy()] / np.sum(density)
    result = kde_recalibrate(prob, keys, target, bandwidth=0.1, method="reference")
    np.testing.assert_allclose(result[0].numpy(), expected, rtol=1e-5)


def test_two_classes_give_the_beta_kernel():
    keys, target = torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1])
    density = [stats.beta(k / 0.2 + 1, (1 - k) / 0.2 + 1).pdf(0.3) for k in (0.1, 0.4)]
    result = kde_recalibrate(torch.tensor([[0.7, 0.3]]), keys, target, bandwidth=0.2)
    assert float(result[0, 1]) == pytest.approx(density[1] / sum(density), abs=1e-5)


@pytest.mark.parametrize("method", ["reference", "attention"])
@pytest.mark.parametrize("space", [(7,), (3, 5), (2, 3, 4)])
def test_images_give_the_result_of_their_voxels_with_shared_and_with_own_keys(method, space):
    prob = simplex(2 * int(np.prod(space)), 3).reshape(2, *space, 3).movedim(-1, 1)
    keys, target = simplex(22, 3, seed=3).reshape(2, 11, 3), labels(22, 3).reshape(2, 11)
    own = kde_recalibrate(prob, keys, target, bandwidth=0.05, method=method)
    shared = kde_recalibrate(prob, keys[0], target[0], bandwidth=0.05, method=method)
    for image in range(2):
        points = prob[image].flatten(1).t()
        expected = oracle(points, keys[image], target[image], 0.05)
        torch.testing.assert_close(own[image].flatten(1).t().double(), expected, atol=1e-5, rtol=0)
        expected = oracle(points, keys[0], target[0], 0.05)
        torch.testing.assert_close(shared[image].flatten(1).t().double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("method", ["reference", "attention"])
def test_absent_keys_do_not_count_and_a_weight_equals_copies_of_a_key(method):
    prob, keys, target = simplex(30, 3), simplex(6, 3, seed=2), labels(6, 3)
    weight = torch.tensor([1, 0, 2, 1, 0, 3])
    copies = weight.repeat_interleave(weight) * 0 + torch.arange(6).repeat_interleave(weight)
    expected = kde_recalibrate(prob, keys[copies], target[copies], bandwidth=0.05, method="reference")
    poisoned = keys.clone()
    poisoned[1] = torch.nan
    result = kde_recalibrate(prob, poisoned, target, bandwidth=0.05, key_weight=weight, method=method)
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=0)
    mask = kde_recalibrate(prob, keys, target, bandwidth=0.05, key_weight=weight > 0, method=method)
    only = kde_recalibrate(prob, keys[weight > 0], target[weight > 0], bandwidth=0.05, method=method)
    torch.testing.assert_close(mask, only, atol=1e-5, rtol=0)


def test_without_keys_the_probability_is_unchanged():
    prob = simplex(20, 3).reshape(2, 10, 3).movedim(-1, 1)
    keys = simplex(10, 3).reshape(2, 5, 3).requires_grad_()
    weight = torch.tensor([[False] * 5, [True] * 5])
    for method in ("reference", "attention"):
        result = kde_recalibrate(
            prob, keys, labels(10, 3).view(2, 5), bandwidth=0.01, key_weight=weight, method=method
        )
        torch.testing.assert_close(result[0], prob[0])
        (gradient,) = torch.autograd.grad(result.square().sum(), keys)
        assert gradient.isfinite().all()
    alone = kde_recalibrate(
        prob[0, :, :1].t(), prob[0, :, :1].t(), labels(1, 3), bandwidth=0.1, leave_one_out=True
    )
    torch.testing.assert_close(alone, prob[0, :, :1].t())


@pytest.mark.parametrize("method", ["reference", "attention", "auto"])
@pytest.mark.parametrize("own_keys", [False, True])
def test_only_the_region_is_recalibrated_and_the_rest_is_unchanged(method, own_keys):
    prob = simplex(3 * 40, 3).reshape(3, 40, 3).movedim(2, 1).reshape(3, 3, 8, 5).clone().requires_grad_()
    key_shape = (3, 20) if own_keys else (20,)
    keys = simplex(60, 3, seed=2)[: 20 * (3 if own_keys else 1)].reshape(*key_shape, 3)
    target = labels(60, 3)[: keys[..., 0].numel()].reshape(key_shape)
    options = {"bandwidth": 0.05, "key_weight": labels(60, 3, seed=4)[: target.numel()].reshape(key_shape)}
    # the region holds all of the first image, part of the second and nothing of the third
    region = torch.zeros(3, 8, 5, dtype=torch.bool)
    region[0] = True
    region[1, 2:5, 1:] = True
    result = kde_recalibrate(prob, keys, target, region=region, method=method, **options)
    everywhere = kde_recalibrate(prob, keys, target, method=method, **options)
    expected = torch.where(region[:, None], everywhere, prob)
    torch.testing.assert_close(result, expected)
    assert torch.equal(result[2], prob[2])
    incoming = torch.randn(result.shape, generator=torch.Generator().manual_seed(0))
    for gradient, expected_gradient in zip(
        *(torch.autograd.grad(out, prob, incoming) for out in (result, expected)), strict=True
    ):
        torch.testing.assert_close(gradient, expected_gradient)


def test_a_region_of_points_may_be_empty_and_must_have_their_shape():
    prob, keys, target = simplex(12, 3), simplex(20, 3, seed=2), labels(20, 3)
    empty_region = torch.zeros(12, dtype=torch.bool)
    assert torch.equal(kde_recalibrate(prob, keys, target, bandwidth=0.05, region=empty_region), prob)
    with pytest.raises(ValueError, match=r"region must be bool \(12,\)"):
        kde_recalibrate(prob, keys, target, bandwidth=0.05, region=empty_region[:5])


def test_leave_one_out_is_the_estimate_from_the_other_points():
    prob, target = simplex(12, 3), labels(12, 3)
    result = kde_recalibrate(prob, prob, target, bandwidth=1e-3, leave_one_out=True)
    for j in range(12):
        others = torch.arange(12) != j
        expected = oracle(prob[j : j + 1], prob[others], target[others], 1e-3)
        torch.testing.assert_close(result[j : j + 1].double(), expected, atol=1e-6, rtol=0)


def test_leave_one_out_works_across_chunks_and_per_image(monkeypatch):
    prob, target = simplex(40, 3), labels(40, 3)
    expected = kde_recalibrate(prob, prob, target, bandwidth=0.01, leave_one_out=True)
    monkeypatch.setattr("semidice.calibration.kde._CPU_CHUNK", 40 * 7)
    torch.testing.assert_close(
        kde_recalibrate(prob, prob, target, bandwidth=0.01, leave_one_out=True), expected, atol=0, rtol=0
    )
    points = torch.stack([prob, prob.flip(0)])
    own = kde_recalibrate(
        points.transpose(1, 2),
        points,
        torch.stack([target, target.flip(0)]),
        bandwidth=0.01,
        leave_one_out=True,
    )
    torch.testing.assert_close(own[0].t(), expected)
    torch.testing.assert_close(own[1].t(), expected.flip(0))


@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("bandwidth", [0.5, 0.02])
def test_the_gradients_of_the_reference_are_correct(monkeypatch, leave_one_out, bandwidth):
    monkeypatch.setattr("semidice.calibration.kde._CPU_CHUNK", 15)
    prob = simplex(8, 3, sharpness=2.0)[1:6].double()
    keys = prob.clone() if leave_one_out else simplex(8, 3, seed=2, sharpness=2.0)[1:6].double()
    soft = torch.softmax(torch.randn(5, 3, dtype=torch.float64), 1)
    weight = torch.tensor([1.0, 2.0, 0.0, 0.5, 1.0])

    def estimate(prob, keys, soft):
        prob, keys, soft = (array / array.sum(1, keepdim=True) for array in (prob, keys, soft))
        return kde_recalibrate(
            prob, keys, soft, bandwidth=bandwidth, key_weight=weight, leave_one_out=leave_one_out
        )

    inputs = tuple(array.requires_grad_() for array in (prob, keys, soft))
    assert torch.autograd.gradcheck(estimate, inputs)


def test_attention_and_reference_have_the_same_gradient():
    gradients, incoming = [], torch.randn(60, 4)
    for method in ("reference", "attention"):
        prob, keys = simplex(60, 4).requires_grad_(), simplex(20, 4, seed=2).requires_grad_()
        result = kde_recalibrate(prob, keys, labels(20, 4), bandwidth=0.1, method=method)
        gradients.append(torch.autograd.grad((result * incoming).sum(), (prob, keys)))
    for reference, attention in zip(*gradients, strict=True):
        assert reference.isfinite().all()
        # float32 scores of up to 160 keep five digits of a gradient that reaches 1e4 near saturation
        torch.testing.assert_close(reference, attention, rtol=1e-4, atol=1e-5 * float(reference.abs().max()))


def test_saturated_probabilities_have_a_finite_gradient_that_is_zero_where_clamped():
    prob = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]], requires_grad=True)
    result = kde_recalibrate(prob, simplex(9, 2), labels(9, 2), bandwidth=5e-5)
    (gradient,) = torch.autograd.grad(result[:, 0].sum(), prob)
    assert gradient.isfinite().all()
    assert float(gradient[0, 1]) == 0
    assert float(gradient[1, 0]) == 0


def test_low_precision_and_autocast_give_float32():
    prob, keys, target = simplex(50, 3), simplex(20, 3, seed=2), labels(20, 3)
    for method in ("reference", "attention"):
        expected = kde_recalibrate(prob.bfloat16().float(), keys, target, bandwidth=0.05, method=method)
        result = kde_recalibrate(prob.bfloat16(), keys, target, bandwidth=0.05, method=method)
        torch.testing.assert_close(result, expected)
        plain = kde_recalibrate(prob, keys, target, bandwidth=0.05, method=method)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cast = kde_recalibrate(prob, keys, target, bandwidth=0.05, method=method)
        torch.testing.assert_close(cast, plain)


MEASURE = """
import torch
from semidice.calibration.recalibration import kde_recalibrate

def peak_mb(call):
    status = lambda name: next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith(name))
    open("/proc/self/clear_refs", "w").write("5")
    before = status("VmRSS")
    call()
    return (status("VmHWM") - before) / 1024

torch.manual_seed(0)
torch.set_num_threads(1)
prob = torch.randn(1, 3, 512, 512).mul(3).softmax(1)
key, target = torch.randn(1024, 3).mul(3).softmax(1), torch.randint(3, (1024,))
def forward(): kde_recalibrate(prob, key, target, bandwidth=bandwidth)
def backward():
    part, keys = prob[..., :128].clone().requires_grad_(), key.clone().requires_grad_()
    kde_recalibrate(part, keys, target, bandwidth=bandwidth).square().sum().backward()
for bandwidth in (1e-3, 1e-1):
    print(peak_mb(forward))
print(peak_mb(backward))
print(peak_mb(lambda: torch.ones(2**25).sum()))
"""


def test_512_x_512_pixels_and_1024_keys_need_less_than_100_mb():
    run = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True)
    reference, attention, backward, known = map(float, run.stdout.split())
    assert max(reference, attention) < 100
    # 65 536 pixels x 1024 keys in float64 are 512 MB
    assert backward < 100
    # a check of the measurement itself: 2^25 floats are 128 MB
    assert known > 120


def test_the_label_likelihood_is_the_likelihood_of_left_out_labels():
    prob, target = simplex(15, 3), labels(15, 3)
    soft = 0.8 * torch.eye(3)[target] + 0.2 / 3
    choice = choose_bandwidth(prob, soft, bandwidths=(1e-3, 0.1))
    for bandwidth, value in zip(choice.bandwidths, choice.log_likelihood, strict=True):
        each = []
        for j in range(15):
            others = torch.arange(15) != j
            mean = oracle(prob[j : j + 1], prob[others], soft[others], bandwidth)[0]
            each.append(float((soft[j] * mean.log()).sum()))
        assert value == pytest.approx(np.mean(each), rel=1e-5)
    assert choice.bandwidth == choice.bandwidths[int(np.argmax(choice.log_likelihood))]


def test_the_density_likelihood_equals_that_of_scipy():
    prob = simplex(12, 3, sharpness=2.0)
    prob = prob[prob.amin(1) > 0]
    choice = choose_bandwidth(prob, labels(len(prob), 3), bandwidths=(0.02, 0.5), likelihood="density")
    points = prob.double().numpy()
    points /= points.sum(1, keepdims=True)
    for bandwidth, value in zip(choice.bandwidths, choice.log_likelihood, strict=True):
        density = np.array([[stats.dirichlet(k / bandwidth + 1).pdf(p) for k in points] for p in points])
        np.fill_diagonal(density, 0)
        expected = np.log(density.sum(1) / (len(points) - 1)).mean()
        assert value == pytest.approx(expected, rel=1e-6)


def test_a_subsample_gives_a_bandwidth_near_that_of_all_points():
    generator = torch.Generator().manual_seed(0)
    lesion = torch.rand(3000, generator=generator)
    target = (torch.rand(3000, generator=generator) < lesion**2).long()
    prob = torch.stack([1 - lesion, lesion], dim=1)
    grid = (1e-4, 1e-3, 1e-2, 1e-1)
    from_all = choose_bandwidth(prob, target, bandwidths=grid, num_points=3000)
    from_some = choose_bandwidth(prob, target, bandwidths=grid, num_points=700, generator=generator)
    assert from_all.bandwidth in (1e-3, 1e-2, 1e-1)
    assert abs(np.log10(from_some.bandwidth) - np.log10(from_all.bandwidth)) < 1.5


def direct_error(prob, label, bandwidth, kind, p):
    """The published estimator: sums of densities that leave the point itself out, without logarithms."""
    num = len(prob)

    def binary(confidence, right):
        total = 0.0
        for j in range(num):
            density = stats.beta.pdf(
                confidence[j], confidence / bandwidth + 1, (1 - confidence) / bandwidth + 1
            )
            density[j] = 0
            total += abs(density @ right / density.sum() - confidence[j]) ** p
        return total / num

    if kind == "canonical":
        total = 0.0
        for j in range(num):
            density = np.array([stats.dirichlet(key / bandwidth + 1).pdf(prob[j]) for key in prob])
            density[j] = 0
            total += (np.abs(density @ label / density.sum() - prob[j]) ** p).sum()
        return total / num
    if kind == "top_label":
        top = prob.argmax(1)
        return binary(prob.max(1), label[np.arange(num), top])
    return np.mean([binary(prob[:, c], label[:, c]) for c in range(prob.shape[1])])


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("kind", ["canonical", "marginal", "top_label"])
@pytest.mark.parametrize("soft", [False, True])
def test_the_calibration_error_equals_the_published_estimator(kind, p, soft):
    prob = torch.softmax(torch.randn(30, 3, dtype=torch.float64), 1)
    target = torch.softmax(torch.randn(30, 3, dtype=torch.float64), 1) if soft else labels(30, 3)
    label = target.numpy() if soft else np.eye(3)[target.numpy()]
    error = kde_calibration_error(prob, target, bandwidth=0.05, kind=kind, p=p)
    assert float(error) == pytest.approx(direct_error(prob.numpy(), label, 0.05, kind, p), rel=1e-9)


def test_the_calibration_error_accepts_keys_images_and_invalid_voxels():
    prob = simplex(24, 3).reshape(2, 3, 4, 3).movedim(-1, 1)
    target = labels(24, 3).reshape(2, 3, 4)
    keys, key_target = simplex(10, 3, seed=3), labels(10, 3)
    valid = torch.rand(2, 3, 4) > 0.3
    points, label = prob.movedim(1, -1)[valid], target[valid]
    for kind in ("canonical", "marginal", "top_label"):
        image = kde_calibration_error(prob, target, bandwidth=0.05, kind=kind, valid=valid)
        torch.testing.assert_close(image, kde_calibration_error(points, label, bandwidth=0.05, kind=kind))
        options = {"bandwidth": 0.05, "kind": kind, "key_prob": keys, "key_target": key_target}
        image = kde_calibration_error(prob, target, valid=valid, **options)
        torch.testing.assert_close(image, kde_calibration_error(points, label, **options))
    mean = kde_recalibrate(points, keys, key_target, bandwidth=0.05)
    canonical = kde_calibration_error(points, label, bandwidth=0.05, key_prob=keys, key_target=key_target)
    torch.testing.assert_close(canonical, (mean - points).abs().sum(1).mean(), atol=1e-5, rtol=0)


def test_one_sigmoid_channel_has_only_a_marginal_error():
    prob, mask = torch.rand(20, 1), (torch.rand(20, 1) > 0.5).float()
    error = kde_calibration_error(prob, mask, bandwidth=0.1, kind="marginal")
    both = torch.cat([1 - prob, prob], 1), torch.cat([1 - mask, mask], 1)
    torch.testing.assert_close(error, kde_calibration_error(*both, bandwidth=0.1, kind="marginal"))
    torch.testing.assert_close(2 * error, kde_calibration_error(*both, bandwidth=0.1))
    with pytest.raises(ValueError, match="one channel"):
        kde_calibration_error(prob, mask, bandwidth=0.1)


@pytest.mark.parametrize("kind", ["canonical", "marginal", "top_label"])
def test_the_calibration_error_has_the_right_gradient(kind):
    logits = torch.randn(9, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda z: kde_calibration_error(z.softmax(1), labels(9, 3), bandwidth=0.1, kind=kind, p=2), logits
    )


@given(st.integers(2, 5), st.integers(0, 10**6), st.sampled_from([1e-3, 1e-2, 1e-1]))
def test_the_estimate_is_a_probability_and_does_not_depend_on_order(num_classes, seed, bandwidth):
    prob, keys = simplex(9, num_classes, seed=seed), simplex(11, num_classes, seed=seed + 1)
    target = labels(11, num_classes, seed=seed)
    result = kde_recalibrate(prob, keys, target, bandwidth=bandwidth, method="reference")
    assert 0 <= float(result.min()) <= float(result.max()) <= 1 + 1e-6
    torch.testing.assert_close(result.sum(1), torch.ones(9))
    order = torch.randperm(11, generator=torch.Generator().manual_seed(seed))
    reordered = kde_recalibrate(
        prob.flip(0), keys[order], target[order], bandwidth=bandwidth, method="reference"
    )
    torch.testing.assert_close(reordered.flip(0), result)
    flipped = kde_recalibrate(
        prob.flip(1), keys.flip(1), num_classes - 1 - target, bandwidth=bandwidth, method="reference"
    )
    torch.testing.assert_close(flipped.flip(1), result)


def distorted(prob, *, slope, shift):
    """A teacher that no temperature can correct: its logits are steeper and shifted towards one class."""
    bias = shift * torch.arange(prob.shape[1]) / (prob.shape[1] - 1)
    return torch.softmax(slope * prob.clamp(min=1e-6).log() + bias.view(-1, 1, 1), dim=1)


def rater_mean(masks, num_classes):
    return torch.stack([(masks.long() == c).float().mean(1) for c in range(num_classes)], dim=1)


@pytest.mark.parametrize(("num_classes", "slope", "shift"), [(2, 1.0, 2.0), (2, 2.0, 2.0), (3, 1.6, 3.0)])
def test_recalibration_halves_the_error_to_the_true_probability(num_classes, slope, shift):
    # without bias, raters are draws from p*; with bias, their mean is not p*
    phantom = make_phantom(16, size=(40, 48), num_raters=8, num_classes=num_classes, seed=3, bias=0.0)
    teacher = distorted(phantom.prob, slope=slope, shift=shift)
    label = rater_mean(phantom.masks, num_classes)
    seen, new = slice(0, 8), slice(8, 16)
    generator = torch.Generator().manual_seed(0)
    keys = sample_keys(label[seen], 2048, generator=generator)
    key_prob, key_label = take_keys(teacher[seen], keys), take_keys(label[seen], keys)
    choice = choose_bandwidth(teacher[seen], label[seen], generator=generator)
    calibrated = kde_recalibrate(
        teacher[new], key_prob, key_label, bandwidth=choice.bandwidth, key_weight=keys.weight
    )
    before = (teacher[new] - phantom.prob[new]).abs().mean()
    after = (calibrated - phantom.prob[new]).abs().mean()
    assert after < 0.5 * before


def test_balanced_keys_need_their_weights():
    """With hard labels, unweighted balanced keys show a rare class too often."""
    phantom = make_phantom(12, size=(40, 48), num_raters=1, num_classes=2, seed=3, bias=0.0)
    teacher, target = phantom.prob, phantom.masks[:, 0].long()
    keys = sample_keys(target, 2048, generator=torch.Generator().manual_seed(0))
    key_prob, key_target = take_keys(teacher, keys), take_keys(target, keys)
    errors = []
    for weight in (keys.weight, keys.mask):
        result = kde_recalibrate(teacher, key_prob, key_target, bandwidth=0.01, key_weight=weight)
        errors.append(float((result - phantom.prob)[:, 1].mean()))
    weighted, unweighted = errors
    assert abs(weighted) < 0.01
    assert unweighted > 3 * abs(weighted)


@pytest.mark.parametrize(("slope", "shift"), [(1.0, 0.0), (2.0, 0.0), (0.5, 0.0), (1.0, 1.5), (1.6, -2.0)])
def test_a_teachers_bias_is_bounded_by_its_calibration_error(slope, shift):
    """|E[p* - f]| <= E|E[y | f] - f|, class by class (paper, theorem on calibration error)."""
    phantom = make_phantom(4, size=(32, 32), num_raters=8, num_classes=3, seed=5, bias=0.0)
    teacher, label = distorted(phantom.prob, slope=slope, shift=shift), rater_mean(phantom.masks, 3)
    bias = (phantom.prob - teacher).mean((0, 2, 3)).abs()
    for c in range(3):
        channel, mask = teacher[:, c : c + 1], label[:, c : c + 1]
        error = kde_calibration_error(channel, mask, bandwidth=1e-3, kind="marginal")
        # the error uses the mean of 8 raters for p*, which differs by a few thousandths
        assert bias[c] <= error + 0.005
    if (slope, shift) == (1.6, -2.0):
        assert bias.max() > 0.01


PROB, KEYS, TARGET = simplex(6, 3), simplex(4, 3), labels(4, 3)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((PROB, KEYS, TARGET), {"bandwidth": 0.0}, "bandwidth must be above 0; got 0.0"),
        ((PROB, KEYS, TARGET), {"bandwidth": -1.0}, "bandwidth must be above 0"),
        ((PROB, KEYS, TARGET), {"bandwidth": float("nan")}, "bandwidth must be a finite number; got nan"),
        ((PROB * 0.5, KEYS, TARGET), {}, "prob must sum to one over its 3 classes; got sums 0.5 to 0.5"),
        ((PROB, KEYS * 0.5, TARGET), {}, "key_prob must sum to one"),
        ((PROB * 3, KEYS, TARGET), {}, r"prob must lie in \[0, 1\]"),
        ((PROB.long(), KEYS, TARGET), {}, r"prob must be a float tensor with a class axis.* int64 \(6, 3\)"),
        ((PROB[:, :1], KEYS, TARGET), {}, "prob has one channel"),
        ((PROB[:0], KEYS, TARGET), {}, "prob is empty"),
        ((PROB, KEYS, TARGET + 3), {}, "key_target holds class indices 3 to 5, but prob has 3 classes"),
        ((PROB, KEYS, -1 - TARGET), {}, "key_target holds class indices -3 to -1"),
        ((PROB, KEYS, TARGET[:2]), {}, r"key_target must be class indices \(4,\)"),
        ((PROB, KEYS, torch.eye(3)), {}, "a soft key_target has the shape"),
        ((PROB, KEYS, torch.zeros(4, 3)), {}, "key_target must sum to one"),
        ((PROB, KEYS[:, :2], TARGET), {}, "key_prob must have the classes"),
        ((PROB, KEYS[:0], TARGET[:0]), {}, "needs at least one key"),
        ((PROB, KEYS[0], TARGET), {}, r"key_prob must be floats \(K, C\)"),
        ((PROB, KEYS.expand(2, 4, 3), TARGET), {}, "if per image its images"),
        (
            (PROB, KEYS, TARGET),
            {"key_weight": torch.ones(3)},
            r"must be one number per key, \(4,\)",
        ),
        ((PROB, KEYS, TARGET), {"key_weight": -torch.ones(4)}, "key_weight must be 0 or more"),
        ((PROB, KEYS, TARGET), {"leave_one_out": True}, "as many points as keys"),
        ((KEYS, KEYS, TARGET), {"leave_one_out": True, "method": "attention"}, "cannot leave a point out"),
    ],
)
def test_the_error_names_bad_keys(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        kde_recalibrate(*arguments, **({"bandwidth": 0.1} | options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"p": 3}, "p must be 1 or 2; got 3"),
        ({"valid": torch.zeros(4, dtype=torch.bool)}, "there is no valid voxel"),
        ({"key_prob": KEYS}, "need both key_prob"),
        ({"bandwidth": 0.0}, "bandwidth must be above 0"),
        ({"key_prob": KEYS, "key_target": TARGET + 9}, "prob has 3 classes"),
    ],
)
def test_the_error_names_bad_options_of_the_calibration_error(options, message):
    with pytest.raises(ValueError, match=message):
        kde_calibration_error(KEYS, TARGET, **({"bandwidth": 0.1} | options))


def test_choosing_a_bandwidth_needs_two_points_and_positive_candidates():
    with pytest.raises(ValueError, match="no valid voxel"):
        choose_bandwidth(KEYS, TARGET, valid=torch.zeros(4, dtype=torch.bool))
    with pytest.raises(ValueError, match="two points or more; got 1"):
        choose_bandwidth(KEYS[:1], TARGET[:1])
    with pytest.raises(ValueError, match="bandwidth must be above 0"):
        choose_bandwidth(KEYS, TARGET, bandwidths=(0.1, 0.0))


def test_attention_gives_probabilities_of_at_most_one():
    prob = torch.rand(2000, 1, generator=torch.Generator().manual_seed(0))
    points = torch.cat([prob, 1 - prob], dim=1)
    # all keys have one class, so the weights must sum to 1; in float32 their sum is larger
    for num_keys in (256, 1000):
        recalibrated = kde_recalibrate(
            points,
            points[:num_keys],
            torch.ones(num_keys, dtype=torch.long),
            bandwidth=0.01,
            method="attention",
        )
        assert recalibrated.max() <= 1
        torch.testing.assert_close(recalibrated[:, 1], torch.ones(2000))
