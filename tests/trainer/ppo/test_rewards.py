import math

import pytest
import torch
from helpers.batches import column, make_batch, rows_of

from lockstep.config.reward import OverlongConfig
from lockstep.errors import ConfigError, RewardError
from lockstep.protocol import DataProto
from lockstep.rewards.outcome import Failure
from lockstep.trainer.ppo import rewards
from lockstep.trainer.ppo.rewards import Scored

NAN = float("nan")


def scored(*failed, rows=4, **extra):
    failures = [Failure("raised", f"row {i}") if i in failed else None for i in range(rows)]
    return Scored(failures, [0.0] * rows, extra)


def test_scores_are_stored_without_padding_and_extra_information_is_passed_on():
    batch = make_batch()
    tensor = torch.tensor([[0.0, 0.0, 1.0], [0.5, 0.0, 0.0]], dtype=torch.float64)
    plain = rewards.score(lambda data: tensor, batch, max_failure_rate=0.0)
    assert (plain.failures, plain.total, plain.extra, plain.parts) == ([None, None], [1.0, 0.5], {}, {})
    assert rows_of(batch, "token_level_scores") == [[0.0, 0.0, 1.0], [0.5]]
    assert batch.ragged("token_level_scores").values.dtype == torch.float32

    def with_dict(data, return_dict=False):
        assert return_dict
        return {"reward_tensor": tensor, "reward_extra_info": {"acc": [1, 0]}}

    assert rewards.score(with_dict, batch, max_failure_rate=0.0).extra == {"acc": [1, 0]}


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (torch.zeros(2), r"shape \(2, 3\), like the responses; got a tensor of shape \(2,\)"),
        (torch.zeros(2, 4), r"shape \(2, 3\).*got a tensor of shape \(2, 4\)"),
        ([1.0, 2.0], r"shape \(2, 3\).*got list"),
        (None, "got NoneType"),
        (torch.tensor([[0.0, 0.0, 0.0], [NAN, 0.0, 0.0]]), "1 of 2 rewards are missing .invalid: 1."),
        (torch.tensor([[math.inf, 0.0, 0.0], [0.0, 0.0, 0.0]]), "row 0, dataset row 30"),
        (torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 1.0]]), r"after the end of the response, in rows \[1\]"),
    ],
)
def test_a_reward_that_cannot_be_used_is_an_error_and_not_a_number(result, message):
    with pytest.raises(RewardError, match=message):
        rewards.score(lambda data: result, make_batch(), max_failure_rate=0.0)


def test_a_missing_reward_leaves_its_row_out_and_too_many_stop_the_run_with_examples():
    failures = [None, Failure("timeout", "it took too long"), None, None]

    def reward(data, return_dict=False):
        return {"reward_tensor": torch.ones(4, 3), "reward_extra_info": {}, "failures": failures}

    batch = make_batch(((5, 6, 7), (8, 9, 9), (1, 1, 1), (2, 2, 2)), mask=[[1, 0, 1], [1, 1, 1], [0, 1, 1], [1, 1, 1]])
    assert rewards.score(reward, batch, max_failure_rate=0.25).failures == failures
    assert rows_of(batch, "response_mask") == [[1, 0, 1], [0, 0, 0], [0, 1, 1], [1, 1, 1]]
    assert rows_of(batch, "token_level_scores")[1] == [0, 0, 0]
    message = r"1 of 4 rewards are missing \(timeout: 1\).*max_failure_rate=0\.2(.|\n)*dataset row 31(.|\n)*too long"
    with pytest.raises(RewardError, match=message):
        rewards.score(reward, batch, max_failure_rate=0.2)


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
    rewards.model_scores(model, None, batch, Tokenizer())
    assert list(model.data.non_tensor_batch["response_text"]) == ["text [5, 6, 7]", "text [8]"]
    assert list(model.data.non_tensor_batch["raw_prompt"]) == ["question 0", "question 1"]
    assert rows_of(batch, "rm_scores") == [[2, 2, 2], [2]]
    batch = make_batch()
    rewards.model_scores(model, Manager(), batch, Tokenizer())
    assert list(model.data.non_tensor_batch["response_text"]) == ["text [8]"]
    assert (rows_of(batch, "rm_scores"), batch.batch["rm_judged"].tolist()) == ([[0, 0, 0], [2]], [False, True])


def test_a_baseline_is_that_of_the_prompt_and_a_missing_one_leaves_the_prompt_out():
    responses = ((5,), (6,), (7,), (8,))
    batch = make_batch(responses)
    greedy = make_batch(((1, 2), (3,)), token_level_scores=[[0.0, 0.25], [0.75]])
    greedy.non_tensor_batch["uid"][:] = ["1", "0"]
    missing = rewards.baselines(batch, greedy, scored(0, rows=2))
    assert batch.batch["reward_baselines"].tolist() == [0.75, 0.75, 0.25, 0.25]
    assert rows_of(batch, "response_mask") == [[1], [1], [0], [0]]
    assert missing == 1


def test_the_overlong_penalty_is_on_the_last_token():
    batch = make_batch(((1,) * 8, (1,) * 10, ()), token_level_scores=[[0.0] * 7 + [1.0], [0.0] * 9 + [1.0], []])
    metrics = rewards.penalise_overlong(batch, OverlongConfig(enable=True, len=4, penalty_factor=2.0), 10)
    assert [sum(row) for row in rows_of(batch, "token_level_scores")] == [0.0, -1.0, 0.0]
    assert metrics["reward/overlong_ratio"] == pytest.approx(2 / 3)
    assert rewards.penalise_overlong(batch, OverlongConfig(), 10) == {}
    with pytest.raises(ConfigError, match=r"reward\.overlong_buffer\.len=20"):
        rewards.penalise_overlong(batch, OverlongConfig(enable=True, len=20), 10)


def test_groups_without_a_signal_are_found_by_what_the_user_names():
    batch = make_batch(((5,), (6,), (7,), (8,)), token_level_scores=[[1.0], [0.5], [1.0], [1.0]])
    said = scored(acc=[1, 1, 0, True])
    said.total = [1.0, 1.0, 0.0, 1.0]
    for metric, expected in (("score", [2, 3]), ("seq_reward", [0, 1]), ("acc", [2, 3])):
        assert rewards.rows_with_signal(batch, said, metric).tolist() == expected
    with pytest.raises(ConfigError, match="not among what the reward function returned: acc"):
        rewards.rows_with_signal(batch, said, "accuracy")
    with pytest.raises(RewardError, match="is not a number in 1 rows: 'x'"):
        rewards.rows_with_signal(batch, scored(acc=[1, "x", 0, 1]), "acc")
    # Of the second group only one reward is left: nothing to compare.
    said = scored(2)
    said.total = [0.0, 1.0, 0.0, 1.0]
    assert rewards.rows_with_signal(batch, said, "score").tolist() == [0, 1]


def test_reward_parts_are_taken_from_judges_and_from_what_functions_return():
    said = scored(1, rows=2, format=[0.5, None])
    said.parts = {"rule": [1.0, None]}
    batch = make_batch()
    rewards.set_parts(batch, said, ["rule", "format"])
    assert batch.batch["reward_parts"].tolist() == [[1.0, 0.5], [0.0, 0.0]]
    with pytest.raises(RewardError, match="no reward part 'style'.*known parts: rule, format"):
        rewards.set_parts(batch, said, ["style"])


def test_metrics_count_what_is_missing_and_average_what_is_not():
    said = scored(1, 3)
    said.parts = {"rule": [1.0, None, 0.0, None], "model": [None, None, -2.0, None]}
    metrics = rewards.reward_metrics(said)
    assert metrics["reward/rule/mean"] == 0.5
    assert metrics["reward/model/min"] == -2.0
    assert (metrics["reward/missing_ratio"], metrics["reward/missing/raised"]) == (0.5, 2.0)


def test_what_is_known_of_rows_can_be_cut_and_joined():
    first, second = scored(1, rows=2, acc=[1, 2]), scored(rows=1)
    joined = Scored.concat([first, second])
    assert (joined.extra, [f is None for f in joined.failures]) == ({"acc": [1, 2, None]}, [True, False, True])
    assert joined.select([2, 0]).extra == {"acc": [None, 1]}
