"""Kernel density recalibration compared with SciPy's Dirichlet and Beta densities, and edge cases."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from semidice.calibration import Keys, choose_bandwidth, draw_keys, kde_calibration_error, kde_recalibrate
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


def keys_of(num, num_classes, *, weight=None, seed=2, **options):
    """One set of keys with hard labels."""
    label = torch.eye(num_classes)[labels(num, num_classes)]
    weight = None if weight is None else weight.unsqueeze(0)
    return Keys(simplex(num, num_classes, seed=seed, **options).unsqueeze(0), label.unsqueeze(0), weight)


def oracle(prob, keys, bandwidth, number=0):
    """The estimate from one set of keys, in float64 from the stored numbers, by SciPy."""
    label = keys.label[number].double().numpy()
    point, key = (np.maximum(array.double().numpy(), 1e-7) for array in (prob, keys.prob[number]))
    alpha = key / key.sum(1, keepdims=True) / bandwidth
    score = np.log(point) @ alpha.T - special.gammaln(alpha + 1).sum(1)
    if keys.weight is not None:
        with np.errstate(divide="ignore"):
            score = score + np.log(keys.weight[number].double().numpy())
    return torch.from_numpy(special.softmax(score, axis=1) @ label)


# a float64 result, rounded once; a score of 16 / h = 3e5 has an absolute error of about 1e-10 in float64
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-6), (torch.float64, 1e-8)])
@pytest.mark.parametrize("num_classes", NUM_CLASSES)
@pytest.mark.parametrize("bandwidth", BANDWIDTHS)
def test_the_estimate_agrees_with_a_float64_oracle(num_classes, bandwidth, dtype, error):
    prob, keys = simplex(400, num_classes).to(dtype), keys_of(300, num_classes)
    result = kde_recalibrate(prob, keys, bandwidth=bandwidth)
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), oracle(prob, keys, bandwidth), atol=error, rtol=0)
    torch.testing.assert_close(result.sum(1), torch.ones_like(result[:, 0]))


def test_the_estimate_is_a_ratio_of_dirichlet_densities_and_of_beta_densities_for_two_classes():
    prob, keys = torch.full((1, 3), 1 / 3), keys_of(6, 3, sharpness=1.0)
    density = [stats.dirichlet(k.double().numpy() / 0.1 + 1).pdf(np.full(3, 1 / 3)) for k in keys.prob[0, 1:]]
    expected = np.array(density) @ keys.label[0, 1:].numpy() / np.sum(density)
    # the first key is a corner, where SciPy has no density
    result = kde_recalibrate(prob, keys._replace(weight=torch.arange(6).unsqueeze(0) > 0), bandwidth=0.1)
    np.testing.assert_allclose(result[0].numpy(), expected, rtol=1e-5)
    pair = Keys(torch.tensor([[[0.9, 0.1], [0.6, 0.4]]]), torch.eye(2).unsqueeze(0))
    density = [stats.beta(k / 0.2 + 1, (1 - k) / 0.2 + 1).pdf(0.3) for k in (0.1, 0.4)]
    result = kde_recalibrate(torch.tensor([[0.7, 0.3]]), pair, bandwidth=0.2)
    assert float(result[0, 1]) == pytest.approx(density[1] / sum(density), abs=1e-5)


@pytest.mark.parametrize("space", [(7,), (3, 5), (2, 3, 4)])
def test_images_give_the_result_of_their_voxels_with_shared_and_with_own_keys(space):
    prob = simplex(2 * int(np.prod(space)), 3).reshape(2, *space, 3).movedim(-1, 1)
    own = Keys(*(part.reshape(2, 11, 3) for part in keys_of(22, 3, seed=3)[:2]))
    shared = Keys(own.prob[:1], own.label[:1])
    for keys, numbers in ((own, (0, 1)), (shared, (0, 0))):
        result = kde_recalibrate(prob, keys, bandwidth=0.05)
        for image, number in enumerate(numbers):
            expected = oracle(prob[image].flatten(1).t(), keys, 0.05, number)
            torch.testing.assert_close(result[image].flatten(1).t().double(), expected, atol=1e-6, rtol=0)


def test_absent_keys_do_not_count_and_a_weight_equals_copies_of_a_key():
    weight = torch.tensor([1, 0, 2, 1, 0, 3])
    prob, keys = simplex(30, 3), keys_of(6, 3, weight=weight)
    copies = torch.arange(6).repeat_interleave(weight)
    expected = kde_recalibrate(prob, Keys(keys.prob[:, copies], keys.label[:, copies]), bandwidth=0.05)
    poisoned = keys.prob.clone()
    poisoned[:, 1] = torch.nan
    result = kde_recalibrate(prob, keys._replace(prob=poisoned), bandwidth=0.05)
    torch.testing.assert_close(result, expected, atol=1e-6, rtol=0)
    mask = kde_recalibrate(prob, keys.unweighted(), bandwidth=0.05)
    real = weight > 0
    only = kde_recalibrate(prob, Keys(keys.prob[:, real], keys.label[:, real]), bandwidth=0.05)
    torch.testing.assert_close(mask, only, atol=1e-6, rtol=0)


def test_without_keys_the_probability_is_unchanged():
    prob = simplex(20, 3).reshape(2, 10, 3).movedim(-1, 1)
    keys = Keys(
        *(part.reshape(2, 5, 3) for part in keys_of(10, 3)[:2]), torch.tensor([[False] * 5, [True] * 5])
    )
    keys.prob.requires_grad_()
    result = kde_recalibrate(prob, keys, bandwidth=0.01)
    torch.testing.assert_close(result[0], prob[0])
    (gradient,) = torch.autograd.grad(result.square().sum(), keys.prob)
    assert gradient.isfinite().all()
    one = prob[0, :, :1].t()
    alone = kde_recalibrate(one, Keys(one[None], torch.eye(3)[None, :1]), bandwidth=0.1, leave_one_out=True)
    torch.testing.assert_close(alone, one)


@pytest.mark.parametrize("num_sets", [1, 3])
@pytest.mark.parametrize("needs_gradient", [False, True])
def test_only_the_region_is_recalibrated_and_the_rest_is_unchanged(num_sets, needs_gradient):
    prob = simplex(3 * 40, 3).reshape(3, 40, 3).movedim(2, 1).reshape(3, 3, 8, 5).clone()
    prob.requires_grad_(needs_gradient)
    keys = keys_of(20 * num_sets, 3, weight=labels(20 * num_sets, 3, seed=4))
    keys = Keys(*(part.reshape(num_sets, 20, *part.shape[2:]) for part in keys))
    # the region holds all of the first image, part of the second and nothing of the third
    region = torch.zeros(3, 8, 5, dtype=torch.bool)
    region[0] = True
    region[1, 2:5, 1:] = True
    result = kde_recalibrate(prob, keys, bandwidth=0.05, region=region)
    expected = torch.where(region[:, None], kde_recalibrate(prob, keys, bandwidth=0.05), prob)
    torch.testing.assert_close(result, expected)
    assert torch.equal(result[2], prob[2])
    if needs_gradient:
        incoming = torch.randn(result.shape, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(
            *(torch.autograd.grad(out, prob, incoming)[0] for out in (result, expected))
        )


# the keys of 700 points are two chunks
@pytest.mark.parametrize(("num", "tried"), [(12, range(12)), (700, (0, 373, 374, 375, 699))])
def test_leave_one_out_is_the_estimate_from_the_other_points(num, tried):
    prob, keys = simplex(num, 3), keys_of(num, 3)._replace(prob=simplex(num, 3).unsqueeze(0))
    region = torch.arange(num) % 2 == 0
    result = kde_recalibrate(prob, keys, bandwidth=1e-3, leave_one_out=True)
    for j in tried:
        others = torch.arange(num) != j
        expected = oracle(prob[j : j + 1], Keys(keys.prob[:, others], keys.label[:, others]), 1e-3)
        torch.testing.assert_close(result[j : j + 1].double(), expected, atol=1e-6, rtol=0)
    inside = kde_recalibrate(prob, keys, bandwidth=1e-3, leave_one_out=True, region=region)
    torch.testing.assert_close(inside, torch.where(region.unsqueeze(1), result, prob))
    both = Keys(*(torch.cat([part, part.flip(1)]) for part in keys[:2]))
    own = kde_recalibrate(both.prob.transpose(1, 2), both, bandwidth=1e-3, leave_one_out=True)
    torch.testing.assert_close(own[0].t(), result)
    torch.testing.assert_close(own[1].t(), result.flip(0))


@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("bandwidth", [0.5, 0.02])
def test_the_gradients_are_correct(leave_one_out, bandwidth):
    prob = simplex(8, 3, sharpness=2.0)[1:6].double()
    keys = prob.clone() if leave_one_out else simplex(8, 3, seed=2, sharpness=2.0)[1:6].double()
    soft = torch.softmax(torch.randn(5, 3, dtype=torch.float64), 1)
    weight = torch.tensor([[1.0, 2.0, 0.0, 0.5, 1.0]])

    def estimate(*arrays):
        prob, keys, soft = (array / array.sum(1, keepdim=True) for array in arrays)
        drawn = Keys(keys.unsqueeze(0), soft.unsqueeze(0), weight)
        return kde_recalibrate(prob, drawn, bandwidth=bandwidth, leave_one_out=leave_one_out)

    inputs = tuple(array.requires_grad_() for array in (prob, keys, soft))
    assert torch.autograd.gradcheck(estimate, inputs)


def test_saturated_probabilities_have_a_finite_gradient_that_is_zero_where_clamped():
    prob = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]], requires_grad=True)
    result = kde_recalibrate(prob, keys_of(9, 2), bandwidth=5e-5)
    (gradient,) = torch.autograd.grad(result[:, 0].sum(), prob)
    assert gradient.isfinite().all()
    assert float(gradient[0, 1]) == 0
    assert float(gradient[1, 0]) == 0


def test_low_precision_and_autocast_give_float32():
    prob, keys = simplex(50, 3), keys_of(20, 3)
    expected = kde_recalibrate(prob.bfloat16().float(), keys, bandwidth=0.05)
    torch.testing.assert_close(kde_recalibrate(prob.bfloat16(), keys, bandwidth=0.05), expected)
    plain = kde_recalibrate(prob, keys, bandwidth=0.05)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = kde_recalibrate(prob, keys, bandwidth=0.05)
    torch.testing.assert_close(cast, plain)


class LargestTensor(TorchDispatchMode):
    """The bytes of the largest tensor that is made in a block."""

    num_bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        tensors = [part for part in tree_leaves(made) if isinstance(part, torch.Tensor)]
        sizes = [tensor.untyped_storage().nbytes() for tensor in tensors]
        self.num_bytes = max([self.num_bytes, *sizes])
        return made


def test_no_tensor_holds_all_pairs_of_pixels_and_keys_and_chunks_have_the_gradient_of_their_points():
    prob, keys = simplex(128 * 256, 3).requires_grad_(), keys_of(512, 3)
    with LargestTensor() as largest:
        kde_recalibrate(prob, keys, bandwidth=0.01).square().sum().backward()
    assert prob.nelement() * 4 <= largest.num_bytes <= 128 * 256 * 512 * 4 / 16
    part = prob.detach()[500:600].requires_grad_()
    kde_recalibrate(part, keys, bandwidth=0.01).square().sum().backward()
    torch.testing.assert_close(prob.grad[500:600], part.grad)


def test_the_label_likelihood_is_the_likelihood_of_left_out_labels():
    prob, target = simplex(15, 3), labels(15, 3)
    soft = 0.8 * torch.eye(3)[target] + 0.2 / 3
    choice = choose_bandwidth(prob, soft, bandwidths=(1e-3, 0.1))
    for bandwidth, value in zip(choice.bandwidths, choice.log_likelihood, strict=True):
        each = []
        for j in range(15):
            others = torch.arange(15) != j
            keys = Keys(prob[others].unsqueeze(0), soft[others].unsqueeze(0))
            mean = oracle(prob[j : j + 1], keys, bandwidth)[0]
            each.append(float((soft[j] * mean.log()).sum()))
        assert value == pytest.approx(np.mean(each), rel=1e-5)
    assert choice.bandwidth == choice.bandwidths[int(np.argmax(choice.log_likelihood))]


def direct_error(prob, label, bandwidth, kind):
    """The published estimator: sums of densities that leave the point itself out, without logarithms."""
    num = len(prob)

    def binary(confidence, right):
        total = 0.0
        for j in range(num):
            density = stats.beta.pdf(
                confidence[j], confidence / bandwidth + 1, (1 - confidence) / bandwidth + 1
            )
            density[j] = 0
            total += abs(density @ right / density.sum() - confidence[j])
        return total / num

    if kind == "canonical":
        total = 0.0
        for j in range(num):
            density = np.array([stats.dirichlet(key / bandwidth + 1).pdf(prob[j]) for key in prob])
            density[j] = 0
            total += np.abs(density @ label / density.sum() - prob[j]).sum()
        return total / num
    if kind == "top_label":
        top = prob.argmax(1)
        return binary(prob.max(1), label[np.arange(num), top])
    return np.mean([binary(prob[:, c], label[:, c]) for c in range(prob.shape[1])])


@pytest.mark.parametrize("kind", ["canonical", "marginal", "top_label"])
@pytest.mark.parametrize("soft", [False, True])
def test_the_calibration_error_equals_the_published_estimator(kind, soft):
    prob = torch.softmax(torch.randn(30, 3, dtype=torch.float64), 1)
    target = torch.softmax(torch.randn(30, 3, dtype=torch.float64), 1) if soft else labels(30, 3)
    label = target.numpy() if soft else np.eye(3)[target.numpy()]
    error = kde_calibration_error(prob, target, bandwidth=0.05, kind=kind)
    assert float(error) == pytest.approx(direct_error(prob.numpy(), label, 0.05, kind), rel=1e-9)


def test_the_calibration_error_accepts_keys_images_and_invalid_voxels():
    prob = simplex(24, 3).reshape(2, 3, 4, 3).movedim(-1, 1)
    target = labels(24, 3).reshape(2, 3, 4)
    keys = keys_of(10, 3)
    valid = torch.rand(2, 3, 4) > 0.3
    points, label = prob.movedim(1, -1)[valid], target[valid]
    for kind in ("canonical", "marginal", "top_label"):
        image = kde_calibration_error(prob, target, bandwidth=0.05, kind=kind, valid=valid)
        torch.testing.assert_close(image, kde_calibration_error(points, label, bandwidth=0.05, kind=kind))
        options = {"bandwidth": 0.05, "kind": kind, "keys": keys}
        image = kde_calibration_error(prob, target, valid=valid, **options)
        torch.testing.assert_close(image, kde_calibration_error(points, label, **options))
    mean = kde_recalibrate(points, keys, bandwidth=0.05)
    canonical = kde_calibration_error(points, label, bandwidth=0.05, keys=keys)
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
        lambda z: kde_calibration_error(z.softmax(1), labels(9, 3), bandwidth=0.1, kind=kind), logits
    )


@given(st.integers(2, 5), st.integers(0, 10**6), st.sampled_from([1e-3, 1e-2, 1e-1]))
def test_the_estimate_is_a_probability_and_does_not_depend_on_order(num_classes, seed, bandwidth):
    prob, keys = simplex(9, num_classes, seed=seed), keys_of(11, num_classes, seed=seed + 1)
    result = kde_recalibrate(prob, keys, bandwidth=bandwidth)
    assert 0 <= float(result.min()) <= float(result.max()) <= 1 + 1e-6
    torch.testing.assert_close(result.sum(1), torch.ones(9))
    order = torch.randperm(11, generator=torch.Generator().manual_seed(seed))
    reordered = kde_recalibrate(
        prob.flip(0), Keys(keys.prob[:, order], keys.label[:, order]), bandwidth=bandwidth
    )
    torch.testing.assert_close(reordered.flip(0), result)
    flipped = kde_recalibrate(prob.flip(1), Keys(keys.prob.flip(2), keys.label.flip(2)), bandwidth=bandwidth)
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
    keys = draw_keys(teacher[seen], label[seen], 2048, generator=generator)
    choice = choose_bandwidth(teacher[seen], label[seen], generator=generator)
    calibrated = kde_recalibrate(teacher[new], keys, bandwidth=choice.bandwidth)
    before = (teacher[new] - phantom.prob[new]).abs().mean()
    after = (calibrated - phantom.prob[new]).abs().mean()
    assert after < 0.5 * before


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
