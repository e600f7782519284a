"""MBPP: short Python functions from a sentence. Reads the whole (`text`) and the sanitized form (`prompt`, `test_imports`)."""

import json

import pyarrow as pa

from lockstep.data.preprocess.humaneval import fenced
from lockstep.data.preprocess.recipe import REWARD_MODEL, Recipe, SourceRow, UnusableRow, WrittenRow, ask, text

INSTRUCTION = "Answer with the whole function in one Python code block."

_FIRST_OF_SPLIT = {"prompt": 1, "test": 11, "validation": 511, "train": 601}
"""The task_id that a split begins with, in the one file that the authors publish. `prompt` are examples for few-shot prompts."""


def convert(row: SourceRow, instruction: str) -> WrittenRow:
    """The task with its first test, which names the function, is the question; all tests are the ground truth, as JSON."""
    task = text(row, "text" if row.get("text") is not None else "prompt")
    tests = row.get("test_list")
    if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
        raise UnusableRow("test_list is not a list of tests")
    setup = row.get("test_setup_code") or "\n".join(row.get("test_imports") or [])
    return WrittenRow(
        prompt=ask(f"{task.strip()}\n\nIt must pass tests such as:\n{fenced(tests[0])}", instruction),
        columns={
            "reward_model": {"style": "rule", "ground_truth": json.dumps({"test_list": tests, "test_setup_code": setup})},
            "response": fenced(text(row, "code").replace("\r\n", "\n")),
        },
        extra_info={"task_id": _task_id(row)},
    )


def split_of(row: SourceRow) -> str | None:
    """The authors' split of a task, by its number."""
    try:
        return max((first, split) for split, first in _FIRST_OF_SPLIT.items() if first <= _task_id(row))[1]
    except UnusableRow:
        return "train"  # where `convert` says what is wrong


def _task_id(row: SourceRow) -> int:
    task_id = row.get("task_id")
    if not isinstance(task_id, int) or task_id < 1:
        raise UnusableRow("task_id is not a positive number")
    return task_id


RECIPE = Recipe(
    hub_id="google-research-datasets/mbpp",
    ability="code",
    instruction=INSTRUCTION,
    convert=convert,
    columns={"reward_model": REWARD_MODEL, "response": pa.string()},
    extra_info={"task_id": pa.int64()},
    secondary="sanitized",
    split_of=split_of,
)
