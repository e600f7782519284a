"""The named tasks: where their rows come from, how they are asked, where an answer ends, who judges it.

A row is asked in one of two forms. `chat` is the prompt of `lockstep preprocess`: one user message with an instruction, examples before it
as turns of a conversation. `plain` is a text to continue, as base models are measured, examples before it.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.data.preprocess import gsm8k, hellaswag, math_dataset
from lockstep.data.preprocess.main import Account, where_of
from lockstep.data.preprocess.recipe import Recipe, SourceRow, UnusableRow, WrittenRow
from lockstep.data.preprocess.sources import SourceFiles, find_files, read_rows
from lockstep.errors import DataError
from lockstep.judging import math
from lockstep.tools.evaluate import grading, programs
from lockstep.tools.evaluate.questions import Question, digest


@dataclass(frozen=True, kw_only=True)
class EvalTask:
    """One of the tasks that ship."""

    name: str
    recipe: Recipe
    as_text: Callable[[SourceRow], tuple[str, str]]
    """A row as a plain prompt and the text that continues it rightly."""
    stop: tuple[str, ...] = ()
    """Where an answer to a plain prompt ends."""
    num_shots: int = 0
    """Examples before a plain question; before one in a chat there are none, unless asked for."""
    max_tokens: int = 512
    grade: Callable[..., dict[str, Any]] | None = None
    """Judges an answer; None: the answer is the likeliest of `choices`."""
    choices: Callable[[SourceRow], tuple[str, ...]] | None = None
    check: Callable[[], None] = lambda: None
    """Raises if an answer cannot be judged on this machine."""

    def template(self, form: str, shots: Sequence[Any]) -> dict[str, Any]:
        """Return what decides how a model is asked and how its answer is read, except the model's own chat template; with its hash."""
        parts = {
            "task": self.name,
            "form": form,
            "instruction": self.recipe.instruction if form == "chat" else None,
            "num_shots": len(shots),
            "stop": list(self.stop) if form == "plain" else [],
            "extraction": inspect.getdoc(self.grade) if self.grade else "acc: the likeliest ending. acc_norm: per character",
        }
        code = [inspect.getsource(function) for function in (self.as_text, self.choices, self.grade) if function is not None]
        return parts | {"hash": digest([parts, shots, code])}


def load_task(
    name: str, sources: Sequence[str] | None, form: str, num_shots: int | None, limit: int | None
) -> tuple[list[Question], dict[str, Any], Account]:
    """Return the first `limit` questions of a task's held-out split, its template, and which rows were read up to there.

    `sources` are those of `lockstep preprocess` (None: the dataset on the hub). Raises DataError if they cannot be read or have no usable
    row, or too few for examples.
    """
    task = TASKS[name]
    task.check()
    if task.choices is not None:
        form = "plain"  # what is measured is a continuation
    num_shots = (task.num_shots if form == "plain" else 0) if num_shots is None else num_shots
    found = find_files(sources or [task.recipe.hub_id], task.recipe.secondary)
    split_of = task.recipe.split_of
    if not found.is_named and split_of is not None:
        found = SourceFiles(dict.fromkeys(("train", "validation", "test"), found.splits["train"]), [])
        # MBPP's authors keep all splits in one file.
    else:
        split_of = None
    held_out = next((split for split in task.recipe.held_out if split in found.splits), "train")
    rows, account = _rows(task, found, held_out, split_of, limit)
    if not rows:
        raise DataError(f"no row of {', '.join(sources or [task.recipe.hub_id])} can be used for the task {name}")
    examples = _rows(task, found, "train", split_of, num_shots)[0] if num_shots and held_out != "train" else []
    if len(examples) < num_shots:
        raise DataError(
            f"--shots {num_shots}: the source has {len(examples)} training rows for examples; give more with --source, or --shots 0"
        )
    shots = [_shot(task, form, row, written) for row, written in examples]
    return [_question(task, form, shots, i, *row) for i, row in enumerate(rows)], task.template(form, shots), account


def _rows(
    task: EvalTask, found: SourceFiles, split: str, split_of: Callable[[SourceRow], str | None] | None, limit: int | None
) -> tuple[list[tuple[SourceRow, WrittenRow]], Account]:
    rows: list[tuple[SourceRow, WrittenRow]] = []
    account = Account()
    for file in found.splits.get(split, ()):
        path = file.fetch()
        for position, row in enumerate(read_rows(path)):
            if limit is not None and len(rows) >= limit:
                return rows, account
            if split_of is not None and not isinstance(row, UnusableRow) and split_of(row) != split:
                continue
            account.num_read += 1
            try:
                if isinstance(row, UnusableRow):
                    raise row
                rows.append((row, task.recipe.convert(row, task.recipe.instruction)))
                account.num_written += 1
            except UnusableRow as reason:
                account.add_unusable(str(reason), where_of(path, position, row))
    if account.unusable and not rows:
        raise DataError(
            f"no row of {found.splits[split][0].name} can be used for the task {task.name} ({next(iter(account.unusable))}): it takes the "
            "dataset's own files, as lockstep preprocess does; files that preprocess wrote go to --data"
        )
    return rows, account


def _shot(task: EvalTask, form: str, row: SourceRow, written: WrittenRow) -> Any:
    if form == "plain":
        return "".join(task.as_text(row)) + "\n\n"
    return [*(written.prompt or ()), {"role": "assistant", "content": written.columns["response"]}]


def _question(task: EvalTask, form: str, shots: list[Any], index: int, row: SourceRow, written: WrittenRow) -> Question:
    assert written.prompt is not None
    text, _ = task.as_text(row)
    is_plain = form == "plain"
    prompt = "".join(shots) + text if is_plain else [turn for shot in shots for turn in shot] + written.prompt
    columns = {
        "data_source": written.data_source or task.recipe.hub_id,
        "reward_model": written.columns["reward_model"],
        "extra_info": {**written.extra_info, "is_plain": is_plain},
    }
    return Question(task.name, text, prompt, is_plain, columns, index, choices=task.choices(row) if task.choices else ())


# The hash of a template in a result file is also of the source of these functions: do not rewrite them for style.


def _gsm8k_text(row: SourceRow) -> tuple[str, str]:
    return f"Question: {row['question']}\nAnswer:", f" {row['answer']}"


def _math_text(row: SourceRow) -> tuple[str, str]:
    return f"Problem:\n{row['problem']}\n\nSolution:", f" {row['solution']}"


def _humaneval_text(row: SourceRow) -> tuple[str, str]:
    return row["prompt"], row["canonical_solution"]


def _mbpp_text(row: SourceRow) -> tuple[str, str]:
    task, tests = row.get("text") or row["prompt"], "\n".join(row["test_list"])
    asked = f"You are an expert Python programmer, and here is your task: {task} Your code should pass these tests:\n\n{tests}\n[BEGIN]\n"
    return asked, f"{row['code']}\n[DONE]"


def _hellaswag_text(row: SourceRow) -> tuple[str, str]:
    first, second = row.get("ctx_a"), row.get("ctx_b")
    context = f"{first} {second.capitalize()}" if first and second else row["ctx"]
    return _untagged(f"{row['activity_label']}: {context}"), _hellaswag_choices(row)[int(row["label"])]


def _hellaswag_choices(row: SourceRow) -> tuple[str, ...]:
    return tuple(f" {_untagged(ending)}" for ending in row["endings"])


def _untagged(passage: str) -> str:
    """Without WikiHow's marks, exactly as lm-evaluation-harness leaves them out."""
    return re.sub(r"\[.*?\]", "", passage.strip().replace(" [title]", ". ")).replace("  ", " ")


TASKS = {
    task.name: task
    for task in (
        EvalTask(name="gsm8k", recipe=gsm8k.RECIPE, as_text=_gsm8k_text, stop=("Question:",), num_shots=5, grade=grading.gsm8k),
        EvalTask(
            name="math",
            recipe=math_dataset.RECIPE,
            as_text=_math_text,
            stop=("Problem:",),
            num_shots=4,
            max_tokens=1024,
            grade=grading.competition_math,
            check=math.check,
        ),
        EvalTask(name="hellaswag", recipe=hellaswag.RECIPE, as_text=_hellaswag_text, choices=_hellaswag_choices),
        EvalTask(
            name="humaneval",
            recipe=programs.HUMANEVAL,
            as_text=_humaneval_text,
            stop=("\nclass", "\ndef", "\n#", "\nif", "\nprint"),
            grade=grading.program,
        ),
        EvalTask(name="mbpp", recipe=programs.MBPP, as_text=_mbpp_text, stop=("[DONE]",), num_shots=3, grade=grading.program),
    )
}
