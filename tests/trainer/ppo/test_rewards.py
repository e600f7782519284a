import math

import pytest
import torch
from helpers.batches import column, make_batch, rows_of

from lockstep.config import PPOConfig
from lockstep.errors import RewardError
from lockstep.observability.metrics import values
from lockstep.rewards.outcome import Failure
from lockstep.trainer.ppo import rewards
from lockstep.trainer.ppo.scored import Scored

NAN = float("nan")


def scored(*failed, rows=4, **extra):
    failures = [Failure("raised", f"row {i}") if i in failed else None for i in range(rows)]
    return Scored(failures, [0.0] * rows, extra)


def test_a_run_without_a_penalty_for_length_has_no_metric_of_it():
    scorer = rewards.Scorer.of(lambda data: torch.zeros(2, 3), None, None, PPOConfig())
    assert set(scorer.score(make_batch(), 1)[1]) == {"reward/missing", "reward/missing_ratio"}


def test_scores_are_stored_without_padding_and_extra_information_is_passed_on():
    batch = make_batch()
    tensor = torch.tensor([[0.0, 0.0, 1.0], [0.5, 0.0, 0.0]], dtype=torch.float64)
    plain = rewards.score(lambda data: tensor, batch, 0.0)
    assert (plain.failures, plain.total, plain.extra, plain.parts) == ([None, None], [1.0, 0.5], {}, {})
    assert rows_of(batch, "token_level_scores") == [[0.0, 0.0, 1.0], [0.5]]
    assert batch.ragged("token_level_scores").values.dtype == torch.float32

    def with_dict(data, return_dict=False):
        assert return_dict
        return {"reward_tensor": tensor, "reward_extra_info": {"acc": [1, 0]}}

    assert rewards.score(with_dict, batch, 0.0).extra == {"acc": [1, 0]}


def test_a_reward_function_that_knows_rows_is_asked_for_them():
    def unpadded(data, ragged=False):
        assert ragged
        return column([[0.0, 0.0, 2.0], [NAN]])

    batch = make_batch()
    found = rewards.score(unpadded, batch, max_failure_rate=0.5)
    assert rows_of(batch, "token_level_scores") == [[0.0, 0.0, 2.0], [0.0]]
    assert [failure and failure.kind for failure in found.failures] == [None, "invalid"]
    assert rows_of(batch, "response_mask") == [[1, 1, 1], [0]]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (torch.zeros(2), r"shape \(2, 3\), like the responses; got a tensor of shape \(2,\)"),
        (torch.zeros(2, 4), r"shape \(2, 3\).*got a tensor of shape \(2, 4\)"),
        ([1.0, 2.0], r"shape \(2, 3\).*got list"),
        (None, "got NoneType"),
        (column([[0.0, 1.0], [1.0]]), r"shape \(2, 3\), like the responses; got Ragged"),
        (torch.tensor([[0.0, 0.0, 1e300], [0.0, 0.0, 0.0]], dtype=torch.float64), "1 of 2 rewards are missing .invalid: 1."),
        (torch.tensor([[0.0, 0.0, 0.0], [NAN, 0.0, 0.0]]), "1 of 2 rewards are missing .invalid: 1."),
        (torch.tensor([[math.inf, 0.0, 0.0], [0.0, 0.0, 0.0]]), "row 0, dataset row 30"),
        (torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 1.0]]), r"after the end of the response, in rows \[1\]"),
    ],
)
def test_a_reward_that_cannot_be_used_is_an_error_and_not_a_number(result, message):
    with pytest.raises(RewardError, match=message):
        rewards.score(lambda data: result, make_batch(), 0.0)


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


def test_metrics_count_what_is_missing_and_average_what_is_not():
    said = scored(1, 3)
    said.parts = {"rule": [1.0, None, 0.0, None], "model": [None, None, -2.0, None]}
    metrics = values(rewards.reward_metrics(said))
    assert metrics["reward/rule/mean"] == 0.5
    assert metrics["reward/model/min"] == -2.0
    assert (metrics["reward/missing"], metrics["reward/missing_ratio"], metrics["reward/missing/raised"]) == (2.0, 0.5, 2.0)
    assert "reward/retries" not in metrics
    said.retries = [0, 3, 1, 0]
    assert values(rewards.reward_metrics(said))["reward/retries"] == 4.0
