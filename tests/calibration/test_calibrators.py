"""Calibrators: fitting at once or from a stream, calibrating, saving and loading."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import optimize, special, stats

from semidice.calibration.calibrators import KDECalibrator, TemperatureScaling
from semidice.data.phantom import make_phantom


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
    logits, target = overconfident(2000, num_classes, temperature=temperature)
    fitted = TemperatureScaling(activation="softmax").fit(logits, target).temperature
    exact = best_temperature(logits.double().numpy(), np.eye(num_classes)[target.numpy()])
    # interpolated between 41 temperatures, as the docstring says
    assert fitted == pytest.approx(exact, rel=1e-4)


def test_soft_targets_and_probabilities_are_accepted():
    logits, _ = overconfident(3000, 3, temperature=1.0)
    soft = (logits / 2.5).softmax(1)
    scaling = TemperatureScaling(activation="softmax").fit(logits, soft)
    assert scaling.temperature == pytest.approx(2.5, rel=1e-4)
    torch.testing.assert_close(scaling.calibrate(logits), soft, atol=1e-4, rtol=0)
    # probabilities are clamped at 1e-7, which these logits rarely reach
    from_prob = TemperatureScaling().fit(logits.softmax(1), soft)
    assert from_prob.temperature == pytest.approx(2.5, rel=0.01)
    torch.testing.assert_close(from_prob.calibrate(logits.softmax(1)), soft, atol=0.01, rtol=0)


def test_sigmoid_networks_can_be_scaled_by_a_temperature():
    logits, target = overconfident(4000, 2, temperature=3.0)
    logit, mask = (logits[:, 1] - logits[:, 0]).unsqueeze(1), target.float().unsqueeze(1)
    pair = TemperatureScaling(activation="softmax").fit(logits, target)
    single = TemperatureScaling(activation="sigmoid").fit(logit, mask)
    assert single.temperature == pytest.approx(pair.temperature, rel=1e-6)
    torch.testing.assert_close(single.calibrate(logit), pair.calibrate(logits)[:, 1:])
    from_prob = TemperatureScaling().fit(logit.double().sigmoid(), mask)
    # given as probabilities, logits beyond 16 are clamped
    assert from_prob.temperature == pytest.approx(pair.temperature, rel=0.01)
    channels = TemperatureScaling(activation="sigmoid").fit(
        torch.cat([logit, logit], 1), torch.cat([mask, mask], 1)
    )
    assert channels.temperature == pytest.approx(pair.temperature, rel=1e-6)


def test_a_stream_gives_the_temperature_of_all_data_at_once():
    logits, target = overconfident(2**20, 2, temperature=2.0)
    stream = TemperatureScaling(activation="softmax")
    for part, label in zip(logits.split(2**18), target.split(2**18), strict=True):
        stream.partial_fit(part.t().reshape(1, 2, 512, 512), label.reshape(1, 512, 512))
    # the standard error of T is about 1e-3 with a million labels
    assert stream.temperature == pytest.approx(2.0, rel=0.01)
    at_once = TemperatureScaling(activation="softmax").fit(logits[:9000], target[:9000])
    in_parts = TemperatureScaling(activation="softmax")
    for start in (6000, 0, 3000):
        in_parts.partial_fit(logits[start : start + 3000], target[start : start + 3000])
    assert in_parts.temperature == pytest.approx(at_once.temperature, rel=1e-9)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 10.0, 1e4])
def test_the_temperature_of_separable_data_stays_within_its_bounds(scale):
    target = torch.randint(2, (500,))
    logits = scale * torch.nn.functional.one_hot(target, 2).float()
    scaling = TemperatureScaling(activation="softmax").fit(logits, target)
    assert 0.05 <= scaling.temperature <= 20
    if scale <= 1:
        assert scaling.temperature == pytest.approx(0.05)
    assert scaling.calibrate(logits).isfinite().all()
    wrong = TemperatureScaling(activation="softmax").fit(logits, 1 - target)
    assert wrong.temperature == pytest.approx(20)


def test_constant_logits_give_a_temperature_of_one():
    assert (
        TemperatureScaling(activation="softmax").fit(torch.zeros(9, 3), torch.zeros(9).long()).temperature
        == 1
    )


@pytest.mark.parametrize("kind", [KDECalibrator, TemperatureScaling])
def test_invalid_voxels_do_not_count_and_a_new_fit_discards_the_old_one(kind):
    logits, target = overconfident(600, 3, temperature=2.0)
    prob = logits.softmax(1).reshape(2, 300, 3).movedim(-1, 1)
    target = target.reshape(2, 300)
    valid = torch.rand(2, 300) > 0.4
    kept = kind().fit(prob.movedim(1, -1)[valid], target[valid])
    masked = kind().fit(prob.flip(1), target).fit(prob, target, valid=valid)
    torch.testing.assert_close(masked.calibrate(prob), kept.calibrate(prob))


@pytest.mark.parametrize("kind", [KDECalibrator, TemperatureScaling])
def test_a_loaded_calibrator_can_be_fitted_further_like_the_saved_one(kind, tmp_path):
    logits, target = overconfident(900, 3, temperature=2.0)
    prob = logits.softmax(1)
    calibrator = kind().fit(prob[:500], target[:500])
    calibrator.save(tmp_path / "calibrator.safetensors")
    loaded = kind.load(tmp_path / "calibrator.safetensors")
    torch.testing.assert_close(loaded.calibrate(prob), calibrator.calibrate(prob), rtol=0, atol=0)
    for each in (calibrator, loaded):
        each.partial_fit(prob[500:], target[500:])
    torch.testing.assert_close(loaded.calibrate(prob), calibrator.calibrate(prob), rtol=0, atol=0)
    other_kind = TemperatureScaling if kind is KDECalibrator else KDECalibrator
    with pytest.raises(ValueError, match=f"must hold a {other_kind.__name__}; got {kind.__name__}"):
        other_kind.load(tmp_path / "calibrator.safetensors")


def test_a_failed_save_keeps_the_old_file(monkeypatch, tmp_path):
    path = tmp_path / "calibrator.safetensors"
    scaling = TemperatureScaling(activation="softmax").fit(*overconfident(100, 3, temperature=2.0))
    scaling.save(path)
    stored = path.read_bytes()

    def broken(tensors, target, metadata):
        Path(target).write_bytes(b"half a file")
        raise OSError("disk full")

    monkeypatch.setattr("safetensors.torch.save_file", broken)
    with pytest.raises(OSError, match="disk full"):
        scaling.save(path)
    assert path.read_bytes() == stored
    assert list(tmp_path.iterdir()) == [path]


def test_without_safetensors_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    scaling = TemperatureScaling().fit(torch.tensor([[0.6, 0.4]]), torch.tensor([1]))
    with pytest.raises(ImportError, match=r"pip install 'semidice\[train\]'"):
        scaling.save(tmp_path / "x")


def test_the_kept_keys_are_balanced_and_uniform_over_the_stream():
    """500 streams of 5 batches of 12 voxels; the rare class appears only in the last two batches."""
    counts = torch.zeros(60)
    position = torch.arange(60).float()
    # the probability encodes the position in the stream, so a key shows where it came from
    prob = torch.stack([1 - position / 64, position / 64], dim=1)
    target = (position % 6 == 5).long() * (position >= 36).long()
    for seed in range(500):
        calibrator = KDECalibrator(num_keys=6, bandwidth=0.1, seed=seed)
        for start in range(0, 60, 12):
            calibrator.partial_fit(prob[start : start + 12], target[start : start + 12])
        keys = calibrator._keys
        assert keys["class_of"].bincount().tolist() == [3, 3]
        counts += torch.bincount((keys["prob"][:, 1] * 64).round().long(), minlength=60)
    for c in range(2):
        assert stats.chisquare(counts[target == c].numpy()).pvalue > 1e-3
    assert float(calibrator.key_weight.sum()) == pytest.approx(60)


def test_a_stream_keeps_the_same_keys_as_one_fit():
    logits, target = overconfident(800, 3, temperature=2.0)
    prob = logits.softmax(1)
    single_fit = KDECalibrator(num_keys=90, seed=3).fit(prob, target)
    stream = KDECalibrator(num_keys=90, seed=3)
    for start in range(0, 800, 100):
        stream.partial_fit(prob[start : start + 100], target[start : start + 100])
    order = (calibrator._keys["draw"].argsort() for calibrator in (single_fit, stream))
    single_fit_prob, stream_prob = (
        c._keys["prob"][i] for c, i in zip((single_fit, stream), order, strict=True)
    )
    assert torch.equal(single_fit_prob, stream_prob)
    assert single_fit.bandwidth == stream.bandwidth


def test_one_channel_equals_two_classes():
    logits, target = overconfident(500, 2, temperature=2.0)
    # in float64, 1 - p keeps the digits of a small p
    prob = logits.double().softmax(1)
    pair = KDECalibrator(seed=1).fit(prob, target)
    single = KDECalibrator(seed=1).fit(prob[:, 1:], target.double().unsqueeze(1))
    assert single.bandwidth == pair.bandwidth
    torch.testing.assert_close(single.calibrate(prob[:, 1:]), pair.calibrate(prob)[:, 1:], atol=1e-5, rtol=0)
    from_logits = KDECalibrator(seed=1, activation="softmax").fit(logits.double(), target)
    torch.testing.assert_close(
        from_logits.calibrate(logits.double()), pair.calibrate(prob), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize(("num_classes", "slope", "shift"), [(2, 1.0, 2.0), (2, 2.0, 2.0), (3, 1.6, 3.0)])
def test_kde_halves_the_error_to_the_truth_and_is_at_least_as_good_as_a_temperature(
    num_classes, slope, shift
):
    # without bias, raters are draws from p*; with bias, their mean is not p*
    phantom = make_phantom(16, size=(40, 48), num_raters=8, num_classes=num_classes, seed=7, bias=0.0)
    bias = shift * torch.arange(num_classes).view(-1, 1, 1) / (num_classes - 1)
    teacher = (slope * phantom.prob.clamp(min=1e-6).log() + bias).softmax(1)
    label = torch.stack([(phantom.masks.long() == c).float().mean(1) for c in range(num_classes)], dim=1)
    before = (teacher[8:] - phantom.prob[8:]).abs().mean()
    error = {}
    for kind in (KDECalibrator, TemperatureScaling):
        calibrator = kind()
        for case in range(0, 8, 2):
            calibrator.partial_fit(teacher[case : case + 2], label[case : case + 2])
        error[kind] = (calibrator.calibrate(teacher[8:]) - phantom.prob[8:]).abs().mean()
    assert error[KDECalibrator] < 0.5 * before
    assert error[KDECalibrator] <= error[TemperatureScaling]


@pytest.mark.parametrize("kind", [KDECalibrator, TemperatureScaling])
def test_the_error_names_bad_input(kind):
    prob, target = torch.full((4, 2), 0.5), torch.zeros(4).long()
    with pytest.raises(ValueError, match="sum to one"):
        kind().fit(0.5 * prob, target)
    with pytest.raises(ValueError, match="there is no valid voxel"):
        kind().fit(prob, target, valid=torch.zeros(4).bool())
    with pytest.raises(ValueError, match="class indices 2 to 2"):
        kind().fit(prob, target + 2)
    with pytest.raises(ValueError, match="class indices must have shape"):
        kind().fit(prob, target[:2])


def test_the_error_names_missing_data_and_bad_options():
    prob = torch.full((4, 2), 0.5)
    with pytest.raises(ValueError, match="this KDECalibrator has seen no data"):
        KDECalibrator().calibrate(prob)
    with pytest.raises(ValueError, match="this TemperatureScaling has seen no data"):
        TemperatureScaling().calibrate(prob)
    with pytest.raises(ValueError, match="num_keys must be 1 or more; got 0"):
        KDECalibrator(num_keys=0)
    with pytest.raises(ValueError, match=r"bandwidth must be above 0; got 0\.0"):
        KDECalibrator(bandwidth=0.0)
    fitted = KDECalibrator(bandwidth=0.1).fit(prob, torch.zeros(4).long())
    with pytest.raises(ValueError, match="fitted to 2 classes"):
        fitted.partial_fit(torch.full((3, 4), 0.25), torch.zeros(3).long())
