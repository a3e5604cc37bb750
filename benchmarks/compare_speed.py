"""Is the loss as fast as before? Two checkouts take turns on one device, and their times are divided.

    python benchmarks/compare_speed.py OLD_CHECKOUT NEW_CHECKOUT [--turns 3] [--shapes 2] [--device cpu]

Each turn is a process of its own per checkout. It times the forward and backward pass of `SegmentationLoss`
as a CUDA graph (the kernels alone) and called from Python in one thread (kernels and host); on a CPU there is
no graph, shapes are smaller, and logits are float32. The table shows
the smallest time over all turns, and NEW / OLD: 1.00 is as fast, below 1 is faster. Small shapes called from
Python depend on the host, which may be busy for a whole turn: give them more turns.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from gpu import need_gpu
from timing import seconds_in_turns, seconds_of, seconds_of_graph

import semidice

SHAPES = [
    (8, 2, 256, 256),
    (8, 2, 512, 512),
    (2, 14, 128, 128, 128),
    (8, 19, 512, 1024),
    (8, 40, 512, 512),
    (4, 150, 512, 512),
    (1, 400, 512, 512),
    (1, 1200, 256, 256),
]
CPU_SHAPES = [(2, 2, 64, 64), (8, 2, 256, 256), (1, 14, 64, 64, 64), (1, 14, 96, 96, 96)]
Times = dict[str, dict[str, float]]


def measure(num_shapes: int, device: str) -> Times:
    """Seconds with the semidice that this process imports, by row of the table and kind of call."""
    times: Times = {}
    loss = semidice.SegmentationLoss()
    on_gpu = device == "cuda"
    for shape in (SHAPES if on_gpu else CPU_SHAPES)[:num_shapes]:
        for dtype in (torch.float32, torch.bfloat16) if on_gpu else (torch.float32,):
            for kind in ("soft", "hard"):
                generator = torch.Generator(device=device).manual_seed(0)
                logits = torch.randn(shape, device=device, generator=generator).to(dtype).requires_grad_()
                if kind == "soft":
                    target = torch.randn(shape, device=device, generator=generator).softmax(1)
                else:
                    space = (shape[0], *shape[2:])
                    target = torch.randint(0, shape[1], space, device=device, generator=generator)
                    target = target.to(torch.uint8 if shape[1] < 256 else torch.int16)

                def both(logits: torch.Tensor = logits, target: torch.Tensor = target) -> None:
                    logits.grad = None
                    loss(logits, target).backward()

                name = f"{'x'.join(map(str, shape))} {str(dtype).removeprefix('torch.')} {kind}"
                times[name] = {}
                if on_gpu:
                    graphed = seconds_of_graph(both)
                    assert graphed is not None, "the loss cannot be captured as a CUDA graph"
                    times[name]["graphed"] = graphed
                with torch.autograd.set_multithreading_enabled(False):
                    times[name]["called"] = (
                        seconds_in_turns({"both": both})["both"] if on_gpu else seconds_of(both, device)
                    )
                shown = ", ".join(f"{1e3 * each:.3f} ms {way}" for way, each in times[name].items())
                print(f"  {name}: {shown}", file=sys.stderr)
    return times


def measured_in(checkout: Path, num_shapes: int, device: str) -> Times:
    """`measure` in a process that imports the sources of `checkout`."""
    paths = [str(checkout / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, __file__, "--measure", "--shapes", str(num_shapes), "--device", device]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    times: Times = json.loads(done.stdout)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkouts", nargs="*", type=Path, metavar="CHECKOUT", help="the old and the new one")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--shapes", type=int, default=len(SHAPES), help="only the first N, which are the smallest"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        need_gpu()
    if arguments.measure:
        print(json.dumps(measure(arguments.shapes, arguments.device)))
        return
    if len(arguments.checkouts) != 2:
        parser.error(f"expected two checkouts, the old and the new one; got {len(arguments.checkouts)}")
    turns: list[list[Times]] = [[], []]
    for turn in range(arguments.turns):
        for number, checkout in enumerate(arguments.checkouts):
            print(f"turn {turn + 1} of {arguments.turns}: {checkout}", file=sys.stderr, flush=True)
            turns[number].append(measured_in(checkout, arguments.shapes, arguments.device))
    ways = list(next(iter(turns[0][0].values())))
    print("| shape, logits, target |" + "".join(f" {way} ms old | new | new / old |" for way in ways))
    print("| --- |" + " ---: |" * 3 * len(ways))
    for name in turns[0][0]:
        cells = []
        for way in ways:
            old, new = (1e3 * min(times[name][way] for times in of_checkout) for of_checkout in turns)
            cells += [f"{old:.3f}", f"{new:.3f}", f"{new / old:.2f}"]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
