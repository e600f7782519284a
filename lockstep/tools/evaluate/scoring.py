"""Answers judged as validation in training judges them: by a RewardManager, while others are still being written."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from lockstep.protocol import DataProto, Ragged
from lockstep.rewards.manager import RewardManager
from lockstep.rewards.outcome import as_float
from lockstep.tools.evaluate.answerers import Answerer, AnswerSampling
from lockstep.tools.evaluate.questions import Question, Sample

FORMATTED = "formatted"
"""A score that says whether the answer has the requested form."""
_PRED = "pred"


class Texts:
    """A tokenizer whose token i is the text of row i: a server's answers have no token ids, and rewards read texts."""

    pad_token_id = 0

    def __init__(self, num_rows: int) -> None:
        self.texts = [""] * num_rows

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of a row."""
        return self.texts[ids[0]]


def ask_and_judge(
    answerer: Answerer,
    questions: Sequence[Question],
    drawing: AnswerSampling,
    judging: Mapping[str, Any],
    on_sample: Callable[[], None] = lambda: None,
) -> list[Sample]:
    """Return `drawing.n` samples of every question, in order, with their scores; `judging` are the arguments of RewardManager.

    A sample without an answer or a reward has a failure instead of scores.
    """
    texts = Texts(len(questions) * drawing.n)
    manager = RewardManager(tokenizer=texts, num_examine=0, **judging)  # type: ignore[arg-type]
    batch = _batch(questions, drawing.n)
    samples: list[Sample | None] = [None] * len(batch)
    try:
        scoring = manager.begin(batch)
        for sample in answerer.answer(questions, drawing):
            row = sample.question * drawing.n + sample.number
            samples[row] = sample
            texts.texts[row] = sample.text
            if sample.failure is None:
                scoring.add(row, torch.tensor([row]))
            on_sample()
        judged: Any = manager(batch, return_dict=True, scoring=scoring, ragged=True)
    finally:
        manager.close()
    rewards = [float(row.sum()) for row in judged["reward_tensor"].rows()]
    done = [sample for sample in samples if sample is not None]
    assert len(done) == len(batch), "an answer is missing"
    for row, sample in enumerate(done):
        if sample.failure is None and judged["failures"][row] is not None:
            failure = judged["failures"][row]
            sample.failure = f"{failure.kind}: {failure.text}"
        if sample.failure is None:
            _take(sample, rewards[row], {name: values[row] for name, values in judged["reward_extra_info"].items()})
    return done


def choose(answerer: Answerer, questions: Sequence[Question]) -> list[Sample]:
    """Return one sample per question: the likeliest choice (acc), and the likeliest per character (acc_norm, without the first space)."""
    samples = []
    for i, (question, found) in enumerate(zip(questions, answerer.log_likelihoods(questions), strict=True)):
        right = question.columns["extra_info"]["label"]
        by_character = np.array(found) / [len(choice.strip()) for choice in question.choices]
        scores = {"acc": float(np.argmax(found) == right), "acc_norm": float(np.argmax(by_character) == right)}
        text = question.choices[int(np.argmax(found))]
        samples.append(Sample(i, 0, text, scores=scores, extra={"log_likelihoods": found}))
    return samples


def _batch(questions: Sequence[Question], n: int) -> DataProto:
    names = dict.fromkeys(name for question in questions for name in question.columns)
    columns = {name: [question.columns.get(name) for question in questions for _ in range(n)] for name in names}
    responses = Ragged.from_rows([[row] for row in range(len(questions) * n)], dtype=torch.int64)
    return DataProto.from_dict({"responses": responses}, columns)


def _take(sample: Sample, reward: float, said: dict[str, Any]) -> None:
    """Write what the judges said into a sample: finite numbers are scores, `pred` and `NAME_pred` are the answers that they read."""
    score = said.pop("score", None)
    sample.scores["reward"] = float(reward if score is None else score)
    for said_name, value in said.items():
        name = "said_reward" if said_name == "reward" else said_name  # as validation in training calls it
        if isinstance(value, int | float | np.number | np.bool_):
            number = as_float(value)
            if number is not None and math.isfinite(number):
                sample.scores[name] = number
            else:
                sample.extra[name] = "not a finite number"
        elif name == _PRED or name.endswith(f"_{_PRED}"):
            if value is not None:
                sample.preds[name.removesuffix(_PRED).removesuffix("_") or "*"] = str(value)
        elif value is not None:
            sample.extra[name] = value
