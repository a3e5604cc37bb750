"""Calibrators: fitting at once or from a stream, calibrating, saving and loading."""

from itertools import product

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from scipy import optimize, special, stats
from start import refused

from semidice.calibration import CALIBRATORS, KDECalibrator, TemperatureScaling, load_calibrator
from semidice.calibration.streams import VoxelSample

FITTED = ("temperature", "vector", "isotonic", "beta")


def overconfident(num, num_classes, *, temperature, seed=0):
    """Logits and labels drawn from softmax(logits / temperature)."""
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(num, num_classes, generator=generator)
    target = torch.multinomial((logits / temperature).softmax(1), 1, generator=generator).squeeze(1)
    return logits, target


def best_temperature(logits, label):
    """The temperature of maximum likelihood by SciPy, in float64, from all data at once."""

    def loss(log_t):
        scaled = logits / np.exp(log_t)
        return (special.logsumexp(scaled, axis=1) - (label * scaled).sum(1)).mean()

    minimum = optimize.minimize_scalar(loss, bounds=(np.log(0.05), np.log(20)), options={"xatol": 1e-10})
    return float(np.exp(minimum.x))


@pytest.mark.parametrize("temperature", [0.2, 0.5, 1.0, 1.7, 6.0, 15.0])
@pytest.mark.parametrize("num_classes", [2, 5])
def test_the_temperature_maximises_the_likelihood(temperature, num_classes):
    # more than one block
    logits, target = overconfident(20_000, num_classes, temperature=temperature)
    fitted = TemperatureScaling(activation="softmax").fit(logits, target).temperature
    exact = best_temperature(logits.double().numpy(), np.eye(num_classes)[target.numpy()])
    # interpolated between 61 temperatures, as the docstring says
    assert fitted == pytest.approx(exact, rel=1e-4)


def test_soft_targets_and_probabilities_are_accepted():
    logits, _ = overconfident(3000, 3, temperature=1.0)
    soft = (logits / 2.5).softmax(1)
    scaling = TemperatureScaling(activation="softmax").fit(logits, soft)
    assert scaling.temperature == pytest.approx(2.5, rel=1e-4)
    torch.testing.assert_close(scaling.calibrate(logits), soft, atol=1e-4, rtol=0)
    # probabilities are clamped at 1e-7, which these logits rarely reach
    assert TemperatureScaling().fit(logits.softmax(1), soft).temperature == pytest.approx(2.5, rel=0.01)


def test_sigmoid_networks_can_be_scaled_by_a_temperature():
    logits, target = overconfident(4000, 2, temperature=3.0)
    logit, mask = (logits[:, 1] - logits[:, 0]).unsqueeze(1), target.float().unsqueeze(1)
    pair = TemperatureScaling(activation="softmax").fit(logits, target)
    for columns in (1, 2):
        channels = TemperatureScaling(activation="sigmoid").fit(
            logit.expand(-1, columns), mask.expand(-1, columns)
        )
        assert channels.temperature == pytest.approx(pair.temperature, rel=1e-6)
    single = TemperatureScaling().fit(logit.double().sigmoid(), mask)
    # given as probabilities, logits beyond 16 are clamped
    assert single.temperature == pytest.approx(pair.temperature, rel=0.01)
    calibrated = TemperatureScaling(activation="sigmoid").fit(logit, mask).calibrate(logit)
    torch.testing.assert_close(calibrated, pair.calibrate(logits)[:, 1:])


@pytest.mark.parametrize("scale", [1e-3, 1.0, 10.0, 1e4])
def test_the_temperature_of_separable_data_stays_within_its_bounds(scale):
    target = torch.randint(2, (500,))
    logits = scale * torch.nn.functional.one_hot(target, 2).float()
    scaling = TemperatureScaling(activation="softmax").fit(logits, target)
    assert 0.05 <= scaling.temperature <= 20
    if scale <= 1:
        assert scaling.temperature == pytest.approx(0.05)
    assert scaling.calibrate(logits).isfinite().all()
    assert scaling.fit(logits, 1 - target).temperature == pytest.approx(20)
    assert scaling.fit(0 * logits, target).temperature == 1


@pytest.mark.parametrize("kind", CALIBRATORS.values())
def test_invalid_voxels_do_not_count_and_a_new_fit_discards_the_old_one(kind):
    logits, target = overconfident(600, 3, temperature=2.0)
    prob = logits.softmax(1).reshape(2, 300, 3).movedim(-1, 1)
    target = target.reshape(2, 300)
    valid = torch.rand(2, 300) > 0.4
    kept = kind().fit(prob.movedim(1, -1)[valid], target[valid])
    masked = kind().fit(prob.flip(1), target).fit(prob, target, valid=valid)
    torch.testing.assert_close(masked.calibrate(prob), kept.calibrate(prob))


@pytest.mark.parametrize("kind", CALIBRATORS.values())
def test_a_saved_calibrator_is_the_same_when_it_is_loaded_and_writes_the_same_bytes(kind, tmp_path):
    logits, target = overconfident(900, 3, temperature=2.0)
    calibrator = kind(activation="softmax").fit(logits, target)
    calibrator.save(tmp_path / "a.safetensors")
    loaded = load_calibrator(tmp_path / "a.safetensors")
    assert type(loaded) is kind
    torch.testing.assert_close(loaded.calibrate(logits), calibrator.calibrate(logits), rtol=0, atol=0)
    loaded.save(tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    refused(lambda: loaded.calibrate(logits[:, :2]), "fitted to 3 classes", "got 2")
    other_kind = TemperatureScaling if kind is KDECalibrator else KDECalibrator
    refused(lambda: other_kind.load(tmp_path / "a.safetensors"), other_kind.__name__, kind.__name__)


@pytest.mark.parametrize("kind", CALIBRATORS.values())
def test_a_loaded_calibrator_cannot_learn_on_but_can_start_again(kind, tmp_path):
    logits, target = overconfident(300, 3, temperature=2.0)
    prob, path = logits.softmax(1), tmp_path / "calibrator.safetensors"
    fitted = kind().fit(prob, target)
    fitted.save(path)
    loaded = kind.load(path)
    for learn_on in (
        lambda: loaded.partial_fit(prob, target),
        lambda: loaded.merge(fitted),
        lambda: fitted.merge(loaded),
        lambda: kind().merge(loaded),
    ):
        refused(learn_on, f"this {kind.__name__} was loaded", "fit a new one to all data")
    torch.testing.assert_close(loaded.calibrate(prob), fitted.calibrate(prob), rtol=0, atol=0)
    other = kind().fit(prob.flip(1), target)
    torch.testing.assert_close(loaded.fit(prob.flip(1), target).calibrate(prob), other.calibrate(prob))


def test_a_file_with_values_that_are_not_finite_is_refused(tmp_path):
    path = tmp_path / "calibrator.safetensors"
    tensors = {"temperature": torch.tensor(float("nan"), dtype=torch.float64)}
    save_file(tensors, path, metadata={"calibrator": '{"kind": "TemperatureScaling", "num_classes": 2}'})
    refused(lambda: load_calibrator(path), str(path), "temperature", "not finite", "fit it again")


def test_the_sample_of_a_stream_is_balanced_uniform_and_that_of_all_voxels_at_once():
    """500 streams of 5 batches of 12 voxels; the rare class appears only in the last two batches."""
    counts = torch.zeros(60)
    position = torch.arange(60).float()
    # the probability encodes the position in the stream, so a sampled voxel shows where it came from
    prob = torch.stack([1 - position / 64, position / 64], dim=1)
    target = (position % 6 == 5).long() * (position >= 36).long()
    label = torch.eye(2)[target]
    for seed in range(500):
        stream, at_once = VoxelSample(6, seed=seed), VoxelSample(6, seed=seed)
        for start in range(0, 60, 12):
            stream.add(prob[start : start + 12], label[start : start + 12])
        at_once.add(prob, label)
        assert torch.equal(stream.rows["prob"], at_once.rows["prob"])
        assert stream.rows["label"].sum(0).tolist() == [3, 3]
        counts += torch.bincount((stream.rows["prob"][:, 1] * 64).round().long(), minlength=60)
    for c in range(2):
        assert stats.chisquare(counts[target == c].numpy()).pvalue > 1e-3
        # each voxel stands for its share of its class
        weight, share = stream.weight[stream.rows["label"][:, c] == 1], float((target == c).sum()) / 3
        assert weight.tolist() == pytest.approx([share] * 3)


# Laws of all calibrators


def stored_prob(num, num_classes, *, seed, spread=2.0):
    """Probabilities that a run stores, multiples of 1/65535, and none below half a unit."""
    rng = np.random.default_rng(seed)
    prob = special.softmax(rng.normal(0, spread, (num, num_classes)), axis=1)
    units = np.maximum(1, np.round(prob * 65535))
    units[np.arange(num), units.argmax(1)] += 65535 - units.sum(1)
    return torch.from_numpy(units / 65535)


def log_likelihood(prob, label):
    return float((label * prob.double().clamp(min=0.5 / 65535).log()).sum(1).mean())


@pytest.mark.parametrize("num_classes", [2, 3, 5])
@pytest.mark.parametrize("name", CALIBRATORS)
def test_calibrated_probabilities_stay_as_they_are(name, num_classes):
    prob = stored_prob(4000, num_classes, seed=1)
    # the label is the probability itself: nothing is to be corrected, and there is no noise
    calibrator = CALIBRATORS[name]().fit(prob, prob)
    error = (calibrator.calibrate(prob) - prob).abs()
    # a kernel density blurs by its bandwidth; a temperature is interpolated to 1e-4
    assert error.mean() < {"kde": 0.02, "temperature": 1e-4}.get(name, 1e-6)


@pytest.mark.parametrize("num_classes", [1, 2, 3, 5])
@pytest.mark.parametrize("name", CALIBRATORS)
def test_outputs_are_probabilities_that_sum_to_one(name, num_classes):
    prob = stored_prob(600, max(2, num_classes), seed=2, spread=6.0)
    target = torch.multinomial(prob, 1, generator=torch.Generator().manual_seed(0)).squeeze(1)
    if num_classes == 1:
        prob, target = prob[:, 1:], target.unsqueeze(1)
    calibrator = CALIBRATORS[name]().fit(prob, target)
    extremes = torch.eye(num_classes) if num_classes > 1 else torch.tensor([[0.0], [1.0]])
    for given in (prob, prob.float(), extremes):
        calibrated = calibrator.calibrate(given)
        assert calibrated.shape == given.shape
        assert calibrated.min() >= 0
        assert calibrated.max() <= 1 + 1e-6
        if num_classes > 1:
            torch.testing.assert_close(calibrated.sum(1), torch.ones_like(calibrated[:, 0]))


@pytest.mark.parametrize(("name", "num_classes"), [*product(FITTED, [2]), ("temperature", 3), ("vector", 3)])
def test_the_fit_is_at_least_as_likely_as_the_uncalibrated_probabilities(name, num_classes):
    for seed in range(5):
        prob = stored_prob(300, num_classes, seed=seed)
        label = torch.from_numpy(np.random.default_rng(100 + seed).dirichlet([0.3] * num_classes, 300))
        fitted = CALIBRATORS[name]().fit(prob, label).calibrate(prob)
        # a temperature is interpolated to a relative error of 1e-4
        assert log_likelihood(fitted, label) >= log_likelihood(prob, label) - 1e-7


@pytest.mark.parametrize("name", ["isotonic", "beta"])
def test_each_of_several_classes_is_calibrated_against_the_rest_and_divided_by_the_sum(name):
    prob = stored_prob(300, 3, seed=0)
    label = torch.from_numpy(np.random.default_rng(1).dirichlet([0.3] * 3, 300))
    each = [CALIBRATORS[name]().fit(*(part[:, c : c + 1] for part in (prob, label))) for c in range(3)]
    alone = torch.cat([fitted.calibrate(prob[:, c : c + 1]) for c, fitted in enumerate(each)], 1)
    together = CALIBRATORS[name]().fit(prob, label).calibrate(prob)
    # where all are 0, each counts as half a unit
    alone = alone.clamp(min=0.5 / 65535)
    torch.testing.assert_close(together, alone / alone.sum(1, keepdim=True))


@pytest.mark.parametrize("name", ["temperature", "isotonic", "beta"])
def test_the_order_of_binary_probabilities_is_kept(name):
    for seed in range(5):
        rng = np.random.default_rng(seed)
        prob = torch.from_numpy(rng.uniform(0, 1, (400, 1)))
        # also where the labels contradict the predictions
        label = torch.from_numpy(rng.uniform(0, 1, (400, 1)) < (1 - prob.numpy()) ** seed).float()
        calibrator = CALIBRATORS[name]().fit(prob, label)
        curve = calibrator.calibrate(torch.linspace(0, 1, 5001, dtype=torch.float64).unsqueeze(1)).flatten()
        assert (curve.diff() >= -1e-12).all()


@pytest.mark.parametrize("name", ["vector", "isotonic", "beta"])
def test_the_mean_of_calibrated_probabilities_is_the_mean_of_the_labels(name):
    prob = stored_prob(2000, 2, seed=3, spread=4.0).float()
    label = prob**2 / (prob**2).sum(1, keepdim=True)
    calibrated = CALIBRATORS[name]().fit(prob, label).calibrate(prob)
    torch.testing.assert_close(calibrated.mean(0), label.mean(0), atol=2e-6, rtol=0)


@pytest.mark.parametrize("num_classes", [1, 2, 3])
@pytest.mark.parametrize("name", CALIBRATORS)
def test_merged_calibrators_and_streams_have_learned_from_the_voxels_of_all(name, num_classes):
    prob = stored_prob(900, max(2, num_classes), seed=4)
    target = torch.multinomial(prob, 1, generator=torch.Generator().manual_seed(4)).squeeze(1)
    if num_classes == 1:
        prob, target = prob[:, 1:], target.unsqueeze(1)
    # every voxel is a key
    options = {"num_keys": 3000, "bandwidth": 0.01} if name == "kde" else {}
    at_once, merged, stream = (CALIBRATORS[name](**options) for _ in range(3))
    at_once.fit(prob, target)
    for start in (600, 0, 300):
        part = slice(start, start + 300)
        merged.merge(CALIBRATORS[name](**options).fit(prob[part], target[part]))
        stream.partial_fit(prob[part], target[part])
        # what was learned so far must not stay
        stream.calibrate(prob)
    for found in (merged, stream):
        torch.testing.assert_close(found.calibrate(prob), at_once.calibrate(prob), rtol=0, atol=1e-9)


def test_only_calibrators_of_one_kind_can_be_merged():
    prob, target = stored_prob(50, 3, seed=4), torch.arange(50) % 3
    fitted = {name: kind().fit(prob, target) for name, kind in CALIBRATORS.items()}
    refused(lambda: fitted["beta"].merge(fitted["kde"]), "BetaCalibrator", "KDECalibrator")
    refused(lambda: fitted["beta"].merge(CALIBRATORS["beta"]()), "has seen no data", "fit")
    other = CALIBRATORS["beta"]().fit(prob[:, :1], target.clamp(max=1).unsqueeze(1))
    refused(lambda: fitted["beta"].merge(other), "fitted to 3 classes", "got 1")


@pytest.mark.parametrize("name", ["vector", "isotonic", "beta"])
def test_logits_and_their_probabilities_give_the_same_calibrator(name):
    logits, target = overconfident(700, 3, temperature=2.0)
    logits = logits.double()
    of_logits = CALIBRATORS[name](activation="softmax").fit(logits, target)
    of_prob = CALIBRATORS[name]().fit(logits.softmax(1), target)
    torch.testing.assert_close(of_logits.calibrate(logits), of_prob.calibrate(logits.softmax(1)))
    single, mask = logits[:, :2], (target > 0).double().unsqueeze(1).expand(-1, 2)
    channels = CALIBRATORS[name](activation="sigmoid").fit(single, mask).calibrate(single)
    for channel in range(2):
        one = slice(channel, channel + 1)
        alone = CALIBRATORS[name]().fit(single[:, one].sigmoid(), mask[:, one])
        torch.testing.assert_close(channels[:, one], alone.calibrate(single[:, one].sigmoid()))


@pytest.mark.parametrize("name", CALIBRATORS)
def test_a_calibrator_can_be_differentiated(name):
    prob = stored_prob(60, 3, seed=5)
    target = torch.randint(3, (60,), generator=torch.Generator().manual_seed(5))
    calibrator = CALIBRATORS[name]().fit(prob, target)
    # between two stored probabilities, where an isotonic function is linear
    point = torch.tensor([[0.21000251, 0.31000737, 0.47999012]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(calibrator.calibrate, point, eps=1e-7, atol=1e-4)
