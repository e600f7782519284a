"""Two runs side by side: the files of their last checkpoints and the lines of their metrics, to the bit."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from lockstep.checkpoint import folders
from lockstep.checkpoint.manifest import MANIFEST, check_manifest
from lockstep.errors import DataError
from lockstep.observability.metrics import MACHINE_METRICS


def end_of(run_dir: Path) -> dict[str, Any]:
    """What a run came to: by name, the checksum of every file of its last checkpoint, its checkpoints, and the lines of its metrics.

    Raises DataError where it has no checkpoint, or a damaged one.
    """
    newest = folders.newest(run_dir)
    if newest is None:
        raise DataError(f"{run_dir} has no checkpoint")
    check_manifest(newest)
    files = json.loads((newest / MANIFEST).read_text())["files"]
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    same = [{name: value for name, value in line.items() if not name.startswith(MACHINE_METRICS)} for line in lines]
    return {
        "steps of metrics.jsonl": [line["step"] for line in lines],
        **{f"metrics of line {number}": line for number, line in enumerate(same, start=1)},
        "checkpoints": [path.name for path in folders.found(run_dir)],
        **{f"{newest.name}/{name}": entry for name, entry in files.items()},
    }


def differences(expected: Path, found: Path) -> Iterator[str]:
    """What differs between two runs, in the order of `end_of`, each with the first place where it does."""
    one = end_of(expected)
    other = end_of(found)
    for name in (*one, *(name for name in other if name not in one)):
        if one.get(name) == other.get(name):
            continue
        if name.endswith(".safetensors") and name in one and name in other:
            yield f"{name}: {_first_tensor(expected / name, found / name)}"
        elif name.startswith("metrics of") and name in one and name in other:
            keys = sorted(key for key in {*one[name], *other[name]} if one[name].get(key) != other[name].get(key))
            values = ", ".join(f"{key} {one[name].get(key)} and {other[name].get(key)}" for key in keys[:3])
            yield f"{name} (step {one[name].get('step')}): {len(keys)} differ, first {values}"
        elif name in one and name in other and "sha256" not in one[name]:
            yield f"{name}: {one[name]} and {other[name]}"
        else:
            yield name


def _first_tensor(one: Path, other: Path) -> str:
    with safe_open(one, framework="pt") as left, safe_open(other, framework="pt") as right:
        for name in left.keys():  # noqa: SIM118  (it is no dict)
            a = left.get_tensor(name)
            b = right.get_tensor(name)
            if not torch.equal(a, b):
                return f"{name} differs in {int((a != b).sum())} of {a.numel()} numbers, by at most {(a - b).abs().max():.3g}"
    return "the same tensors in other bytes"
