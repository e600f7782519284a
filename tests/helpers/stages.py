"""Rows and metrics for the recipes that learn from files, on the embedded task: words written backwards."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

WORDS = ["abc", "cab", "bade", "face", "jig", "hi", "ace", "bead", "dig", "fig", "chad", "gab"]


def write_examples(folder: Path, words: Sequence[str], name: str = "train.jsonl") -> Path:
    """A conversation for each word."""
    rows = [{"messages": [{"role": "user", "content": w}, {"role": "assistant", "content": w[::-1] + "<eos>"}]} for w in words]
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run_main(main: Callable[[list[str]], int], arguments: Mapping[str, Any]) -> int:
    """The exit status of a recipe's program."""
    return main([f"{key}={value}" for key, value in arguments.items()])


def metrics(folder: Path) -> list[dict[str, Any]]:
    """What a run logged, without times."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith(("time", "timing", "perf"))} for row in rows]
