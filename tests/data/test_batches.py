"""Batches: a pure function of seed and step, the same streamed, resident, shared by processes or resumed."""

import os
import threading

import numpy as np
import pytest
import torch
from prepared import make_prepared

from semidice.data import storage as storage_module
from semidice.data.augment import AugmentOptions
from semidice.data.batches import Batches, Feed, WholeCases
from semidice.data.label_making import LabelOptions, make_labels
from semidice.data.storage import Storage, common_space, free_memory, inside
from semidice.labels.makers import mean_label

SIZES = [(20, 33), (40, 17), (32, 32)]
EVERYTHING = AugmentOptions(rotate_degrees=15, gamma=0.3, noise=0.1)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Fourteen cases of three sizes, three raters of whom one may be absent, three classes, two channels."""
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
def square(tmp_path_factory):
    """Ten cases that fill their 64 x 64 voxels, two classes, four raters."""
    return make_prepared(tmp_path_factory.mktemp("data") / "set", num_cases=10, size=(64, 64), num_raters=4)


def batches_of(dataset, cases=None, **changes):
    options = {
        "batch_size": 4,
        "label": LabelOptions(),
        "augment": EVERYTHING,
        "seed": 7,
        **changes,
    }
    storage = Storage(dataset, options.pop("device", "cpu"), resident=options.pop("resident", True))
    return Batches(storage, range(len(dataset)) if cases is None else cases, **options)


def make(batches, step):
    torch.manual_seed(step)
    return batches.make(batches.feed(step))


def assert_same(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert one is other is None or torch.equal(one, other)


def test_a_batch_without_augmentation_is_the_normalised_image_and_the_label(dataset):
    batches = batches_of(dataset, augment=None)
    mean, std = (
        np.array(numbers).reshape(-1, 1, 1) for numbers in (dataset.manifest.mean, dataset.manifest.std)
    )
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


@pytest.mark.parametrize("augment", [None, AugmentOptions(), EVERYTHING, AugmentOptions(crop=(32, 96))])
@pytest.mark.parametrize("label", [LabelOptions(maker="random"), LabelOptions(smoothing="spatial")])
def test_streamed_and_resident_batches_have_the_same_bits(dataset, augment, label):
    resident = batches_of(dataset, augment=augment, label=label)
    streamed = batches_of(dataset, augment=augment, label=label, resident=False)
    assert streamed.feed(0).image is not None
    assert resident.feed(0).image is None
    for step in range(5):
        assert_same(make(resident, step), make(streamed, step))


@pytest.mark.parametrize("resident", [True, False])
def test_the_same_seed_gives_the_same_batches_and_another_seed_others(dataset, resident):
    first, second, other = (batches_of(dataset, seed=seed, resident=resident) for seed in (3, 3, 4))
    for step in (0, 5, 2):
        assert_same(make(first, step), make(second, step))
    assert not torch.equal(first.feed(0).case, other.feed(0).case)
    assert not torch.equal(first.feed(0).params, other.feed(0).params)


@pytest.mark.parametrize("options", [{}, {"resident": False}, {"resident": False, "workers": 2}])
def test_feeds_from_any_step_on_are_the_tail_of_all_feeds(dataset, options):
    batches = batches_of(dataset, label=LabelOptions(maker="random"), **options)
    for step, feed in zip(range(4, 9), batches.feeds(4, 9), strict=True):
        assert_same(feed, batches_of(dataset, label=LabelOptions(maker="random"), **options).feed(step))


def test_reading_ahead_ends_with_the_iterator_and_passes_errors_on(tmp_path):
    dataset = make_prepared(tmp_path / "set", num_cases=8, size=(32, 32))
    before = threading.active_count()
    feeds = batches_of(dataset, resident=False, workers=2).feeds(0, 1_000_000)
    next(feeds)
    assert threading.active_count() > before
    feeds.close()
    assert threading.active_count() == before
    feeds = batches_of(dataset, resident=False, workers=2).feeds(0, 100)
    dataset.folder.array("masks", "scan003").unlink()
    with pytest.raises(ValueError, match=r"cannot read .*scan003\.npy"):
        list(feeds)
    assert threading.active_count() == before


def test_writing_into_a_feed_does_not_change_later_ones(dataset):
    batches = batches_of(dataset)
    expected = batches.feed(1).case.clone()
    batches.feed(1).case.zero_()
    assert torch.equal(batches.feed(1).case, expected)


def test_reading_ahead_leaves_the_default_generator_alone(dataset):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert len(list(batches_of(dataset, resident=False, workers=1).feeds(0, 3))) == 3
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_shares_of_all_processes_make_up_the_batch_of_one(dataset, world_size):
    options = {"label": LabelOptions(maker="random"), "augment": EVERYTHING}
    alone = batches_of(dataset, **options)
    together = [
        batches_of(dataset, rank=rank, world_size=world_size, **options) for rank in range(world_size)
    ]
    for step in range(5):
        shares = [make(batches, step) for batches in together]
        ours, theirs = make(alone, step)[:4], zip(*(share[:4] for share in shares), strict=True)
        assert_same(ours, [torch.cat(parts) for parts in theirs])
    assert {batches.steps_per_epoch for batches in together} == {alone.steps_per_epoch}


def test_an_epoch_shows_each_case_at_most_once_and_only_those_asked_for(dataset):
    cases = [1, 2, 3, 5, 8, 13, 0, 7, 11]
    batches = batches_of(dataset, cases)
    assert batches.steps_per_epoch == 2
    orders = []
    for epoch in range(20):
        order = torch.cat([batches.feed(2 * epoch + step).case for step in range(2)]).tolist()
        assert len(set(order)) == 8
        orders.append(order)
    assert set().union(*orders) == set(cases)
    assert len({tuple(order) for order in orders}) == 20


def test_fewer_cases_than_a_batch_are_repeated(dataset):
    batches = batches_of(dataset, [4, 9, 2], batch_size=8)
    assert batches.steps_per_epoch == 1
    counts = torch.cat([batches.feed(step).case for step in range(3)]).bincount(minlength=14)
    assert (counts[[2, 4, 9]] >= 6).all()
    assert counts.sum() == 24


def test_a_random_rater_is_drawn_anew_in_every_epoch_among_those_present(dataset):
    batches = batches_of(dataset, batch_size=14, label=LabelOptions(maker="random"))
    num_epochs = 300
    drawn = np.zeros((14, 3), dtype=int)
    for epoch in range(num_epochs):
        feed = batches.feed(epoch)
        drawn[feed.case.numpy(), feed.rater.numpy()] += 1
    assert not drawn[~dataset.present].any()
    share = drawn / num_epochs
    expected = dataset.present / dataset.present.sum(1, keepdims=True)
    # five standard deviations of a share of 300 draws
    assert np.abs(share - expected).max() < 5 * np.sqrt(0.25 / num_epochs)


def test_the_rater_of_a_case_does_not_depend_on_the_other_cases_or_their_order(dataset):
    label = LabelOptions(maker="random")
    all_of_them = batches_of(dataset, batch_size=14, label=label).feed(0)
    rater_of = dict(zip(all_of_them.case.tolist(), all_of_them.rater.tolist(), strict=True))
    some = batches_of(dataset, [2, 6, 10, 11], batch_size=4, label=label).feed(0)
    assert [rater_of[case] for case in some.case.tolist()] == some.rater.tolist()
    assert len(set(rater_of.values())) > 1


def test_augmented_batches_keep_probabilities(dataset):
    batches = batches_of(dataset, batch_size=14)
    for step in range(5):
        batch = make(batches, step)
        assert 0 <= batch.target.min() <= batch.target.max() <= 1
        torch.testing.assert_close(batch.target.sum(1), torch.ones(14, 64, 64), atol=1e-5, rtol=0)
        assert 0.05 < batch.valid.float().mean() < 0.95
        assert batch.image.isfinite().all()


def test_volumes_and_slices_of_volumes_are_batched_too(tmp_path):
    volumes = make_prepared(tmp_path / "volumes", num_cases=3, size=(10, 12), depth=6)
    batch = make(batches_of(volumes, batch_size=2), 0)
    assert batch.image.shape == (2, 1, 32, 32, 32)
    assert batch.valid.any()
    slices = make_prepared(tmp_path / "slices", num_cases=5, size=(32, 32), slices_per_scan=3)
    batches = batches_of(slices, batch_size=5, augment=None)
    batch = make(batches, 0)
    for row, number in enumerate(batch.case.tolist()):
        image = (slices.image(number) - slices.manifest.mean[0]) / slices.manifest.std[0]
        np.testing.assert_allclose(batch.image[row], image, atol=1e-5)


def test_images_of_eight_and_sixteen_bits_go_together(tmp_path):
    dataset = make_prepared(tmp_path / "set", num_cases=4, size=(32, 32))
    path = dataset.folder.array("images", "scan002")
    np.save(path, np.round(np.load(path) * (32767 / 255)).astype(np.int16))
    batch = make(batches_of(dataset, augment=None), 0)
    for row, number in enumerate(batch.case.tolist()):
        image = (dataset.image(number) - dataset.manifest.mean[0]) / dataset.manifest.std[0]
        np.testing.assert_allclose(batch.image[row], image, atol=1e-5)


@pytest.mark.parametrize("resident", [True, False])
def test_whole_cases_come_in_order_with_every_voxel_and_rater(dataset, resident):
    cases = [13, 0, 5, 4, 7]
    batches = batches_of(dataset, resident=resident)
    whole = WholeCases(batches.storage, cases, batch_size=2)
    assert len(whole) == 3
    found = []
    for batch in whole:
        assert batch.image.shape[2:] == batch.masks.shape[2:] == batch.valid.shape[1:] == (64, 64)
        assert not batch.image.movedim(1, -1)[~batch.valid].any()
        assert not batch.masks.movedim(1, -1)[~batch.valid].any()
        for row, number in enumerate(batch.case.tolist()):
            found.append(number)
            shape = dataset.cases[number].shape
            corner = (..., *(slice(side) for side in shape))
            assert batch.valid[row].sum() == batch.valid[row][corner].sum() == np.prod(shape)
            np.testing.assert_array_equal(batch.masks[row][corner], dataset.masks(number))
            np.testing.assert_array_equal(batch.present[row], dataset.present[number])
            image = batch.image[row][corner].numpy().reshape(2, -1)
            raw = dataset.image(number).reshape(2, -1)
            manifest = dataset.manifest
            expected = (raw - np.array(manifest.mean)[:, None]) / np.array(manifest.std)[:, None]
            np.testing.assert_allclose(image, expected, atol=1e-5)
    assert found == cases


def test_whole_cases_are_padded_no_further_than_they_need(dataset):
    storage = Storage(dataset, "cpu", resident=False)
    (batch,) = WholeCases(storage, [1, 4], batch_size=2)
    assert tuple(batch.valid.shape[1:]) == (64, 32)
    assert batch.valid.sum() == 2 * 40 * 17
    assert list(WholeCases(storage, [], batch_size=2)) == []


@pytest.mark.parametrize("maker", ["random", "staple", "dice_weighted"])
def test_labels_of_whole_cases_are_those_of_training(dataset, maker):
    options = LabelOptions(maker=maker, smoothing="spatial")
    batches = batches_of(dataset, augment=None, batch_size=14, label=options)
    trained = make(batches, 0)
    (whole,) = WholeCases(batches.storage, trained.case.tolist(), batch_size=14)
    label = batches.labels(whole.masks, whole.case)
    assert torch.equal(label, trained.target)


def test_a_batch_whose_maker_has_no_table_is_made_directly(tmp_path):
    dataset = make_prepared(tmp_path / "set", num_cases=4, size=(16, 20), num_raters=6, num_classes=4)
    batch = make(batches_of(dataset, augment=None, label=LabelOptions(maker="dice_weighted")), 0)
    (whole,) = WholeCases(Storage(dataset, "cpu", resident=False), batch.case.tolist(), batch_size=4)
    expected = make_labels(whole.masks, whole.present, LabelOptions(maker="dice_weighted"), num_classes=4)
    assert torch.equal(batch.target, expected)


def test_a_dataset_is_resident_if_it_takes_half_of_the_free_memory_at_most(square, monkeypatch):
    needed = 10 * (64 * 64 + 4 * 64 * 8)
    assert Storage(square, "cpu").bytes_per_case() * 10 == needed
    for free, resident in ((2 * needed, True), (2 * needed - 2, False)):
        monkeypatch.setattr(storage_module, "free_memory", lambda _, free=free: free)
        assert Storage(square, "cpu").resident is resident


@pytest.mark.skipif(not os.path.exists("/proc/meminfo"), reason="only Linux tells in this way")
def test_free_memory_of_the_cpu_is_less_than_all_of_it():
    assert 0 < free_memory(torch.device("cpu")) < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_a_feed_moves_and_keeps_what_is_not_there(square):
    feed = batches_of(square).feed(0).to("cpu")
    assert isinstance(feed, Feed)
    assert feed.image is None
    with pytest.raises(ValueError, match="not resident, so a feed must contain its images"):
        batches_of(square, resident=False).make(feed)


def test_inside_and_common_space():
    flags = inside(torch.tensor([[2, 3], [4, 0]]), (4, 5))
    assert flags.sum((1, 2)).tolist() == [6, 0]
    assert flags[0, :2, :3].all()
    assert common_space([(1, 32), (33, 5)]) == (64, 32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cases": []}, "cases must be numbers from 0 to 9"),
        ({"cases": [3, 10]}, "cases must be numbers from 0 to 9"),
        (
            {"batch_size": 6, "world_size": 4},
            "a multiple of their number; got 6",
        ),
        ({"batch_size": 0}, "got 0"),
        ({"rank": 2, "world_size": 2}, "rank must be from 0 to 1; got 2"),
        (
            {"augment": AugmentOptions(crop=(32, 32, 32))},
            r"crop \(32, 32, 32\) does not fit images with 2 spatial axes",
        ),
    ],
)
def test_what_cannot_be_batched_is_refused_by_name(square, options, message):
    with pytest.raises(ValueError, match=message):
        batches_of(square, **options)


def test_a_file_that_does_not_fit_the_manifest_is_named(tmp_path):
    dataset = make_prepared(tmp_path / "set", num_cases=2, size=(16, 16), num_raters=2)
    path = dataset.folder.array("masks", "scan001")
    np.save(path, np.load(path)[:, :, :, :8])
    with pytest.raises(
        ValueError, match=r"scan001\.npy holds \(2, 1, 8, 2\) .* manifest says \(2, 1, 16, 2\)"
    ):
        batches_of(dataset)
    path = dataset.folder.array("images", "scan001")
    np.save(path, np.load(path).astype(np.float32))
    with pytest.raises(ValueError, match="must be stored as uint8 or int16; got float32"):
        batches_of(dataset)


def test_images_and_volumes_in_one_dataset_are_refused(tmp_path):
    dataset = make_prepared(tmp_path / "set", num_cases=2, size=(16, 16))
    first, second = dataset.manifest.scans
    mixed = dataset.manifest.model_copy(
        update={"scans": (first, second.model_copy(update={"shape": (4, 8, 8)}))}
    )
    dataset.folder.manifest.write_text(mixed.model_dump_json())
    with pytest.raises(ValueError, match="images and volumes together"):
        Storage(type(dataset)(dataset.folder.path), "cpu")


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("augment", [None, EVERYTHING])
@pytest.mark.parametrize("label", [LabelOptions(maker="random"), LabelOptions(smoothing="spatial")])
def test_make_can_be_recorded_as_a_cuda_graph(dataset, resident, augment, label):
    options = {"augment": augment, "label": label, "resident": resident}
    batches = batches_of(dataset, device="cuda", **options)
    on_cpu = batches_of(dataset, **options)
    static = batches.feed(0).to("cuda")
    batches.make(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = batches.make(static)
    for step, feed in zip(range(6), batches.feeds(0, 6), strict=True):
        assert feed.case.is_pinned()
        for place, part in zip(static, feed, strict=True):
            if part is not None:
                place.copy_(part, non_blocking=True)
        graph.replay()
        assert_same(recorded, batches.make(feed.to("cuda")))
        assert torch.equal(recorded.case.cpu(), on_cpu.feed(step).case)
        expected = on_cpu.make(on_cpu.feed(step))
        assert (recorded.valid.cpu() == expected.valid).float().mean() > 0.999
        # a GPU adds up positions in another order; at a steep edge that is seen in the fourth digit
        torch.testing.assert_close(recorded.image.cpu(), expected.image, atol=2e-3, rtol=0)
        torch.testing.assert_close(recorded.target.cpu(), expected.target, atol=2e-3, rtol=0)
