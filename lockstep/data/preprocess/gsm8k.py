"""GSM8K: grade school mathematics. An answer is steps of reasoning and a last line `#### number`."""

import re

import pyarrow as pa

from lockstep.data.preprocess.recipe import REWARD_MODEL, Recipe, SourceRow, UnusableRow, WrittenRow, ask, text

INSTRUCTION = "Reason step by step, and end with the final answer on a line of its own, in the form: #### number"

_CALCULATION = re.compile(r"<<[^<>]*>>")
"""Notes for a calculator, which the text says again."""
_FINAL = re.compile(r"####\s*\$?(-?[0-9][0-9,]*(?:\.[0-9]+)?|-?\.[0-9]+)\s*\Z")


def convert(row: SourceRow, instruction: str) -> WrittenRow:
    """The number after the last `####`, without thousands commas, is the ground truth; the steps are the response to learn from."""
    question = text(row, "question")
    answer = text(row, "answer")
    if "####" not in answer:
        raise UnusableRow("the answer has no '####'")
    final = _FINAL.search(answer)
    if final is None:
        raise UnusableRow("no number after '####' at the end of the answer")
    return WrittenRow(
        prompt=ask(question, instruction),
        columns={
            "reward_model": {"style": "rule", "ground_truth": final[1].replace(",", "")},
            "response": _CALCULATION.sub("", answer),
        },
        extra_info={"question": question, "answer": answer},
    )


RECIPE = Recipe(
    hub_id="openai/gsm8k",
    ability="math",
    instruction=INSTRUCTION,
    convert=convert,
    columns={"reward_model": REWARD_MODEL, "response": pa.string()},
    extra_info={"question": pa.string(), "answer": pa.string()},
    secondary="socratic",
)
