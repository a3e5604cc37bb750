"""A grid file as variants: one dataset for all, options of their own, teachers before their students."""

import numpy as np
import pytest
from prepared import make_prepared

from semidice.data import dataset as dataset_module
from semidice.data import foreground
from semidice.recipes import auto
from semidice.recipes.grid import read_variants


@pytest.fixture
def variants_of(tmp_path):
    def read(lines, **options):
        (tmp_path / "grid.yaml").write_text("\n".join(lines))
        grid = [str(tmp_path / "grid.yaml")]
        return read_variants(grid, dataset=tmp_path / "data", out=tmp_path / "out", **options)

    return read


def test_the_dataset_is_opened_and_looked_at_once_for_all_variants_with_auto(
    variants_of, tmp_path, monkeypatch
):
    make_prepared(tmp_path / "data", num_cases=8, size=(128, 128))
    calls = []

    def counted(module, name):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args: calls.append(name) or original(*args))

    counted(foreground, "_read_facts")
    counted(dataset_module, "read_manifest")
    monkeypatch.setattr(auto, "weights_can_be_had", lambda *_: bool(calls.append("hub")))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    lines = ["recipe: auto", "variants:", *(f"  v{number}: {{seed: {number}}}" for number in range(20))]
    variants = variants_of(lines, accelerator="cuda")
    assert sorted(calls) == ["_read_facts", "hub", "read_manifest"]
    assert all(variant.recipe.reasons for variant in variants)


def test_options_of_one_variant_do_not_change_another(variants_of):
    lines = [
        "recipe: quick",
        "set: {label: {smoothing: spatial}, model.options: {channels: [8, 16]}}",
        "variants: {a: {label.sigma: 3, model.options.channels: [4]}, b: {}}",
    ]
    first, second = (variant.recipe for variant in variants_of(lines, accelerator="cpu"))
    assert (first.label.sigma, second.label.sigma) == (3, 1)
    assert (first.model.options, second.model.options) == ({"channels": [4]}, {"channels": [8, 16]})


def test_a_teacher_comes_before_its_first_student_and_the_order_is_kept_otherwise(variants_of):
    rng = np.random.default_rng(0)
    for _ in range(10):
        teachers = {}
        for number in rng.permutation(12):
            # a teacher has a lower number, so that there is no circle
            has_teacher = number and rng.random() < 0.6
            teachers[f"v{number}"] = f"v{rng.integers(number)}" if has_teacher else None
        lines = ["recipe: quick", "variants:"]
        lines += [f"  {name}: {{{f'teacher.run: {of}' if of else ''}}}" for name, of in teachers.items()]
        names = [each.name for each in variants_of(lines, accelerator="cpu")]
        assert sorted(names) == sorted(teachers)
        place = {name: number for number, name in enumerate(names)}
        assert all(place[of] < place[name] for name, of in teachers.items() if of)
        # without its students, the order is that of the file
        alone = [name for name in teachers if teachers[name] is None and name not in teachers.values()]
        assert [name for name in names if name in alone] == alone


def test_variants_that_teach_each_other_are_refused(variants_of):
    lines = ["recipe: quick", "variants: {a: {}, b: {teacher.run: c}, c: {teacher.run: b}}"]
    with pytest.raises(ValueError, match="no variant of b, c can be trained first"):
        variants_of(lines)


def test_grids_share_a_method_only_with_equal_options(variants_of, tmp_path):
    (tmp_path / "second.yaml").write_text("recipe: quick\nvariants: {a: {}, c: {seed: 1}}")
    first, second = str(tmp_path / "grid.yaml"), str(tmp_path / "second.yaml")
    (tmp_path / "grid.yaml").write_text("recipe: quick\nvariants: {a: {}, b: {}}")
    both = read_variants([first, second], dataset=tmp_path, out=tmp_path)
    assert [each.name for each in both] == ["a", "b", "c"]
    (tmp_path / "grid.yaml").write_text("recipe: quick\nvariants: {a: {seed: 2}}")
    with pytest.raises(ValueError, match="two variants with different options are called a"):
        read_variants([first, second], dataset=tmp_path, out=tmp_path)
