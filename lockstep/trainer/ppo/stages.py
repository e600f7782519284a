"""One stage of a training step, one function. Each names the columns it reads and writes (see lockstep.protocol for what they mean).

Stages act on the batch in place and return metrics. They know worker groups by their methods (interfaces.py), not by their classes.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.algorithms import mismatch
from lockstep.algorithms.advantages.recursion import turn_discount
from lockstep.algorithms.aggregation import Denominators
from lockstep.algorithms.binding import read_estimate
from lockstep.algorithms.kl import KLController, reward_penalty
from lockstep.algorithms.masking import masked_mean, zero_outside
from lockstep.algorithms.rows import Rows
from lockstep.config.sampling import SamplingParams
from lockstep.errors import ConfigError, NumericalError
from lockstep.observability.metrics import Mean, Metric, average_updates, merge_metrics
from lockstep.observability.spans import expect
from lockstep.protocol import DataProto, Ragged
from lockstep.trainer.ppo.algorithm import Estimation, PolicyUpdate
from lockstep.trainer.ppo.interfaces import Actor, Critic, Exchange, Reference, Rollout, Scoring
from lockstep.trainer.ppo.passes import Drift

_OPTIONAL_INPUTS = ("values", "reward_baselines", "old_log_probs", "ref_log_prob", "sum_pi_squared", "rollout_is_weights")
"""Columns that estimators may read, where the run has them."""


def token_columns(batch: DataProto) -> list[str]:
    """Return the columns that a model reads."""
    return [name for name in ("prompts", "responses", "restarts", "experts") if name in batch]


def generate(rollout: Rollout, batch: DataProto, sampling: SamplingParams, step: int, scoring: Scoring | None = None) -> None:
    """Read prompts, index, sample. Write responses, rollout_log_probs, response_mask, finish_reason.

    `scoring` gets each response as soon as it is finished, on another thread. It may not get all of them.
    """
    prompts = batch.select(["prompts"], rollout.reads)
    prompts.non_tensor_batch["row"] = np.array(range(len(batch)), dtype=object)
    progress = expect(len(batch), "responses")

    def receive(message: tuple[int, Tensor]) -> None:
        row, response_ids = message
        progress.done += 1
        progress.tokens += len(response_ids)
        if scoring is not None:
            scoring.add(row, response_ids)

    with rollout.receiving(receive) as send:
        found = rollout.generate_sequences(prompts, sampling=sampling, step=step, on_finished=send)
    if "prompts" in found:  # of episodes, whose environments write them
        batch.set("prompts", found.ragged("prompts"))
    batch.union(found)


def sync_weights(exchange: Exchange | None) -> None:
    """Send the actor's weights to a rollout in separate workers. A rollout in the actor's workers (None) reads them as they are."""
    if exchange is not None:
        exchange.sync()


def old_log_prob(actor: Actor, batch: DataProto, drift: Drift | None = None) -> dict[str, float]:
    """Read prompts, responses. Write old_log_probs, entropys. Compare with the sampler's log-probs, if it has any, and let `drift` note the
    largest difference."""
    batch.union(actor.compute_log_prob(batch.select(token_columns(batch), [])))
    check_finite(batch, "old_log_probs")
    mask = batch.ragged("response_mask").values.bool()
    new, old = (batch.ragged(name).values[mask] for name in ("old_log_probs", "rollout_log_probs"))
    metrics: dict[str, float] = {}
    if len(new):
        metrics["actor/entropy"] = batch.ragged("entropys").values[mask].mean().item()
    if len(new) and _has_sampler_log_probs(batch):
        difference = (new.double().exp() - old.double().exp()).abs()
        ratio = (new - old).double().exp()
        metrics |= _sampler_metrics(
            log_ratio_max=(new - old).abs().max().item(),
            ratio=ratio.mean().item(),
            ratio_square=ratio.square().mean().item(),
            difference_max=difference.max().item(),
            difference=difference.mean().item(),
            difference_square=difference.square().mean().item(),
        )
    if drift is not None:
        drift.note(metrics.get("training/rollout_log_probs_diff_max"))
    return metrics


def use_sampler_log_probs(batch: DataProto) -> None:
    """Read rollout_log_probs. Write old_log_probs. For a sampler whose log-probs are the trainer's own."""
    log_probs, mask = batch.ragged("rollout_log_probs"), batch.ragged("response_mask").values.bool()
    batch.set("old_log_probs", log_probs.like(zero_outside(log_probs.values, mask)))
    check_finite(batch, "old_log_probs")


def ref_log_prob(reference: Reference, batch: DataProto) -> None:
    """Read prompts, responses. Write ref_log_prob."""
    batch.union(reference.compute_ref_log_prob(batch.select(token_columns(batch), [])))
    check_finite(batch, "ref_log_prob")


def values(critic: Critic, batch: DataProto) -> None:
    """Read prompts, responses. Write values."""
    batch.union(critic.compute_values(batch.select(token_columns(batch), [])))
    check_finite(batch, "values")


def correct(batch: DataProto, correction: mismatch.Correction | None) -> dict[str, float]:
    """Read old_log_probs, rollout_log_probs, response_mask, uid. Write rollout_is_weights; rejected tokens leave response_mask.

    Tokens outside the mask do not count in the losses' denominators, the estimators' sums and the groups' statistics. If the sampler's
    log-probs serve as old log-probs, the correction is the identity. None does nothing.
    """
    if correction is None:
        return {}
    rows, mask = _rows_and_mask(batch)
    old, rollout = (batch.ragged(name).values for name in ("old_log_probs", "rollout_log_probs"))
    weights, accepted, metrics = mismatch.correct(correction, old, rollout, mask, rows, group_numbers(batch))
    if weights is not None:
        _set_tokens(batch, "rollout_is_weights", weights)
    if correction.rejections:
        _set_tokens(batch, "response_mask", accepted.long())
    return {f"rollout_corr/{name}": value for name, value in metrics.items()}


def shape_rewards(batch: DataProto, estimation: Estimation, kl_control: KLController) -> dict[str, float]:
    """Read token_level_scores, response_mask and, with KL in the reward, old_log_probs and ref_log_prob. Write token_level_rewards. With KL
    in the reward, update `kl_control`."""
    rows, mask = _rows_and_mask(batch)
    rewards = batch.ragged("token_level_scores").values
    metrics = {}
    if estimation.kl_kind is not None:
        old, reference = (batch.ragged(name).values for name in ("old_log_probs", "ref_log_prob"))
        penalty = reward_penalty(old, reference, mask, estimation.kl_kind)
        rewards = rewards - kl_control.value * penalty
        metrics = {"actor/reward_kl_penalty_coeff": kl_control.value}
        if mask.any():
            metrics["actor/reward_kl_penalty"] = masked_mean(rows.mean(penalty, mask), rows.sum(mask)).item()
            kl_control.update(metrics["actor/reward_kl_penalty"], n_steps=len(batch))
    _set_tokens(batch, "token_level_rewards", rewards)
    return metrics


def estimate(batch: DataProto, estimation: Estimation) -> None:
    """Read token_level_rewards, response_mask, uid and, if the run has them, ref_log_prob, old_log_probs, values, reward_baselines,
    reward_parts, sum_pi_squared, rollout_is_weights. Write advantages, returns."""
    rows, mask = _rows_and_mask(batch)
    columns: dict[str, Any] = {
        "token_level_rewards": batch.ragged("token_level_rewards").values,
        "response_mask": mask,
        "reward_parts": _reward_parts(batch, estimation.reward_keys),
        "group": group_numbers(batch),
        "index": batch.non_tensor_batch["uid"],
    }
    for name in _OPTIONAL_INPUTS:
        if name in batch:
            column = batch.columns[name]
            columns[name] = column.values if isinstance(column, Ragged) else column
    for name, value in estimation.turn_discounts.items():
        columns[name] = turn_discount(batch.ragged("turn").values, mask, rows, value)
    advantages, returns = read_estimate(estimation.estimator, estimation.estimator(columns, rows), rows)
    _set_tokens(batch, "advantages", advantages)
    _set_tokens(batch, "returns", returns)


def update_critic(critic: Critic, batch: DataProto, mini_batches: Sequence[Tensor]) -> dict[str, float]:
    """Read values, returns. Make one optimizer step for each of `mini_batches` (row numbers)."""
    data = batch.select([*token_columns(batch), "response_mask", "values", "returns"], ["index"])
    updates: list[dict[str, Metric]] = []
    for rows in mini_batches:
        mini_batch = data.select_idxs(rows)
        updates.append(merge_metrics(critic.update_critic(mini_batch, denominators=denominators_of(mini_batch))))
    return average_updates(updates)


def learn_values(critic: Critic, batch: DataProto, estimation: Estimation) -> dict[str, float]:
    """Read token_level_rewards. Write values. Make the critic's only update of this batch. Its own forward pass gives the values, and so
    the returns (`Estimation.of_values`)."""
    data = batch.select([*token_columns(batch), "response_mask", "token_level_rewards"], ["index"])
    found = critic.learn_values(data, denominators=denominators_of(data), discounts=estimation.of_values)
    metrics = found.meta_info.pop("metrics")
    batch.union(found)
    check_finite(batch, "values")
    ranks: list[dict[str, Metric]] = []
    for name, metric in metrics.items():
        of_ranks = metric if isinstance(metric, list) else [metric]
        ranks += [{name: one} for one in of_ranks]
    return average_updates([merge_metrics(ranks)])


def update_actor(
    actor: Actor, batch: DataProto, mini_batches: Sequence[Tensor], update: PolicyUpdate, drift: Drift | None = None
) -> dict[str, float]:
    """Read advantages and, if the run has them, old_log_probs, ref_log_prob and rollout_is_weights.

    One optimizer step for each of `mini_batches` (row numbers). What the policy loss needs of a whole mini-batch is computed here,
    before it is cut. A row whose advantages are all 0 is left out if it has no part in the gradient; actor/skipped_rows is their share.

    If there was no pass for the old log-probs (the batch has no entropys), the first mini-batch, before any step, compares the trainer's
    log-probs with the sampler's: metrics training/rollout_*. `drift` then notes the largest difference, or None without a comparison: no
    rollout_log_probs, or no token of the policy in that mini-batch.
    """
    had_pass = "entropys" in batch
    updates: list[dict[str, Metric]] = []
    for rows in mini_batches:
        mini_batch = actor_mini_batch(batch, rows, update)
        if not updates and not had_pass and _has_sampler_log_probs(batch):
            mini_batch.union(batch.select(["rollout_log_probs"], []).select_idxs(rows))
        chosen = rows_with_gradient(mini_batch, update)
        sent = mini_batch if len(chosen) == len(mini_batch) else mini_batch.select_idxs(chosen)
        updates.append(merge_metrics(actor.update_actor(sent, denominators=denominators_of(mini_batch))))
        updates[-1]["actor/skipped_rows"] = Mean(float(len(mini_batch) - len(chosen)), float(len(mini_batch)))
    sampler = {name: updates[0].pop(name).value for name in list(updates[0]) if name.startswith("sampler/")}
    metrics = average_updates(updates)
    if "sampler/log_ratio_max" in sampler:
        metrics |= _sampler_metrics(**{name.removeprefix("sampler/"): value for name, value in sampler.items()})
    if drift is not None and not had_pass:
        drift.note(sampler.get("sampler/log_ratio_max"))
    return metrics


def _has_sampler_log_probs(batch: DataProto) -> bool:
    """Return whether the sampler gave a log-prob for every token of the policy."""
    mask = batch.ragged("response_mask").values.bool()
    return "rollout_log_probs" in batch and not batch.ragged("rollout_log_probs").values[mask].isnan().any()


def _sampler_metrics(
    *, log_ratio_max: float, ratio: float, ratio_square: float, difference_max: float, difference: float, difference_square: float
) -> dict[str, float]:
    """Return training/rollout_*: of each token's ratio r of the trainer's over the sampler's probability, and of their difference.

    `ratio_ess` is the effective share of the samples, mean(r)^2 / mean(r^2), 1 if all ratios are equal; `ratio_max` is the largest
    of r and 1 / r.
    """
    return {
        "training/rollout_ratio_max": math.exp(min(log_ratio_max, 700.0)),
        "training/rollout_ratio_mean": ratio,
        "training/rollout_ratio_ess": ratio**2 / ratio_square if ratio_square else math.nan,
        "training/rollout_log_probs_diff_max": log_ratio_max,
        "training/rollout_probs_diff_max": difference_max,
        "training/rollout_probs_diff_mean": difference,
        "training/rollout_probs_diff_std": math.sqrt(max(difference_square - difference**2, 0.0)),
    }


def cut_mini_batches(num_prompts: int, n: int, size: int, epochs: int, seed: int | None) -> list[Tensor]:
    """Return the row numbers of each optimizer step: `size` prompts with all their `n` samples, `epochs` times over all prompts.

    Prompts keep their order; with `seed` they are shuffled anew for each epoch.
    """

    def one_epoch(epoch: int) -> Iterator[Tensor]:
        order = torch.arange(num_prompts)
        if seed is not None:
            order = torch.randperm(num_prompts, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
        for prompts in order.split(size):
            yield (prompts[:, None] * n + torch.arange(n)).flatten()

    return [rows for epoch in range(epochs) for rows in one_epoch(epoch)]


def actor_mini_batch(batch: DataProto, rows: Tensor, update: PolicyUpdate) -> DataProto:
    """Return these rows with the columns that an update of the actor reads, and the columns that the policy loss computes from all rows."""
    optional = [name for name in ("old_log_probs", "ref_log_prob", "rollout_is_weights") if name in batch]
    data = batch.select([*token_columns(batch), "response_mask", "advantages", *optional], ["index", "sample"])
    mini_batch = data.select_idxs(rows)
    if update.prepare is None:
        return mini_batch
    objects = mini_batch.non_tensor_batch
    keys = [(int(index) << 24) + int(sample) for index, sample in zip(objects["index"], objects["sample"], strict=True)]
    rows_of_tokens, mask = _rows_and_mask(mini_batch)
    columns = {
        "old_log_prob": mini_batch.ragged("old_log_probs").values if "old_log_probs" in mini_batch else None,
        "advantages": mini_batch.ragged("advantages").values,
        "response_mask": mask,
        "row_keys": torch.tensor(keys, dtype=torch.int64),
    }
    for name, values in update.prepare(columns, rows_of_tokens).items():
        _set_tokens(mini_batch, name, values)
    return mini_batch


def _rows_and_mask(batch: DataProto) -> tuple[Rows, Tensor]:
    """Return how the response tokens divide into rows, and which of them the policy wrote (bool [M])."""
    mask = batch.ragged("response_mask")
    return Rows(mask.lengths), mask.values.bool()


def _set_tokens(batch: DataProto, name: str, values: Tensor) -> None:
    """Write a column of one number per response token [M]. Raise NumericalError unless all are finite."""
    batch.set(name, batch.ragged("responses").like(values))
    check_finite(batch, name)


def group_numbers(batch: DataProto) -> Tensor:
    """Read uid. Return int64 [rows]: rows of one prompt share a number."""
    return torch.from_numpy(np.unique(batch.non_tensor_batch["uid"].astype(str), return_inverse=True)[1])


def _reward_parts(batch: DataProto, keys: Sequence[str] | None) -> Tensor | None:
    """Return the columns of reward_parts that algorithm.gdpo_reward_keys names [rows, K]; None without the key."""
    if keys is None:
        return None
    names = list(batch.meta_info.get("reward_part_names", ()))
    missing = [key for key in keys if key not in names]
    if missing or "reward_parts" not in batch:
        raise ConfigError(
            f"algorithm.gdpo_reward_keys names {keys}, but the reward function gave the parts {names}: make it "
            f"return a dict with {missing or keys}, or change the keys"
        )
    return batch.batch["reward_parts"][:, [names.index(key) for key in keys]]


def rows_with_gradient(mini_batch: DataProto, update: PolicyUpdate) -> Tensor:
    """Return the numbers of the rows that have a part in the gradient of the policy loss.

    If no row has, return one row, because an update is made in any case: the first with a token of the policy, so that there is something
    to measure.
    """
    numbers = torch.arange(len(mini_batch))
    if not update.skips_rows or not len(mini_batch):
        return numbers
    rows, mask = _rows_and_mask(mini_batch)
    has_advantage = rows.sum((mini_batch.ragged("advantages").values != 0) & mask) > 0
    if has_advantage.any():
        return numbers[has_advantage]
    return (rows.sum(mask) > 0).long().argmax(0, keepdim=True)


def denominators_of(mini_batch: DataProto) -> Denominators:
    """Return the denominators of a whole mini-batch, whichever of its rows are sent."""
    rows, mask = _rows_and_mask(mini_batch)
    return Denominators.of(mask, rows)


def check_finite(batch: DataProto, name: str) -> None:
    """Raise NumericalError, with the dataset's rows, unless every number of a column is finite."""
    column = batch.ragged(name)
    if not torch.isfinite(column.values).all():
        bad = [i for i, row in enumerate(column.rows()) if not torch.isfinite(row).all()]
        rows = [batch.non_tensor_batch["index"][i] for i in bad]
        raise NumericalError(f"{name} is not finite for {len(bad)} rows; dataset rows {rows[:10]}. Nothing was updated")
