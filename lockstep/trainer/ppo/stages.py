"""One stage of a training step, one function. Each names the columns it reads and writes (see lockstep.protocol for what they mean).

Stages act on the batch in place and return metrics. They know worker groups by their methods, not by their classes.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.algorithms.advantages import compute_advantage
from lockstep.algorithms.aggregation import Denominators
from lockstep.algorithms.kl import KLController, kl_penalty
from lockstep.algorithms.masked import masked_mean
from lockstep.config.algorithm import AlgorithmConfig
from lockstep.config.sampling import SamplingParams
from lockstep.errors import NumericalError, RewardError
from lockstep.observability.metrics import Metric, average_updates, merge_metrics
from lockstep.protocol import DataProto, Ragged

UPDATE_COLUMNS = ("prompts", "responses", "response_mask")
"""What every update needs of a row beside the columns of its own loss."""


def make_prompts(dataset: Any, positions: Sequence[int], n: int, pad_token_id: int) -> DataProto:
    """The dataset's rows at `positions`, each `n` times. Writes prompts, uid, sample and every column of the dataset."""
    items = [dataset[position] for position in positions]
    columns = {key: [item[key] for item in items] for key in items[0] if key != "prompt_ids"}
    prompts = Ragged.from_rows([item["prompt_ids"] for item in items], dtype=torch.int64)
    data = DataProto.from_dict({"prompts": prompts}, columns, {"pad_token_id": pad_token_id})
    data.non_tensor_batch["uid"] = np.array([str(i) for i in range(len(data))], dtype=object)
    data = data.repeat(n)
    data.non_tensor_batch["sample"] = np.array(list(range(n)) * len(items), dtype=object)
    return data


def generate(rollout: Any, batch: DataProto, sampling: SamplingParams, step: int) -> None:
    """Reads prompts, index, sample. Writes responses, rollout_log_probs, response_mask, finish_reason."""
    prompts = batch.select(["prompts"], ["index", "sample"])
    batch.union(rollout.generate_sequences(prompts, sampling=sampling, step=step))


def model_scores(reward_model: Any, batch: DataProto, tokenizer: Any) -> None:
    """Reads responses, raw_prompt. Writes rm_scores."""
    texts = tokenizer.batch_decode([row.tolist() for row in batch.ragged("responses").rows()], skip_special_tokens=True)
    data = batch.select(["responses"], ["raw_prompt"])
    data.non_tensor_batch["response_text"] = np.array(texts, dtype=object)
    batch.union(reward_model.compute_rm_score(data))


def score(reward_fn: Callable[..., Any], batch: DataProto) -> dict[str, list[Any]]:
    """Reads what the reward function reads. Writes token_level_scores; returns what else the reward function said of each row.

    A reward function takes the batch and returns a tensor like `batch.batch["responses"]`, or a dict with that as "reward_tensor" and
    "reward_extra_info" (it is asked for the dict when it has an argument `return_dict`).
    """
    takes_dict = "return_dict" in inspect.signature(reward_fn).parameters
    result = reward_fn(batch, return_dict=True) if takes_dict else reward_fn(batch)
    rewards, extra = (result["reward_tensor"], result["reward_extra_info"]) if isinstance(result, dict) else (result, {})
    responses = batch.ragged("responses")
    expected = tuple(batch.batch["responses"].shape)
    if not isinstance(rewards, Tensor) or tuple(rewards.shape) != expected:
        raise RewardError(
            f"the reward function must return a tensor of shape {expected}, like the responses; got {_describe(rewards)}"
        )
    if not torch.isfinite(rewards).all():
        rows = (~torch.isfinite(rewards)).any(1).nonzero().flatten().tolist()
        raise RewardError(f"the reward function returned numbers that are not finite, in rows {rows}")
    rewards = rewards.float().cpu()
    scores = Ragged.from_padded(rewards, responses.lengths)
    if not torch.equal(scores.pad(), rewards):
        rows = (scores.pad() != rewards).any(1).nonzero().flatten().tolist()
        raise RewardError(
            f"the reward function put rewards after the end of the response, in rows {rows}: the last token of row i is at "
            "data.ragged('responses').lengths[i] - 1"
        )
    batch.set("token_level_scores", scores)
    return extra


def old_log_prob(actor: Any, batch: DataProto) -> dict[str, float]:
    """Reads prompts, responses. Writes old_log_probs, entropys; measures how far the sampler's log-probs are from them."""
    batch.union(actor.compute_log_prob(batch.select(["prompts", "responses"], [])))
    _check_finite(batch, "old_log_probs")
    mask = batch.ragged("response_mask").values.bool()
    new, old = (batch.ragged(name).values[mask] for name in ("old_log_probs", "rollout_log_probs"))
    metrics: dict[str, float] = {}
    if len(new):
        difference = (new.exp() - old.exp()).abs()
        ratio = (new - old).double().exp()
        metrics |= _ratio_metrics((new - old).abs().max().item(), ratio.mean().item(), ratio.square().mean().item())
        metrics["actor/entropy"] = batch.ragged("entropys").values[mask].mean().item()
        metrics["training/rollout_log_probs_diff_max"] = (new - old).abs().max().item()
        metrics["training/rollout_probs_diff_max"] = difference.max().item()
        metrics["training/rollout_probs_diff_mean"] = difference.mean().item()
        metrics["training/rollout_probs_diff_std"] = difference.std(correction=0).item()
    return metrics


def use_sampler_log_probs(batch: DataProto) -> None:
    """Reads rollout_log_probs. Writes old_log_probs: for a sampler whose log-probs are the trainer's own."""
    batch.set("old_log_probs", batch.ragged("rollout_log_probs"))
    _check_finite(batch, "old_log_probs")


def ref_log_prob(reference: Any, batch: DataProto) -> None:
    """Reads prompts, responses. Writes ref_log_prob."""
    batch.union(reference.compute_ref_log_prob(batch.select(["prompts", "responses"], [])))
    _check_finite(batch, "ref_log_prob")


def values(critic: Any, batch: DataProto) -> None:
    """Reads prompts, responses. Writes values."""
    batch.union(critic.compute_values(batch.select(["prompts", "responses"], [])))
    _check_finite(batch, "values")


def advantage(batch: DataProto, config: AlgorithmConfig, kl_control: KLController) -> dict[str, float]:
    """Reads token_level_scores, response_mask, uid and, where the run has them, ref_log_prob, old_log_probs, values.

    Writes token_level_rewards, advantages, returns. With KL in the reward, `kl_control` is updated.
    """
    responses, mask = batch.ragged("responses"), batch.batch["response_mask"].bool()
    rewards = batch.batch["token_level_scores"]
    metrics = {}
    if config.use_kl_in_reward:
        penalty = kl_penalty(batch.batch["old_log_probs"], batch.batch["ref_log_prob"], config.kl_penalty)
        kl = masked_mean(masked_mean(penalty, mask, dim=1), mask.any(1)).item()
        rewards = rewards - kl_control.value * torch.where(mask, penalty, 0.0)
        metrics = {"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": kl_control.value}
        kl_control.update(kl, n_steps=len(batch))
    available = {
        "token_level_rewards": rewards,
        "response_mask": mask,
        "values": batch.batch["values"] if "values" in batch else None,
        "group": torch.from_numpy(np.unique(batch.non_tensor_batch["uid"].astype(str), return_inverse=True)[1]),
        "gamma": config.gamma,
        "lam": config.lam,
        "norm_adv_by_std_in_grpo": config.norm_adv_by_std_in_grpo,
    }
    advantages, returns = compute_advantage(config.adv_estimator, available)
    for name, padded in (("token_level_rewards", rewards), ("advantages", advantages), ("returns", returns)):
        batch.set(name, Ragged.from_padded(padded, responses.lengths))
        _check_finite(batch, name)
    return metrics


def update_critic(critic: Any, batch: DataProto, mini_batches: Sequence[Tensor]) -> dict[str, float]:
    """Reads values, returns. One optimizer step for each of `mini_batches` (row numbers)."""
    data = batch.select([*UPDATE_COLUMNS, "values", "returns"], ["index"])
    return average_updates([_update(critic.update_critic, data, rows) for rows in mini_batches])


def update_actor(actor: Any, batch: DataProto, mini_batches: Sequence[Tensor]) -> tuple[dict[str, float], float]:
    """Reads old_log_probs, advantages and, with a KL loss, ref_log_prob. One optimizer step for each of `mini_batches`.

    Also returns the largest |log-prob - old log-prob| in the first mini-batch: before any step it is how far the sampler (or the
    old-log-prob pass) is from the policy that is trained. Where that pass was skipped (the batch has no entropys), the metrics
    training/rollout_ratio_* are those of the first mini-batch.
    """
    columns = [*UPDATE_COLUMNS, "old_log_probs", "advantages", *(["ref_log_prob"] if "ref_log_prob" in batch else [])]
    data = batch.select(columns, ["index"])
    updates = [_update(actor.update_actor, data, rows) for rows in mini_batches]
    metrics, first = average_updates(updates), {name: metric.value for name, metric in updates[0].items()}
    if "entropys" not in batch:
        metrics |= _ratio_metrics(first["actor/log_ratio_max"], first["actor/ratio_mean"], first["actor/ratio_square_mean"])
    return metrics, first["actor/log_ratio_max"]


def _ratio_metrics(log_ratio_max: float, mean: float, square_mean: float) -> dict[str, float]:
    """training/rollout_ratio_*: the trainer's over the sampler's probability of the tokens. `ess` is the effective share of the samples,
    mean(r)^2 / mean(r^2), 1 when all ratios are the same; `max` is the largest of r and 1 / r."""
    return {
        "training/rollout_ratio_max": math.exp(min(log_ratio_max, 700.0)),
        "training/rollout_ratio_mean": mean,
        "training/rollout_ratio_ess": mean**2 / square_mean if square_mean else math.nan,
    }


def cut_mini_batches(num_prompts: int, n: int, size: int, epochs: int, seed: int | None) -> list[Tensor]:
    """Row numbers of each optimizer step: `size` prompts with all their `n` samples, `epochs` times over all prompts.

    Prompts keep their order, or are drawn in a new one each epoch when `seed` is given.
    """

    def one_epoch(epoch: int) -> Iterator[Tensor]:
        order = torch.arange(num_prompts)
        if seed is not None:
            order = torch.randperm(num_prompts, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
        for prompts in order.split(size):
            yield (prompts[:, None] * n + torch.arange(n)).flatten()

    return [rows for epoch in range(epochs) for rows in one_epoch(epoch)]


def _update(update: Callable[..., Any], data: DataProto, rows: Tensor) -> dict[str, Metric]:
    mini_batch = data.select_idxs(rows)
    return merge_metrics(update(mini_batch, denominators=Denominators.of(mini_batch.batch["response_mask"].bool())))


def _check_finite(batch: DataProto, name: str) -> None:
    column = batch.ragged(name)
    if not torch.isfinite(column.values).all():
        bad = [i for i, row in enumerate(column.rows()) if not torch.isfinite(row).all()]
        rows = [batch.non_tensor_batch["index"][i] for i in bad]
        raise NumericalError(f"{name} is not finite for {len(bad)} rows; dataset rows {rows[:10]}. Nothing was updated")


def _describe(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{type(value).__name__}"
