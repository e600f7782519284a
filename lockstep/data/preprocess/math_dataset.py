r"""MATH: competition mathematics. A solution ends with its answer in \boxed{}.

Reads MATH-lighteval and lighteval/MATH (problem, level, type, solution), MATH-500 (also subject, answer, unique_id) and the
original files of hendrycks/math (one JSON object a file, in train/ and test/, a folder a subject).
"""

import pyarrow as pa

from lockstep.data.preprocess.recipe import REWARD_MODEL, Recipe, SourceRow, UnusableRow, WrittenRow, ask, text
from lockstep.judging import last_boxed

INSTRUCTION = r"Reason step by step, and state the final answer once, at the end, inside \boxed{}."

MATH_500 = "HuggingFaceH4/MATH-500"


def convert(row: SourceRow, instruction: str) -> WrittenRow:
    r"""The column `answer` is the ground truth where there is one (MATH-500), otherwise the last \boxed{} of the solution."""
    problem = text(row, "problem")
    solution = text(row, "solution")
    is_math_500 = row.get("answer") is not None
    answer = text(row, "answer") if is_math_500 else last_boxed(solution)
    if answer is None or not answer.strip():
        raise UnusableRow(r"the solution has no \boxed{} with an answer in it")
    subject = row.get("subject") if is_math_500 else row.get("type")
    return WrittenRow(
        prompt=ask(problem, instruction),
        columns={"reward_model": {"style": "rule", "ground_truth": answer}, "response": solution},
        extra_info={
            "question": problem,
            "answer": solution,
            "level": None if row.get("level") is None else str(row["level"]),
            "subject": None if subject is None else str(subject),
        },
        data_source=MATH_500 if is_math_500 else None,
    )


RECIPE = Recipe(
    hub_id="DigitalLearningGmbH/MATH-lighteval",
    ability="math",
    instruction=INSTRUCTION,
    convert=convert,
    columns={"reward_model": REWARD_MODEL, "response": pa.string()},
    extra_info={"question": pa.string(), "answer": pa.string(), "level": pa.string(), "subject": pa.string()},
    secondary=r"(^|/)(algebra|counting_and_probability|geometry|intermediate_algebra|number_theory|prealgebra|precalculus)/",
)
