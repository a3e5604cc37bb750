"""Small files that ask for much are refused with the number, before memory is taken."""

import ast
import gzip
import json
import os
import resource
import signal
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import nibabel
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from bad_commands import run_command
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from prepared import make_prepared
from trained import make_run
from typer.testing import CliRunner

from semidice import limits
from semidice.cli import app
from semidice.data.dataset import Dataset
from semidice.data.manifest import PrepareOptions, read_manifest
from semidice.data.sources.readers import file_shape, read_image, read_mask
from semidice.data.storage import Storage
from semidice.limits import read_json
from semidice.metrics.cases import CaseRow, CaseTable, read_cases, write_cases
from semidice.metrics.cells import escaped_cell, unescaped_cell
from semidice.metrics.tables import Cell, Table
from semidice.networks.build import build_model
from semidice.networks.checkpoint import Checkpoint
from semidice.recipes import read_recipe
from semidice.recipes.grid import read_variants
from semidice.recipes.text import parse_yaml
from semidice.report.curves import read_log
from semidice.runs.predictions import read_prediction, write_prediction

LAUGHS = "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)
MERGES = "a0: &a0 {k: 1}\n" + "".join(
    f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}\n" for n in range(1, 10)
)


class TestRecipes:
    @pytest.mark.parametrize("text", [LAUGHS, MERGES])
    def test_aliases_that_multiply_are_refused_with_the_number_of_values(self, text):
        with pytest.raises(ValueError, match=r"recipe: aliases make it \d{9,} values; at most 100000"):
            parse_yaml(text, "recipe")

    def test_an_alias_of_itself_is_refused(self):
        with pytest.raises(ValueError, match="recipe: aliases make it 100003 values; at most"):
            parse_yaml("a: &a [*a]", "recipe")

    def test_an_alias_that_is_used_twice_is_allowed(self):
        assert parse_yaml("a: &a [1, 2]\nb: *a", "r") == {"a": [1, 2], "b": [1, 2]}

    def test_deep_nesting_is_refused(self):
        with pytest.raises(ValueError, match="nested too deeply"):
            parse_yaml("[" * 50_000, "recipe")

    def test_a_long_text_is_refused_before_it_is_parsed(self, tmp_path):
        path = tmp_path / "recipe.yaml"
        path.write_text("#" * (limits.MAX_RECIPE_BYTES + 1))
        for read in (lambda: read_recipe(path), lambda: read_variants([str(path)], dataset=path, out=path)):
            with pytest.raises(ValueError, match=r"recipe\.yaml has 1048577 bytes; at most 1048576 are read"):
                read()

    def test_a_billion_folds_are_refused(self):
        with pytest.raises(
            ValueError, match=r"data.num_folds: expected less than or equal to 1000; got 10+$"
        ):
            read_recipe("quick", ["data.dataset=data", "data.num_folds=1000000000"])

    @pytest.mark.parametrize(
        "options",
        [
            {"architecture": "small_unet", "encoder": "none", "channels": [8, 10**9]},
            {"architecture": "unet", "encoder": "resnet18", "decoder_channels": [10**9]},
            {"architecture": "unet", "encoder": "tu-resnet18", "encoder_options": {"img_size": float("inf")}},
        ],
    )
    def test_a_network_with_a_billion_channels_is_refused(self, options):
        with pytest.raises(ValueError, match="may be 4096 at most; got"):
            build_model(weights="none", num_channels=1, num_classes=2, **options)


class TestFilesWithoutAnEnd:
    READERS = (
        lambda path: read_image(path.with_suffix(".png"), num_axes=2),
        lambda path: file_shape(path.with_suffix(".nii.gz")),
        lambda path: read_mask(path.with_suffix(".tif"), num_axes=2),
        lambda path: read_recipe(path.with_suffix(".yaml")),
        lambda path: read_cases(path.with_suffix(".parquet")),
        lambda path: read_cases(path.with_suffix(".csv")),
        lambda path: read_prediction(path.with_suffix(".npz")),
        lambda path: Checkpoint(path.with_suffix(".safetensors")),
        lambda path: read_log(path.with_suffix(".jsonl")),
        lambda path: read_json(path.with_suffix(".json")),
        lambda path: build_model(
            architecture="unet",
            encoder="tu-resnet18",
            weights=str(path.with_suffix(".safetensors")),
            num_channels=3,
            num_classes=2,
        ),
    )

    @pytest.mark.parametrize("number", range(len(READERS)))
    @pytest.mark.parametrize("kind", ["pipe", "device"])
    def test_a_pipe_or_device_is_refused_and_nothing_waits_for_it(self, number, kind, tmp_path):
        suffixes = ".png .nii.gz .tif .yaml .parquet .csv .npz .safetensors .json .jsonl"
        for suffix in suffixes.split():
            path = (tmp_path / "file").with_suffix(suffix)
            if kind == "pipe":
                os.mkfifo(path)
            else:
                path.symlink_to("/dev/zero")
        with pytest.raises(ValueError, match=f"is a {kind}, which has no end"):
            self.READERS[number](tmp_path / "file")

    def test_the_folders_of_a_stranger_are_read_to_the_end_although_they_hold_pipes(self, tmp_path):
        """One file after the other of a run and its dataset is replaced by a pipe."""
        dataset = make_prepared(tmp_path / "data")
        run = make_run(tmp_path / "run", dataset)
        picture = tmp_path / "a.png"
        Image.radial_gradient("L").save(picture)
        predict = ["predict", run.path, picture, "-o", tmp_path / "out"]
        evaluate = ["evaluate", run.path, "--decide", "fitted"]
        assert run_command(predict)[0] == run_command(evaluate)[0] == 0
        files = {
            run.recipe: predict,
            run.dataset: predict,
            run.fold(0).last: predict,
            run.decision: [*predict[:-1], tmp_path / "new", "--decide", "fitted"],
            tmp_path / "out/prediction.json": predict,
            tmp_path / "out/volumes.csv": predict,
            picture: [*predict[:-1], tmp_path / "other"],
            run.folds: evaluate,
            run.fold(0).prediction("scan002"): evaluate,
            run.decisions: evaluate,
            dataset.folder.manifest: evaluate,
            dataset.folder.array("masks", "scan000"): ["check", dataset.folder.path],
            dataset.folder.array("masks", "scan001"): [*evaluate, "--metric", "dice_score"],
        }

        def too_long(*_):
            raise AssertionError("it waits for a pipe")

        handler = signal.signal(signal.SIGALRM, too_long)
        for path, command in files.items():
            content = path.read_bytes()
            path.unlink()
            os.mkfifo(path)
            signal.alarm(60)
            code, printed, unhandled = run_command(command)
            signal.alarm(0)
            assert unhandled is None, (path, unhandled)
            # a pipe in the place of results of the same command is replaced by them
            assert code == (0 if path.parent == tmp_path / "out" or path == run.decisions else 1), printed
            path.unlink()
            path.write_bytes(content)
        signal.signal(signal.SIGALRM, handler)

    def test_prepare_names_a_pipe_among_the_images(self, tmp_path):
        for folder in ("images", "masks"):
            (tmp_path / "raw" / folder).mkdir(parents=True)
        os.mkfifo(tmp_path / "raw" / "images" / "a.png")
        os.mkfifo(tmp_path / "raw" / "masks" / "a.png")
        done = CliRunner().invoke(
            app, ["prepare", "folder", str(tmp_path / "raw"), str(tmp_path / "out"), "--workers", "0"]
        )
        assert done.exit_code == 1
        assert "a.png" in done.output


def nifti_bytes(shape, *, declared=None, vox_offset=None, after=b""):
    """A NIfTI file of zeros, of which the header may declare another shape or start of the voxels."""
    image = nibabel.Nifti1Image(np.zeros(shape, np.uint8), np.eye(4))
    raw = bytearray(image.to_bytes())
    if declared is not None:
        raw[40:56] = np.array([len(declared), *declared], np.int16).tobytes().ljust(16, b"\1")
    if vox_offset is not None:
        raw[108:112] = np.float32(vox_offset).tobytes()
    return bytes(raw) + after


class TestImages:
    def test_a_nifti_that_declares_too_many_voxels_is_refused(self, tmp_path):
        path = tmp_path / "a.nii.gz"
        path.write_bytes(gzip.compress(nifti_bytes((4, 4, 4), declared=(32000, 32000, 32000))))
        for read in (lambda: file_shape(path), lambda: read_image(path, num_axes=3)):
            with pytest.raises(
                ValueError, match=r"declares 32000 x 32000 x 32000 = 32768000000000 values; at"
            ):
                read()

    def test_what_follows_the_voxels_of_a_compressed_nifti_is_bounded(self, tmp_path):
        path = tmp_path / "a.nii.gz"
        image = nibabel.Nifti1Image(np.arange(64, dtype=np.uint8).reshape(4, 4, 4), np.eye(4)).to_bytes()
        path.write_bytes(gzip.compress(image + bytes(1000)))
        assert read_image(path, num_axes=3).values.shape == (1, 4, 4, 4)
        path.write_bytes(gzip.compress(image + bytes(2 * limits.MAX_NIFTI_EXTRA_BYTES)))
        with pytest.raises(
            ValueError, match=r"a\.nii\.gz: it holds more than the 16777280 bytes that its hea"
        ):
            read_image(path, num_axes=3)

    def test_a_header_cannot_ask_for_a_large_extension(self, tmp_path):
        raw = bytearray(nifti_bytes((4, 4, 4), vox_offset=2**30))
        raw[348:360] = b"\1\0\0\0" + np.array([2**30, 4], np.int32).tobytes()
        path = tmp_path / "a.nii.gz"
        path.write_bytes(gzip.compress(bytes(raw)))
        with pytest.raises(ValueError, match=r"it holds more than the 16777280 bytes"):
            read_image(path, num_axes=3)

    def test_a_picture_that_declares_too_many_pixels_is_refused(self, tmp_path, monkeypatch):
        path = tmp_path / "a.png"
        Image.radial_gradient("L").save(path)
        raw = bytearray(path.read_bytes())
        # width and height of the header, and its checksum
        raw[16:24] = (60_000).to_bytes(4, "big") * 2
        raw[29:33] = zlib.crc32(bytes(raw[12:29])).to_bytes(4, "big")
        path.write_bytes(bytes(raw))
        for limit in (Image.MAX_IMAGE_PIXELS, None):
            monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
            with pytest.raises(ValueError, match="3600000000"):
                read_image(path, num_axes=2)


class TestPreparedData:
    def test_a_manifest_with_a_huge_shape_is_refused(self, tmp_path):
        dataset = make_prepared(tmp_path / "data")
        record = json.loads(dataset.folder.manifest.read_text())
        record["scans"][0]["shape"] = [10**5, 10**5]
        dataset.folder.manifest.write_text(json.dumps(record))
        with pytest.raises(
            ValueError, match=r"shape of scan scan000 declares 100000 x 100000 = 10000000000 va"
        ):
            read_manifest(tmp_path / "data")

    def test_a_shape_that_the_arrays_do_not_have_is_refused_before_memory_is_taken(self, tmp_path):
        dataset = make_prepared(tmp_path / "data")
        record = json.loads(dataset.folder.manifest.read_text())
        record["scans"][0]["shape"] = [30_000, 30_000]
        dataset.folder.manifest.write_text(json.dumps(record))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(
            ValueError, match=r"holds \(1, 32, 32\) for a case, but the manifest says \(1, 30000"
        ):
            Storage(Dataset(tmp_path / "data"), "cpu")
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000

    def test_a_huge_size_to_resize_to_is_refused(self):
        with pytest.raises(ValueError, match="size declares 100000 x 100000 = 10000000000 values"):
            PrepareOptions(size=(10**5, 10**5))

    def test_the_run_of_a_stranger_cannot_ask_for_a_billion_raters(self, tmp_path):
        run = make_run(tmp_path / "run", make_prepared(tmp_path / "data"), scored=False)
        record = json.loads(run.dataset.read_text()) | {"num_raters": 10**9}
        run.dataset.write_text(json.dumps(record))
        done = CliRunner().invoke(app, ["evaluate", str(run.path)])
        assert done.exit_code == 1
        assert "num_raters: Input should be less than or equal to 1000" in done.stderr


class TestPredictions:
    def test_an_archive_that_expands_to_another_shape_is_not_expanded(self, tmp_path):
        path = tmp_path / "case.npz"
        with (
            zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
            archive.open("foreground.npy", "w", force_zip64=True) as file,
        ):
            header = {"descr": "<u2", "fortran_order": False, "shape": (1, 2**14, 2**14)}
            np.lib.format.write_array_header_1_0(file, header)
            for _ in range(64):
                file.write(bytes(2**23))
        assert path.stat().st_size < 2**20
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(ValueError, match=r"has shape \(2, 16384, 16384\), but the case has"):
            read_prediction(path, shape=(2, 32, 32))
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000

    def test_an_archive_that_declares_too_many_values_is_refused(self, tmp_path):
        path = tmp_path / "case.npz"
        with zipfile.ZipFile(path, "w") as archive, archive.open("foreground.npy", "w") as file:
            header = {"descr": "<u2", "fortran_order": False, "shape": (1, 10**5, 10**5)}
            np.lib.format.write_array_header_1_0(file, header)
        with pytest.raises(ValueError, match="declares 1 x 100000 x 100000 = 10000000000 values"):
            read_prediction(path)

    def test_a_stored_prediction_of_the_expected_shape_is_read(self, tmp_path):
        prob = np.full((2, 4, 4), 0.5, np.float32)
        write_prediction(tmp_path / "a.npz", prob)
        np.testing.assert_allclose(read_prediction(tmp_path / "a.npz", shape=(2, 4, 4)), prob, atol=1e-5)

    def test_a_table_that_declares_too_many_rows_is_refused(self, tmp_path):
        path = tmp_path / "cases.parquet"
        rows = pyarrow.table({"case": pyarrow.array(["a"]).take(pyarrow.array(np.zeros(10**6, np.int32)))})
        many = pyarrow.concat_tables([rows] * 11)
        pyarrow.parquet.write_table(many, path)
        assert path.stat().st_size < 2**20
        with pytest.raises(ValueError, match=r"declares 11000000 rows; at most 10000000 are read"):
            read_cases(path)


class TestCells:
    @given(st.text())
    def test_every_name_is_read_back_as_it_was(self, name):
        assert unescaped_cell(escaped_cell(name)) == name

    @given(st.text())
    def test_no_cell_is_a_formula(self, name):
        assert not escaped_cell(name).startswith(("=", "+", "-", "@", "\t", "\r", "\n"))

    def test_names_in_a_case_table_are_escaped_and_read_back_and_numbers_are_not(self, tmp_path):
        row = CaseRow("=cmd|' /C calc'!A0", "@x", -1, "+a", "-b", "'=c", -0.5)
        table = CaseTable.from_rows([row])
        write_cases(table, tmp_path / "cases.csv")
        text = (tmp_path / "cases.csv").read_text()
        assert text.splitlines()[1] == "'=cmd|' /C calc'!A0,'@x,-1,'+a,'-b,''=c,-0.5"
        assert next(read_cases(tmp_path / "cases.csv").rows()) == row

    def test_names_in_a_table_of_means_are_escaped_and_numbers_are_not(self):
        table = Table("t", ("method",), ((Cell("=1"),),), "", ({"method": "=1+1", "mean": -1.5},))
        assert table.csv() == "method,mean\n'=1+1,-1.5\n"


def test_no_bound_is_stated_anywhere_else():
    """Numbers that bound a file are in `limits` alone; readers import them."""
    sources = Path(limits.__file__).parent
    users = [path for path in sources.rglob("*.py") if "limits import" in path.read_text()]
    assert len(users) >= 10
    names = [name for name in vars(limits) if name.startswith("MAX_")]
    for name in names:
        # the others are the defaults of functions in `limits`
        is_default = name in ("MAX_VALUES", "MAX_JSON_BYTES")
        assert any(name in path.read_text() for path in users) or is_default, name


# modules that read what no stranger writes: the machine's own files, files of this package, an owner's lock
OWN_READERS = {
    *("limits.py", "locks.py", "recipes/files.py", "reproduce/tables.py", "report/page/build.py"),
    *("kernels/__init__.py", "data/storage.py", "training/crossvalidation.py", "metrics/accumulators.py"),
    # of a dataset that was just compared with its hashes
    "data/prepare/scan.py",
}


def unbounded_reads(source):
    """Calls that read a whole file, or nested text, without a bound."""
    calls = [ast.unparse(node.func) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    readers = (".read_text", ".read_bytes", "json.loads", "json.load", "np.load")
    return [call for call in calls if call.endswith(readers)]


def test_every_file_is_read_through_the_bounds():
    root = Path(limits.__file__).parent
    found = {
        str(path.relative_to(root)): unbounded_reads(path.read_text())
        for path in root.rglob("*.py")
        if str(path.relative_to(root)) not in OWN_READERS
    }
    assert {path: calls for path, calls in found.items() if calls} == {}


def test_an_unbounded_read_is_found():
    assert unbounded_reads("json.loads(path.read_text())") == ["json.loads", "path.read_text"]
    assert unbounded_reads("read_json(path)") == []


def test_the_memory_of_a_refusal_is_small():
    code = f"""
import resource
from semidice.recipes.text import parse_yaml
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    parse_yaml({LAUGHS!r}, "recipe")
except ValueError:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 20_000
