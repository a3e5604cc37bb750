"""Agreement over many cases, in batches."""

import numpy as np
import torch

from semidice.labels import rater_agreement
from semidice.metrics import agreement
from semidice.metrics.agreement import AgreementBatches, drawn_voxels


def test_batches_give_what_one_case_at_a_time_gives_and_are_bounded(monkeypatch):
    rng = np.random.default_rng(0)
    shapes = [(5, 7), (40, 40), (3, 3), (4, 4, 4), (60, 50), (2, 2), (9, 9)]
    masks = [rng.integers(0, 3, (4, *shape), dtype=np.uint8) for shape in shapes]
    masks[3][:] = 0
    present = rng.random((len(masks), 4)) < 0.7
    present[:, 0] = True
    sizes = []

    def recorded(batch, **options):
        sizes.append(tuple(batch.shape))
        return rater_agreement(batch, **options)

    monkeypatch.setattr(agreement, "rater_agreement", recorded)
    monkeypatch.setattr(agreement, "BATCH_SIZE", 3000)
    batches = AgreementBatches(len(masks) + 1, 4, num_classes=3)
    for number, (case, there) in enumerate(zip(masks, present, strict=True)):
        batches.add(number, drawn_voxels(case * there.reshape(-1, *[1] * (case.ndim - 1))), present=there)
    found = batches.finish()
    for number, (case, there) in enumerate(zip(masks, present, strict=True)):
        expected = rater_agreement(torch.from_numpy(case), num_classes=3, present=there)
        torch.testing.assert_close(found.majority[number], expected.majority, equal_nan=True)
        torch.testing.assert_close(found.pairwise[number], expected.pairwise, equal_nan=True)
    assert found.majority[-1].isnan().all()
    # a large case stands alone, the small ones stand together
    assert [size[0] for size in sizes] == [1, 1, 2, 1, 2]
    assert all(np.prod(size) * 2 <= 3000 or size[0] == 1 for size in sizes)


def test_a_batch_is_full_before_it_is_too_large(monkeypatch):
    sizes = []

    def recorded(batch, **options):
        sizes.append(batch.shape[0])
        return rater_agreement(batch, **options)

    monkeypatch.setattr(agreement, "rater_agreement", recorded)
    monkeypatch.setattr(agreement, "BATCH_SIZE", 1300)
    batches = AgreementBatches(7, 4)
    for number in range(7):
        batches.add(number, np.ones((4, 100), dtype=bool), present=np.ones(4, dtype=bool))
    assert (batches.finish().majority == 1).all()
    assert sizes == [3, 3, 1]


def test_raters_who_drew_nothing_in_any_case_agree():
    batches = AgreementBatches(1, 2)
    batches.add(0, drawn_voxels(np.zeros((2, 4, 4), dtype=bool)), present=np.ones(2, dtype=bool))
    assert batches.finish().majority.tolist() == [[1, 1]]
