"""Agreement over many cases, in batches."""

import numpy as np
import torch

from semidice.labels import rater_agreement
from semidice.metrics import agreement
from semidice.metrics.agreement import AgreementBatches, drawn_voxels


def test_batches_give_the_same_result_as_single_cases_and_have_a_bounded_size(monkeypatch):
    rng = np.random.default_rng(0)
    shapes = [(5, 7), (40, 40), (3, 3), (4, 4, 4), (60, 50), (2, 2), (9, 9)]
    masks = [rng.integers(0, 3, (4, *shape), dtype=np.uint8) for shape in shapes]
    masks[3][:] = 0
    present = rng.random((len(masks), 4)) < 0.7
    present[:, 0] = True
    sizes = []

    def record_size(batch, **options):
        sizes.append(tuple(batch.shape))
        return rater_agreement(batch, **options)

    monkeypatch.setattr(agreement, "rater_agreement", record_size)
    monkeypatch.setattr(agreement, "BATCH_SIZE", 3000)
    batches = AgreementBatches(len(masks) + 1, 4, num_classes=3)
    for number, (case, case_present) in enumerate(zip(masks, present, strict=True)):
        batches.add(
            number,
            drawn_voxels(case * case_present.reshape(-1, *[1] * (case.ndim - 1))),
            present=case_present,
        )
    result = batches.finish()
    for number, (case, case_present) in enumerate(zip(masks, present, strict=True)):
        expected = rater_agreement(torch.from_numpy(case), num_classes=3, present=case_present)
        torch.testing.assert_close(result.majority[number], expected.majority, equal_nan=True)
        torch.testing.assert_close(result.pairwise[number], expected.pairwise, equal_nan=True)
    assert result.majority[-1].isnan().all()
    # a large case has its own batch; small cases share a batch
    assert [size[0] for size in sizes] == [1, 1, 2, 1, 2]
    assert all(np.prod(size) * 2 <= 3000 or size[0] == 1 for size in sizes)


def test_a_batch_is_closed_before_it_exceeds_the_limit(monkeypatch):
    sizes = []

    def record_size(batch, **options):
        sizes.append(batch.shape[0])
        return rater_agreement(batch, **options)

    monkeypatch.setattr(agreement, "rater_agreement", record_size)
    monkeypatch.setattr(agreement, "BATCH_SIZE", 1300)
    batches = AgreementBatches(7, 4)
    for number in range(7):
        batches.add(number, np.ones((4, 100), dtype=bool), present=np.ones(4, dtype=bool))
    assert (batches.finish().majority == 1).all()
    assert sizes == [3, 3, 1]


def test_raters_who_drew_nothing_agree_fully():
    batches = AgreementBatches(1, 2)
    batches.add(0, drawn_voxels(np.zeros((2, 4, 4), dtype=bool)), present=np.ones(2, dtype=bool))
    assert batches.finish().majority.tolist() == [[1, 1]]
