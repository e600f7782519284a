"""HumanEval: finish a Python function. The tests are the ground truth, run by the code rule."""

import json

import pyarrow as pa

from lockstep.data.preprocess.recipe import REWARD_MODEL, Recipe, SourceRow, WrittenRow, ask, text

INSTRUCTION = "Finish this Python function. Answer with the whole function in one Python code block."


def convert(row: SourceRow, instruction: str) -> WrittenRow:
    """The function's head is the question; the tests, the function's name and the head are the ground truth, as JSON."""
    head = text(row, "prompt")
    solution = text(row, "canonical_solution")
    tests = {"prompt": head, "test": text(row, "test"), "entry_point": text(row, "entry_point")}
    return WrittenRow(
        prompt=ask(fenced(head), instruction),
        columns={"reward_model": {"style": "rule", "ground_truth": json.dumps(tests)}, "response": fenced(head + solution)},
        extra_info={"task_id": text(row, "task_id")},
    )


def fenced(program: str) -> str:
    """The program in a Python code block."""
    return f"```python\n{program.strip()}\n```"


RECIPE = Recipe(
    hub_id="openai/openai_humaneval",
    ability="code",
    instruction=INSTRUCTION,
    convert=convert,
    columns={"reward_model": REWARD_MODEL, "response": pa.string()},
    extra_info={"task_id": pa.string()},
)
