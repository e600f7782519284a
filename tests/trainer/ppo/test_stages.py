import math
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.batches import column, make_batch, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.algorithms.kl import KLController, make_kl_controller
from lockstep.config.actor_rollout_ref import ActorConfig, PolicyLossConfig
from lockstep.config.algorithm import AlgorithmConfig, RolloutCorrectionConfig
from lockstep.config.sampling import SamplingParams
from lockstep.errors import ConfigError, NumericalError
from lockstep.observability.metrics import Max, Mean, Sum
from lockstep.observability.spans import progress, running
from lockstep.protocol import DataProto
from lockstep.trainer.ppo import stages
from lockstep.trainer.ppo.algorithm import Estimation, PolicyUpdate, correction_of

NAN = float("nan")


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
        if "rollout_log_probs" in data:
            rank |= {f"sampler/{name}": Mean(1.0) for name in ("ratio", "difference")}
            rank |= {f"sampler/{name}_square": Mean(4.0) for name in ("ratio", "difference")}
            rank |= {f"sampler/{name}_max": Max(float(len(self.calls))) for name in ("log_ratio", "difference")}
        return [rank, rank | {"actor/log_ratio_max": Max(0.5)}]

    update_critic = update_actor


class Noted:
    """A drift that keeps what it was told."""

    def __init__(self):
        self.differences = []

    def note(self, difference):
        self.differences.append(difference)


# -- generation ------------------------------------------------------------------------------------------------------------


class Sampler(Group):
    """A rollout that tells of its first response before it answers."""

    reads = ("index", "sample")

    @contextmanager
    def receiving(self, handle):
        yield handle

    def generate_sequences(self, data, on_finished, **arguments):
        on_finished((1, torch.tensor([5, 6, 7])))
        self.heard = running[-1].done, running[-1].total, running[-1].tokens
        return Group.__getattr__(self, "generate_sequences")(data, **arguments)


def test_generation_sees_the_prompts_and_the_sampling_key_and_counts_what_it_hears_of():
    batch = make_batch().select(["prompts"])
    group = Sampler(responses=[[1.0], [2.0]])
    sampling = SamplingParams(temperature=1.0, top_k=-1, top_p=1.0, max_tokens=3, stop_token_ids=(1,), seed=0)
    heard = []
    with progress("gen"):
        scoring = SimpleNamespace(add=lambda row, ids: heard.append((row, ids.tolist())))
        stages.generate(group, batch, sampling, 4, scoring)
    assert (group.heard, heard) == ((1, 2, 3), [(1, [5, 6, 7])])
    ((method, data, arguments),) = group.calls
    assert (method, arguments) == ("generate_sequences", {"sampling": sampling, "step": 4})
    assert (set(data.columns), set(data.non_tensor_batch)) == ({"prompts"}, {"index", "sample", "row"})
    assert rows_of(batch, "responses") == [[1.0], [2.0]]


# -- log-probs and values --------------------------------------------------------------------------------------------------


def test_old_log_probs_are_compared_with_the_samplers_on_the_policys_tokens():
    old, sampled = [[-1.0, -2.0, -9.0], [-0.5]], [[-1.5, -2.0, -1.0], [-0.25]]
    batch = make_batch(mask=[[1, 1, 0], [1]], rollout_log_probs=sampled)
    drift = Noted()
    metrics = stages.old_log_prob(Group(old_log_probs=old, entropys=[[1.0, 2.0, 90.0], [3.0]]), batch, drift)
    assert drift.differences == [0.5]
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


def test_a_sampler_without_log_probs_is_not_compared_and_cannot_stand_in():
    batch = make_batch(rollout_log_probs=[[math.nan] * 3, [math.nan]])
    metrics = stages.old_log_prob(Group(old_log_probs=[[-1, -2, -3], [-4]], entropys=[[1, 1, 1], [1]]), batch)
    assert metrics == {"actor/entropy": 1.0}
    with pytest.raises(NumericalError, match="old_log_probs is not finite"):
        stages.use_sampler_log_probs(make_batch(rollout_log_probs=[[-1, -2, -3], [math.nan]]))


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


def advantage(batch: DataProto, estimation: Estimation, control: KLController) -> dict[str, float]:
    """The two stages between the scores and the update."""
    metrics = stages.shape_rewards(batch, estimation, control)
    stages.estimate(batch, estimation)
    return metrics


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
    metrics = advantage(batch, Estimation.of(AlgorithmConfig(use_kl_in_reward=True, kl_penalty=kind)), control)

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


@pytest.mark.parametrize("estimator", ["grpo", "grpo_passk", "rloo", "reinforce_plus_plus_baseline"])
def test_the_rounding_of_the_kl_is_no_advantage_between_equal_scores(estimator):
    reference = (-torch.rand(4, 3, generator=torch.Generator().manual_seed(0))).tolist()
    old = [[x + 1e-6 * (i + k - 2) for k, x in enumerate(row)] for i, row in enumerate(reference)]
    scores = [[0.0, 0.0, score] for score in (0.3, 0.3, 0.0, 0.0)]
    batch = make_batch([[1] * 3] * 4, old_log_probs=old, ref_log_prob=reference, token_level_scores=scores)
    estimation = Estimation.of(AlgorithmConfig(adv_estimator=estimator, use_kl_in_reward=True))
    metrics = advantage(batch, estimation, make_kl_controller("fixed", 0.1, 0.1, 100))
    assert metrics["actor/reward_kl_penalty"] == 0.0
    assert rows_of(batch, "advantages") == [[0.0] * 3] * 4


def test_without_kl_the_rewards_are_the_scores_and_the_weight_stays():
    batch = make_batch(token_level_scores=[[0, 0, 1], [0]], values=[[0, 0, 0], [0]])
    control = make_kl_controller("adaptive", 0.1, 0.5, 1000)
    assert advantage(batch, Estimation.of(AlgorithmConfig()), control) == {}
    assert rows_of(batch, "token_level_rewards") == [[0, 0, 1], [0]]
    assert rows_of(batch, "returns") == [[1, 1, 1], [0]]
    assert control.value == 0.1


def test_groups_are_the_samples_of_one_prompt_wherever_they_are():
    batch = make_batch([[1], [1], [1], [1]], token_level_scores=[[1], [5], [3], [9]])
    batch.non_tensor_batch["uid"] = np.array(["b", "a", "b", "a"], dtype=object)
    config = AlgorithmConfig(adv_estimator="grpo", norm_adv_by_std_in_grpo=False)
    advantage(batch, Estimation.of(config), make_kl_controller("fixed", 0.1, 0.5, 1000))
    assert rows_of(batch, "advantages") == [[-1], [-2], [1], [2]]


def test_remax_reads_the_greedy_scores_and_gdpo_the_named_parts_of_the_reward():
    control = make_kl_controller("fixed", 0.1, 0.5, 1000)
    scores = [[1], [5], [3], [9]]
    batch = make_batch([[1]] * 4, token_level_scores=scores)
    batch.set("reward_baselines", torch.tensor([1.0, 1.0, 4.0, 4.0]))
    advantage(batch, Estimation.of(AlgorithmConfig(adv_estimator="remax")), control)
    assert rows_of(batch, "advantages") == [[0], [4], [-1], [5]]

    batch = make_batch([[1]] * 4, token_level_scores=scores)
    batch.set("reward_parts", torch.tensor([[7.0, 1.0], [7.0, 2.0], [7.0, 5.0], [7.0, 4.0]]))
    batch.meta_info["reward_part_names"] = ["length", "right"]
    advantage(
        batch, Estimation.of(AlgorithmConfig(adv_estimator="gdpo", gdpo_reward_keys=["right"], gdpo_reward_weights=[3.0])), control
    )
    signs = [[math.copysign(1, value) for value in row] for row in rows_of(batch, "advantages")]
    assert signs == [[-1], [1], [1], [-1]]
    with pytest.raises(ConfigError, match=r"names \['wrong'\], but the reward function gave the parts \['length', 'right'\]"):
        advantage(batch, Estimation.of(AlgorithmConfig(adv_estimator="gdpo", gdpo_reward_keys=["wrong"])), control)


def test_an_estimator_from_a_file_gets_what_it_names(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def twice(*, token_level_rewards, config):\n    return 2 * token_level_rewards, config.gamma * token_level_rewards\n"
    )
    batch = make_batch(token_level_scores=[[0, 0, 1], [3]])
    config = AlgorithmConfig(adv_estimator=f"{file}:twice", gamma=0.5)
    advantage(batch, Estimation.of(config), make_kl_controller("fixed", 0.1, 0.5, 1000))
    assert rows_of(batch, "advantages") == [[0, 0, 2], [6]]
    assert rows_of(batch, "returns") == [[0, 0, 0.5], [1.5]]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("token_level_rewards", r"must return \(advantages, returns\); it returned shape \(4,\)"),
        ("(token_level_rewards,) * 3", r"must return \(advantages, returns\); it returned tuple of 3"),
        ("(token_level_rewards[:1], token_level_rewards)", r"one number per token, \(4,\).*it returned shape \(1,\) as advantages"),
        ("(token_level_rewards, None)", "it returned NoneType as returns"),
    ],
)
@pytest.mark.parametrize("rows", ["rows", ""])
def test_an_estimator_that_returns_the_wrong_thing_is_told_what_is_right(tmp_path, result, message, rows):
    file = tmp_path / "mine.py"
    file.write_text(f"def mine(*, token_level_rewards, {rows}):\n    return {result}\n")
    batch = make_batch(token_level_scores=[[0, 0, 1], [3]])
    with pytest.raises(ConfigError, match=message if rows else "must return"):
        advantage(batch, Estimation.of(AlgorithmConfig(adv_estimator=f"{file}:mine")), make_kl_controller("fixed", 0.1, 0.5, 1000))


def test_advantages_that_are_not_finite_stop_the_step_with_their_rows(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text("def log(*, token_level_rewards):\n    return token_level_rewards.log(), token_level_rewards\n")
    batch = make_batch([[1], [1]], token_level_scores=[[1], [0]])
    with pytest.raises(NumericalError, match=r"advantages is not finite for 1 rows; dataset rows \[31\]"):
        advantage(batch, Estimation.of(AlgorithmConfig(adv_estimator=f"{file}:log")), make_kl_controller("fixed", 0.1, 0.5, 1000))


def test_an_advantage_without_its_inputs_is_an_error():
    with pytest.raises(ConfigError, match="'gae' needs values"):
        advantage(
            make_batch(token_level_scores=[[0, 0, 1], [0]]), Estimation.of(AlgorithmConfig()), make_kl_controller("fixed", 0, 1, 1)
        )


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
        rollout_log_probs=[[0, math.nan, 0], [0], [0, 0], [math.nan]],
        advantages=[[1, 0, 0], [2], [0, 3], [4]],
        values=nothing,
        returns=nothing,
        token_level_scores=nothing,
    )
    mini_batches = [torch.tensor([2, 3]), torch.tensor([0, 1])]
    actor, critic = Learner(), Learner()
    drift = Noted()
    metrics = stages.update_actor(actor, batch, mini_batches, PolicyUpdate.of(ActorConfig()), drift)
    rollout = {name: value for name, value in metrics.items() if name.startswith("training/")}
    assert rollout == pytest.approx(  # of the first update: the old log-probs are the sampler's
        {
            "training/rollout_ratio_max": math.e,
            "training/rollout_ratio_mean": 1.0,
            "training/rollout_ratio_ess": 0.25,
            "training/rollout_log_probs_diff_max": 1.0,
            "training/rollout_probs_diff_max": 1.0,
            "training/rollout_probs_diff_mean": 1.0,
            "training/rollout_probs_diff_std": math.sqrt(3.0),
        }
    )
    metrics = {name: value for name, value in metrics.items() if name not in rollout}
    assert drift.differences == [1.0]  # of the first update, before any step
    assert metrics == {"actor/tokens": 2.5, "actor/log_ratio_max": 2.0, "actor/skipped_rows": 0.25}
    assert [(list(d.non_tensor_batch["index"]), c.tokens, c.sequences) for d, c in actor.calls] == [
        ([32], 2, 1),  # nothing in the last row is the policy's
        ([30, 31], 3, 2),
    ]
    columns = {"prompts", "responses", "response_mask", "old_log_probs", "advantages"}
    assert [set(data.columns) for data, _ in actor.calls] == [columns | {"rollout_log_probs"}, columns]
    stages.update_critic(critic, batch, mini_batches)
    assert set(critic.calls[0][0].columns) == {"prompts", "responses", "response_mask", "values", "returns"}
    batch.set("ref_log_prob", column(nothing))
    batch.set("rollout_is_weights", column(nothing))
    stages.update_actor(actor, batch, mini_batches, PolicyUpdate.of(ActorConfig()))
    assert {"ref_log_prob", "rollout_is_weights"} <= set(actor.calls[-1][0].columns)


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        (ActorConfig(), [0, 3]),
        (ActorConfig(policy_loss=PolicyLossConfig(loss_mode="gspo")), [0, 3]),
        (ActorConfig(entropy_coeff=0.1), [0, 1, 2, 3]),
        (ActorConfig(use_kl_loss=True), [0, 1, 2, 3]),
        (ActorConfig(policy_loss=PolicyLossConfig(loss_mode="dro")), [0, 1, 2, 3]),
    ],
)
def test_a_row_without_advantage_leaves_the_update_where_it_has_no_gradient(config, kept):
    advantages = [[0.0, 1.0], [0.0], [5.0, 0.0], [-1.0]]
    batch = make_batch([[1] * 2, [1], [1] * 2, [1]], [[1, 1], [1], [0, 1], [1]], old_log_probs=advantages, advantages=advantages)
    assert stages.rows_with_gradient(batch, PolicyUpdate.of(config)).tolist() == kept
    assert stages.rows_with_gradient(batch, PolicyUpdate.of(config, balances=True)).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("advantages", [[0, 1], [0, 0]], ids=["some rows have a gradient", "no row has"])
def test_rows_that_are_left_out_stay_in_the_denominators(advantages):
    """Else the gradient of the others would be larger, by as much as there are rows without an advantage."""
    lengths, groups = [3, 1, 2, 4, 2], [0, 1, 0, 1, 0]
    mask = [[1] * length for length in lengths]
    rows = [[float(advantages[group])] * length for group, length in zip(groups, lengths, strict=True)]
    batch = make_batch([[1] * length for length in lengths], mask, old_log_probs=rows, advantages=rows)
    actor = Learner()
    metrics = stages.update_actor(actor, batch, [torch.arange(5)], PolicyUpdate.of(ActorConfig()))
    (sent, denominators) = actor.calls[0]
    assert len(sent) == max(1, sum(advantages[group] != 0 for group in groups)) < len(batch)
    assert (denominators.tokens, denominators.sequences) == (sum(lengths), len(lengths))
    assert metrics["actor/skipped_rows"] == 1 - len(sent) / len(batch)


def test_an_update_is_made_even_where_no_row_has_an_advantage():
    """AdamW's decay and momentum go on in such a step."""
    nothing = {"old_log_probs": [[0.0], [0.0]], "advantages": [[0.0], [0.0]]}
    for mask, kept in (([[1], [1]], 0), ([[0], [1]], 1), ([[0], [0]], 0)):  # a row that can be measured, where there is one
        batch = make_batch([[1], [1]], mask, **nothing)
        assert stages.rows_with_gradient(batch, PolicyUpdate.of(ActorConfig())).tolist() == [kept]


def test_nothing_measured_is_no_number_and_moves_no_weight():
    nothing = [[0.0], [0.0]]
    names = ("rollout_log_probs", "advantages", "token_level_scores", "ref_log_prob", "old_log_probs")
    batch = make_batch([[1], [1]], [[0], [0]], **dict.fromkeys(names, nothing))

    class Unmeasured:
        def update_actor(self, data, denominators):
            return [{"actor/loss": Sum(0.0), "actor/entropy": Mean(0.0, 0.0), "sampler/ratio": Mean(0.0, 0.0)}]

    drift = Noted()
    metrics = stages.update_actor(Unmeasured(), batch, [torch.tensor([0, 1])], PolicyUpdate.of(ActorConfig()), drift)
    assert (metrics, drift.differences) == ({"actor/loss": 0.0, "actor/skipped_rows": 0.5}, [None])
    control = make_kl_controller("adaptive", 0.5, 0.1, 100)
    estimation = Estimation.of(AlgorithmConfig(adv_estimator="grpo", use_kl_in_reward=True))
    assert advantage(batch, estimation, control) == {"actor/reward_kl_penalty_coeff": 0.5}
    assert control.value == 0.5


def test_what_a_loss_needs_of_a_whole_mini_batch_is_computed_before_it_is_cut():
    numbers = [[0.0, -1.0, -2.0], [-3.0], [-0.5, -0.1], [-4.0]]
    batch = make_batch([[1] * 3, [1], [1] * 2, [1]], old_log_probs=numbers, advantages=numbers)
    config = ActorConfig(policy_loss=PolicyLossConfig(loss_mode="kl_cov", kl_cov_ratio=0.5))
    actor = Learner()
    stages.update_actor(actor, batch, [torch.tensor([0, 1]), torch.tensor([2, 3])], PolicyUpdate.of(config))
    assert [rows_of(data, "cov_selected") for data, _ in actor.calls] == [[[1, 0, 0], [1]], [[0, 0], [1]]]


# -- correction ------------------------------------------------------------------------------------------------------------


def corrected(**options):
    """Two prompts with two samples each; the sampler's probability of row 1 was half, of the last token of row 2 a tenth."""
    log = math.log
    batch = make_batch(
        [[1, 2], [3], [4, 5], [6]],
        old_log_probs=[[log(0.5), log(0.5)], [log(0.5)], [log(0.5), log(0.5)], [log(0.5)]],
        rollout_log_probs=[[log(0.5), log(0.5)], [log(0.25)], [log(0.5), log(0.05)], [log(0.5)]],
        token_level_scores=[[0, 1], [2], [0, 4], [8]],
    )
    return batch, stages.correct(batch, correction_of(RolloutCorrectionConfig(**options)))


def test_no_correction_asked_for_is_none_made():
    batch, metrics = corrected()
    assert metrics == {}
    assert "rollout_is_weights" not in batch


def test_weights_are_a_column_and_leave_the_mask_alone():
    batch, metrics = corrected(rollout_is="token", rollout_is_threshold=3.0)
    assert rows_of(batch, "rollout_is_weights") == [[1, 1], [pytest.approx(2)], [1, 3], [1]]
    assert rows_of(batch, "response_mask") == [[1, 1], [1], [1, 1], [1]]
    assert metrics["rollout_corr/rollout_is_max"] == pytest.approx(3)
    assert metrics["rollout_corr/rollout_is_ratio_fraction_high"] == pytest.approx(1 / 6)
    assert metrics["rollout_corr/kl"] == pytest.approx(-math.log(20) / 6)
    assert not any("rollout_rs" in name for name in metrics)


def test_rejected_tokens_leave_the_mask_and_with_it_the_groups_and_the_denominators():
    batch, metrics = corrected(rollout_rs="seq_mean_k1", rollout_rs_threshold=1.9)
    assert rows_of(batch, "response_mask") == [[1, 1], [0], [0, 0], [1]]
    assert "rollout_is_weights" not in batch
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(3 / 6)
    assert metrics["rollout_corr/rollout_rs_seq_mean_k1_masked_fraction"] == pytest.approx(3 / 6)
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(2 / 4)
    config = AlgorithmConfig(adv_estimator="grpo")
    advantage(batch, Estimation.of(config), make_kl_controller("fixed", 0.1, 0.5, 1000))
    # Each prompt has one sample left: a group of one, whose advantage is its score.
    assert rows_of(batch, "advantages") == [[1, 1], [0], [0, 0], [8]]
    actor = Learner()
    stages.update_actor(actor, batch, [torch.arange(4)], PolicyUpdate.of(ActorConfig()))
    assert (actor.calls[0][1].tokens, actor.calls[0][1].sequences) == (3, 2)


def test_every_kind_of_rejection_must_be_passed_and_is_counted_alone():
    batch, metrics = corrected(rollout_rs="token_k1,group_k2", rollout_rs_threshold="3.0,0.5")
    # token_k1 drops the token of ratio 10; group_k2 the prompt it belongs to.
    assert rows_of(batch, "response_mask") == [[1, 1], [1], [0, 0], [0]]
    assert metrics["rollout_corr/rollout_rs_token_k1_masked_fraction"] == pytest.approx(1 / 6)
    assert metrics["rollout_corr/rollout_rs_group_k2_masked_fraction"] == pytest.approx(3 / 6)


def test_weights_that_are_not_finite_stop_the_step():
    batch = make_batch(old_log_probs=[[0, 0, 0], [0]], rollout_log_probs=[[0, 0, 0], [NAN]])
    with pytest.raises(NumericalError, match=r"rollout_is_weights is not finite for 1 rows; dataset rows \[31\]"):
        stages.correct(batch, correction_of(RolloutCorrectionConfig(rollout_is="token")))
