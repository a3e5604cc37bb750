"""Does the redesign change a result? What commit f55cdaf computes is stored once, and compared by bits.

    python benchmarks/oracle.py store CHECKOUT_OF_F55CDAF [--out oracle_out]
    python benchmarks/oracle.py compare [--only training] [--all]

`store` runs the probes of `oracle_probes` on a checkout of f55cdaf, `compare` on this one, on the CPU with
one thread. Names say what is computed; `oracle_f55cdaf` and `oracle_today` say how each side is called. Bits
differ between machines: with another processor or other packages, `compare` asks to store again. What
differs by intention is named in `oracle_today.INTENDED`. Exit code 1 if anything else differs.
All four modules go in the last part of the redesign.
"""

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from fnmatch import fnmatchcase
from importlib import import_module, metadata, util
from pathlib import Path

import numpy as np
from oracle_probes import PROBES, Record, run_forked

Values = dict[str, np.ndarray]
# what can change a bit of a result
PACKAGES = "torch numpy scipy triton pyarrow pandas timm segmentation-models-pytorch safetensors nibabel"
PACKAGES += " pillow monai torchmetrics lightning-fabric pydantic scikit-learn matplotlib"
# modules that take seconds to import, as far as they are installed
SLOW_TO_IMPORT = ("torch", "torchmetrics", "lightning_fabric", "torch.utils.tensorboard", "timm", "pandas")
# maximum number of differences shown per section without --all
SHOWN = 20


def machine() -> dict[str, str]:
    """Processor and versions that bits depend on."""
    lines = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
    facts = {name.strip(): value.strip() for name, _, value in lines}
    flags = hashlib.sha256(" ".join(sorted(facts["flags"].split())).encode()).hexdigest()[:12]
    found = {"processor": f"{facts['model name']}, flags {flags}", "Python": platform.python_version()}
    found["C library"] = " ".join(platform.libc_ver())
    installed = {each.name.lower().replace("_", "-"): each.version for each in metadata.distributions()}
    return found | {name: installed[name] for name in PACKAGES.split() if name in installed}


def restart_with_one_thread(checkout: Path) -> None:
    """Start this program again, unless its environment has one thread and the sources of the checkout."""
    wanted = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    wanted |= {"PYTHONPATH": str(checkout / "src"), "CUDA_VISIBLE_DEVICES": ""}
    if not wanted.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | wanted)
    spec = util.find_spec("semidice")
    if spec is None or not Path(str(spec.origin)).is_relative_to(checkout / "src"):
        raise SystemExit(f"semidice must be that of {checkout}; found {spec and spec.origin}")


def run_section(section: str, adapter: str, folder: Path, file: Path) -> None:
    folder.mkdir()
    os.chdir(folder)
    record = Record()
    PROBES[section](record, import_module(adapter))
    # written last: without it, the section has failed
    np.savez(file, **record.values)  # type: ignore[arg-type]


def run_probes(sections: list[str], adapter: str, out: Path) -> None:
    """Write the values of each section to a file."""
    for name in SLOW_TO_IMPORT:
        if util.find_spec(name.partition(".")[0]) is not None:
            import_module(name)
    with tempfile.TemporaryDirectory(prefix="oracle_") as work:
        for section in sections:
            start, file = time.monotonic(), out / f"{section}.npz"
            ended_well = run_forked(run_section, section, adapter, Path(work) / section, file)
            took = f"{time.monotonic() - start:.0f} s"
            print(f"{section}: {'computed' if ended_well else 'FAILED'}, {took}", flush=True)


def values_of(file: Path) -> Values:
    if not file.is_file():
        return {}
    with np.load(file, allow_pickle=False) as stored:
        return {name: stored[name] for name in stored.files}


def difference(old: np.ndarray, new: np.ndarray) -> tuple[str, float]:
    """The first one in words, or "", and the largest; inf without numbers. NaN equals NaN; 0 is not -0."""
    if old.dtype.kind == new.dtype.kind == "U":
        before, now = ("\n".join(part.ravel().tolist()).splitlines() for part in (old, new))
        gone, added = ([line for line in a if line not in set(b)] for a, b in ((before, now), (now, before)))
        words = f"lines were {gone[:1]} ({len(gone)}), are {added[:1]} ({len(added)})"
        return words if before != now else "", np.inf
    if (old.dtype, old.shape) != (new.dtype, new.shape):
        was, now_is = (str(part) if part.ndim == 0 else f"{part.dtype} {part.shape}" for part in (old, new))
        return f"was {was}, is {now_is}", np.inf
    as_bytes = [part.ravel().view((np.uint8, part.itemsize)) for part in (old, new)]
    differs = (as_bytes[0] != as_bytes[1]).any(1)
    if not differs.any():
        return "", 0.0
    place = int(differs.argmax())
    distance = np.abs(old.astype(float) - new.astype(float)).ravel()[differs]
    size = float(np.nan_to_num(distance, nan=np.inf).max())
    words = f"value {place}: was {old.flat[place].item()!r}, is {new.flat[place].item()!r}"
    return f"{words}; {differs.sum()} of {old.size} differ, by {size:.2g} at most", size


def compare_values(section: str, old: Values, new: Values) -> tuple[list[str], int]:
    """One line per difference, and the number of differences that are intended."""
    lines, num_intended = [], 0
    intended: dict[str, tuple[float, str]] = import_module("oracle_today").INTENDED
    for name in [*old, *(new.keys() - old.keys())]:
        words, size = "is missing now" if name in old else "was not stored: store again", np.inf
        if name in old and name in new:
            words, size = difference(old[name], new[name])
            # the digest of a large array does not tell the size of a difference; its sample does
            size = 0 if name.endswith(" SHA-256") else size
        full_name = f"{section}: {name}"
        if words and any(
            fnmatchcase(full_name, each) and size <= most for each, (most, _) in intended.items()
        ):
            num_intended += 1
        elif words:
            lines.append(f"{name}: {words}")
    return lines, num_intended


def store(checkout: Path, out: Path) -> None:
    sources = ["git", "-C", str(checkout), "diff", "--quiet", "f55cdaf", "--", "src"]
    if subprocess.run(sources, stderr=subprocess.DEVNULL).returncode != 0:
        raise SystemExit(f"{checkout} must be an unchanged checkout: git worktree add FOLDER f55cdaf")
    out.mkdir(parents=True, exist_ok=True)
    for name in ("machine.json", *(f"{section}.npz" for section in PROBES)):
        (out / name).unlink(missing_ok=True)
    run_probes(list(PROBES), "oracle_f55cdaf", out)
    failed = [section for section in PROBES if not (out / f"{section}.npz").is_file()]
    if failed:
        raise SystemExit(f"nothing is stored, because these sections failed: {', '.join(failed)}")
    # written last: without it, nothing is stored
    (out / "machine.json").write_text(json.dumps(machine(), indent=1) + "\n")


def compare(sections: list[str], out: Path, *, show_all: bool) -> int:
    """Print and count what this checkout computes in another way than the stored results."""
    advice = f"store again with {sys.argv[0]} store CHECKOUT_OF_F55CDAF --out {out}"
    if not (out / "machine.json").is_file():
        raise SystemExit(f"nothing is stored in {out}: {advice}")
    stored, here = json.loads((out / "machine.json").read_text()), machine()
    # a package that only one side has changes nothing that is not seen
    other = [
        f"{name} {each}, not {here[name]}" for name, each in stored.items() if here.get(name, each) != each
    ]
    if other:
        raise SystemExit(f"results were stored with {'; '.join(other)}: {advice}")
    num_values = num_different = 0
    with tempfile.TemporaryDirectory(prefix="oracle_") as results:
        run_probes(sections, "oracle_today", Path(results))
        for section in sections:
            old, new = (values_of(folder / f"{section}.npz") for folder in (out, Path(results)))
            lines, num_intended = compare_values(section, old, new) if new else (["the probe failed"], 0)
            num_values, num_different = num_values + len(old), num_different + len(lines)
            print(f"{section}: {len(old)} values, {len(lines)} differences, {num_intended} intended ones")
            if len(lines) > SHOWN and not show_all:
                lines[SHOWN:] = [f"and {len(lines) - SHOWN} more; --all shows them"]
            print("".join(f"  {line}\n" for line in lines), end="")
    told = "NOT THE SAME" if num_different else "the same"
    print(f"{told}: {num_values} values, {num_different} differences")
    return num_different


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    storing, comparing = commands.add_parser("store"), commands.add_parser("compare")
    storing.add_argument("checkout", type=Path, help="a checkout of f55cdaf")
    comparing.add_argument("--only", action="append", choices=PROBES, help="a section; repeatable")
    comparing.add_argument("--all", action="store_true", help=f"show all differences, not {SHOWN} a section")
    for each in (storing, comparing):
        each.add_argument("--out", type=Path, default=Path("oracle_out"), help="folder of the stored results")
    options = parser.parse_args()
    checkout = options.checkout if options.command == "store" else Path(__file__).parents[1]
    restart_with_one_thread(checkout.resolve())
    if options.command == "store":
        store(options.checkout.resolve(), options.out.resolve())
    elif compare(options.only or list(PROBES), options.out.resolve(), show_all=options.all):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
