"""nnU-Net's training step with its own loss and with ours, and whole trainings beside our own `auto`.

    pip install 'semidice[nnunet]'
    python benchmarks/bench_nnunet.py step --out step.json
    python benchmarks/bench_nnunet.py train lidc --raw DATA -o bench_out --weights WEIGHTS.safetensors
    python benchmarks/bench_nnunet.py runs lidc -o bench_out --out lidc.json
    python benchmarks/bench_nnunet.py docs step.json lidc.json hippocampus.json --docs docs/nnunet.md

`step`: forward, loss, backward and update of nnU-Net's network with random images, in half precision as it
trains, for two plans: 2d, batch 12 of 512 x 512, and 3d_fullres, batch 2 of 128 x 128 x 128. Their loss is
Dice + CE with labels of one rater, nearest-neighbour at the coarse outputs; nnU-Net compiles its Dice. Ours
is `RatersLoss` with the mean of four raters. Both take turns in one process. The memory is the largest of a
step, beyond what was there before.

`train lidc|hippocampus`: prepares the raw data of DATA/lidc or DATA/hippocampus, exports and preprocesses
them for nnU-Net, and trains `auto` and, in each configuration, nnU-Net with its own loss and with mean +
DML1, on the same folds, several trainings at a time. Every step is a semidice command. What is finished is
skipped.

`runs`: collects the trainings and scores whole scans, with the differences to nnU-Net's own loss. The minutes
are those of a fold while others were trained on the same GPU; of nnU-Net, those of its epochs.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from doc_tables import write_between_markers

from semidice.paths import RunFolder

PLANS = {
    "2d, 12 x 512 x 512": (2, 12, (512, 512), 8),
    "3d_fullres, 2 x 128 x 128 x 128": (3, 2, (128, 128, 128), 6),
}
NUM_RATERS, NUM_CLASSES = 4, 3
# of a line in nnU-Net's log
EPOCH_TIME = r"Epoch time: ([0-9.]+) s"
SCORES = {
    "dice_score": ("Dice", 100),
    "binarized_dice_score": ("BDice", 100),
    "calibration_error": ("ECE", 100),
    "volume_coverage_score": ("raters' volumes in 90 % interval", 100),
}


def network(num_axes: int, num_stages: int) -> torch.nn.Module:
    """The network that nnU-Net plans for such patches."""
    from dynamic_network_architectures.architectures.unet import PlainConvUNet

    conv = torch.nn.Conv2d if num_axes == 2 else torch.nn.Conv3d
    norm = torch.nn.InstanceNorm2d if num_axes == 2 else torch.nn.InstanceNorm3d
    features = [min(32 * 2**stage, 512 if num_axes == 2 else 320) for stage in range(num_stages)]
    model: torch.nn.Module = PlainConvUNet(
        1,
        num_stages,
        features,
        conv,
        3,
        [1] + [2] * (num_stages - 1),
        2,
        NUM_CLASSES,
        2,
        conv_bias=True,
        norm_op=norm,
        norm_op_kwargs={"eps": 1e-5, "affine": True},
        nonlin=torch.nn.LeakyReLU,
        nonlin_kwargs={"inplace": True},
        deep_supervision=True,
    )
    return model


def losses(num_outputs: int) -> dict[str, torch.nn.Module]:
    """nnU-Net's own loss and ours, with the same weights of the outputs."""
    from nnunetv2.training.loss.compound_losses import DC_and_CE_loss
    from nnunetv2.training.loss.deep_supervision import DeepSupervisionWrapper
    from nnunetv2.training.loss.dice import MemoryEfficientSoftDiceLoss

    from semidice.data.batches.label_making import LabelOptions
    from semidice.losses import SegmentationLoss
    from semidice.nnunet.options import TrainerOptions
    from semidice.nnunet.trainer import RatersLoss

    weights = [0.5**level for level in range(num_outputs - 1)] + [0.0]
    weights = [weight / sum(weights) for weight in weights]
    own = DC_and_CE_loss(
        {"batch_dice": True, "smooth": 1e-5, "do_bg": False, "ddp": False},
        {},
        weight_ce=1,
        weight_dice=1,
        dice_class=MemoryEfficientSoftDiceLoss,
    )
    # as nnU-Net does
    own.dc = torch.compile(own.dc)
    mix = SegmentationLoss(**asdict(TrainerOptions().loss_options()), scale_weights=weights)
    ours = RatersLoss(mix, LabelOptions(), num_classes=NUM_CLASSES)
    return {"nnU-Net": DeepSupervisionWrapper(own, weights), "semidice": ours}


def time_steps(plan: str, *, compiled: bool, repeats: int = 12) -> list[dict[str, Any]]:
    """Milliseconds and memory of a step, and of the loss alone, by each loss."""
    num_axes, batch_size, size, num_stages = PLANS[plan]
    model = network(num_axes, num_stages).cuda()
    optimiser = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.99, nesterov=True, weight_decay=3e-5)
    scaler = torch.amp.GradScaler("cuda")
    step_model = torch.compile(model) if compiled else model
    image = torch.randn(batch_size, 1, *size, device="cuda")
    raters = torch.randint(0, NUM_CLASSES, (batch_size, NUM_RATERS, *size), device="cuda", dtype=torch.int16)
    label = raters[:, :1].clone()
    with torch.no_grad(), torch.autocast("cuda"):
        sizes = [output.shape[2:] for output in step_model(image)]
    coarse = [torch.nn.functional.interpolate(label.float(), each, mode="nearest-exact") for each in sizes]
    targets = {"nnU-Net": [each.to(torch.int16) for each in coarse], "semidice": [label, raters]}
    both = losses(len(sizes))

    def step(name: str) -> None:
        optimiser.zero_grad(set_to_none=True)
        with torch.autocast("cuda"):
            loss = both[name](step_model(image), targets[name])
        scaler.scale(loss).backward()
        scaler.unscale_(optimiser)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 12)
        scaler.step(optimiser)
        scaler.update()

    logits = [
        torch.randn(batch_size, NUM_CLASSES, *each, device="cuda", dtype=torch.float16).requires_grad_()
        for each in sizes
    ]

    def loss_alone(name: str) -> None:
        with torch.autocast("cuda"):
            loss = both[name](logits, targets[name])
        torch.autograd.grad(loss, logits, allow_unused=True)

    rows = []
    for what, work in (("step", step), ("loss", loss_alone)):
        times: dict[str, list[float]] = {name: [] for name in both}
        memory = {}
        for turn in range(repeats + 3):
            for name in both:
                torch.cuda.synchronize()
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                work(name)
                end.record()
                torch.cuda.synchronize()
                if turn >= 3:
                    times[name].append(start.elapsed_time(end))
                    memory[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
        rows += [
            {"plan": plan, "what": what, "loss": name, "ms": sorted(each)[len(each) // 2], "mb": memory[name]}
            for name, each in times.items()
        ]
    return rows


def step_table(rows: list[dict[str, Any]], device: str) -> str:
    lines = [f"{device}; median of 12 turns.", "", "| plan | | nnU-Net | semidice, 4 raters | ratio |"]
    lines.append("| --- | --- | ---: | ---: | ---: |")
    for plan in dict.fromkeys(row["plan"] for row in rows):
        for what in ("step", "loss"):
            pair = {r["loss"]: r for r in rows if r["plan"] == plan and r["what"] == what}
            theirs, ours = pair["nnU-Net"], pair["semidice"]
            for unit, key, form in (("ms", "ms", ".2f"), ("MiB", "mb", ".0f")):
                cells = [f"{each[key]:{form}}" for each in (theirs, ours)]
                ratio = ours[key] / theirs[key]
                lines.append(f"| {plan} | {what}, {unit} | {' | '.join(cells)} | {ratio:.2f} |")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Experiment:
    """Raw data, nnU-Net's name of them, and a short schedule.

    configurations: epochs and steps per epoch of each. sliced: volumes, of which `auto` sees slices.
    """

    source: str
    dataset: str
    configurations: dict[str, tuple[int, int]]
    auto_epochs: int
    sliced: bool


EXPERIMENTS = {
    "lidc": Experiment("folder", "Dataset101_LIDC", {"2d": (15, 250)}, auto_epochs=30, sliced=False),
    "hippocampus": Experiment(
        "nnunet",
        "Dataset104_Hippocampus",
        {"2d": (10, 50), "3d_fullres": (20, 50)},
        auto_epochs=4,
        sliced=True,
    ),
}
# name of a training, and what `semidice nnunet train` is told
LOSSES = {"own": ["--loss", "nnunet"], "mean_dml1": ["--label", "mean", "--loss", "dml1"]}


@dataclass(frozen=True)
class Work:
    """Folders of one experiment."""

    name: str
    path: Path

    @property
    def experiment(self) -> Experiment:
        return EXPERIMENTS[self.name]

    @property
    def volumes(self) -> Path:
        return self.path / self.name

    @property
    def slices(self) -> Path:
        """What `auto` is trained on."""
        return self.path / f"{self.name}_slices" if self.experiment.sliced else self.volumes

    @property
    def nnunet(self) -> Path:
        return self.path / "nnunet"

    @property
    def minutes(self) -> Path:
        return self.path / f"{self.name}_minutes.json"

    def run(self, name: str) -> Path:
        return self.path / f"{self.name}_runs" / name

    def names(self) -> list[str]:
        """All runs; the first one is what the others are compared with."""
        configurations = reversed(self.experiment.configurations)
        of_nnunet = [f"nnunet_{each}_{loss}" for each in configurations for loss in LOSSES]
        return [of_nnunet[0], "auto", *of_nnunet[1:]]


def semidice(*arguments: object, log: Path | None = None) -> float:
    """Run a command of semidice, with its output in `log`; returns its seconds."""
    start = time.perf_counter()
    # compiling takes longer than it saves in a short training
    environment = {**os.environ, "nnUNet_compile": "f"}
    command = [sys.executable, "-m", "semidice", *map(str, arguments)]
    if log is None:
        subprocess.run(command, check=True, env=environment)
    else:
        with log.open("a") as file:
            subprocess.run(command, check=True, env=environment, stdout=file, stderr=file)
    return time.perf_counter() - start


def prepare(work: Work, raw: Path, processes: int) -> None:
    """The prepared datasets, and nnU-Net's preprocessed data."""
    experiment = work.experiment
    raw = raw / work.name
    whole = ["--slices", "none"] if experiment.sliced else []
    semidice("prepare", experiment.source, raw, work.volumes, *whole)
    if experiment.sliced:
        semidice("prepare", experiment.source, raw, work.slices, "--slices", "all")
    if not (work.nnunet / "raw" / experiment.dataset).exists():
        semidice("nnunet", "export", work.volumes, experiment.dataset, "--work", work.nnunet)
    chosen = [option for each in experiment.configurations for option in ("-c", each)]
    nnunet = ["--work", work.nnunet, "--processes", processes]
    semidice("nnunet", "preprocess", experiment.dataset, *nnunet, *chosen)


def train(
    work: Work, folds: Sequence[int], *, at_once: int, weights: Path | None, device: str, shorter: int
) -> None:
    """Train everything, `at_once` at a time; shorter: divides all epochs and steps."""
    experiment = work.experiment
    jobs: dict[tuple[str, int | None], list[object]] = {}
    network: list[object] = []
    if weights is not None and not experiment.sliced:
        network = [
            "--set",
            "model.encoder=tf_efficientnet_lite0",
            "--set",
            f"model.weights={weights.resolve()}",
        ]
    epochs = max(1, experiment.auto_epochs // shorter)
    jobs["auto", None] = [
        *("train", "auto", "--resume", "-o", work.run("auto"), "--accelerator", device, *network),
        *("--set", f"data.dataset={work.slices.resolve()}", "--set", f"data.folds={list(folds)}"),
        *("--set", f"schedule.epochs={epochs}"),
    ]
    for fold in folds:
        for configuration, (num_epochs, steps) in experiment.configurations.items():
            for loss, options in LOSSES.items():
                name = f"{configuration}_{loss}"
                jobs[f"nnunet_{name}", fold] = [
                    *("nnunet", "train", experiment.dataset, configuration, fold, "--work", work.nnunet),
                    *("--name", name, "--resume", "--device", device, *options),
                    *("--epochs", max(1, num_epochs // shorter), "--iterations", max(2, steps // shorter)),
                ]
    minutes: dict[str, dict[str, float]] = (
        json.loads(work.minutes.read_text()) if work.minutes.is_file() else {}
    )

    def one(job: tuple[tuple[str, int | None], list[object]]) -> None:
        (name, fold), arguments = job
        label = "all" if fold is None else str(fold)
        if label in minutes.get(name, {}):
            return
        spent = semidice(*arguments, log=work.path / f"{work.name}_{name}_{label}.log") / 60
        if fold is None:
            spent /= len(folds)
        minutes.setdefault(name, {})[label] = spent
        work.minutes.write_text(json.dumps(minutes, indent=1) + "\n")
        print(f"{name}, fold {label}: {spent:.1f} minutes per fold", flush=True)

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(one, jobs.items()))


def collect(work: Work) -> None:
    """nnU-Net's held-out predictions as run folders, and the case tables of all runs."""
    from semidice.data.dataset import Dataset
    from semidice.runs.scoring import inapplicable_metrics

    experiment = work.experiment
    left_out = inapplicable_metrics(Dataset(work.volumes), [*SCORES])
    metrics = [option for name in SCORES if name not in left_out for option in ("--metric", name)]
    semidice("evaluate", work.run("auto"), *metrics)
    for configuration in experiment.configurations:
        for loss in LOSSES:
            trainer = f"SemidiceTrainer_{configuration}_{loss}"
            semidice(
                *("nnunet", "collect", experiment.dataset, configuration, "--work", work.nnunet),
                *("--trainer", trainer, "--dataset", work.volumes, *metrics),
                *("-o", work.run(f"nnunet_{configuration}_{loss}")),
            )


def training_minutes(work: Work) -> dict[str, float]:
    """Minutes per fold: of nnU-Net, the sum of its epochs, which counts a resumed training as one."""
    minutes = {"auto": json.loads(work.minutes.read_text())["auto"]["all"]}
    for name in work.names():
        logs = sorted(work.path.glob(f"{work.name}_{name}_*.log"))
        if name != "auto":
            seconds = [float(each) for log in logs for each in re.findall(EPOCH_TIME, log.read_text())]
            minutes[name] = sum(seconds) / 60 / len(logs)
    return minutes


def score_runs(work: Work) -> dict[str, Any]:
    """Mean scores of whole scans on the folds of all runs, and differences to the first run with p-values."""
    from semidice.statistics import compare_cases, concatenate, read_cases

    tables = {name: read_cases(RunFolder(work.run(name)).cases) for name in work.names()}
    splits = [dict(zip(each["case"], each["fold"], strict=True)) for each in tables.values()]
    if any(split != splits[0] for split in splits):
        raise ValueError("the runs have different folds: train the same --folds of all")
    table = concatenate(list(tables.values()))
    stored = set(table["metric"])
    methods = [str(each["method"].iloc[0]) for each in tables.values()]
    result: dict[str, Any] = {
        "data": work.name,
        "folds": sorted({int(fold) for fold in splits[0].values()}),
        "num_scans": len(splits[0]),
        "rows": {},
        "minutes": training_minutes(work),
        "order": list(tables),
    }
    for metric in (name for name in SCORES if name in stored):
        comparison = compare_cases(table, metric, drop=True)
        for name, method in zip(tables, methods, strict=True):
            numbers = {"mean": float(comparison.means.loc[method, "mean"]), "difference": 0.0, "p": 1.0}
            if method != methods[0]:
                pair = comparison.pairs.loc[(method, methods[0])]
                numbers |= {"difference": float(pair.difference), "p": float(pair.p)}
            result["rows"].setdefault(name, {})[metric] = numbers
    return result


def runs_table(result: dict[str, Any]) -> str:
    metrics = [name for name in SCORES if name in next(iter(result["rows"].values()))]
    lines = [
        f"`{result['data']}`: {result['num_scans']} held-out scans of folds "
        f"{', '.join(map(str, result['folds']))}; differences to the first row, with "
        "Holm-corrected p-values.",
        "",
        "| run | " + " | ".join(f"{SCORES[name][0]} (%)" for name in metrics) + " | minutes per fold |",
        "| --- |" + " ---: |" * (len(metrics) + 1),
    ]
    for number, name in enumerate(result["order"]):
        cells = []
        for metric in metrics:
            entry, scale = result["rows"][name][metric], SCORES[metric][1]
            text = f"{entry['mean'] * scale:.2f}"
            if number:
                p = "p < 0.001" if entry["p"] < 1e-3 else f"p = {entry['p']:.3f}"
                text += f" ({entry['difference'] * scale:+.2f}, {p})"
            cells.append(text)
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {result['minutes'][name]:.1f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["step", "train", "runs", "docs"])
    parser.add_argument("names", nargs="*", help="lidc or hippocampus; docs: JSON files of --out")
    parser.add_argument("--out", type=Path, help="JSON file of step or runs")
    parser.add_argument("-o", "--work", type=Path, default=Path("bench_out"), help="folder for data and runs")
    parser.add_argument(
        "--raw", type=Path, help="train: folder with lidc/ or hippocampus/; without: prepared"
    )
    parser.add_argument("--weights", type=Path, help="train: of tf_efficientnet_lite0, .safetensors")
    parser.add_argument("--folds", type=int, nargs="+", default=[0, 1, 2], help="train: folds of five")
    parser.add_argument("--at-once", type=int, default=5, help="train: trainings at a time")
    parser.add_argument("--shorter", type=int, default=1, help="train: divides epochs and steps, for a trial")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="train")
    parser.add_argument("--compile", action="store_true", help="step: compile the network, takes minutes")
    parser.add_argument("--docs", type=Path, help="docs: page to write the tables into")
    args = parser.parse_args()
    if args.what == "train":
        for name in args.names:
            work = Work(name, args.work)
            if args.raw is not None:
                prepare(work, args.raw, processes=os.cpu_count() or 1)
            train(
                work,
                args.folds,
                at_once=args.at_once,
                weights=args.weights,
                device=args.device,
                shorter=args.shorter,
            )
        return
    if args.what == "docs":
        contents = [json.loads(Path(path).read_text()) for path in args.names]
        steps = [step_table(each["rows"], each["device"]) for each in contents if "device" in each]
        runs = [runs_table(each) for each in contents if "device" not in each]
        for name, tables in (("nnunet step", steps), ("nnunet runs", runs)):
            if tables:
                write_between_markers(args.docs, name, "\n".join(tables))
        return
    if args.what == "step":
        from gpu import need_gpu

        need_gpu()
        rows = [row for plan in PLANS for row in time_steps(plan, compiled=args.compile)]
        result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "rows": rows}
        print(step_table(rows, result["device"]))
    else:
        work = Work(args.names[0], args.work)
        collect(work)
        result = score_runs(work)
        print(runs_table(result))
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
