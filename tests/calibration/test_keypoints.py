"""The sampling of key voxels, and the region where calibration is applied."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from semidice.calibration import calibration_region, draw_keys, kde_recalibrate
from semidice.labels.smoothing import boundary_band


def drawn(target, num_keys, **options):
    """Numbers of the voxels that are keys, their classes, and their weights; (K,), or (N, K) per image.

    The first class has the number of the voxel as its probability.
    """
    number = torch.arange(target.numel(), dtype=torch.float64).reshape(target.shape) / target.numel()
    num_classes = int(target.clamp(max=9).max()) + 2
    prob = torch.stack([number, *[(1 - number) / (num_classes - 1)] * (num_classes - 1)], dim=1)
    keys = draw_keys(prob, target, num_keys, **options)
    voxel = (keys.prob[..., 0] * target.numel()).round().long()
    found = voxel, keys.label.argmax(-1), keys.weight
    return found if options.get("per_image") else tuple(part[0] for part in found)


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(any),
    st.integers(1, 60),
    st.integers(0, 10**6),
)
def test_every_present_class_gets_its_share_of_keys_without_replacement(sizes, num_keys, seed):
    target = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    generator = torch.Generator().manual_seed(seed)
    target = target[torch.randperm(len(target), generator=generator)].unsqueeze(0)
    voxel, label, weight = drawn(target, num_keys, generator=generator)
    assert voxel.shape == weight.shape == (num_keys,)
    present = [c for c, size in enumerate(sizes) if size > 0]
    shares = {c: len(range(position, num_keys, len(present))) for position, c in enumerate(present)}
    assert max(shares.values()) == -(-num_keys // len(present))
    expected = [min(size, shares.get(c, 0)) for c, size in enumerate(sizes)]
    real = weight > 0
    assert len(voxel[real].unique()) == real.sum()
    assert torch.equal(target.flatten()[voxel], label)
    assert torch.bincount(label[real], minlength=len(sizes)).tolist() == expected
    # the key weights of a class sum to its number of voxels
    for c in present:
        if shares[c] > 0:
            assert float(weight[real & (label == c)].sum()) == pytest.approx(sizes[c], rel=1e-5)


def test_voxels_of_a_class_are_equally_likely_to_be_keys():
    # 4000 images drawn independently: each of 30 background voxels is one of 6 keys in a fifth of them
    target = torch.cat([torch.zeros(4000, 30), torch.ones(4000, 9)], dim=1).long()
    voxel, _, weight = drawn(target, 12, per_image=True, generator=torch.Generator().manual_seed(0))
    assert weight.all()
    counts = torch.bincount(voxel.flatten() % 39, minlength=39)
    assert stats.chisquare(counts[:30].numpy()).pvalue > 1e-3
    assert stats.chisquare(counts[30:].numpy()).pvalue > 1e-3
    assert counts[:30].sum() == counts[30:].sum() == 4000 * 6


@pytest.mark.parametrize("space", [(), (50,), (3, 4, 5)])
def test_the_same_seed_gives_the_same_keys_in_any_form_of_the_target(space):
    target = torch.randint(3, (20, *space))
    soft = torch.nn.functional.one_hot(target, 3).movedim(-1, 1) * 0.8 + 0.2 / 3
    prob = torch.rand(20, 3, *space).softmax(1)
    first, second, other = (
        draw_keys(prob, each, 12, generator=torch.Generator().manual_seed(seed))
        for each, seed in ((target.to(torch.uint8), 0), (soft, 0), (target, 1))
    )
    assert torch.equal(first.prob, second.prob)
    assert not torch.equal(first.prob, other.prob)
    assert torch.equal(first.label, torch.eye(3)[second.label.argmax(-1)])
    assert first.label.sum(1).tolist() == [[4, 4, 4]]


def test_per_image_draws_keys_within_each_image():
    target = torch.stack([torch.zeros(5, 6), torch.ones(5, 6)]).long()
    target[1, 0, 0] = 2
    valid = torch.ones(2, 5, 6, dtype=torch.bool)
    voxel, label, weight = drawn(target, 6, per_image=True, valid=valid)
    assert label[0].tolist() == [0] * 6
    assert label[1][weight[1] > 0].tolist() == [1, 2, 1, 1]
    assert (voxel // 30).tolist() == [[0] * 6, [1] * 6]
    valid[0] = False
    assert (drawn(target, 6, per_image=True, valid=valid)[2] > 0).sum(1).tolist() == [0, 4]


def test_invalid_voxels_are_never_drawn_and_may_hold_any_class():
    target = torch.randint(2, (1, 200))
    valid = torch.rand(1, 200) > 0.5
    target[~valid] = -100
    voxel, _, weight = drawn(target, 400, valid=valid)
    assert sorted(voxel[weight > 0].tolist()) == valid.flatten().nonzero().flatten().tolist()


def test_the_gradient_of_keys_reaches_their_voxels():
    prob = (torch.rand(2, 3, 4) / 3).requires_grad_()
    draw_keys(prob, torch.zeros(2, 4, dtype=torch.long), 3).prob.sum().backward()
    assert float(prob.grad.sum()) == 9


@pytest.mark.parametrize("space", [(9, 14), (4, 6, 5)])
def test_the_region_holds_mispredicted_voxels_and_those_near_a_boundary(space):
    target = torch.randint(3, (2, *space))
    target[0] = 1
    prob = torch.rand(2, 3, *space).softmax(1)
    region = calibration_region(prob, target, width=1)
    assert torch.equal(region[0], prob[0].argmax(0) != 1)
    assert torch.equal(region[1], (prob[1].argmax(0) != target[1]) | boundary_band(target, width=1)[1])
    soft = torch.nn.functional.one_hot(target, 3).movedim(-1, 1).float()
    assert torch.equal(calibration_region(prob, soft, width=1), region)
    valid = torch.rand(2, *space) > 0.5
    assert torch.equal(calibration_region(prob, target, width=1, valid=valid), region & valid)


@pytest.mark.gpu
def test_keys_region_and_recalibration_are_captured_in_a_cuda_graph():
    prob = torch.rand(2, 3, 32, 40, device="cuda").mul(5).softmax(1)
    target = torch.randint(3, (2, 32, 40), device="cuda")

    def step():
        keys = draw_keys(prob, target, 64)
        new = kde_recalibrate(prob, keys, bandwidth=1e-3, region=calibration_region(prob, target))
        return keys, new

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        keys, result = step()
    draws = []
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        draws.append(keys.prob.clone())
        torch.testing.assert_close(result.sum(1), torch.ones_like(result[:, 0]))
        assert keys.weight.all()
    assert not torch.equal(draws[0], draws[1])
