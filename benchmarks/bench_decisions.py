"""Time of each decision rule by size, beside a sort of the same voxels in the same run, as Markdown.

python benchmarks/bench_decisions.py --docs docs/decisions.md      two CPU threads, up to 256^3 voxels
python benchmarks/bench_decisions.py --device cuda                 also 512^3 voxels, with the peak memory
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from doc_tables import write_between_markers
from timing import seconds_of
from torch import Tensor

from semidice.decisions import decide

RULES = ("argmax", "threshold:0.4", "dice", "jaccard", "nested", "mix:0.5")
SIZES: tuple[tuple[int, ...], ...] = ((64, 64), (256, 256), (128, 128, 128), (256, 256, 256))


def ball(size: tuple[int, ...], device: str) -> Tensor:
    """Probabilities of a ball with an uncertain edge and noise, (1, 1, *size)."""
    squares = torch.zeros(size, device=device)
    for axis, length in enumerate(size):
        shape = [-1 if number == axis else 1 for number in range(len(size))]
        squares += torch.linspace(-1, 1, length, device=device).square().view(shape)
    noise = torch.randn(size, generator=torch.Generator(device).manual_seed(0), device=device)
    return noise.add_(squares.sqrt_().neg_().add_(0.6).mul_(12)).sigmoid_()[None, None]


def extra_bytes(rule: str, prob: Tensor) -> int:
    """Peak memory of a rule on a CUDA device, beyond what is allocated before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    decide(prob, rule)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def time_table(device: str) -> Iterator[str]:
    """Milliseconds of each rule, and as a share of torch.sort."""
    sizes = SIZES if device == "cpu" else (*SIZES, (512, 512, 512))
    where = f"{torch.get_num_threads()} threads" if device == "cpu" else torch.cuda.get_device_name()
    memory, rule_of_memory = ("", "") if device == "cpu" else (" | extra memory / input", " ---: |")
    yield f"{where}, torch {torch.__version__}.\n"
    yield f"| voxels | rule | ms | of a sort{memory} |\n| --- | --- | ---: | ---: |{rule_of_memory}"
    for size in sizes:
        prob = ball(size, device)
        sort = seconds_of(lambda prob=prob: prob.flatten().sort(), device)  # type: ignore[misc]
        name = " x ".join(map(str, size))
        yield f"| {name} | a sort | {1000 * sort:.3g} | 1.00 |{' |' if memory else ''}"
        for text in RULES:
            seconds = seconds_of(lambda rule=text, prob=prob: decide(prob, rule), device)  # type: ignore[misc]
            extra = f" {extra_bytes(text, prob) / (4 * prob.numel()):.1f} |" if memory else ""
            yield f"| {name} | `{text}` | {1000 * seconds:.3g} | {seconds / sort:.2f} |{extra}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--docs", type=Path, help="page whose table to replace")
    chosen = parser.parse_args()
    torch.set_num_threads(2)
    lines = []
    for line in time_table(chosen.device):
        print(line, flush=True)
        lines.append(line + "\n")
    if chosen.docs:
        write_between_markers(chosen.docs, "decisions", "".join(lines))


if __name__ == "__main__":
    main()
