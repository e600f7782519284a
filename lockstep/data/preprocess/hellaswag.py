"""HellaSwag: choose the ending that continues a text. The hub has labels "0" to "3", GitHub 0 to 3; test rows have none."""

import re

import pyarrow as pa

from lockstep.data.preprocess.recipe import REWARD_MODEL, Recipe, SourceRow, UnusableRow, WrittenRow, ask, text

INSTRUCTION = (
    "Which ending continues the text best? Say why, and end with a last line of the form: Answer: X, where X is its letter."
)

LETTERS = "ABCD"

_TAG = re.compile(r"\s*\[(header|title|step|substeps)\]\s*")
"""Marks that WikiHow texts carry: a heading, the parts of a step."""


def convert(row: SourceRow, instruction: str) -> WrittenRow:
    """The letter of the label's ending is the ground truth."""
    context = _context(row)
    endings = row.get("endings")
    if not isinstance(endings, list) or len(endings) != len(LETTERS) or not all(isinstance(e, str) and e.strip() for e in endings):
        raise UnusableRow(f"endings is not a list of {len(LETTERS)} texts")
    label = _label(row)
    choices = "\n".join(f"{letter}. {_clean(ending)}" for letter, ending in zip(LETTERS, endings, strict=True))
    return WrittenRow(
        prompt=ask(f"{context} ...\n\n{choices}", instruction),
        columns={"reward_model": {"style": "rule", "ground_truth": LETTERS[label]}},
        extra_info={
            "activity_label": row.get("activity_label"),
            "endings": endings,
            "label": label,
            "source_id": row.get("source_id"),
        },
    )


def _context(row: SourceRow) -> str:
    """What has happened, under the name of the activity. The second part begins a sentence that the endings finish."""
    first = row.get("ctx_a")
    second = row.get("ctx_b")
    context = f"{first} {second[:1].upper()}{second[1:]}" if first and second else text(row, "ctx")
    activity = row.get("activity_label")
    return f"{activity}: {_clean(context)}" if activity else _clean(context)


def _label(row: SourceRow) -> int:
    label = row.get("label")
    if label is None or label == "":
        raise UnusableRow("no label")
    if isinstance(label, bool) or str(label) not in ("0", "1", "2", "3"):
        raise UnusableRow("the label is not one of 0, 1, 2, 3")
    return int(label)


def _clean(passage: str) -> str:
    """Without tags; what a tag kept apart stays apart as sentences."""
    parts = [part.strip() for part in _TAG.split(passage)[::2]]
    joined = ""
    for part in filter(None, parts):
        joined += ("" if not joined else " " if joined[-1] in ".!?:;," else ". ") + part
    return " ".join(joined.split())


RECIPE = Recipe(
    hub_id="Rowan/hellaswag",
    ability="commonsense",
    instruction=INSTRUCTION,
    convert=convert,
    columns={"reward_model": REWARD_MODEL},
    extra_info={
        "activity_label": pa.string(),
        "endings": pa.list_(pa.string()),
        "label": pa.int64(),
        "source_id": pa.string(),
    },
    held_out=("validation", "test"),
)
