"""Random damage to files: bytes, values of JSON and YAML, cells of CSV. A seed always makes the same one."""

import gzip
import json
from copy import deepcopy
from pathlib import Path

import numpy as np
import yaml

# numbers and words that break assumptions
ODD_NUMBERS = (0, -1, 255, 65535, 2**31, 2**63, 10**30, float("nan"), float("inf"), 1e-320)
ODD_VALUES = (*ODD_NUMBERS, None, True, "", "x", "../x", "[x]", "é\0", [], {}, [[]], [None], {"a": [1]})
_TEXTS = {".json", ".yaml", ".csv"}


def damage(path: Path, seed: int) -> None:
    """Change a file: every second time its bytes, otherwise values or cells, if it has a text."""
    rng = np.random.default_rng(seed)
    if path.suffix not in _TEXTS or seed % 2:
        _damage_bytes(path, rng)
    elif path.suffix == ".csv":
        _damage_cells(path, rng)
    else:
        _damage_values(path, rng)


def _damage_bytes(path: Path, rng: np.random.Generator) -> None:
    """Cut, flip, insert, overwrite or repeat some bytes, more often near the start, where headers are."""
    is_packed = path.suffix == ".gz" and rng.random() < 0.5
    content = bytearray(gzip.decompress(path.read_bytes()) if is_packed else path.read_bytes())
    for _ in range(int(rng.integers(1, 5))):
        at = int(rng.integers(max(1, len(content))) * rng.random() ** 2)
        kind = int(rng.integers(6))
        if kind == 0:
            del content[at:]
        elif kind == 1 and content:
            content[at] ^= 1 << int(rng.integers(8))
        elif kind == 2:
            content[at:at] = rng.bytes(int(rng.integers(1, 9)))
        elif kind == 3:
            content[at : at + 4] = int(rng.choice([0, 1, 2**31 - 1, 2**31, 2**32 - 1])).to_bytes(4, "big")
        elif kind == 4:
            content[at : at + 8] = bytes(8)
        else:
            content[at:at] = content[at : at + 64]
    path.write_bytes(gzip.compress(content) if is_packed else content)


def _damage_values(path: Path, rng: np.random.Generator) -> None:
    """Replace, delete or move values of a JSON or YAML file, which stays well-formed."""
    is_json = path.suffix == ".json"
    tree = json.loads(path.read_text()) if is_json else yaml.safe_load(path.read_text())
    for _ in range(int(rng.integers(1, 4))):
        node, key = tree, None
        while isinstance(node, dict | list) and node and (key is None or rng.random() < 0.8):
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            parent, key = node, keys[int(rng.integers(len(keys)))]
            node = node[key]
        if key is None:
            continue
        kind = int(rng.integers(4))
        if kind == 0:
            del parent[key]
        elif kind == 1 and isinstance(parent, dict):
            parent[str(rng.integers(9))] = parent.pop(key)
        else:
            # a copy: an odd list must not hold itself
            parent[key] = deepcopy(ODD_VALUES[int(rng.integers(len(ODD_VALUES)))])
    path.write_text(json.dumps(tree) if is_json else yaml.safe_dump(tree))


def _damage_cells(path: Path, rng: np.random.Generator) -> None:
    """Replace, delete, repeat or split cells and lines of a CSV file."""
    rows = [line.split(",") for line in path.read_text().splitlines()]
    for _ in range(int(rng.integers(1, 4))):
        row = rows[int(rng.integers(len(rows)))] if rows else []
        if not row:
            break
        at, kind = int(rng.integers(len(row))), int(rng.integers(6))
        odd = str(ODD_VALUES[int(rng.integers(len(ODD_VALUES)))])
        if kind == 0:
            row[at] = odd
        elif kind == 1:
            del row[at]
        elif kind == 2:
            row.insert(at, odd)
        elif kind == 3:
            rows.remove(row)
        elif kind == 4:
            rows.append(list(row))
        else:
            row[at] = '"' + row[at]
    path.write_text("\n".join(",".join(row) for row in rows) + "\n")
