"""HumanEval and MBPP as rows: Python functions to write, whose tests are the ground truth, run by the code rule.

`lockstep eval` asks them; examples/data_preprocess/{humaneval,mbpp}.py write them to parquet files.
"""

import json

import pyarrow as pa

from lockstep.data.preprocess.recipe import REWARD_MODEL, Recipe, SourceRow, UnusableRow, WrittenRow, ask, text

_FIRST_OF_SPLIT = {"prompt": 1, "test": 11, "validation": 511, "train": 601}
"""The task_id that a split of MBPP begins with, in the one file that the authors publish. `prompt` are examples for few-shot prompts."""


def convert_humaneval(row: SourceRow, instruction: str) -> WrittenRow:
    """The function's head is the question; the tests, the function's name and the head are the ground truth, as JSON."""
    head = text(row, "prompt")
    solution = text(row, "canonical_solution")
    tests = {"prompt": head, "test": text(row, "test"), "entry_point": text(row, "entry_point")}
    return WrittenRow(
        prompt=ask(_fenced(head), instruction),
        columns={"reward_model": {"style": "rule", "ground_truth": json.dumps(tests)}, "response": _fenced(head + solution)},
        extra_info={"task_id": text(row, "task_id")},
    )


def convert_mbpp(row: SourceRow, instruction: str) -> WrittenRow:
    """The task with its first test, which names the function, is the question; all tests are the ground truth, as JSON.

    Rows are of the whole form (`text`) or the sanitized one (`prompt`, `test_imports`).
    """
    task = text(row, "text" if row.get("text") is not None else "prompt")
    tests = row.get("test_list")
    if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
        raise UnusableRow("test_list is not a list of tests")
    setup = row.get("test_setup_code") or "\n".join(row.get("test_imports") or [])
    return WrittenRow(
        prompt=ask(f"{task.strip()}\n\nIt must pass tests such as:\n{_fenced(tests[0])}", instruction),
        columns={
            "reward_model": {"style": "rule", "ground_truth": json.dumps({"test_list": tests, "test_setup_code": setup})},
            "response": _fenced(text(row, "code").replace("\r\n", "\n")),
        },
        extra_info={"task_id": _task_id(row)},
    )


def split_of_mbpp(row: SourceRow) -> str | None:
    """Return the authors' split of a task, by its number."""
    try:
        number = _task_id(row)
    except UnusableRow:
        return "train"  # where `convert_mbpp` says what is wrong
    return max((first, split) for split, first in _FIRST_OF_SPLIT.items() if first <= number)[1]


def _task_id(row: SourceRow) -> int:
    task_id = row.get("task_id")
    if not isinstance(task_id, int) or task_id < 1:
        raise UnusableRow("task_id is not a positive number")
    return task_id


def _fenced(program: str) -> str:
    return f"```python\n{program.strip()}\n```"


HUMANEVAL = Recipe(
    hub_id="openai/openai_humaneval",
    ability="code",
    instruction="Finish this Python function. Answer with the whole function in one Python code block.",
    convert=convert_humaneval,
    columns={"reward_model": REWARD_MODEL, "response": pa.string()},
    extra_info={"task_id": pa.string()},
)

MBPP = Recipe(
    hub_id="google-research-datasets/mbpp",
    ability="code",
    instruction="Answer with the whole function in one Python code block.",
    convert=convert_mbpp,
    columns={"reward_model": REWARD_MODEL, "response": pa.string()},
    extra_info={"task_id": pa.int64()},
    secondary="sanitized",
    split_of=split_of_mbpp,
)
