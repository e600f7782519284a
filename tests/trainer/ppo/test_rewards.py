"""When missing rewards end a run, and what the error says."""

from __future__ import annotations

import math
from fractions import Fraction
from math import comb

import pytest
import torch
from helpers.batches import column, make_batch, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.config import PPOConfig
from lockstep.config.reward import OverlongConfig
from lockstep.errors import RewardError
from lockstep.observability.metrics import values
from lockstep.protocol import DataProto
from lockstep.rewards.outcome import Failure
from lockstep.trainer.ppo import rewards
from lockstep.trainer.ppo.rewards import Scored, chance_of, check_failures, check_validated

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


def batch_of(num_rows: int, num_missing: int, kind: str = "raised", retries: int = 0) -> tuple[DataProto, Scored]:
    failures = [Failure(kind, "Traceback\nValueError: why", num_retries=retries)] * num_missing + [None] * (num_rows - num_missing)
    batch = DataProto({}, {"index": list(range(num_rows))})
    return batch, Scored(failures, [0.0] * num_rows, retries=[retries] * num_rows)


@settings(max_examples=60, deadline=None)
@given(num_rows=st.integers(1, 40), data=st.data(), rate=st.fractions(0, 1, max_denominator=20))
def test_the_chance_is_that_of_counted_outcomes(num_rows, data, rate):
    count = data.draw(st.integers(0, num_rows))
    exact = sum(comb(num_rows, k) * rate**k * (1 - rate) ** (num_rows - k) for k in range(count, num_rows + 1))
    assert isinstance(exact, Fraction | int)
    assert chance_of(count, num_rows, float(rate)) == pytest.approx(float(exact), abs=1e-9)


@pytest.mark.parametrize(
    ("num_rows", "num_missing", "rate", "ends"),
    [
        (16, 4, 0.1, False),
        (16, 6, 0.1, False),
        (16, 7, 0.1, True),
        (2, 2, 0.1, True),  # all
        (2, 2, 1.0, False),
        (1000, 100, 0.1, False),
        (1000, 150, 0.1, True),
        (50, 1, 0.0, True),
        (50, 0, 0.0, False),
    ],
)
def test_a_validation_ends_a_run_when_chance_does_not_explain_what_is_missing(num_rows, num_missing, rate, ends):
    if ends:
        with pytest.raises(RewardError):
            check_validated(*batch_of(num_rows, num_missing), rate)
    else:
        check_validated(*batch_of(num_rows, num_missing), rate)


@pytest.mark.parametrize(
    ("kind", "retries", "cure"),
    [
        ("raised", 0, "reward.retries=3"),
        ("timeout", 2, "raise reward.retries"),
        ("environment", 0, "agent.retries"),
        ("invalid", 0, "reward.max_failure_rate=0.25"),
    ],
)
def test_the_cure_and_the_file_stand_above_the_first_traceback_and_the_file_again_below_the_last(tmp_path, kind, retries, cure):
    with pytest.raises(RewardError) as caught:
        check_failures(*batch_of(16, 4, kind, retries), 0.1, tmp_path)
    text = str(caught.value)
    above, _, below = text.partition("Traceback")
    file = str(tmp_path / "reward_failures.jsonl")
    assert cure in above
    assert "reward.max_failure_rate=0.25" in above
    assert ("reward.retries" in above) == (kind in ("raised", "timeout"))
    assert file in above
    assert file in below.splitlines()[-1]


def test_the_rate_that_the_error_names_allows_what_was_missing():
    for num_missing in range(2, 17):
        batch, scored = batch_of(16, num_missing)
        with pytest.raises(RewardError) as caught:
            check_failures(batch, scored, 0.1)
        named = float(str(caught.value).partition("allow more with reward.max_failure_rate=")[2].split()[0])
        check_failures(batch, scored, named)


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
    said = scored(rows=3)
    metrics = rewards.penalise_overlong(batch, said, OverlongConfig(enable=True, len=4, penalty_factor=2.0), 10)
    assert said.parts == {"overlong_penalty": [-1.0, -2.0, 0.0]}
    assert [sum(row) for row in rows_of(batch, "token_level_scores")] == [0.0, -1.0, 0.0]
    assert metrics["reward/overlong_ratio"].value == pytest.approx(2 / 3)


def test_reward_parts_are_taken_from_judges_and_from_what_functions_return():
    said = scored(1, rows=2, format=[0.5, None])
    said.parts = {"rule": [1.0, None]}
    batch = make_batch()
    rewards.set_parts(batch, said, ["rule", "format"])
    assert batch.batch["reward_parts"].tolist() == [[1.0, 0.5], [0.0, 0.0]]
    with pytest.raises(RewardError, match="no reward part 'style'.*known parts: rule, format"):
        rewards.set_parts(batch, said, ["style"])
    for value in ("good", [0.5], math.nan):
        with pytest.raises(RewardError, match=r"gdpo_reward_keys names 'tone', which is not a finite number in 1 rows"):
            rewards.set_parts(batch, scored(1, rows=2, tone=[value, None]), ["tone"])


def test_what_is_known_of_rows_can_be_cut_and_joined():
    first, second = scored(1, rows=2, acc=[1, 2]), scored(rows=1)
    joined = Scored.concat([first, second])
    assert (joined.extra, [f is None for f in joined.failures]) == ({"acc": [1, 2, None]}, [True, False, True])
    assert joined.select([2, 0]).extra == {"acc": [None, 1]}
