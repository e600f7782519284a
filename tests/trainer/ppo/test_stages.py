import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.algorithms.kl import make_kl_controller
from lockstep.config.algorithm import AlgorithmConfig
from lockstep.config.sampling import SamplingParams
from lockstep.errors import ConfigError, NumericalError, RewardError
from lockstep.observability.metrics import Max, Mean
from lockstep.protocol import DataProto, Ragged
from lockstep.trainer.ppo import stages

NAN = float("nan")


def column(rows, dtype=torch.float32):
    return Ragged.from_rows(rows, dtype=dtype)


def rows_of(batch, name):
    return [row.tolist() for row in batch.ragged(name).rows()]


def make_batch(responses=((5, 6, 7), (8,)), mask=None, **columns):
    """Rows 30, 31, ... of a dataset, two samples a prompt."""
    mask = mask or [[1] * len(row) for row in responses]
    tensors = {
        "prompts": column([[1, 2]] * len(responses), torch.int64),
        "responses": column(responses, torch.int64),
        "response_mask": column(mask, torch.int64),
        **{name: column(rows) for name, rows in columns.items()},
    }
    objects = {
        "index": [30 + i for i in range(len(responses))],
        "uid": [str(i // 2) for i in range(len(responses))],
        "sample": [i % 2 for i in range(len(responses))],
        "raw_prompt": [f"question {i}" for i in range(len(responses))],
    }
    return DataProto.from_dict(tensors, objects, {"pad_token_id": 0})


class Group:
    """A worker group that answers with given columns and keeps what it was given."""

    def __init__(self, **columns):
        self.columns, self.calls = columns, []

    def __getattr__(self, method):
        def call(data, **arguments):
            self.calls.append((method, data, arguments))
            return DataProto.from_dict({name: column(rows) for name, rows in self.columns.items()})

        return call


class Learner:
    """A worker group of two ranks whose metric is the number of tokens it was given and whose drift grows with each update."""

    def __init__(self):
        self.calls = []

    def update_actor(self, data, denominators):
        self.calls.append((data, denominators))
        rank = {"actor/tokens": Mean(float(denominators.tokens)), "actor/log_ratio_max": Max(float(len(self.calls)))}
        rank |= {"actor/ratio_mean": Mean(1.0), "actor/ratio_square_mean": Mean(4.0 * len(self.calls))}
        return [rank, rank | {"actor/log_ratio_max": Max(0.5)}]

    update_critic = update_actor


# -- prompts and generation ------------------------------------------------------------------------------------------------


def test_prompts_are_the_datasets_rows_each_n_times_with_ids_of_their_own():
    dataset = [{"prompt_ids": [i, i + 1], "index": i, "data_source": f"s{i}", "extra_info": {"i": i}} for i in range(4)]
    dataset[2]["prompt_ids"] = []
    batch = stages.make_prompts(dataset, [3, 2], n=2, pad_token_id=9)
    assert rows_of(batch, "prompts") == [[3, 4], [3, 4], [], []]
    assert batch.ragged("prompts").values.dtype == torch.int64
    assert {name: list(values) for name, values in batch.non_tensor_batch.items()} == {
        "index": [3, 3, 2, 2],
        "data_source": ["s3", "s3", "s2", "s2"],
        "extra_info": [{"i": 3}, {"i": 3}, {"i": 2}, {"i": 2}],
        "uid": ["0", "0", "1", "1"],
        "sample": [0, 1, 0, 1],
    }
    assert batch.meta_info == {"pad_token_id": 9}


def test_generation_sees_the_prompts_and_the_sampling_key_and_nothing_else():
    batch = make_batch().select(["prompts"])
    group = Group(responses=[[1.0], [2.0]])
    sampling = SamplingParams(temperature=1.0, top_k=-1, top_p=1.0, max_tokens=3, stop_token_ids=(1,), seed=0)
    stages.generate(group, batch, sampling, step=4)
    ((method, data, arguments),) = group.calls
    assert (method, arguments) == ("generate_sequences", {"sampling": sampling, "step": 4})
    assert (set(data.columns), set(data.non_tensor_batch)) == ({"prompts"}, {"index", "sample"})
    assert rows_of(batch, "responses") == [[1.0], [2.0]]


# -- scores ----------------------------------------------------------------------------------------------------------------


def test_scores_are_stored_without_padding_and_extra_information_is_passed_on():
    batch = make_batch()
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.5, 0.0, 0.0]], dtype=torch.float64)
    assert stages.score(lambda data: rewards, batch) == {}
    assert rows_of(batch, "token_level_scores") == [[0.0, 0.0, 1.0], [0.5]]
    assert batch.ragged("token_level_scores").values.dtype == torch.float32

    def with_dict(data, return_dict=False):
        assert return_dict
        return {"reward_tensor": rewards, "reward_extra_info": {"acc": [1, 0]}}

    assert stages.score(with_dict, batch) == {"acc": [1, 0]}


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (torch.zeros(2), r"shape \(2, 3\), like the responses; got a tensor of shape \(2,\)"),
        (torch.zeros(2, 4), r"shape \(2, 3\).*got a tensor of shape \(2, 4\)"),
        ([1.0, 2.0], r"shape \(2, 3\).*got list"),
        (None, "got NoneType"),
        (torch.tensor([[0.0, 0.0, 0.0], [NAN, 0.0, 0.0]]), r"not finite, in rows \[1\]"),
        (torch.tensor([[math.inf, 0.0, 0.0], [0.0, 0.0, 0.0]]), r"not finite, in rows \[0\]"),
        (torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 1.0]]), r"after the end of the response, in rows \[1\]"),
    ],
)
def test_a_reward_that_cannot_be_used_is_an_error_and_not_a_number(result, message):
    batch = make_batch()
    with pytest.raises(RewardError, match=message):
        stages.score(lambda data: result, batch)
    assert "token_level_scores" not in batch


def test_a_reward_model_gets_the_question_and_the_text_of_the_answer():
    class Tokenizer:
        def batch_decode(self, rows, skip_special_tokens):
            return [f"text {row}" for row in rows]

    group, batch = Group(rm_scores=[[0, 0, 1], [2]]), make_batch()
    stages.model_scores(group, batch, Tokenizer())
    ((method, data, _),) = group.calls
    assert method == "compute_rm_score"
    assert list(data.non_tensor_batch["response_text"]) == ["text [5, 6, 7]", "text [8]"]
    assert list(data.non_tensor_batch["raw_prompt"]) == ["question 0", "question 1"]
    assert rows_of(batch, "rm_scores") == [[0, 0, 1], [2]]


# -- log-probs and values --------------------------------------------------------------------------------------------------


def test_old_log_probs_are_compared_with_the_samplers_on_the_policys_tokens():
    old, sampled = [[-1.0, -2.0, -9.0], [-0.5]], [[-1.5, -2.0, -1.0], [-0.25]]
    batch = make_batch(mask=[[1, 1, 0], [1]], rollout_log_probs=sampled)
    metrics = stages.old_log_prob(Group(old_log_probs=old, entropys=[[1.0, 2.0, 90.0], [3.0]]), batch)
    pairs = [(-1.0, -1.5), (-2.0, -2.0), (-0.5, -0.25)]
    differences = [abs(math.exp(a) - math.exp(b)) for a, b in pairs]
    mean, ratios = sum(differences) / 3, [math.exp(a - b) for a, b in pairs]
    assert metrics == pytest.approx(
        {
            "actor/entropy": 2.0,
            "training/rollout_log_probs_diff_max": 0.5,
            "training/rollout_probs_diff_max": max(differences),
            "training/rollout_probs_diff_mean": mean,
            "training/rollout_probs_diff_std": math.sqrt(sum((d - mean) ** 2 for d in differences) / 3),
            "training/rollout_ratio_max": math.exp(0.5),
            "training/rollout_ratio_mean": sum(ratios) / 3,
            "training/rollout_ratio_ess": sum(ratios) ** 2 / (3 * sum(r * r for r in ratios)),
        }
    )
    assert rows_of(batch, "old_log_probs") == old


def test_there_is_nothing_to_compare_where_the_policy_wrote_nothing():
    batch = make_batch(mask=[[0, 0, 0], [0]], rollout_log_probs=[[0, 0, 0], [0]])
    assert stages.old_log_prob(Group(old_log_probs=[[0, 0, 0], [0]], entropys=[[1, 1, 1], [1]]), batch) == {}


def test_the_samplers_log_probs_can_stand_in():
    batch = make_batch(rollout_log_probs=[[-1, -2, -3], [-4]])
    stages.use_sampler_log_probs(batch)
    assert rows_of(batch, "old_log_probs") == [[-1, -2, -3], [-4]]


@pytest.mark.parametrize(
    ("stage", "name"),
    [
        (stages.old_log_prob, "old_log_probs"),
        (stages.ref_log_prob, "ref_log_prob"),
        (stages.values, "values"),
        (lambda _, batch: stages.use_sampler_log_probs(batch), "old_log_probs"),
    ],
)
def test_a_column_that_is_not_finite_is_an_error_that_names_the_datasets_rows(stage, name):
    bad = [[-1.0, -1.0, -1.0], [-math.inf]]
    batch = make_batch(rollout_log_probs=bad)
    extra = {"entropys": [[0, 0, 0], [0]]} if stage is stages.old_log_prob else {}
    with pytest.raises(NumericalError, match=rf"{name} is not finite for 1 rows; dataset rows \[31\]"):
        stage(Group(**{name: bad}, **extra), batch)


# -- advantages ------------------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 99), kind=st.sampled_from(["kl", "abs", "mse"]))
def test_the_kl_in_the_reward_equals_a_loop_and_moves_the_weight(seed, kind):
    generator = torch.Generator().manual_seed(seed)
    lengths = [3, 1, 2, 4]
    old, ref, scores, values = (
        [torch.randn(n, generator=generator).tolist() for n in lengths] for _ in ("old", "ref", "scores", "values")
    )
    mask = [[1, 0, 1], [0], [1, 1], [1, 1, 1, 1]]
    batch = make_batch(
        [[1] * n for n in lengths], mask, old_log_probs=old, ref_log_prob=ref, token_level_scores=scores, values=values
    )
    control = make_kl_controller("adaptive", 0.1, 0.5, 1000)
    metrics = stages.advantage(batch, AlgorithmConfig(use_kl_in_reward=True, kl_penalty=kind), control)

    penalty = {"kl": lambda d: d, "abs": abs, "mse": lambda d: d * d / 2}[kind]
    expected, per_row = [], []
    for i in range(4):
        kl = [penalty(a - b) for a, b in zip(old[i], ref[i], strict=True)]
        expected.append([s - 0.1 * k * m for s, k, m in zip(scores[i], kl, mask[i], strict=True)])
        if any(mask[i]):
            per_row.append(sum(k * m for k, m in zip(kl, mask[i], strict=True)) / sum(mask[i]))
    for got, want in zip(rows_of(batch, "token_level_rewards"), expected, strict=True):
        assert got == pytest.approx(want, abs=1e-5)
    mean = sum(per_row) / len(per_row)
    assert metrics == pytest.approx({"actor/reward_kl_penalty": mean, "actor/reward_kl_penalty_coeff": 0.1}, abs=1e-5)
    error = min(max(mean / 0.5 - 1, -0.2), 0.2)
    assert control.value == pytest.approx(0.1 * (1 + error * 4 / 1000), rel=1e-4)
    assert {"advantages", "returns"} <= set(batch.columns)


def test_without_kl_the_rewards_are_the_scores_and_the_weight_stays():
    batch = make_batch(token_level_scores=[[0, 0, 1], [0]], values=[[0, 0, 0], [0]])
    control = make_kl_controller("adaptive", 0.1, 0.5, 1000)
    assert stages.advantage(batch, AlgorithmConfig(), control) == {}
    assert rows_of(batch, "token_level_rewards") == [[0, 0, 1], [0]]
    assert rows_of(batch, "returns") == [[1, 1, 1], [0]]
    assert control.value == 0.1


def test_groups_are_the_samples_of_one_prompt_wherever_they_are():
    batch = make_batch([[1], [1], [1], [1]], token_level_scores=[[1], [5], [3], [9]])
    batch.non_tensor_batch["uid"] = np.array(["b", "a", "b", "a"], dtype=object)
    config = AlgorithmConfig(adv_estimator="grpo", norm_adv_by_std_in_grpo=False)
    stages.advantage(batch, config, make_kl_controller("fixed", 0.1, 0.5, 1000))
    assert rows_of(batch, "advantages") == [[-1], [-2], [1], [2]]


def test_an_advantage_without_its_inputs_is_an_error():
    with pytest.raises(ConfigError, match="'gae' needs values"):
        stages.advantage(make_batch(token_level_scores=[[0, 0, 1], [0]]), AlgorithmConfig(), make_kl_controller("fixed", 0, 1, 1))


# -- updates ---------------------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(
    size=st.integers(1, 4),
    count=st.integers(1, 4),
    n=st.integers(1, 3),
    epochs=st.integers(1, 3),
    seed=st.none() | st.integers(0, 10**6),
)
def test_an_epoch_takes_every_prompt_once_with_all_its_samples(size, count, n, epochs, seed):
    cuts = stages.cut_mini_batches(size * count, n, size, epochs, seed)
    assert [len(rows) for rows in cuts] == [size * n] * (count * epochs)
    assert all(rows.view(size, n).tolist() == [[r - r % n + s for s in range(n)] for r in rows[::n].tolist()] for rows in cuts)
    for epoch in range(epochs):
        rows = torch.cat(cuts[epoch * count : (epoch + 1) * count])
        assert sorted(rows.tolist()) == list(range(size * count * n))
        if seed is None:
            assert rows.tolist() == sorted(rows.tolist())
    assert [rows.tolist() for rows in stages.cut_mini_batches(size * count, n, size, epochs, seed)] == [r.tolist() for r in cuts]


def test_orders_differ_between_epochs_and_seeds():
    orders = [torch.cat(stages.cut_mini_batches(64, 1, 64, 1, seed)).tolist() for seed in (0, 1)]
    orders += [rows.tolist() for rows in stages.cut_mini_batches(64, 1, 64, 3, 0)[1:]]
    assert len({tuple(order) for order in orders}) == 4


def test_updates_get_their_rows_and_the_counts_of_the_whole_mini_batch():
    nothing = [[0] * 3, [0], [0] * 2, [0]]
    batch = make_batch(
        [[1] * 3, [1], [1] * 2, [1]],
        [[1, 0, 1], [1], [1, 1], [0]],
        old_log_probs=nothing,
        advantages=nothing,
        values=nothing,
        returns=nothing,
        token_level_scores=nothing,
    )
    mini_batches = [torch.tensor([2, 3]), torch.tensor([0, 1])]
    actor, critic = Learner(), Learner()
    metrics, drift = stages.update_actor(actor, batch, mini_batches)
    rollout = {name: value for name, value in metrics.items() if name.startswith("training/")}
    assert rollout == pytest.approx(  # of the first update: the old log-probs are the sampler's
        {
            "training/rollout_ratio_max": math.e,
            "training/rollout_ratio_mean": 1.0,
            "training/rollout_ratio_ess": 0.25,
        }
    )
    metrics = {name: value for name, value in metrics.items() if name not in rollout and "ratio_" not in name.removesuffix("_max")}
    assert drift == 1.0  # of the first update, before any step
    assert metrics == {"actor/tokens": 2.5, "actor/log_ratio_max": 2.0}
    assert [(list(d.non_tensor_batch["index"]), c.tokens, c.sequences) for d, c in actor.calls] == [
        ([32, 33], 2, 1),
        ([30, 31], 3, 2),
    ]
    assert set(actor.calls[0][0].columns) == {"prompts", "responses", "response_mask", "old_log_probs", "advantages"}
    stages.update_critic(critic, batch, mini_batches)
    assert set(critic.calls[0][0].columns) == {"prompts", "responses", "response_mask", "values", "returns"}
    batch.set("ref_log_prob", column(nothing))
    stages.update_actor(actor, batch, mini_batches)
    assert "ref_log_prob" in actor.calls[-1][0].columns
