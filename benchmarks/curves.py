"""Train every algorithm of examples/algorithms on the embedded task and draw its curve.

    python benchmarks/curves.py [--runs DIR] [NAME ...]

Each run is `lockstep ppo --config examples/algorithms/NAME.yaml trainer.test_freq=10`, about two minutes on two CPU cores. A run whose
folder is complete is not made again. Writes docs/algorithms/curves.svg and benchmarks/results/curves.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CONFIGS = ROOT / "examples" / "algorithms"
ACCURACY = "val-core/lockstep/reverse/reward/mean@1"
BAR = 0.9
"""The accuracy that the demo must reach."""
LEGEND = f"blue: accuracy in validation; grey: mean reward in training; dashed: {BAR}; across: steps"
PANEL, GAP, LEFT, TOP = (250, 150), 46, 52, 66


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=sorted(path.stem for path in CONFIGS.glob("*.yaml")))
    parser.add_argument("--runs", type=Path, default=Path("checkpoints/curves"), help="where the runs' folders are")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs/algorithms/curves.svg", help="where the picture is written")
    parser.add_argument("--keys", nargs="*", default=[], help="more keys for every run, as key=value")
    arguments = parser.parse_args()
    curves = {name: read_curve(run(name, arguments.runs / name, arguments.keys)) for name in arguments.names}
    arguments.picture.write_text(draw(curves))
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": f"{platform.processor() or platform.machine()}, CPU",
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__},
        "commit": subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip(),
        "command": "python benchmarks/curves.py",
        "accuracy": {name: curve["accuracy"] for name, curve in curves.items()},
    }
    (RESULTS / "curves.json").write_text(json.dumps(result, indent=1) + "\n")
    for name, curve in curves.items():
        (_, first), (_, last) = curve["accuracy"][0], curve["accuracy"][-1]
        print(f"{name:22} {first:.3f} -> {last:.3f}  {'reaches' if last >= BAR else 'MISSES'} {BAR}")


def run(name: str, folder: Path, keys: Sequence[str] = ()) -> Path:
    """The metrics file of a finished run."""
    metrics = folder / "metrics.jsonl"
    if not metrics.exists() or ACCURACY not in metrics.read_text().splitlines()[-1]:
        command = [sys.executable, "-m", "lockstep.cli", "ppo", "--config", str(CONFIGS / f"{name}.yaml")]
        subprocess.run([*command, "trainer.test_freq=10", f"trainer.default_local_dir={folder}", *keys], check=True)
    return metrics


def read_curve(metrics: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of the accuracy in validation and of the mean reward in training."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return {
        "accuracy": [(row["step"], row[ACCURACY]) for row in rows if ACCURACY in row],
        "reward": [(row["step"], row["critic/score/mean"]) for row in rows if "critic/score/mean" in row],
    }


def draw(curves: dict[str, dict[str, list[tuple[int, float]]]]) -> str:
    """One panel an algorithm, four in a row: training reward in grey, validation accuracy in blue, the bar as a dashed line."""
    width, height = LEFT + 4 * (PANEL[0] + GAP), TOP + -(-len(curves) // 4) * (PANEL[1] + GAP + 18)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="Helvetica, sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{LEFT}" y="26" font-size="17" font-weight="600">The embedded task: write a word backwards</text>',
        f'<text x="{LEFT}" y="46" fill="#656d76">{LEGEND}</text>',
    ]
    for i, (name, curve) in enumerate(curves.items()):
        x, y = LEFT + i % 4 * (PANEL[0] + GAP), TOP + 18 + i // 4 * (PANEL[1] + GAP + 18)
        steps = max(step for step, _ in curve["accuracy"]) or 1

        def at(step: float, value: float, x: float = x, y: float = y, steps: int = steps) -> str:
            return f"{x + step / steps * PANEL[0]:.1f},{y + (1 - min(max(value, 0.0), 1.0)) * PANEL[1]:.1f}"

        last = curve["accuracy"][-1][1]
        out.append(f'<text x="{x}" y="{y - 7}" font-weight="600">{name}</text>')
        out.append(f'<text x="{x + PANEL[0]}" y="{y - 7}" text-anchor="end" fill="#2166ac">{last:.3f}</text>')
        out.append(f'<rect x="{x}" y="{y}" width="{PANEL[0]}" height="{PANEL[1]}" fill="none" stroke="#d0d7de"/>')
        for value in (0.0, 0.5, 1.0):
            height_of = y + (1 - value) * PANEL[1] + 4
            out.append(f'<text x="{x - 6}" y="{height_of:.0f}" text-anchor="end" fill="#656d76" font-size="10">{value:g}</text>')
        out.append(
            f'<text x="{x + PANEL[0]}" y="{y + PANEL[1] + 14}" text-anchor="end" fill="#656d76" font-size="10">{steps}</text>'
        )
        out.append(f'<polyline points="{at(0, BAR)} {at(steps, BAR)}" stroke="#8c959f" stroke-dasharray="4 4" fill="none"/>')
        for key, colour, stroke in (("reward", "#afb8c1", 1), ("accuracy", "#2166ac", 2)):
            points = " ".join(at(step, value) for step, value in curve[key])
            out.append(f'<polyline points="{points}" stroke="{colour}" stroke-width="{stroke}" fill="none"/>')
    return "\n".join([*out, "</svg>"]) + "\n"


if __name__ == "__main__":
    main()
