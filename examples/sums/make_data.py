"""Write questions about small sums: train.parquet and test.parquet in the folder given, which share no question."""

import random
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

NUM_TEST = 64


def main(folder: Path) -> None:
    """Write both files; the same numbers each time."""
    pairs = [(a, b) for a in range(2, 60) for b in range(2, 60)]
    random.Random(0).shuffle(pairs)
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("test", pairs[:NUM_TEST]), ("train", pairs[NUM_TEST:])):
        rows = [
            {
                "data_source": "sums",
                "prompt": [{"role": "user", "content": f"What is {a} + {b}? Answer with the number only."}],
                "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            }
            for a, b in part
        ]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
