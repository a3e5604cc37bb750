"""Recipes: reading with overrides, error messages, writing, shipped files and their documentation."""

import re
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

import semidice
from semidice.recipes import (
    differing_keys,
    read_recipe,
    shipped_recipes,
    write_recipe,
)
from semidice.recipes.grid import shipped_grids
from semidice.recipes.options import options_of
from semidice.recipes.text import parse_yaml, yaml_text

DOCS = Path(__file__).parents[2] / "docs"
sys.path.insert(0, str(DOCS))

import recipe_table  # noqa: E402

RECIPES = Path(semidice.__file__).parent / "recipes" / "shipped"


def write_file(folder, text, name="my.yaml"):
    path = folder / name
    path.write_text(text)
    return path


def problems(*arguments):
    with pytest.raises(ValueError, match=r"\w") as caught:
        read_recipe(*arguments)
    return str(caught.value).splitlines()


class TestReading:
    def test_missing_options_have_the_values_of_the_paper(self, tmp_path):
        recipe = read_recipe(write_file(tmp_path, "data: {dataset: prepared}"))
        assert (recipe.name, recipe.batch_size, recipe.schedule.epochs, recipe.schedule.power) == (
            "my", 8, 150, 0.9,
        )  # fmt: skip
        optimiser = recipe.optimiser
        assert (optimiser.name, optimiser.lr, optimiser.momentum, optimiser.weight_decay) == (
            "sgd", 0.01, 0.9, 5e-4,
        )  # fmt: skip
        assert (recipe.loss.cross_entropy_weight, recipe.loss.region_weight) == (0.25, 0.75)
        assert (recipe.data.num_folds, recipe.teacher) == (5, None)

    def test_overrides_replace_values_of_the_file_and_later_ones_replace_earlier_ones(self, tmp_path):
        path = write_file(
            tmp_path, "data: {dataset: prepared}\nloss: {form: product, gamma: 2}\nteacher: null"
        )
        overrides = [
            "loss.form=squared",
            "loss.form=relaxed",
            "data.folds=[0, 2]",
            "optimiser.lr=1e-3",
            "teacher.run=big",
            "model.options.decoder_channels=[64, 32, 16, 8, 8]",
            "precision.graph=false",
            "name='off'",
        ]
        recipe = read_recipe(path, overrides)
        assert (recipe.loss.form, recipe.loss.gamma, recipe.data.folds) == ("relaxed", 2.0, (0, 2))
        assert (recipe.optimiser.lr, recipe.precision.graph, recipe.name) == (0.001, False, "off")
        assert recipe.model.options == {"decoder_channels": [64, 32, 16, 8, 8]}
        assert recipe.teacher.run.name == "big"

    def test_an_override_can_remove_a_section(self, tmp_path):
        path = write_file(tmp_path, "data: {dataset: prepared}\nteacher: {run: big}")
        assert read_recipe(path).teacher.calibration == "kde"
        assert read_recipe(path, ["teacher=null"]).teacher is None

    def test_paths_are_relative_to_the_file_and_in_overrides_to_the_working_directory(
        self, tmp_path, monkeypatch
    ):
        (tmp_path / "recipes").mkdir()
        text = "data: {dataset: ../prepared}\nteacher: {run: ../big}\nmodel: {weights: ../net.safetensors}"
        path = write_file(tmp_path / "recipes", text)
        monkeypatch.chdir(tmp_path)
        recipe = read_recipe(path.relative_to(tmp_path))
        assert recipe.data.dataset == tmp_path / "prepared"
        assert recipe.teacher.run == tmp_path / "big"
        assert recipe.model.weights == str(tmp_path / "net.safetensors")
        overrides = ["data.dataset=other", "model.weights=here.safetensors", "teacher={run: small}"]
        recipe = read_recipe(path, overrides)
        assert recipe.data.dataset == tmp_path / "other"
        assert recipe.teacher.run == tmp_path / "small"
        assert recipe.model.weights == str(tmp_path / "here.safetensors")

    def test_names_of_weights_and_absolute_paths_are_kept(self, tmp_path):
        path = write_file(tmp_path, "data: {dataset: ~/prepared}\nteacher: {run: /runs/big}")
        recipe = read_recipe(path)
        assert recipe.data.dataset == Path.home() / "prepared"
        assert recipe.teacher.run == Path("/runs/big")
        assert [
            read_recipe(path, [f"model.weights={name}"]).model.weights for name in ("imagenet", "none")
        ] == [
            "imagenet",
            "none",
        ]

    def test_a_file_has_priority_over_a_shipped_recipe_of_the_same_name(self, tmp_path, monkeypatch):
        write_file(tmp_path, "data: {dataset: mine}\nbatch_size: 3", name="quick")
        assert read_recipe("quick", ["data.dataset=x"]).batch_size == 8
        monkeypatch.chdir(tmp_path)
        assert read_recipe("quick").batch_size == 3

    def test_a_recipe_cannot_be_changed(self):
        recipe = read_recipe("quick", ["data.dataset=prepared"])
        with pytest.raises(ValueError, match="frozen"):
            recipe.seed = 3


def test_all_problems_of_a_recipe_are_listed_at_once(tmp_path):
    path = write_file(
        tmp_path,
        """
loss: {fom: relaxed, form: mni, gamma: x}
optimser: {lr: 0.1}
teacher: {run: a, temperature: hot, terms: [region, dice]}
data: {dataset: 3, folds: [a]}
schedule: 3
augment: {scale: [1, 2, 3]}
batch_size: 8.5
""",
    )
    wrong = "augment.scale batch_size data.dataset data.folds loss.fom loss.form loss.gamma optimser schedule"
    lines = problems(path)
    assert all(line.startswith(f"{path}: ") for line in lines)
    keys = sorted(line.removeprefix(f"{path}: ").partition(":")[0] for line in lines)
    assert keys == [*wrong.split(), "teacher.temperature", "teacher.terms"]


class TestWriting:
    def test_a_written_recipe_is_read_back_unchanged_and_written_again_with_the_same_bytes(self, tmp_path):
        overrides = ["data.dataset=prepared", "name='1e-3'", "optimiser.lr=3e-17", "teacher.run=big"]
        overrides += ["model.options={norm: group, channels: [8, 16]}", "loss.class_weight=[0.1, 3]"]
        recipe = read_recipe("quick", overrides)
        write_recipe(recipe, tmp_path / "recipe.yaml")
        again = read_recipe(tmp_path / "recipe.yaml")
        assert again == recipe
        write_recipe(again, tmp_path / "again.yaml")
        assert (tmp_path / "again.yaml").read_bytes() == (tmp_path / "recipe.yaml").read_bytes()
        assert sorted(file.name for file in tmp_path.iterdir()) == ["again.yaml", "recipe.yaml"]

    def test_a_written_recipe_has_every_option_in_the_order_of_declaration(self, tmp_path):
        recipe = read_recipe("tumour_distillation", ["data.dataset=prepared", "teacher.run=big"])
        write_recipe(recipe, tmp_path / "recipe.yaml")
        # an independent YAML 1.1 reader gives the same values
        read = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
        assert read == recipe.model_dump(mode="json")
        assert read.pop("reasons") == {}
        keys = [key for section, options in read.items() for key in _keys(section, options)] + ["reasons"]
        assert keys == [option.key for option in options_of() if option.section is None]

    def test_a_moved_run_folder_still_finds_its_dataset(self, tmp_path):
        path = write_file(tmp_path, "data: {dataset: prepared}")
        (tmp_path / "run").mkdir()
        write_recipe(read_recipe(path), tmp_path / "run" / "recipe.yaml")
        (tmp_path / "far" / "away").mkdir(parents=True)
        moved = (tmp_path / "run").rename(tmp_path / "far" / "away" / "run")
        assert read_recipe(moved / "recipe.yaml").data.dataset == tmp_path / "prepared"

    def test_a_teacher_next_to_the_run_moves_with_it_and_another_teacher_does_not(
        self, tmp_path, monkeypatch
    ):
        (tmp_path / "out" / "student").mkdir(parents=True)
        # the output folder is a relative path
        monkeypatch.chdir(tmp_path)
        neighbour, elsewhere = tmp_path / "out" / "big", tmp_path / "big"
        for teacher, expected in ((neighbour, tmp_path / "moved" / "big"), (elsewhere, elsewhere)):
            recipe = read_recipe("quick", ["data.dataset=prepared", f"teacher.run={teacher}"])
            file = Path("out/student/recipe.yaml")
            write_recipe(recipe, file)
            assert read_recipe(file) == recipe
            moved = Path("out").rename("moved")
            assert read_recipe(moved / "student" / "recipe.yaml").teacher.run == expected
            moved.rename("out")

    def test_differing_options_are_named(self):
        recipe = read_recipe("quick", ["data.dataset=prepared"])
        changed = read_recipe("quick", ["data.dataset=prepared", "loss.form=product", "teacher.run=big"])
        assert differing_keys(recipe, recipe) == []
        keys = differing_keys(recipe, changed)
        assert {"loss.form", "teacher.run"} <= set(keys)
        assert all(key == "loss.form" or key.startswith("teacher") for key in keys)


def _keys(section, options):
    if not isinstance(options, dict):
        return [section]
    return [f"{section}.{name}" for name in options]


class TestYaml:
    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("1e-3", 0.001), ("5E4", 50000.0), ("-.5", -0.5), ("1.", 1.0), ("8", 8), ("-3", -3),
            ("true", True), ("False", False), ("null", None), ("~", None), ("", None),
            ("off", False), ("none", "none"), ("e3", "e3"), ("'1e-3'", "1e-3"), ("2.1.0", "2.1.0"),
        ],
    )  # fmt: skip
    def test_numbers_words_and_nothing(self, text, value):
        read = parse_yaml(text, "here")
        assert read == value
        assert type(read) is type(value)

    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
            | st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S", "Zs")))
            | st.sampled_from(["off", "1e-3", "null", "~", "010", "1:30", "2024-01-31", "=", "<<", "1.0e5"]),
            lambda inner: st.lists(inner, max_size=3)
            | st.dictionaries(st.from_regex("[a-z_]{1,8}", fullmatch=True), inner, max_size=3),
            max_leaves=8,
        )
    )  # fmt: skip
    def test_a_written_value_is_read_back_exactly(self, value):
        assert parse_yaml(yaml_text(value), "here") == value


class TestBuilding:
    @pytest.mark.parametrize(
        ("options", "alpha", "beta"),
        [
            ({}, 0.5, 0.5),
            ({"alpha": 0.7, "beta": 0.3}, 0.7, 0.3),
        ],
    )
    def test_the_loss_has_the_options_of_the_recipe(self, options, alpha, beta):
        overrides = [f"loss.{name}={value}" for name, value in options.items()]
        overrides += ["data.dataset=x", "loss.form=product", "loss.class_weight=[1, 2]"]
        loss = semidice.SegmentationLoss(**asdict(read_recipe("quick", overrides).loss))
        logits, target = torch.randn(2, 2, 8, 8), torch.rand(2, 2, 8, 8).softmax(1)
        expected = 0.25 * semidice.soft_cross_entropy(
            logits, target, activation="softmax", class_weight=[1, 2]
        ) + 0.75 * semidice.tversky_loss(
            logits, target, alpha=alpha, beta=beta, activation="softmax", form="product", class_weight=[1, 2]
        )
        torch.testing.assert_close(loss(logits, target), expected)

    def test_invalid_options_of_the_loss_are_refused_on_reading(self):
        wrong = ["loss.alpha=0.7", "loss.form=squared"]
        assert "form squared needs alpha = beta" in problems("quick", ["data.dataset=x", *wrong])[0]
        weights = ["loss.region_weight=0", "loss.cross_entropy_weight=0", "loss.calibration_weight=1"]
        assert "both 0" in problems("quick", ["data.dataset=x", *weights])[0]

    @pytest.mark.parametrize("name", ["activation", "ignore_index", "sync"])
    def test_arguments_of_a_loss_that_depend_on_the_task_are_no_options_of_a_recipe(self, name):
        (problem,) = problems("quick", ["data.dataset=x", f"loss.{name}=1"])
        assert f"loss.{name}" in problem
        assert "no such option" in problem


class TestShipped:
    def test_the_files_are_in_the_package(self):
        names = sorted(path.stem for path in RECIPES.glob("*.yaml"))
        assert sorted([*shipped_recipes(), *shipped_grids()]) == names
        assert {"auto", "quick"} <= set(shipped_recipes())

    @pytest.mark.parametrize("name", shipped_recipes())
    def test_a_shipped_recipe_and_the_overrides_in_its_comments_are_valid(self, name):
        needed = ["data.dataset=prepared"]
        if name == "tumour_distillation":
            needed.append("teacher.run=big")
        assert read_recipe(name, needed, accelerator=None).name
        lines = [line for line in (RECIPES / f"{name}.yaml").read_text().splitlines() if line.startswith("#")]
        examples = [re.findall(r"--set ([\w.]+=[^\s,`]+)", line) for line in lines]
        assert any(examples)
        for overrides in filter(None, examples):
            read_recipe(name, [*needed, *overrides], accelerator=None)

    @pytest.mark.parametrize(
        ("name", "epochs", "size"),
        [("qubiq_labels", 150, 256), ("qubiq_losses", 150, 256), ("tumours", 60, 512),
         ("tumour_distillation", 60, 512)],
    )  # fmt: skip
    def test_shipped_recipes_follow_the_protocol_in_section_3_of_the_paper(self, name, epochs, size):
        recipe = read_recipe(name, ["data.dataset=prepared", "teacher={run: big, reweight_keys: false}"])
        assert (recipe.schedule.epochs, recipe.augment.crop) == (epochs, (size, size))
        assert (recipe.optimiser.lr, recipe.optimiser.momentum, recipe.optimiser.weight_decay) == (
            0.01,
            0.9,
            5e-4,
        )
        assert (recipe.schedule.power, recipe.batch_size, recipe.data.num_folds) == (0.9, 8, 5)
        assert (recipe.loss.alpha, recipe.loss.beta, recipe.loss.form) == (0.5, 0.5, "min")
        assert (recipe.loss.cross_entropy_weight, recipe.loss.region_weight) == (0.25, 0.75)
        assert recipe.model.weights == "imagenet"
        assert recipe.augment.scale == (0.5, 2.0)


class TestPage:
    def test_the_tables_of_the_page_match_the_options(self):
        page = recipe_table.PAGE.read_text()
        assert recipe_table.with_tables(page) == page, "run python docs/recipe_table.py"

    def test_every_option_has_a_description_and_a_row(self):
        page = recipe_table.PAGE.read_text()
        for option in options_of():
            if option.section is None:
                assert option.meaning, option.key
                assert f"| `{option.key}` |" in page
