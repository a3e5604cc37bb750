"""Lines covered by the tests, by package: a rebuilt package may not be tested less than it was.

    python -m pytest -q -n 2 --dist loadfile --cov=semidice --cov-report=json:fast.json
    python -m pytest -q -m slow --cov=semidice --cov-append --cov-report=json:all.json
    python benchmarks/oracle_coverage.py all.json [--store]

Needs pytest-cov, which `make` does not install. Lines that only subprocesses run are not counted, and the
bodies of Triton kernels are left out. `oracle_coverage.json` beside this file was stored before the first
package was rebuilt, from both commands together, without the slow halves of the laws of survival and of
damaged files, whose fast halves run the same lines. This prints each package then and now.
"""

import ast
import json
import sys
from collections import Counter
from pathlib import Path

STORED = Path(__file__).with_suffix(".json")
SOURCE = Path("src/semidice")


def kernel_lines(path: Path) -> set[int]:
    """Lines inside functions that Triton compiles."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and any(
            "triton" in ast.unparse(each) for each in node.decorator_list
        ):
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def by_package(report: Path) -> dict[str, list[int]]:
    """Lines covered and lines of each package in a report of coverage.py; modules at the top are "."."""
    covered, total = Counter[str](), Counter[str]()
    for name, file in json.loads(report.read_text(encoding="utf-8"))["files"].items():
        parts = Path(name).relative_to(SOURCE).parts
        package = parts[0] if len(parts) > 1 else "."
        left_out = kernel_lines(Path(name))
        hit, missed = (set(file[key]) - left_out for key in ("executed_lines", "missing_lines"))
        covered[package] += len(hit)
        total[package] += len(hit) + len(missed)
    return {package: [covered[package], total[package]] for package in sorted(total)}


def main() -> None:
    now = by_package(Path(sys.argv[1]))
    if "--store" in sys.argv:
        STORED.write_text(json.dumps(now, indent=1) + "\n", encoding="utf-8")
    before = json.loads(STORED.read_text(encoding="utf-8"))
    for package in sorted(before | now):
        shares = [
            f"{100 * hit / lines:5.1f} %"
            for hit, lines in (before.get(package, (0, 1)), now.get(package, (0, 1)))
        ]
        print(f"{package:14} {shares[0]} {shares[1]}")


if __name__ == "__main__":
    main()
