import math

import pytest
import torch
from helpers.batches import column, make_batch, rows_of

from lockstep.config.reward import OverlongConfig
from lockstep.errors import ConfigError, RewardError
from lockstep.protocol import DataProto
from lockstep.rewards.outcome import Failure
from lockstep.trainer.ppo import reward_columns
from lockstep.trainer.ppo.scored import Scored


def scored(*failed, rows=4, **extra):
    failures = [Failure("raised", f"row {i}") if i in failed else None for i in range(rows)]
    return Scored(failures, [0.0] * rows, extra)


def test_a_reward_model_gets_the_question_and_the_text_of_the_rows_that_it_judges():
    class Tokenizer:
        def batch_decode(self, rows, skip_special_tokens):
            return [f"text {row}" for row in rows]

    class Model:
        def compute_rm_score(self, data):
            self.data = data
            return DataProto.from_dict({"rm_scores": column([[2.0] * len(row) for row in rows_of(data, "responses")])})

    class Manager:
        def wants_model(self, data):
            return torch.tensor([False, True])

    model, batch = Model(), make_batch()
    reward_columns.model_scores(model, None, batch, Tokenizer())
    assert list(model.data.non_tensor_batch["response_text"]) == ["text [5, 6, 7]", "text [8]"]
    assert list(model.data.non_tensor_batch["raw_prompt"]) == ["question 0", "question 1"]
    assert rows_of(batch, "rm_scores") == [[2, 2, 2], [2]]
    batch = make_batch()
    reward_columns.model_scores(model, Manager(), batch, Tokenizer())
    assert list(model.data.non_tensor_batch["response_text"]) == ["text [8]"]
    assert (rows_of(batch, "rm_scores"), batch.batch["rm_judged"].tolist()) == ([[0, 0, 0], [2]], [False, True])


def test_a_baseline_is_that_of_the_prompt_and_a_missing_one_leaves_the_prompt_out():
    responses = ((5,), (6,), (7,), (8,))
    batch = make_batch(responses)
    greedy = make_batch(((1, 2), (3,)), token_level_scores=[[0.0, 0.25], [0.75]])
    greedy.non_tensor_batch["uid"][:] = ["1", "0"]
    missing = reward_columns.baselines(batch, greedy, scored(0, rows=2))
    assert batch.batch["reward_baselines"].tolist() == [0.75, 0.75, 0.25, 0.25]
    assert rows_of(batch, "response_mask") == [[1], [1], [0], [0]]
    assert missing == 1


def test_the_overlong_penalty_is_on_the_last_token():
    batch = make_batch(((1,) * 8, (1,) * 10, ()), token_level_scores=[[0.0] * 7 + [1.0], [0.0] * 9 + [1.0], []])
    said = scored(rows=3)
    metrics = reward_columns.penalise_overlong(batch, said, OverlongConfig(enable=True, len=4, penalty_factor=2.0), 10)
    assert said.parts == {"overlong_penalty": [-1.0, -2.0, 0.0]}
    assert [sum(row) for row in rows_of(batch, "token_level_scores")] == [0.0, -1.0, 0.0]
    assert metrics["reward/overlong_ratio"].value == pytest.approx(2 / 3)


def test_groups_without_a_signal_are_found_by_what_the_user_names():
    batch = make_batch(((5,), (6,), (7,), (8,)), token_level_scores=[[1.0], [0.5], [1.0], [1.0]])
    said = scored(acc=[1, 1, 0, True])
    said.total = [1.0, 1.0, 0.0, 1.0]
    for metric, expected in (("score", [2, 3]), ("seq_reward", [0, 1]), ("acc", [2, 3])):
        assert reward_columns.rows_with_signal(batch, said, metric).tolist() == expected
    with pytest.raises(ConfigError, match="not among what the reward function returned: acc"):
        reward_columns.rows_with_signal(batch, said, "accuracy")
    with pytest.raises(RewardError, match="is not a number in 1 rows: 'x'"):
        reward_columns.rows_with_signal(batch, scored(acc=[1, "x", 0, 1]), "acc")
    # Of the second group only one reward is left: nothing to compare.
    said = scored(2)
    said.total = [0.0, 1.0, 0.0, 1.0]
    assert reward_columns.rows_with_signal(batch, said, "score").tolist() == [0, 1]


def test_reward_parts_are_taken_from_judges_and_from_what_functions_return():
    said = scored(1, rows=2, format=[0.5, None])
    said.parts = {"rule": [1.0, None]}
    batch = make_batch()
    reward_columns.set_parts(batch, said, ["rule", "format"])
    assert batch.batch["reward_parts"].tolist() == [[1.0, 0.5], [0.0, 0.0]]
    with pytest.raises(RewardError, match="no reward part 'style'.*known parts: rule, format"):
        reward_columns.set_parts(batch, said, ["style"])
    for value in ("good", [0.5], math.nan):
        with pytest.raises(RewardError, match=r"gdpo_reward_keys names 'tone', which is not a finite number in 1 rows"):
            reward_columns.set_parts(batch, scored(1, rows=2, tone=[value, None]), ["tone"])
