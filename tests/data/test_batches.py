"""Batches depend on seed and step only: streaming, residency, processes and resuming do not change them."""

import threading

import numpy as np
import pytest
import torch
from prepared import dataset_with, make_prepared
from scipy import ndimage
from start import refused

from semidice.data.batches import storage as storage_module
from semidice.data.batches.augment import AugmentOptions
from semidice.data.batches.feed import Batches, BatchOptions, Share, whole_cases
from semidice.data.batches.label_making import LabelOptions
from semidice.data.batches.storage import Storage, centred
from semidice.data.dataset import Dataset
from semidice.data.intensities import MeanStd
from semidice.labels.makers import mean_label

SIZES = [(20, 33), (40, 17), (32, 32)]
ALL_AUGMENTATIONS = AugmentOptions(rotate_degrees=15, gamma=0.3, noise=0.1)
ON_FOREGROUND = AugmentOptions(crop=(16, 16), foreground=0.7)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Fourteen cases of three sizes, three raters, one of whom may be absent, three classes, two channels."""
    return make_prepared(
        tmp_path_factory.mktemp("data") / "set",
        num_cases=14,
        sizes=SIZES,
        num_classes=3,
        num_channels=2,
        dtype="int16",
        absent=True,
    )


@pytest.fixture(scope="module")
def square_dataset(tmp_path_factory):
    """Ten cases that fill their 64 x 64 voxels, two classes, four raters."""
    return make_prepared(tmp_path_factory.mktemp("data") / "set", num_cases=10, size=(64, 64), num_raters=4)


def mean_std_of(dataset):
    """Not those of the whole dataset: training takes those of its own cases."""
    manifest = dataset.manifest
    return MeanStd(tuple(mean + 0.1 for mean in manifest.mean), tuple(2 * std for std in manifest.std))


def make_batches(dataset, cases=None, *, device="cpu", resident=True, workers=0, share=None, **changes):
    options = BatchOptions(**{"batch_size": 4, "augment": ALL_AUGMENTATIONS, "seed": 7} | changes)
    storage = Storage(dataset, device, resident=resident)
    cases = range(len(dataset)) if cases is None else cases
    return Batches(storage, cases, mean_std_of(dataset), options, share or Share(), workers)


def make(batches, step):
    torch.manual_seed(step)
    return batches.make(batches.feed(step))


def assert_same(first, second):
    for left, right in zip(first, second, strict=True):
        assert left is right is None or torch.equal(left, right)


def test_a_batch_without_augmentation_is_the_normalised_image_and_the_label(dataset):
    batches = make_batches(dataset, augment=None)
    mean, std = (np.array(numbers).reshape(-1, 1, 1) for numbers in mean_std_of(dataset))
    seen = set()
    for step in range(batches.steps_per_epoch):
        batch = make(batches, step)
        assert batch.image.shape == (4, 2, 64, 64)
        assert batch.target.shape == (4, 3, 64, 64)
        for row, number in enumerate(batch.case.tolist()):
            seen.add(number)
            shape = dataset.cases[number].shape
            corner = (..., *(slice(side) for side in shape))
            image = (dataset.image(number).astype(np.float64) - mean) / std
            np.testing.assert_allclose(batch.image[row][corner], image, atol=1e-5)
            label = mean_label(dataset.masks(number), num_classes=3, present=dataset.present[number])
            np.testing.assert_array_equal(batch.target[row][corner], label)
            assert batch.valid[row].sum() == np.prod(shape)
            assert batch.valid[row][corner].all()
            assert not batch.image[row][:, ~batch.valid[row]].any()
            assert (batch.target[row][0, ~batch.valid[row]] == 1).all()
    assert len(seen) == 12


@pytest.mark.parametrize(
    "augment", [None, AugmentOptions(), ALL_AUGMENTATIONS, AugmentOptions(crop=(32, 96)), ON_FOREGROUND]
)
@pytest.mark.parametrize("label", [LabelOptions(maker="random"), LabelOptions(smoothing="spatial")])
def test_streamed_and_resident_batches_have_the_same_bits(dataset, augment, label):
    resident = make_batches(dataset, augment=augment, label=label)
    streamed = make_batches(dataset, augment=augment, label=label, resident=False)
    assert streamed.feed(0).image is not None
    assert resident.feed(0).image is None
    for step in range(5):
        assert_same(make(resident, step), make(streamed, step))


@pytest.mark.parametrize("resident", [True, False])
def test_windows_on_the_foreground_are_centred_on_a_voxel_that_a_rater_marked(tmp_path, resident):
    masks = np.zeros((4, 64, 64), dtype=np.uint8)
    for number, mask in enumerate(masks[:3]):
        mask[10 + 9 * number, 40 - 5 * number] = 1
    augment = AugmentOptions(scale=(1, 1), flip=False, crop=(15, 15), foreground=1.0)
    batches = make_batches(dataset_with(tmp_path / "set", masks), augment=augment, resident=resident)
    for step in range(3):
        batch = make(batches, step)
        marked = batch.target[:, 1].flatten(1)
        for number, label in zip(batch.case.tolist(), marked, strict=True):
            assert label.sum() == (number < 3)
            assert number == 3 or label.argmax() == 7 * 15 + 7


@pytest.mark.parametrize("options", [{}, {"resident": False}, {"resident": False, "workers": 2}])
def test_feeds_that_start_at_a_later_step_equal_the_feeds_of_a_full_run(dataset, options):
    batches = make_batches(dataset, label=LabelOptions(maker="random"), **options)
    generator = torch.get_rng_state()
    for step, feed in zip(range(4, 9), batches.feeds(4, 9), strict=True):
        assert_same(feed, make_batches(dataset, label=LabelOptions(maker="random"), **options).feed(step))
    assert torch.equal(torch.get_rng_state(), generator)
    other = make_batches(dataset, label=LabelOptions(maker="random"), **options | {"seed": 8})
    assert not torch.equal(other.feed(0).case, batches.feed(0).case)


def test_reading_ahead_stops_with_the_iterator_and_raises_errors_of_workers(tmp_path):
    dataset = make_prepared(tmp_path / "set", num_cases=8, size=(32, 32))
    before = threading.active_count()
    feeds = make_batches(dataset, resident=False, workers=2).feeds(0, 1_000_000)
    next(feeds)
    assert threading.active_count() > before
    feeds.close()
    assert threading.active_count() == before
    feeds = make_batches(dataset, resident=False, workers=2).feeds(0, 100)
    dataset.folder.array("masks", "scan003").unlink()
    refused(lambda: list(feeds), "scan003.npy")
    assert threading.active_count() == before


@pytest.mark.parametrize(
    "options", [{"augment": ALL_AUGMENTATIONS}, {"augment": ON_FOREGROUND, "resident": False}]
)
@pytest.mark.parametrize("world_size", [2, 4])
def test_the_parts_of_all_processes_form_the_batch_of_a_single_process(dataset, world_size, options):
    options = {"label": LabelOptions(maker="random"), **options}
    single = make_batches(dataset, **options)
    per_process = [
        make_batches(dataset, share=Share(rank, world_size), **options) for rank in range(world_size)
    ]
    for step in range(5):
        parts_by_rank = [make(batches, step) for batches in per_process]
        expected, parts_by_field = (
            make(single, step)[:4],
            zip(*(part[:4] for part in parts_by_rank), strict=True),
        )
        assert_same(expected, [torch.cat(parts) for parts in parts_by_field])
    assert {batches.steps_per_epoch for batches in per_process} == {single.steps_per_epoch}


def test_the_parts_of_a_piece_form_the_piece_of_a_single_process(dataset):
    single = make(make_batches(dataset, batch_size=8), 0).image.chunk(2)
    parts = [
        make(make_batches(dataset, batch_size=8, share=Share(rank, 2, pieces=2)), 0).image.chunk(2)
        for rank in range(2)
    ]
    for piece, *halves in zip(single, *parts, strict=True):
        assert torch.equal(piece, torch.cat(halves))


def test_an_epoch_has_each_requested_case_at_most_once_and_no_other_case(dataset):
    cases = [1, 2, 3, 5, 8, 13, 0, 7, 11]
    batches = make_batches(dataset, cases)
    assert batches.steps_per_epoch == 2
    orders = []
    for epoch in range(20):
        order = torch.cat([batches.feed(2 * epoch + step).case for step in range(2)]).tolist()
        assert len(set(order)) == 8
        orders.append(order)
    assert set().union(*orders) == set(cases)
    assert len({tuple(order) for order in orders}) == 20


def test_fewer_cases_than_a_batch_are_repeated(dataset):
    batches = make_batches(dataset, [4, 9, 2], batch_size=8)
    assert batches.steps_per_epoch == 1
    counts = torch.cat([batches.feed(step).case for step in range(3)]).bincount(minlength=14)
    assert (counts[[2, 4, 9]] >= 6).all()
    assert counts.sum() == 24


@pytest.mark.parametrize("raters", [None, (1, 2)])
def test_every_epoch_draws_a_rater_of_the_label_among_those_present_with_equal_chances(dataset, raters):
    label = LabelOptions(maker="random", raters=raters)
    batches = make_batches(dataset, batch_size=14, label=label)
    num_epochs = 300
    drawn = np.zeros((14, 3), dtype=int)
    for epoch in range(num_epochs):
        feed = batches.feed(epoch)
        drawn[feed.case.numpy(), feed.rater.numpy()] += 1
    allowed = dataset.present & np.isin(range(3), raters or range(3))
    assert not drawn[~allowed].any()
    # five standard deviations of a share of 300 draws
    expected = allowed / allowed.sum(1, keepdims=True)
    assert np.abs(drawn / num_epochs - expected).max() < 5 * np.sqrt(0.25 / num_epochs)


def test_the_rater_of_a_case_does_not_depend_on_the_other_cases_or_their_order(dataset):
    label = LabelOptions(maker="random")
    all_cases = make_batches(dataset, batch_size=14, label=label).feed(0)
    rater_of = dict(zip(all_cases.case.tolist(), all_cases.rater.tolist(), strict=True))
    subset = make_batches(dataset, [2, 6, 10, 11], batch_size=4, label=label).feed(0)
    assert [rater_of[case] for case in subset.case.tolist()] == subset.rater.tolist()
    assert len(set(rater_of.values())) > 1


def test_a_rotated_mean_of_two_raters_equals_the_linear_interpolation_of_scipy(tmp_path):
    dataset = make_prepared(tmp_path / "set", num_cases=4, size=(32, 32), num_raters=2)
    batches = make_batches(dataset, augment=AugmentOptions(rotate_degrees=40))
    feed = batches.feed(0)
    batch = batches.make(feed)
    index = np.stack(np.indices((32, 32)), axis=-1)
    for row, number in enumerate(feed.case.tolist()):
        matrix, origin = np.split(feed.params[row, :6].double().numpy(), [4])
        position = np.moveaxis(index @ matrix.reshape(2, 2).T + origin, -1, 0)
        mean = dataset.masks(number).mean(0)
        expected = ndimage.map_coordinates(mean, position, order=1, mode="nearest")
        valid = batch.valid[row].numpy()
        np.testing.assert_allclose(batch.target[row, 1].numpy()[valid], expected[valid], atol=1e-4)


def test_volumes_and_slices_of_volumes_are_batched(tmp_path):
    volumes = make_prepared(tmp_path / "volumes", num_cases=3, size=(10, 12), depth=6)
    batch = make(make_batches(volumes, batch_size=2), 0)
    assert batch.image.shape == (2, 1, 32, 32, 32)
    assert batch.valid.any()
    slices = make_prepared(tmp_path / "slices", num_cases=5, size=(32, 32), slices_per_scan=3)
    batches = make_batches(slices, batch_size=5, augment=None)
    batch = make(batches, 0)
    for row, number in enumerate(batch.case.tolist()):
        mean, std = mean_std_of(slices)
        image = (slices.image(number) - mean[0]) / std[0]
        np.testing.assert_allclose(batch.image[row], image, atol=1e-5)


@pytest.mark.parametrize("resident", [True, False])
def test_whole_cases_come_in_order_with_every_voxel_and_rater(dataset, resident):
    cases = [13, 0, 5, 4, 7]
    batches = make_batches(dataset, resident=resident)
    found = list(whole_cases(batches.storage, cases, mean_std_of(dataset), batch_size=2))
    assert len(found) == 3
    numbers = []
    for batch in found:
        assert batch.image.shape[2:] == batch.masks.shape[2:] == batch.valid.shape[1:] == (64, 64)
        assert not batch.image.movedim(1, -1)[~batch.valid].any()
        assert not batch.masks.movedim(1, -1)[~batch.valid].any()
        for row, number in enumerate(batch.case.tolist()):
            numbers.append(number)
            shape = dataset.cases[number].shape
            place = (..., *centred(shape, (64, 64)))
            assert batch.valid[row].sum() == batch.valid[row][place].sum() == np.prod(shape)
            np.testing.assert_array_equal(batch.masks[row][place], dataset.masks(number))
            np.testing.assert_array_equal(batch.present[row], dataset.present[number])
            image = batch.image[row][place].numpy().reshape(2, -1)
            raw = dataset.image(number).reshape(2, -1)
            mean, std = (np.array(numbers)[:, None] for numbers in mean_std_of(dataset))
            expected = (raw - mean) / std
            np.testing.assert_allclose(image, expected, atol=1e-5)
    assert numbers == cases


def test_whole_cases_are_padded_no_more_than_needed(dataset):
    storage = Storage(dataset, "cpu", resident=False)
    (batch,) = whole_cases(storage, [1, 4], mean_std_of(dataset), batch_size=2)
    assert tuple(batch.valid.shape[1:]) == (64, 32)
    assert batch.valid.sum() == 2 * 40 * 17
    assert list(whole_cases(storage, [], mean_std_of(dataset), batch_size=2)) == []


@pytest.mark.parametrize("maker", ["random", "staple", "dice_weighted"])
def test_labels_of_whole_cases_equal_the_labels_of_training(dataset, maker):
    options = LabelOptions(maker=maker, smoothing="spatial")
    batches = make_batches(dataset, augment=None, batch_size=14, label=options)
    trained = make(batches, 0)
    cases = trained.case.tolist()
    (whole_batch,) = whole_cases(batches.storage, cases, mean_std_of(dataset), batch_size=14)
    label = batches.labels(whole_batch)
    for number, whole, expected in zip(trained.case.tolist(), label, trained.target, strict=True):
        shape = dataset.cases[number].shape
        corner = (..., *(slice(side) for side in shape))
        # sums of a Gaussian near the border may be rounded differently
        torch.testing.assert_close(whole[(..., *centred(shape, (64, 64)))], expected[corner])


def test_a_dataset_is_resident_if_it_takes_at_most_half_of_the_free_memory(square_dataset, monkeypatch):
    needed = 10 * (64 * 64 + 4 * 64 * 8)
    assert Storage(square_dataset, "cpu").bytes_per_case() * 10 == needed
    for free, resident in ((2 * needed, True), (2 * needed - 2, False)):
        monkeypatch.setattr(storage_module, "free_memory", lambda _, free=free: free)
        assert Storage(square_dataset, "cpu").resident is resident


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cases": []}, ["cases", "0 to 9"]),
        ({"cases": [3, 10]}, ["cases", "0 to 9"]),
        ({"batch_size": 6, "share": Share(0, 4)}, ["batch_size", "multiple", "6"]),
        ({"batch_size": 4, "share": Share(0, 2, pieces=4)}, ["batch_size", "optimiser.accumulate 4"]),
        ({"augment": AugmentOptions(crop=(32, 32, 32))}, ["augment.crop", "2 spatial axes"]),
    ],
)
def test_invalid_arguments_of_batches_are_refused_with_their_values(square_dataset, options, words):
    refused(lambda: make_batches(square_dataset, **options), *words)


def test_a_file_that_is_longer_or_shorter_than_it_was_prepared_is_refused(tmp_path):
    dataset = make_prepared(tmp_path / "set", num_cases=2, size=(16, 16), num_raters=2)
    path = dataset.folder.array("masks", "scan001")
    np.save(path, np.load(path)[:, :, :, :8])
    refused(lambda: make_batches(dataset), "scan001.npy", "bytes instead of", "semidice check")


def test_images_and_volumes_in_one_dataset_are_refused(tmp_path):
    dataset = make_prepared(tmp_path / "set", num_cases=2, size=(16, 16))
    first, second = dataset.manifest.scans
    mixed = dataset.manifest.model_copy(
        update={"scans": (first, second.model_copy(update={"shape": (4, 8, 8)}))}
    )
    dataset.folder.manifest.write_text(mixed.model_dump_json())
    refused(lambda: Storage(Dataset(dataset.folder.path), "cpu"), "images and volumes", "two datasets")


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("augment", [None, ALL_AUGMENTATIONS])
@pytest.mark.parametrize("label", [LabelOptions(maker="random"), LabelOptions(smoothing="spatial")])
def test_make_can_be_recorded_as_a_cuda_graph(dataset, resident, augment, label):
    options = {"augment": augment, "label": label, "resident": resident}
    batches = make_batches(dataset, device="cuda", **options)
    on_cpu = make_batches(dataset, **options)
    static = batches.feed(0).to("cuda")
    batches.make(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = batches.make(static)
    for step, feed in zip(range(6), batches.feeds(0, 6), strict=True):
        assert feed.case.is_pinned()
        for static_part, part in zip(static, feed, strict=True):
            if part is not None:
                static_part.copy_(part, non_blocking=True)
        graph.replay()
        assert_same(recorded, batches.make(feed.to("cuda")))
        assert torch.equal(recorded.case.cpu(), on_cpu.feed(step).case)
        expected = on_cpu.make(on_cpu.feed(step))
        assert (recorded.valid.cpu() == expected.valid).float().mean() > 0.999
        # a GPU sums positions in another order, which changes the fourth digit at a steep edge
        torch.testing.assert_close(recorded.image.cpu(), expected.image, atol=2e-3, rtol=0)
        torch.testing.assert_close(recorded.target.cpu(), expected.target, atol=2e-3, rtol=0)
