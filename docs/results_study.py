"""Train and score the studies of docs/results.md, and store the scores of every case in docs/results.

    python docs/results_study.py run labels --lidc RAW --hippocampus RAW --weights FILE --work DIR

Each study is one `semidice compare`. Raw data are prepared in DIR if they are not. A stopped command goes on
where it stopped, and its seconds are added up. A study whose files are stored is not run again.
`--epochs`, `--seeds` and `--folds` are for a quick try. Tables and figures: docs/results_tables.py.
"""

import argparse
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
from result_files import RESULTS, Record, write_record, write_scores

import semidice
from semidice.paths import ComparisonFolder, DatasetFolder, MethodFolder, RunFolder, atomic_write
from semidice.statistics.cases import CaseTable, concatenate, read_cases


class Data(NamedTuple):
    """A dataset: how it is prepared, and the options of every training on it."""

    source: str
    prepare: tuple[str, ...]
    epochs: int
    batch_size: int
    metrics: tuple[str, ...]
    pretrained: bool = False


class Study(NamedTuple):
    """A comparison. decided: methods whose masks are also made by each of `RULES`."""

    data: str
    grids: tuple[str, ...]
    decided: tuple[str, ...] = ()


NUM_FOLDS, NUM_SEEDS = 5, 3
RULES = ("dice", "fitted")
_OF_ONE_RATER = (
    "dice_score",
    "soft_dice_score",
    "calibration_error",
    "brier_error",
    "negative_log_likelihood",
    "volume_error",
)
_OF_SEVERAL_RATERS = (
    "binarized_dice_score",
    "rater_calibration_error",
    "generalised_energy_distance",
    "volume_crps_error",
    "volume_coverage_score",
)
# the epochs were chosen beforehand and are the same for all methods
DATA: Mapping[str, Data] = {
    "lidc": Data("folder", (), 15, 8, (*_OF_ONE_RATER, *_OF_SEVERAL_RATERS), pretrained=True),
    "hippocampus": Data("nnunet", ("--slices", "all"), 2, 16, _OF_ONE_RATER),
}
STUDIES: Mapping[str, Study] = {
    "labels": Study("lidc", ("labels", "losses"), decided=("majority_sdl", "uniform_sdl", "uniform")),
    "smoothing": Study("lidc", ("smoothing",)),
    "systems": Study("lidc", ("systems",)),
    "distillation": Study("hippocampus", ("distillation",)),
    "bandwidth": Study("hippocampus", ("bandwidth",)),
    "raters": Study("lidc", ("raters",)),
}


class Settings(NamedTuple):
    """What a call of this script decides. folds: numbers of the folds to run; None runs all."""

    lidc: Path
    hippocampus: Path
    weights: Path
    work: Path
    out: Path
    on: str | None = None
    epochs: int | None = None
    seeds: int = NUM_SEEDS
    folds: tuple[int, ...] | None = None

    def num_epochs(self, study: Study) -> int:
        return self.epochs or DATA[study.data].epochs


def compare_arguments(study: Study, settings: Settings, dataset: str, weights: str, out: str) -> list[str]:
    """The arguments of `semidice compare` with these names of the dataset, of the weights and of OUT."""
    data = DATA[study.data]
    options = {
        "schedule.epochs": settings.num_epochs(study),
        "batch_size": data.batch_size,
        "data.num_folds": NUM_FOLDS,
        "validation.every": settings.num_epochs(study),
        "validation.metrics": f"[{','.join(data.metrics)}]",
    }
    if data.pretrained:
        options["model.weights"] = weights
    if settings.folds is not None:
        options["data.folds"] = f"[{','.join(map(str, settings.folds))}]"
    arguments = ["compare", dataset, *study.grids, "-o", out, "--seeds", str(settings.seeds)]
    arguments += [part for key, value in options.items() for part in ("--set", f"{key}={value}")]
    return arguments if settings.on is None else [*arguments, "--on", settings.on]


def shown_command(study: Study, settings: Settings) -> str:
    """The command with names in place of folders; brackets are quoted for a shell."""
    arguments = compare_arguments(study, settings, study.data.upper(), "WEIGHTS", "OUT")
    return shlex.join(["semidice", *arguments])


def run_study(name: str, settings: Settings) -> None:
    """Train, score and store one study, unless it is stored."""
    study, record_path = STUDIES[name], settings.out / f"{name}.json"
    if record_path.is_file():
        print(f"{name}: stored in {record_path.parent}; remove {record_path.name} to run it again")
        return
    dataset, out = settings.work / study.data, settings.work / name
    _prepare(study.data, settings, dataset)
    arguments = compare_arguments(study, settings, str(dataset), str(settings.weights), str(out))
    started = time.time()
    command = [sys.executable, "-m", "semidice", *arguments]
    seconds, code = _timed(command, settings.work / f"{name}.seconds")
    cases = ComparisonFolder(out).cases
    # if some methods failed, the others are stored, but not as a finished study
    if cases.is_file() and cases.stat().st_mtime >= started:
        write_scores(read_cases(cases), settings.out / f"{name}.parquet")
    if code != 0:
        raise SystemExit(f"stopped with exit code {code}: {shlex.join(command)}")
    if study.decided:
        write_scores(decisions(study, out), settings.out / f"{name}_decisions.parquet")
    write_record(_record(study, settings, seconds), record_path)
    print(f"{name}: {seconds:.0f} seconds; wrote {record_path}")


def decisions(study: Study, out: Path) -> CaseTable:
    """The scores of the study's decided methods by argmax and each rule, as methods NAME, RULE.

    Each run is one process of one thread: fitting a rule is no work for a GPU.
    """
    runs = [run for method in study.decided for run in _runs(method, out)]
    with ThreadPoolExecutor(min(len(runs), os.cpu_count() or 1)) as pool:
        return concatenate(pool.map(lambda run: _decided(*run), runs))


def _runs(method: str, out: Path) -> list[tuple[str, int | None, RunFolder]]:
    seeds = MethodFolder(out / method).seeds()
    return [(method, seed if len(seeds) > 1 else None, run) for seed, run in seeds.items()]


def _decided(method: str, seed: int | None, run: RunFolder) -> CaseTable:
    path = run.path.parent / f"{run.path.name}_rules.parquet"
    if not path.is_file():
        rules = [part for rule in RULES for part in ("--decide", rule)]
        command = [sys.executable, "-m", "semidice", "evaluate", str(run.path), *rules, "-o", str(path)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    table = read_cases(path)
    named = table.assign(method=f"{method}, " + table["method"])
    return named if seed is None else named.assign(seed=seed)


def _prepare(name: str, settings: Settings, dataset: Path) -> None:
    if DatasetFolder(dataset).manifest.is_file():
        return
    raw = str({"lidc": settings.lidc, "hippocampus": settings.hippocampus}[name])
    data = DATA[name]
    command = [sys.executable, "-m", "semidice", "prepare", data.source, raw, str(dataset), *data.prepare]
    subprocess.run(command, check=True)


def _timed(command: Sequence[str], path: Path) -> tuple[float, int]:
    """Run a command: the seconds of this call and of stopped calls before it, from a file; the exit code."""
    path.parent.mkdir(parents=True, exist_ok=True)
    before = float(path.read_text()) if path.is_file() else 0.0
    start = time.monotonic()
    # not subprocess.run: a call that is killed has stored all but its last seconds
    with subprocess.Popen(command) as process:
        try:
            while process.poll() is None:
                time.sleep(0.5)
                with atomic_write(path) as temp_path:
                    temp_path.write_text(f"{before + time.monotonic() - start:.1f}")
        finally:
            process.terminate()
    return before + time.monotonic() - start, process.returncode


def _record(study: Study, settings: Settings, seconds: float) -> Record:
    return Record(
        command=shown_command(study, settings),
        seeds=settings.seeds,
        folds=NUM_FOLDS if settings.folds is None else len(settings.folds),
        epochs=settings.num_epochs(study),
        seconds=round(seconds, 1),
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        versions={
            "semidice": semidice.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    )


def _stopped(*_: object) -> NoReturn:
    raise SystemExit("stopped; the same command continues")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="train and score studies")
    run.add_argument("names", nargs="+", choices=STUDIES, metavar="NAME", help=", ".join(STUDIES))
    run.add_argument("--lidc", type=Path, required=True, help="raw LIDC slices")
    run.add_argument("--hippocampus", type=Path, required=True, help="raw task 4 of the Decathlon")
    run.add_argument("--weights", type=Path, required=True, help="tf_efficientnet_lite0.safetensors")
    run.add_argument("--work", type=Path, required=True, help="folder for prepared data and runs")
    run.add_argument("--out", type=Path, default=RESULTS, help="folder for the stored results")
    run.add_argument("--on", help="engine, as in semidice compare")
    run.add_argument("--epochs", type=int, help="of every training, for a quick try")
    run.add_argument("--seeds", type=int, default=NUM_SEEDS, help="trainings of each method")
    run.add_argument("--folds", type=int, nargs="+", help="numbers of the folds to run, for a quick try")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    options = vars(_parser().parse_args(arguments))
    options.pop("command")
    names, folds = options.pop("names"), options.pop("folds")
    settings = Settings(**options, folds=None if folds is None else tuple(folds))
    signal.signal(signal.SIGTERM, _stopped)
    for name in dict.fromkeys(names):
        run_study(name, settings)


if __name__ == "__main__":
    main()
