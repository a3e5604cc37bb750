"""Vector scaling and beta calibration against scikit-learn and SciPy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, special
from sklearn.linear_model import LogisticRegression

from semidice.calibration import BetaCalibrator, VectorScaling
from semidice.calibration.newton import PENALTY, fit_logistic, fit_vector

UNITS = 65535


def binary(num, *, a, b, c, seed=0):
    """Stored probabilities of the foreground, and labels drawn from sigmoid(a log p - b log(1 - p) + c)."""
    rng = np.random.default_rng(seed)
    prob = rng.integers(200, UNITS - 200, num) / UNITS
    label = rng.uniform(0, 1, num) < special.expit(a * np.log(prob) - b * np.log1p(-prob) + c)
    return prob, label.astype(np.float64)


def columns(*arrays):
    return [torch.from_numpy(array).unsqueeze(1) for array in arrays]


@pytest.mark.parametrize(("scale", "bias"), [(1.0, 0.0), (0.4, 1.0), (2.5, -1.5), (-0.5, 0.3)])
def test_platt_scaling_is_the_logistic_regression_of_scikit_learn(scale, bias):
    prob, label = binary(3000, a=scale, b=scale, c=bias)
    scaling = VectorScaling().fit(*columns(prob, label))
    oracle = LogisticRegression(C=np.inf, tol=1e-10, max_iter=1000).fit(special.logit(prob)[:, None], label)
    expected = [oracle.coef_[0, 0], oracle.intercept_[0]]
    np.testing.assert_allclose(scaling.parameters[0].numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("parameters", [(1, 1, 0), (2, 0.5, 0.7), (0.3, 1.8, -1), (0.6, 0.6, 0.2)])
def test_beta_calibration_is_the_logistic_regression_of_scikit_learn(parameters):
    a, b, c = parameters
    prob, label = binary(3000, a=a, b=b, c=c)
    features = np.stack([np.log(prob), -np.log1p(-prob)], 1)
    oracle = LogisticRegression(C=np.inf, tol=1e-10, max_iter=1000).fit(features, label)
    assert oracle.coef_.min() > 0
    expected = [*oracle.coef_[0], oracle.intercept_[0]]
    fitted = BetaCalibrator().fit(*columns(prob, label)).parameters[0]
    np.testing.assert_allclose(fitted.numpy(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "parameters", [(-1, 1, 0), (1, -0.8, 0.5), (-1, -1, 0), (-0.3, 2, 0), (0.5, -2, 0), (-2, 0.2, 0)]
)
def test_beta_calibration_has_the_best_parameters_that_are_not_negative(parameters):
    a, b, c = parameters
    prob, label = binary(2000, a=a, b=b, c=c, seed=2)
    features = np.stack([np.log(prob), -np.log1p(-prob), np.ones_like(prob)], 1)

    def loss(theta):
        logits = features @ theta
        gradient = features.T @ (special.expit(logits) - label) / len(label)
        return (np.logaddexp(0, logits) - label * logits).mean(), gradient

    bounds = [(0, None), (0, None), (None, None)]
    oracle = optimize.minimize(
        loss, [1, 1, 0], jac=True, bounds=bounds, method="L-BFGS-B", options={"ftol": 1e-15, "gtol": 1e-9}
    )
    fitted = BetaCalibrator().fit(*columns(prob, label)).parameters[0].numpy()
    assert min(fitted[:2]) == 0
    assert loss(fitted)[0] <= oracle.fun + 1e-8
    np.testing.assert_allclose(fitted, oracle.x, atol=2e-3)


@pytest.mark.parametrize("soft", [False, True])
def test_vector_scaling_of_many_classes_has_the_likelihood_that_scipy_finds(soft):
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (1500, 4))
    prob = special.softmax(logits, axis=1)
    log_prob = np.log(np.maximum(prob, 0.5 / UNITS))
    truth = special.softmax(log_prob * [0.5, 1, 2, 1.2] + [0, 1, -1, 0.5], axis=1)
    label = truth if soft else np.eye(4)[[rng.choice(4, p=row) for row in truth]]
    fitted = VectorScaling().fit(torch.from_numpy(prob), torch.from_numpy(label))

    def loss(theta):
        scaled = special.log_softmax(log_prob * theta[:4] + theta[4:], axis=1)
        return -(label * scaled).sum(1).mean()

    oracle = optimize.minimize(loss, [1] * 4 + [0] * 4, method="BFGS", options={"gtol": 1e-9})
    theta = fitted.parameters.t().flatten().numpy()
    assert loss(theta) <= oracle.fun + 1e-9
    # a bias of all classes changes nothing
    np.testing.assert_allclose(theta[:4], oracle.x[:4], atol=1e-4)
    np.testing.assert_allclose(theta[4:] - theta[4], oracle.x[4:] - oracle.x[4], atol=1e-4)
    expected = special.softmax(log_prob * theta[:4] + theta[4:], axis=1)
    np.testing.assert_allclose(fitted.calibrate(torch.from_numpy(prob)).numpy(), expected, atol=1e-12)
    if soft:
        torch.testing.assert_close(
            fitted.calibrate(torch.from_numpy(prob)), torch.from_numpy(truth), atol=1e-3, rtol=0
        )


def test_a_sample_of_a_long_stream_gives_nearly_the_fit_of_all_voxels(monkeypatch):
    rng = np.random.default_rng(1)
    # most voxels are certain background, as in a scan
    logits = rng.normal([4, 0, 0], 2, (60_000, 3))
    prob = special.softmax(logits, axis=1)
    truth = special.softmax(logits * 0.5 + [0.0, 1.0, 0.0], axis=1)
    draws = (rng.uniform(0, 1, (len(truth), 1)) > truth.cumsum(1)).sum(1)
    prob, target = torch.from_numpy(prob), torch.from_numpy(draws)
    monkeypatch.setattr(VectorScaling, "num_voxels", 3 * 60_000)
    exact = VectorScaling().fit(prob, target)
    assert len(exact._fitted().rows["draw"]) == 60_000
    monkeypatch.setattr(VectorScaling, "num_voxels", 9000)
    stream = VectorScaling()
    for part, label in zip(prob.split(7000), target.split(7000), strict=True):
        stream.partial_fit(part, label)
    assert len(stream._fitted().rows["draw"]) <= 9000
    before = (prob - torch.from_numpy(truth)).abs().mean()
    for fitted in (exact, stream):
        assert (fitted.calibrate(prob) - torch.from_numpy(truth)).abs().mean() < 0.1 * before
    difference = (stream.calibrate(prob) - exact.calibrate(prob)).abs().mean()
    assert difference < 0.05 * before


@pytest.mark.parametrize("kind", [VectorScaling, BetaCalibrator])
@pytest.mark.parametrize("num_classes", [2, 3])
def test_separable_and_constant_predictions_give_finite_parameters(kind, num_classes):
    target = torch.arange(60) % num_classes
    separable = 0.1 / num_classes + 0.9 * torch.nn.functional.one_hot(target, num_classes)
    separable = separable / separable.sum(1, keepdim=True)
    constant = torch.full((60, num_classes), 1 / num_classes)
    for prob in (separable, constant, torch.eye(num_classes)[target]):
        for label in (target, torch.zeros_like(target), (target + 1) % num_classes):
            fitted = kind().fit(prob, label)
            assert fitted.parameters.isfinite().all()
            assert fitted.calibrate(prob).isfinite().all()
    certain = kind().fit(separable, target).calibrate(separable)
    assert certain.gather(1, target.unsqueeze(1)).min() > 0.999


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**16), num=st.integers(1, 40), k=st.integers(1, 4), spread=st.floats(0.1, 12))
def test_newton_stops_where_the_gradient_is_zero(seed, num, k, spread):
    generator = torch.Generator().manual_seed(seed)
    features = spread * torch.randn(num, k, generator=generator, dtype=torch.float64)
    label = torch.rand(num, generator=generator, dtype=torch.float64)
    weight = 0.1 + torch.rand(num, generator=generator, dtype=torch.float64)
    identity = torch.ones(k, dtype=torch.float64)
    theta, value = fit_logistic(features, label, weight, identity)
    free = theta.clone().requires_grad_()
    logits = features @ free
    share = weight / weight.sum()
    loss = (share * (torch.nn.functional.softplus(logits) - label * logits)).sum()
    loss = loss + PENALTY / 2 * (free - identity).square().sum()
    assert float(loss.detach()) == pytest.approx(value, rel=1e-12)
    assert torch.autograd.grad(loss, free)[0].abs().max() < 1e-7 * spread


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**16), num=st.integers(2, 60), num_classes=st.integers(3, 6))
def test_the_vector_fit_stops_where_the_gradient_is_zero(seed, num, num_classes):
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(num, num_classes, generator=generator, dtype=torch.float64)).log_softmax(1)
    label = torch.randn(num, num_classes, generator=generator, dtype=torch.float64).softmax(1)
    weight = 0.1 + torch.rand(num, generator=generator, dtype=torch.float64)
    fitted = fit_vector(logits, label, weight).requires_grad_()
    log_prob = (logits * fitted[:, 0] + fitted[:, 1]).log_softmax(1)
    loss = -(weight.unsqueeze(1) / weight.sum() * label * log_prob).sum()
    identity = torch.tensor([1.0, 0.0], dtype=torch.float64)
    loss = loss + PENALTY / 2 * (fitted - identity).square().sum()
    assert torch.autograd.grad(loss, fitted)[0].abs().max() < 1e-6
