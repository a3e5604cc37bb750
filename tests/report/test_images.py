"""Pictures of a page: their pixels equal the masks and predictions, and they fit into the page."""

import base64
import io

import numpy as np
from pages import (
    build,
    embedded,
)
from PIL import Image
from prepared import make_prepared

from semidice.report.images import PictureLayout, make_picture, make_pictures
from semidice.runs.predictions import read_prediction


def decoded(uri):
    kind, _, code = uri.partition(",")
    assert kind == "data:image/webp;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(code))).convert("L"))


def tile(maps, size, columns, number):
    (height, width), (row, column) = size, divmod(number, columns)
    return maps[row * height : (row + 1) * height, column * width : (column + 1) * width]


def test_pictures_store_masks_exactly_and_predictions_to_half_a_grey_level(built):
    layout = built.data["layout"]
    for record in built.data["pictures"]:
        case = built.data["cases"][record["case"]]["name"]
        (number,) = built.dataset.numbers_of([case])
        maps = decoded(record["maps"])
        raters = tile(maps, record["size"], layout["columns"], 0)
        for rater, mask in enumerate(built.dataset.masks(number)):
            np.testing.assert_array_equal(raters >> rater & 1, mask)
        assert record["present"] == built.dataset.present[number].tolist()
        truth = tile(maps, record["size"], layout["columns"], 1)
        np.testing.assert_allclose(truth / 255, built.dataset.truth(number)[1], atol=0.51 / 255)
        for position, run in enumerate(built.runs.values()):
            (path,) = run.path.glob(f"fold_*/predictions/{case}.npz")
            stored = tile(maps, record["size"], layout["columns"], 2 + position) / 255
            np.testing.assert_allclose(stored, read_prediction(path)[1], atol=0.51 / 255)
        grey = decoded(record["image"]).astype(float)
        assert np.corrcoef(grey.ravel(), built.dataset.image(number)[0].ravel())[0, 1] > 0.97


def test_a_picture_of_a_volume_shows_the_slice_with_most_foreground_in_all_classes_and_channels(classes):
    layout = classes.data["layout"]
    assert (layout["bits"], layout["raters_per_tile"], layout["classes"]) == (2, 4, ["class1", "class2"])
    assert [score["name"] for score in classes.data["scores"]][:3] == [
        "dice_score",
        "dice_score, class1",
        "dice_score, class2",
    ]
    record = classes.data["pictures"][0]
    case = classes.data["cases"][record["case"]]["name"]
    (number,) = classes.dataset.numbers_of([case])
    masks = classes.dataset.masks(number)
    # the slice axis is the last one if the dataset does not name it
    counts = (masks > 0).sum((0, 1, 2))
    assert record["slice_number"] == counts.argmax()
    assert (record["num_slices"], record["size"]) == (28, [5, 20])
    shown_masks = masks[..., record["slice_number"]]
    raters = tile(decoded(record["maps"]), record["size"], layout["columns"], 0)
    for rater, mask in enumerate(shown_masks):
        np.testing.assert_array_equal(raters >> 2 * rater & 3, mask)
    assert decoded(record["image"]).shape == (2 * 5, 20)


def test_raters_beyond_the_bits_of_one_byte_are_stored_in_a_second_tile(tmp_path):
    dataset = make_prepared(tmp_path / "data", num_cases=2, num_raters=11, size=(24, 16))
    layout = PictureLayout.of(dataset, 1)
    assert layout.rater_tiles == 2
    picture = make_picture(dataset, 0, [dataset.truth(0)], layout, side=512)
    second = tile(decoded(picture.maps), picture.size, layout.columns, 1)
    np.testing.assert_array_equal(second >> 2 & 1, dataset.masks(0)[10])


def test_a_picture_is_shrunk_by_averaging_over_areas(tmp_path):
    dataset = make_prepared(tmp_path / "data", num_cases=2, size=(40, 64), num_classes=3)
    layout = PictureLayout.of(dataset, 1)
    picture = make_picture(dataset, 0, [dataset.truth(0)], layout, side=32)
    assert (picture.size, picture.full_size) == ((20, 32), (40, 64))
    maps = decoded(picture.maps)
    blocks = dataset.truth(0)[2].reshape(20, 2, 32, 2).mean((1, 3))
    shrunk = tile(maps, picture.size, layout.columns, layout.rater_tiles + 1)
    np.testing.assert_allclose(shrunk / 255, blocks, atol=0.51 / 255)
    shares = np.stack([dataset.masks(0)[0] == index for index in range(3)]).reshape(3, 20, 2, 32, 2)
    raters = tile(maps, picture.size, layout.columns, 0)
    np.testing.assert_array_equal(raters & 3, shares.mean((2, 4)).argmax(0))


def test_pictures_are_shrunk_until_they_fit_into_max_characters(tmp_path):
    dataset = make_prepared(tmp_path / "data", num_cases=3, size=(160, 160))
    layout = PictureLayout.of(dataset, 1)

    def sizes(max_characters):
        pictures = make_pictures(
            dataset, range(3), lambda number: [dataset.truth(number)], layout, max_characters=max_characters
        )
        return {picture.size for picture in pictures}, sum(picture.num_characters() for picture in pictures)

    (full,), characters = sizes(10**9)
    assert full == (160, 160)
    (smaller,), fewer = sizes(characters - 1)
    assert smaller == (128, 128)
    assert fewer < characters
    # smaller sizes are not tried: they would not be readable
    assert sizes(1)[0] == {(128, 128)}


def test_the_pictures_are_of_the_worst_the_best_and_the_most_different_cases(built, tmp_path):
    report = build(built.runs, built.dataset, tmp_path / "report.html", max_cases=3)
    data = embedded(report.page)
    shown_cases = [data["cases"][record["case"]]["name"] for record in data["pictures"]]
    dice = {case: list(row.values()) for case, row in built.values("dice_score").items()}
    worst, best = (extreme(dice, key=lambda case: np.mean(dice[case])) for extreme in (min, max))
    widest = max(dice, key=lambda case: np.ptp(dice[case]))
    assert shown_cases[:2] == [worst, best]
    assert widest in shown_cases
