"""nnU-Net's training step with its own loss and with ours, and a table of runs that were collected from it.

    pip install 'semidice[nnunet]'
    python benchmarks/bench_nnunet.py step --out step.json
    python benchmarks/bench_nnunet.py runs PREPARED RUN... --minutes minutes.json --out runs.json
    python benchmarks/bench_nnunet.py docs step.json runs.json... --docs docs/nnunet.md

`step`: forward, loss, backward and update of nnU-Net's network with random images, in half precision as it
trains, for two plans: 2d, batch 12 of 512 x 512, and 3d_fullres, batch 2 of 128 x 128 x 128. Their loss is
Dice + CE with labels of one rater, nearest-neighbour at the coarse outputs; nnU-Net compiles its Dice. Ours
is `RatersLoss` with the mean of four raters. Both take turns in one process. The memory is the largest of a
step, beyond what was there before.

`runs`: scores on the cases that all runs have predicted, with the differences to the first run. Run folders
come from `semidice nnunet collect` and `semidice train`. minutes.json: {name of a run: GPU minutes}.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from doc_tables import write_between_markers

PLANS = {
    "2d, 12 x 512 x 512": (2, 12, (512, 512), 8),
    "3d_fullres, 2 x 128 x 128 x 128": (3, 2, (128, 128, 128), 6),
}
NUM_RATERS, NUM_CLASSES = 4, 3
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

    from semidice.data.label_making import LabelOptions
    from semidice.nnunet.options import trainer_options
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
    options = trainer_options("mean", "dml1").loss
    assert options is not None
    mix = options.build()
    mix.scale_weights = tuple(weights)
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


def score_runs(data: Path, runs: list[Path]) -> dict[str, Any]:
    """Mean scores on the cases of all runs, and differences to the first run with p-values."""
    from semidice.data.dataset import Dataset
    from semidice.data.folds import read_folds
    from semidice.metrics.cases import CaseTable, concatenate
    from semidice.metrics.statistics import compare_cases
    from semidice.runs.run import open_run
    from semidice.runs.scoring import inapplicable_metrics, score_fold

    dataset = Dataset(data)
    left_out = inapplicable_metrics(dataset, list(SCORES))
    metrics = [name for name in SCORES if name not in left_out]
    opened = {path.name: open_run(path) for path in runs}
    folds = {name: read_folds(run.folder.folds, dataset) for name, run in opened.items()}
    first = next(iter(folds.values()))
    assert all(each == first for each in folds.values()), "the runs have different folds"
    common = set.intersection(*(set(run.finished_folds) for run in opened.values()))
    tables = []
    for name, run in opened.items():
        for fold in sorted(common):
            cases = [number for number, of_case in enumerate(first) if of_case == fold]
            tables.append(
                score_fold(dataset, cases, run.folder.fold(fold), metrics=metrics, method=name, fold=fold)
            )
    table: CaseTable = concatenate(tables)
    result: dict[str, Any] = {"data": data.name, "folds": sorted(common), "rows": {}}
    for metric in metrics:
        comparison = compare_cases(table, metric, missing="drop")
        for number, name in enumerate(comparison.methods):
            row = result["rows"].setdefault(name, {})
            row[metric] = {
                "mean": float(comparison.mean[number]),
                "difference": float(
                    comparison.difference[number, comparison.methods.index(next(iter(opened)))]
                ),
                "p": float(comparison.p_holm[number, comparison.methods.index(next(iter(opened)))]),
            }
        result["num_cases"] = len(comparison.cases) if hasattr(comparison, "cases") else None
    result["order"] = list(opened)
    return result


def runs_table(result: dict[str, Any]) -> str:
    metrics = [name for name in SCORES if name in next(iter(result["rows"].values()))]
    lines = [
        f"`{result['data']}`, fold {', '.join(map(str, result['folds']))}; differences to the first row, "
        "with Holm-corrected p-values.",
        "",
        "| run | " + " | ".join(f"{SCORES[name][0]} (%)" for name in metrics) + " | GPU minutes |",
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
        minutes = result.get("minutes", {}).get(name)
        lines.append(
            f"| {name} | " + " | ".join(cells) + f" | {'' if minutes is None else f'{minutes:.1f}'} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["step", "runs", "docs"])
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--minutes", type=Path, help="JSON file with the GPU minutes of each run")
    parser.add_argument(
        "--compile", action="store_true", help="also compile the network, which takes minutes"
    )
    parser.add_argument("--docs", type=Path, help="page to write the tables into")
    args = parser.parse_args()
    if args.what == "step":
        from gpu import need_gpu

        need_gpu()
        rows = [row for plan in PLANS for row in time_steps(plan, compiled=args.compile)]
        result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "rows": rows}
        print(step_table(rows, result["device"]))
    elif args.what == "runs":
        result = score_runs(args.paths[0], args.paths[1:])
        if args.minutes is not None:
            result["minutes"] = json.loads(args.minutes.read_text())
        print(runs_table(result))
    else:
        contents = [json.loads(path.read_text()) for path in args.paths]
        steps = [step_table(each["rows"], each["device"]) for each in contents if "device" in each]
        runs = [runs_table(each) for each in contents if "device" not in each]
        for name, tables in (("nnunet step", steps), ("nnunet runs", runs)):
            if tables:
                write_between_markers(args.docs, name, "\n".join(tables))
        return
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
