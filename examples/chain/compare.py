"""The share of right answers of each stage, with Wilson's 95 % interval. Exits with 1 unless each interval is above the one before.

python examples/chain/compare.py FOLDER STAGE ...
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path


def wilson(right: int, total: int, z: float = 1.959964) -> tuple[float, float]:
    """The interval of a share that holds the true one 95 times in a hundred."""
    centre, width = (
        (right + z * z / 2) / (total + z * z),
        z / (total + z * z) * math.sqrt(right * (total - right) / total + z * z / 4),
    )
    return centre - width, centre + width


def main(folder: Path, stages: list[str]) -> int:
    print(f"\n{'stage':14}{'right':>8}   95 % interval")
    highest, is_better = 0.0, True
    for stage in stages:
        (file,) = (folder / stage).glob("*.jsonl")
        scores = [json.loads(line)["reward"] for line in file.read_text().splitlines()]
        low, high = wilson(round(sum(scores)), len(scores))
        print(f"{stage:14}{sum(scores) / len(scores):8.3f}   {low:.3f} to {high:.3f}")
        is_better, highest = is_better and low > highest, high
    print("each stage is better than the one before" if is_better else "the intervals of two stages overlap")
    return 0 if is_better else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
