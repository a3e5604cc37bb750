"""A grid of thousands of variants is read in seconds: what its variants share is read and parsed once."""

import time

import numpy as np
import pytest
from prepared import make_prepared

from semidice.data import dataset as dataset_module
from semidice.data import foreground
from semidice.recipes import Recipe, auto, files
from semidice.recipes.grid import Variant, _teachers_first, read_variants
from semidice.training.grid import job_lines


def write_grid(path, num_variants, *, recipe="quick", seeds=1):
    """Every second variant is a student of the one before it."""
    lines = [f"recipe: {recipe}", f"seeds: {seeds}", "set: {data.num_folds: 5}", "variants:"]
    for number in range(num_variants):
        teacher = f", teacher.run: v{number - 1}" if number % 2 else ""
        lines.append(f"  v{number}: {{optimiser.lr: {1e-6 * (number + 1):.6f}{teacher}}}")
    path.write_text("\n".join(lines))
    return path


def variants_of(grid, tmp_path, **options):
    return read_variants(
        [str(grid)], dataset=tmp_path / "data", out=tmp_path / "out", accelerator="cpu", **options
    )


@pytest.mark.parametrize(("num_variants", "seeds"), [(2000, 1), (400, 5)])
def test_10_000_jobs_of_a_grid_file_are_listed_in_under_5_seconds(tmp_path, num_variants, seeds):
    grid = write_grid(tmp_path / "grid.yaml", num_variants, seeds=seeds)
    # of this process: other programs may be busy
    started = time.process_time()
    lines = list(job_lines(variants_of(grid, tmp_path), ["semidice", "compare"]))
    seconds = time.process_time() - started
    assert len([line for line in lines if not line.startswith("#")]) == 10_000
    assert seconds < 5


def test_what_all_variants_share_is_parsed_once(tmp_path, monkeypatch):
    parsed, original = [], files.parse_yaml
    monkeypatch.setattr(files, "parse_yaml", lambda *args: parsed.append(args) or original(*args))
    files._parsed.cache_clear()
    grid = write_grid(tmp_path / "grid.yaml", 30)
    variants = variants_of(grid, tmp_path, overrides=["loss.form=relaxed", "augment.crop=[32, 64]"])
    assert len(variants) == 30
    assert len(parsed) == 3
    assert {variant.recipe.augment.crop for variant in variants} == {(32, 64)}


def test_the_dataset_is_opened_and_looked_at_once_for_all_variants_with_auto(tmp_path, monkeypatch):
    make_prepared(tmp_path / "data", num_cases=8, size=(128, 128))
    calls = []

    def counted(module, name):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args: calls.append(name) or original(*args))

    counted(foreground, "_read_facts")
    counted(dataset_module, "read_manifest")
    monkeypatch.setattr(auto, "weights_can_be_had", lambda *_: bool(calls.append("hub")))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    grid = write_grid(tmp_path / "grid.yaml", 20, recipe="auto")
    variants = read_variants([str(grid)], dataset=tmp_path / "data", out=tmp_path / "out", accelerator="cuda")
    assert sorted(calls) == ["_read_facts", "hub", "read_manifest"]
    assert all(variant.recipe.reasons for variant in variants)


def test_options_of_one_variant_do_not_change_another(tmp_path):
    grid = tmp_path / "grid.yaml"
    grid.write_text(
        "recipe: quick\nset: {label: {smoothing: spatial}, model.options: {channels: [8, 16]}}\nvariants:\n"
        "  a: {label.sigma: 3, model.options.channels: [4]}\n  b: {}\n"
    )
    first, second = (variant.recipe for variant in variants_of(grid, tmp_path))
    assert (first.label.sigma, second.label.sigma) == (3, 1)
    assert (first.model.options, second.model.options) == ({"channels": [4]}, {"channels": [8, 16]})


def simple_order(variants):
    """The first variant whose teacher is done, again and again."""
    ordered, waiting = [], list(variants)
    while waiting:
        done = {variant.name for variant in ordered}
        ready = [variant for variant in waiting if variant.teacher is None or variant.teacher in done]
        ordered.append(ready[0])
        waiting.remove(ready[0])
    return ordered


def test_teachers_come_first_and_the_order_is_kept_otherwise(tmp_path):
    rng = np.random.default_rng(0)
    for _ in range(50):
        names = rng.permutation([f"v{number}" for number in range(12)]).tolist()
        # a teacher has a lower number, so that there is no circle
        teachers = {f"v{number}": f"v{rng.integers(number)}" for number in range(1, 12) if rng.random() < 0.6}
        variants = [
            Variant(Recipe(name=name, data={"dataset": "d"}), tmp_path / name, teachers.get(name))
            for name in names
        ]
        assert _teachers_first(variants) == simple_order(variants)
