"""verl's names give verl's formulas, written here a second time in plain loops. Inputs are float64, masks have holes.

Groups of one, rows without a token and what lies outside the mask are where Lockstep differs on purpose (docs/algorithms/verl.md): the
comparisons here leave these out, the tests of `lockstep.algorithms` have them.
"""

import inspect
import math
import statistics
from contextlib import ExitStack
from enum import Enum
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from lockstep.algorithms.advantages import ADV_ESTIMATORS
from lockstep.algorithms.aggregation import LOSS_AGG_MODES
from lockstep.algorithms.policy_losses import POLICY_LOSSES
from lockstep.algorithms.rows import Rows
from lockstep.compat import core_algos
from lockstep.compat.core_algos import AdvantageEstimator
from lockstep.config.actor_rollout_ref import ActorConfig
from lockstep.errors import ConfigError

PROPERTY = settings(max_examples=25, deadline=None)
TOLERANCE = {"rtol": 1e-6, "atol": 1e-6}
UIDS = np.array(["a", "b", "a", "b", "a"], dtype=object)


@st.composite
def batches(draw):
    """Five rows of two prompts, each with at least one token of the policy; holes anywhere."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    mask = torch.rand(5, 6, generator=generator) < draw(st.sampled_from([0.4, 0.8, 1.0]))
    mask[torch.arange(5), torch.randint(0, 6, (5,), generator=generator)] = True
    names = ("rewards", "values", "old", "new", "advantages", "weights")
    numbers = {name: torch.randn(5, 6, generator=generator, dtype=torch.float64) for name in names}
    numbers["rewards"] *= mask
    numbers |= {"old": -numbers["old"].abs(), "new": -numbers["old"].abs() - 0.3 * numbers["new"].abs()}
    return SimpleNamespace(mask=mask.long(), **numbers)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, **TOLERANCE)


def positions(batch, i):
    return batch.mask[i].nonzero().flatten().tolist()


def scores(batch):
    return [sum(batch.rewards[i].tolist()) for i in range(5)]


def peers(i):
    return [j for j in range(5) if UIDS[j] == UIDS[i]]


def over_tokens(batch, per_row):
    result = torch.zeros(5, 6, dtype=torch.float64)
    for i, value in enumerate(per_row):
        result[i, positions(batch, i)] = value
    return result


def whiten(batch, raw):
    at = [tuple(p) for p in batch.mask.nonzero().tolist()]
    values = [raw[p].item() for p in at]
    result = torch.zeros_like(raw)
    for p in at:
        result[p] = (raw[p] - statistics.fmean(values)) / math.sqrt(statistics.variance(values) + 1e-8)
    return result


def normalise(values, i, epsilon=1e-6):
    group = [values[j] for j in peers(i)]
    return (values[i] - statistics.fmean(group)) / (statistics.stdev(group) + epsilon)


@PROPERTY
@given(batch=batches())
def test_outcome_advantages_are_verls(batch):
    s = scores(batch)
    arguments = (batch.rewards, batch.mask, UIDS)
    means = [statistics.fmean(s[j] for j in peers(i)) for i in range(5)]
    lengths = [len(positions(batch, i)) for i in range(5)]
    expected = {
        "grpo": [normalise(s, i) for i in range(5)],
        "rloo": [len(peers(i)) / (len(peers(i)) - 1) * (s[i] - means[i]) for i in range(5)],
        "opo": [s[i] - sum(lengths[j] * s[j] for j in peers(i)) / sum(lengths[j] for j in peers(i)) for i in range(5)],
        "gpg": [5 / max(sum(v != 0 for v in s), 1) * (s[i] - means[i]) / 2.0 for i in range(5)],
    }
    expected["grpo_vectorized"], expected["rloo_vectorized"] = expected["grpo"], expected["rloo"]
    for name, per_row in expected.items():
        more = {"f_norm": 2.0} if name == "gpg" else {}
        advantages, returns = core_algos.get_adv_estimator_fn(name)(*arguments, **more)
        close(advantages, over_tokens(batch, per_row))
        assert returns.equal(advantages)
    plain, _ = core_algos.compute_grpo_outcome_advantage(*arguments, norm_adv_by_std_in_grpo=False)
    close(plain, over_tokens(batch, [s[i] - means[i] for i in range(5)]))
    wide, _ = core_algos.compute_grpo_outcome_advantage(*arguments, 0.5)
    close(wide, over_tokens(batch, [normalise(s, i, 0.5) for i in range(5)]))
    baseline, _ = core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(*arguments)
    close(baseline, whiten(batch, over_tokens(batch, [s[i] - means[i] for i in range(5)])))


@PROPERTY
@given(batch=batches())
def test_passk_gives_the_best_row_its_margin(batch):
    s = scores(batch)
    expected = []
    for i in range(5):
        group = sorted((s[j] for j in peers(i)), reverse=True)
        expected.append((group[0] - group[1]) / (statistics.stdev(group) + 1e-6) if s[i] == group[0] else 0.0)
    actual, _ = core_algos.compute_grpo_passk_outcome_advantage(batch.rewards, batch.mask, UIDS, config={})
    close(actual, over_tokens(batch, expected))


@PROPERTY
@given(batch=batches(), gamma=st.sampled_from([1.0, 0.9]), lam=st.sampled_from([1.0, 0.8]))
def test_token_advantages_are_verls(batch, gamma, lam):
    advantages, discounted, plain = (torch.zeros(5, 6, dtype=torch.float64) for _ in range(3))
    for i in range(5):
        next_value = last = togo = total = 0.0
        for t in reversed(positions(batch, i)):
            delta = batch.rewards[i, t] + gamma * next_value - batch.values[i, t]
            last = delta + gamma * lam * last
            next_value = batch.values[i, t]
            togo = batch.rewards[i, t] + gamma * togo
            total = batch.rewards[i, t] + total
            advantages[i, t], discounted[i, t], plain[i, t] = last, togo, total
    actual = core_algos.compute_gae_advantage_return(batch.rewards, batch.values, batch.mask, gamma, lam)
    close(actual, (whiten(batch, advantages), (advantages + batch.values) * batch.mask))
    config = OmegaConf.create({"gamma": gamma})
    actual = core_algos.compute_reinforce_plus_plus_outcome_advantage(batch.rewards, batch.mask, config)
    close(actual, (whiten(batch, discounted), discounted))
    baselines = batch.values[:, 0]
    actual = core_algos.compute_remax_outcome_advantage(batch.rewards, baselines, batch.mask)
    close(actual, ((plain - baselines[:, None]) * batch.mask, plain))


@PROPERTY
@given(batch=batches(), weights=st.sampled_from([None, [2.0, 0.5]]))
def test_gdpo_is_verls(batch, weights):
    parts = {"format": batch.values[:, 0].tolist(), "right": batch.values[:, 1].tolist(), "other": [0.0] * 5}
    config = SimpleNamespace(gdpo_reward_keys=["format", "right"], gdpo_reward_weights=weights)
    w = weights or [1.0, 1.0]
    rows = [w[0] * normalise(parts["format"], i) + w[1] * normalise(parts["right"], i) for i in range(5)]
    actual, _ = core_algos.compute_gdpo_outcome_advantage(
        batch.rewards, batch.mask, UIDS, config=config, non_tensor_batch={k: np.array(v, dtype=object) for k, v in parts.items()}
    )
    close(actual, whiten(batch, over_tokens(batch, rows)))
    whole, _ = core_algos.compute_gdpo_outcome_advantage(batch.rewards, batch.mask, UIDS)
    close(whole, whiten(batch, over_tokens(batch, [normalise(scores(batch), i) for i in range(5)])))


@PROPERTY
@given(batch=batches(), with_weights=st.booleans(), compact=st.booleans())
def test_the_token_baseline_is_verls(batch, with_weights, compact):
    pi = batch.old.exp()
    squares = pi.square() + 0.4 * (1 - pi).square()
    weights = batch.weights.abs() if with_weights else None
    expected, returns = torch.zeros(5, 6, dtype=torch.float64), torch.zeros(5, 6, dtype=torch.float64)
    table = {}
    for i in range(5):
        energy = 0.0
        for k, t in enumerate(positions(batch, i)):
            step = 1 - 2 * pi[i, t].item() + squares[i, t].item()
            energy += step * (weights[i, t].item() ** 2 if with_weights else 1.0)
            g = sum(batch.rewards[i, u].item() for u in positions(batch, i)[k:])
            table[i, k if compact else t] = (g, energy, t)
    for (i, k), (g, _, t) in table.items():
        others = [table[j, k] for j in peers(i) if (j, k) in table]
        # verl adds 1e-8 to the divisor, which shows where every token was nearly certain; ours is a proper mean (docs/algorithms/verl.md).
        energies = [x[1] + 1e-12 for x in others]
        total = sum(x[0] * energy for x, energy in zip(others, energies, strict=True))
        baseline = total / sum(energies) if len(others) > 1 else 0.0
        expected[i, t], returns[i, t] = g - baseline, g
    name = "tir_optimal_token_baseline" if compact else "optimal_token_baseline"
    actual = core_algos.get_adv_estimator_fn(name)(batch.rewards, batch.mask, UIDS, batch.old, squares, weights)
    close(actual, (expected, returns))


# -- losses ----------------------------------------------------------------------------------------------------------------

LOW, HIGH, C = 0.1, 0.3, 1.4
CONFIG = {"clip_ratio": 0.2, "clip_ratio_low": LOW, "clip_ratio_high": HIGH, "clip_ratio_c": C, "tau_pos": 0.9, "tau_neg": 1.2}
CONFIG |= {"policy_loss": {"dro_beta": 0.3, "kl_cov_ratio": 0.2, "ppo_kl_coef": 0.7, "clip_cov_ratio": 1.0}}
CONFIG["policy_loss"] |= {"clip_cov_lb": 0.2, "clip_cov_ub": 1.0}


def slow_losses(batch):
    """Every loss per token [5, 6], with autograd through `new`."""
    new = batch.new.clone().requires_grad_()
    x = new - batch.old
    rho, a, mask = x.exp(), batch.advantages, batch.mask.bool()
    clipped = torch.maximum(-a * rho, -a * rho.clamp(1 - LOW, 1 + HIGH))
    row_mean = torch.stack([x[i, positions(batch, i)].mean() for i in range(5)])[:, None]
    s = (row_mean.detach() + new - new.detach()).exp()
    tau = torch.where(a > 0, 0.9, 1.2).double()
    tau[a > 0], tau[a <= 0] = 0.9, 1.2
    p, p_old = new.detach().exp(), batch.old.exp()
    kl = p_old * (batch.old - new.detach()) + (1 - p_old) * torch.log((1 - p_old + 1e-8) / (1 - p + 1e-8))
    weight = rho.detach().clamp(max=C)
    tv_inside = torch.where(a > 0, p - p_old <= HIGH, p - p_old >= -LOW)
    kl_inside = torch.where(a > 0, (kl <= HIGH) | (p <= p_old), (kl <= LOW) | (p >= p_old))
    cov = (a - a[mask].mean()) * (new.detach() - new.detach()[mask].mean())
    chosen = torch.zeros_like(mask)
    order = sorted((tuple(t) for t in mask.nonzero().tolist()), key=lambda t: -cov[t].item())
    for t in order[: max(1, int(0.2 * len(order)))]:
        chosen[t] = True
    is_clipped = -a * rho.clamp(1 - LOW, 1 + HIGH) > -a * rho
    left_out = mask & (cov > 0.2) & (cov < 1.0) & ~is_clipped  # a ratio of 1.0 takes every candidate: nothing is drawn
    absolute = torch.where(x.detach().abs() < 1e-4, x.detach().abs(), x.abs())  # see docs/algorithms/verl.md
    geo = torch.where(a < 0, x.clamp(min=-LOW), x.clamp(max=HIGH))
    geo_rows = torch.stack([-a[i, positions(batch, i)].mean() * geo[i, positions(batch, i)].mean().exp() for i in range(5)])
    return new, {
        "vanilla": torch.where(a < 0, torch.minimum(clipped, -a * C), clipped),
        "gspo": torch.maximum(-a * s, -a * s.clamp(1 - LOW, 1 + HIGH)),
        "sapo": -a * torch.sigmoid(tau * (rho - 1)) * 4 / tau,
        "gpg": -a * new,
        "cispo": -rho.detach().clamp(1 - LOW, 1 + HIGH) * a * new,
        "dro": -(new * a - 0.15 * x.square()),
        "dppo_tv": -a * weight * new * tv_inside,
        "dppo_kl": -a * weight * new * kl_inside,
        "kl_cov": -a * rho + 0.7 * chosen * absolute,
        "clip_cov": clipped * ~left_out,
        "geo_mean": geo_rows[:, None].expand(5, 6),
    }


def slow_aggregate(loss, batch, mode):
    rows = [loss[i, positions(batch, i)] for i in range(5)]
    return {
        "token-mean": lambda: torch.cat(rows).mean(),
        "token-sum": lambda: torch.cat(rows).sum(),
        "seq-mean-token-sum": lambda: torch.stack([row.sum() for row in rows]).mean(),
        "seq-mean-token-mean": lambda: torch.stack([row.mean() for row in rows]).mean(),
        "seq-mean-token-sum-norm": lambda: torch.stack([row.sum() for row in rows]).mean() / 6,
    }[mode]()


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
@PROPERTY
@given(batch=batches(), mode=st.sampled_from(LOSS_AGG_MODES), weighted=st.booleans(), form=st.sampled_from(["dict", "omegaconf"]))
def test_policy_losses_and_gradients_are_verls(name, batch, mode, weighted, form):
    new, losses = slow_losses(batch)
    weights = batch.weights.abs()
    loss = losses[name] * weights if weighted else losses[name]
    expected = slow_aggregate(loss, batch, "seq-mean-token-mean" if name in ("sapo", "geo_mean") else mode)
    (gradient,) = torch.autograd.grad(expected, new)

    log_prob = batch.new.clone().requires_grad_()
    config = CONFIG if form == "dict" else OmegaConf.create(CONFIG)
    actual, metrics = core_algos.get_policy_loss_fn(name)(
        batch.old, log_prob, batch.advantages, batch.mask, mode, config, weights if weighted else None
    )
    actual.backward()
    close(actual.detach(), expected.detach())
    close(log_prob.grad, gradient * batch.mask)
    kl = statistics.fmean((batch.old - batch.new)[batch.mask.bool()].tolist())
    assert metrics["actor/ppo_kl"] == pytest.approx(kl, abs=1e-9)


def test_gspo_is_aggregated_as_loss_agg_mode_says():
    """By hand: the ratio of the first row is 1.1, that of the second 2, which the clip makes 1.2."""
    old = torch.zeros(2, 2, dtype=torch.float64)
    new = torch.tensor([[1.21, 1.0], [2.0, 1.0]], dtype=torch.float64).log()
    advantages = torch.tensor([[1.0, 1.0], [4.0, 9.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1], [1, 0]])
    expected = {
        "token-mean": -(1.1 + 1.1 + 4.8) / 3,
        "token-sum": -(1.1 + 1.1 + 4.8),
        "seq-mean-token-mean": -(1.1 + 4.8) / 2,
        "seq-mean-token-sum": -(2.2 + 4.8) / 2,
        "seq-mean-token-sum-norm": -(2.2 + 4.8) / 2 / 2,
    }
    assert set(expected) == set(LOSS_AGG_MODES)
    for mode, value in expected.items():
        loss, _ = core_algos.compute_policy_loss_gspo(old, new, advantages, mask, mode, {"clip_ratio": 0.2})
        assert loss.item() == pytest.approx(value, rel=1e-12), mode
    default, _ = core_algos.compute_policy_loss_gspo(old, new, advantages, mask, config={"clip_ratio": 0.2})
    assert default.item() == pytest.approx(expected["seq-mean-token-mean"], rel=1e-12)


@pytest.mark.parametrize("name", ["sapo", "geo_mean"])
def test_losses_of_whole_rows_are_averaged_over_rows_whatever_mode_is_given(name):
    generator = torch.Generator().manual_seed(0)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])  # by tokens the first row would weigh three times as much
    blocks = [torch.randn(2, 3, generator=generator, dtype=torch.float64) for _ in range(3)]
    compute = getattr(core_algos, f"compute_policy_loss_{name}")
    rows = [compute(*(block[i : i + 1] for block in (*blocks, mask)))[0].item() for i in range(2)]
    for mode in LOSS_AGG_MODES:
        assert compute(*blocks, mask, mode)[0].item() == pytest.approx(sum(rows) / 2, rel=1e-12)
    assert compute(*blocks, mask)[0].item() == pytest.approx(sum(rows) / 2, rel=1e-12)


def test_the_deprecated_policy_loss_returns_four_numbers():
    one = torch.ones(1, 1, dtype=torch.float64)
    loss, clipfrac, kl, lower = core_algos.compute_policy_loss(0 * one, one, one, one, cliprange=0.2)
    assert [x.item() for x in (loss, clipfrac, kl, lower)] == pytest.approx([-1.2, 1.0, -1.0, 0.0])
    with pytest.raises(ValueError, match="cliprange"):
        core_algos.compute_policy_loss(one, one, one, one)


def test_configs_of_every_kind_are_read_and_a_missing_one_means_the_defaults():
    one = torch.ones(1, 1, dtype=torch.float64)
    arguments = (0 * one, one, one, one, "token-mean")
    assert core_algos.compute_policy_loss_vanilla(*arguments)[0].item() == pytest.approx(-1.2)
    for config in (ActorConfig(clip_ratio=0.5), SimpleNamespace(clip_ratio=0.5), {"clip_ratio": 0.5, "clip_ratio_low": None}):
        assert core_algos.compute_policy_loss_vanilla(*arguments, config)[0].item() == pytest.approx(-1.5)
    info = {"dp_size": 2, "batch_num_tokens": 8, "global_batch_size": 4}
    shared = SimpleNamespace(clip_ratio=0.5, global_batch_info=info)
    assert core_algos.compute_policy_loss_vanilla(*arguments, shared)[0].item() == pytest.approx(-1.5 * 2 / 8)


@PROPERTY
@given(batch=batches())
def test_value_loss_entropy_kl_and_rewards_are_verls(batch):
    near = torch.clamp(batch.new, batch.values - 0.5, batch.values + 0.5)
    token = torch.maximum((batch.new - batch.rewards).square(), (near - batch.rewards).square())
    expected = 0.5 * slow_aggregate(token, batch, "token-mean")
    clipped = (near - batch.rewards).square() > (batch.new - batch.rewards).square()
    share = clipped[batch.mask.bool()].double().mean()
    close(core_algos.compute_value_loss(batch.new, batch.rewards, batch.values, batch.mask, 0.5), (expected, share))

    logits = torch.stack([batch.new, batch.values, batch.old], dim=-1)
    p = logits.softmax(-1)
    entropy = slow_aggregate(-(p * p.log()).sum(-1), batch, "token-mean")
    close(core_algos.compute_entropy_loss(logits, batch.mask), entropy)

    x = batch.new - batch.old
    for kinds, value in {
        ("kl", "k1"): x,
        ("abs",): x.abs(),
        ("mse", "k2"): x.square() / 2,
        ("low_var_kl", "k3"): (-x).exp() + x - 1,
    }.items():
        for kind in (*kinds, *(f"{k}+" for k in kinds)):
            close(core_algos.kl_penalty(batch.new, batch.old, kind), value.clamp(max=10) if "k3" in kinds else value)
            close(core_algos.kl_penalty_forward(batch.new, batch.old, kind), value.clamp(max=10) if "k3" in kinds else value)
    close(core_algos.compute_rewards(batch.rewards, batch.new, batch.old, 0.3), batch.rewards - 0.3 * x)
    mean = statistics.fmean(batch.values[batch.mask.bool()].tolist())
    close(core_algos.masked_mean(batch.values, batch.mask), torch.tensor(mean, dtype=torch.float64))
    close(core_algos.masked_whiten(batch.values, batch.mask), whiten(batch, batch.values))


def test_full_kl_does_not_exist():
    with pytest.raises(ConfigError, match="'full'"):
        core_algos.kl_penalty(torch.ones(1), torch.ones(1), "full")


def test_controllers_come_from_a_section():
    assert core_algos.get_kl_controller(OmegaConf.create({"type": "fixed", "kl_coef": 0.2})).value == 0.2
    adaptive = core_algos.get_kl_controller({"type": "adaptive", "kl_coef": 0.2, "target_kl": 0.1, "horizon": 1000})
    assert isinstance(adaptive, core_algos.AdaptiveKLController)
    adaptive.update(1.0, 10)
    assert adaptive.value == pytest.approx(0.2 * (1 + 0.2 * 10 / 1000))


# -- names -----------------------------------------------------------------------------------------------------------------

FIRST_ARGUMENTS = {
    "compute_gae_advantage_return": "token_level_rewards values response_mask gamma lam",
    "compute_grpo_outcome_advantage": "token_level_rewards response_mask index epsilon norm_adv_by_std_in_grpo config",
    "compute_grpo_passk_outcome_advantage": "token_level_rewards response_mask index epsilon norm_adv_by_std_in_grpo config",
    "compute_gdpo_outcome_advantage": "token_level_rewards response_mask index epsilon norm_adv_by_std_in_grpo config",
    "compute_rloo_outcome_advantage": "token_level_rewards response_mask index epsilon config",
    "compute_opo_outcome_advantage": "token_level_rewards response_mask index epsilon config",
    "compute_reinforce_plus_plus_outcome_advantage": "token_level_rewards response_mask config",
    "compute_reinforce_plus_plus_baseline_outcome_advantage": "token_level_rewards response_mask index epsilon config",
    "compute_remax_outcome_advantage": "token_level_rewards reward_baselines response_mask config",
    "compute_gpg_outcome_advantage": "token_level_rewards response_mask index epsilon f_norm alpha config",
    "compute_optimal_token_baseline_advantage": "token_level_rewards response_mask index old_log_probs sum_pi_squared",
    "agg_loss": "loss_mat loss_mask loss_agg_mode dp_size batch_num_tokens global_batch_size loss_scale_factor",
    "kl_penalty": "logprob ref_logprob kl_penalty",
    "compute_value_loss": "vpreds returns values response_mask cliprange_value loss_agg_mode",
    "compute_policy_loss": "old_log_prob log_prob advantages response_mask cliprange cliprange_low cliprange_high clip_ratio_c",
    "compute_policy_loss_vanilla": "old_log_prob log_prob advantages response_mask loss_agg_mode config rollout_is_weights",
    "compute_entropy_loss": "logits response_mask loss_agg_mode",
    "compute_rewards": "token_level_scores old_log_prob ref_log_prob kl_ratio",
}


@pytest.mark.parametrize("name", FIRST_ARGUMENTS)
def test_arguments_are_in_verls_order(name):
    expected = FIRST_ARGUMENTS[name].split()
    assert list(inspect.signature(getattr(core_algos, name)).parameters)[: len(expected)] == expected


def test_every_estimator_of_the_enum_has_its_function():
    for member in AdvantageEstimator:
        assert core_algos.get_adv_estimator_fn(member) is core_algos.get_adv_estimator_fn(member.value)
    assert core_algos.compute_policy_loss_vanilla.__name__ == "compute_policy_loss_vanilla"


@pytest.fixture
def scratch():
    """Registries that forget."""
    with ExitStack() as stack:
        for table in (ADV_ESTIMATORS, POLICY_LOSSES, core_algos.ADV_ESTIMATOR_REGISTRY, core_algos.POLICY_LOSS_REGISTRY):
            stack.enter_context(patch.dict(table))
        yield


@pytest.mark.usefixtures("scratch")
def test_an_estimator_written_for_verl_is_registered_and_gets_index_and_config():
    from lockstep.algorithms import advantages

    @core_algos.register_adv_est("recipe")
    def recipe(token_level_rewards, response_mask, index, config=None, **kwargs):
        assert not kwargs
        assert index is UIDS
        return token_level_rewards * config.gamma, token_level_rewards.cumsum(-1) * response_mask

    assert advantages.required_inputs("recipe") == ("token_level_rewards", "response_mask", "index")
    rows, tokens = Rows(torch.tensor([2, 1, 0, 0, 0])), {"token_level_rewards": torch.ones(3), "response_mask": torch.ones(3)}
    others = {"index": UIDS, "config": SimpleNamespace(gamma=0.5), "lam": 1}
    result = advantages.bind_estimator("recipe", {})(tokens | others, rows)
    assert [x.tolist() for x in result] == [[0.5, 0.5, 0.5], [1.0, 2.0, 1.0]]  # it was called with blocks
    assert core_algos.get_adv_estimator_fn("recipe") is not None
    with pytest.raises(ConfigError, match="did you mean 'grpo'"):
        core_algos.get_adv_estimator_fn("grpoo")


@pytest.mark.usefixtures("scratch")
def test_a_loss_that_was_registered_is_aggregated_like_the_others():

    @core_algos.register_policy_loss("plain")
    def plain(*, log_prob, advantages):
        return -log_prob * advantages, {}

    one = torch.ones(2, 3, dtype=torch.float64)
    loss, metrics = core_algos.get_policy_loss_fn("plain")(one, 2 * one, one, one, "seq-mean-token-sum")
    assert (loss.item(), metrics) == (-6.0, {})


@pytest.mark.usefixtures("scratch")
def test_a_member_of_an_enum_registers_its_value_and_the_same_function_may_come_again():
    class Mine(Enum):
        NAME = "mine"

    def estimator(token_level_rewards, response_mask, **kwargs):
        return token_level_rewards, token_level_rewards

    for _ in range(2):
        assert core_algos.register_adv_est(Mine.NAME)(estimator) is estimator
    assert core_algos.ADV_ESTIMATOR_REGISTRY["mine"] is core_algos.get_adv_estimator_fn(Mine.NAME) is estimator
    with pytest.raises(ConfigError, match="already registered"):
        core_algos.register_adv_est("mine")(lambda **kwargs: None)


@pytest.mark.usefixtures("scratch")
def test_a_policy_loss_that_returns_one_number_is_refused_with_the_change_that_it_needs():
    with pytest.raises(ConfigError, match="return loss_mat, {}"):

        @core_algos.register_policy_loss("means")
        def means(
            old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None, rollout_is_weights=None
        ):
            return core_algos.agg_loss(-log_prob * advantages, response_mask, loss_agg_mode), {}

    assert "means" not in core_algos.POLICY_LOSS_REGISTRY
    assert "means" not in POLICY_LOSSES

    @core_algos.register_policy_loss("means")
    def changed(old_log_prob, log_prob, advantages, response_mask, clip_ratio_low):
        return -(log_prob - clip_ratio_low) * advantages, {}

    one = torch.ones(2, 3, dtype=torch.float64)
    loss, _ = core_algos.get_policy_loss_fn("means")(one, 2 * one, one, one, "seq-mean-token-sum", {"clip_ratio": 0.5})
    assert loss.item() == pytest.approx(-4.5)


def test_verls_path_has_the_same_functions_and_registries():
    from lockstep.trainer.ppo import core_algos as at_verls_path

    for name in [*FIRST_ARGUMENTS, "ADV_ESTIMATOR_REGISTRY", "POLICY_LOSS_REGISTRY", "AdvantageEstimator", "register_adv_est"]:
        assert getattr(at_verls_path, name) is getattr(core_algos, name)


def test_the_value_loss_of_parts_adds_up_to_that_of_the_whole():
    generator = torch.Generator().manual_seed(0)
    vpreds, returns, values = (torch.randn(4, 3, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = torch.ones(4, 3)
    whole, _ = core_algos.compute_value_loss(vpreds, returns, values, mask, 0.5)
    counts = {"batch_num_tokens": 12, "global_batch_size": 4, "dp_size": 2}
    parts = [core_algos.compute_value_loss(vpreds[i : i + 2], returns[i : i + 2], values[i : i + 2], mask[i : i + 2], 0.5, **counts)[0]
             for i in (0, 2)]  # fmt: skip
    close(sum(parts) / 2, whole)


@pytest.mark.usefixtures("scratch")
def test_the_recipe_of_the_docs_is_registered():
    from pathlib import Path

    page = (Path(__file__).parents[2] / "docs/from_verl.md").read_text()
    exec(page.split("```python\n")[-1].split("```")[0], {})
    block = torch.ones(2, 3)
    advantages, _ = core_algos.get_adv_estimator_fn("centred")(torch.tensor([[1.0], [3.0]]), torch.ones(2, 1), None)
    assert advantages.flatten().tolist() == [-1.0, 1.0]
    assert core_algos.get_policy_loss_fn("plain")(block, block, block, block)[0].item() == -1.0
