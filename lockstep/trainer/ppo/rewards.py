"""The stages of a step that turn responses into scores.

A reward that is missing is no number: the row's response_mask becomes zero, so that it leaves the loss, its denominators and the statistics
of its group alike; it is counted by kind and its text is recorded.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.algorithms.shaping import has_signal, overlong_penalty
from lockstep.config.ppo import PPOConfig
from lockstep.config.reward import OverlongConfig
from lockstep.config.sampling import SamplingParams
from lockstep.errors import ConfigError, RewardError
from lockstep.protocol import DataProto, Ragged
from lockstep.rewards.outcome import Failure
from lockstep.trainer.ppo.metrics import row_sums
from lockstep.trainer.ppo.stages import generate

_NUM_EXAMPLES = 3


@dataclass
class Scored:
    """What is known of the rows of a batch beside their scores; each list has one entry per row."""

    failures: list[Failure | None]
    """Why a row's reward is missing."""
    total: list[float]
    """The reward, as the judges gave it; 0 where it is missing."""
    extra: dict[str, list[Any]] = field(default_factory=dict)
    """What the reward function returned: "score" and its other keys."""
    parts: dict[str, list[float | None]] = field(default_factory=dict)
    """Judge -> its score before weighting; None where it was not asked."""

    def select(self, rows: Sequence[int]) -> Scored:
        """The same of some rows."""
        extra, parts = ({name: [values[i] for i in rows] for name, values in kind.items()} for kind in (self.extra, self.parts))
        return Scored([self.failures[i] for i in rows], [self.total[i] for i in rows], extra, parts)

    @staticmethod
    def concat(all_scored: Sequence[Scored]) -> Scored:
        """The same of several batches, one after the other; None where one lacks a key."""
        joined = Scored([f for scored in all_scored for f in scored.failures], [t for scored in all_scored for t in scored.total])
        for kind in ("extra", "parts"):
            for name in dict.fromkeys(name for scored in all_scored for name in getattr(scored, kind)):
                lists = (getattr(scored, kind).get(name, [None] * len(scored.failures)) for scored in all_scored)
                getattr(joined, kind)[name] = [value for values in lists for value in values]
        return joined


@dataclass(frozen=True, slots=True)
class Scorer:
    """The score stage: asks `reward_model` (or None) and `reward_fn`, and writes down which rewards are missing."""

    reward_fn: Any
    reward_model: Any
    tokenizer: Any
    config: PPOConfig

    def begin(self, batch: DataProto) -> Any:
        """Start scoring a batch of prompts while it is generated: `add(row, token ids)` of what is returned takes a response.

        None where the reward function only takes whole batches.
        """
        return self.reward_fn.begin(batch) if hasattr(self.reward_fn, "begin") else None

    def judge(self, batch: DataProto, number: int, scoring: Any = None) -> Scored:
        """`score` with the reward function alone; missing rewards are recorded under the batch's `number`."""
        scored = score(self.reward_fn, batch, self.config.reward.max_failure_rate, scoring)
        record_failures(self.config.trainer.run_dir, number, batch, scored, self.tokenizer)
        return scored

    def score(self, batch: DataProto, number: int, scoring: Any = None) -> tuple[Scored, dict[str, float]]:
        """Reads responses. Writes token_level_scores, with the penalty for length, and where they are used rm_scores and reward_parts.

        `scoring` is what `begin` returned. Returns what else the judges said, and metrics.
        """
        if self.reward_model is not None:
            model_scores(self.reward_model, self.reward_fn, batch, self.tokenizer)
        scored = self.judge(batch, number, scoring)
        overlong = penalise_overlong(batch, self.config.reward.overlong_buffer, self.config.data.max_response_length)
        if keys := self.config.algorithm.gdpo_reward_keys:
            set_parts(batch, scored, keys)
        return scored, reward_metrics(scored) | overlong


def model_scores(reward_model: Any, reward_fn: Any, batch: DataProto, tokenizer: Any) -> None:
    """Reads responses, raw_prompt. Writes rm_scores, and rm_judged (bool): the rows that `reward_fn` wants the model to score."""
    wants = getattr(reward_fn, "wants_model", None)
    judged = wants(batch) if wants is not None else torch.ones(len(batch), dtype=torch.bool)
    responses = batch.ragged("responses")
    scores = responses.like(torch.zeros(len(responses.values)))
    if judged.any():
        data = batch.select(["responses"], ["raw_prompt"]).select_idxs(judged)
        rows = [row.tolist() for row in data.ragged("responses").rows()]
        data.non_tensor_batch["response_text"] = np.array(tokenizer.batch_decode(rows, skip_special_tokens=True), dtype=object)
        scored = iter(reward_model.compute_rm_score(data).ragged("rm_scores").rows())
        scores = Ragged.from_rows(
            [next(scored) if was else row for was, row in zip(judged.tolist(), scores.rows(), strict=True)], dtype=torch.float32
        )
    batch.set("rm_scores", scores)
    batch.set("rm_judged", judged)


def score(reward_fn: Callable[..., Any], batch: DataProto, max_failure_rate: float, scoring: Any = None) -> Scored:
    """Reads what the reward function reads. Writes token_level_scores; zeroes response_mask where the reward is missing.

    A reward function takes the batch and returns a tensor like `batch.batch["responses"]`, or a dict with that as "reward_tensor" and
    "reward_extra_info" (it is asked for the dict when it has an argument `return_dict`), and, where it knows them, "failures" and
    "reward_parts" as in `Scored`. One with an argument `ragged` is asked for a Ragged instead of the padded tensor. A row with a number
    that is not finite is a failure too. `scoring` is what `reward_fn.begin` returned.

    Raises RewardError for a tensor of the wrong shape, and with examples when more than `max_failure_rate` of the rewards are missing.
    """
    parameters = inspect.signature(reward_fn).parameters
    arguments: dict[str, Any] = {name: True for name in ("return_dict", "ragged") if name in parameters}
    if scoring is not None:
        arguments["scoring"] = scoring
    result = reward_fn(batch, **arguments)
    result = result if isinstance(result, dict) else {"reward_tensor": result}
    failures = list(result.get("failures") or [None] * len(batch))
    scores = _read_rewards(result["reward_tensor"], batch.ragged("responses"), failures)
    batch.set("token_level_scores", scores)
    total = row_sums(batch, "token_level_scores").tolist()
    scored = Scored(failures, total, result.get("reward_extra_info") or {}, result.get("reward_parts") or {})
    _check_failures(batch, scored, max_failure_rate)
    leave_out(batch, torch.tensor([failure is not None for failure in failures], dtype=torch.bool))
    return scored


def _read_rewards(rewards: Any, responses: Ragged, failures: list[Failure | None]) -> Ragged:
    """What a reward function returned, as float32 on the CPU. Rows with a number that is not finite become failures, in place; rows that
    are failures are zero. Raises RewardError unless there is one number for each token of the responses, or of their padded view."""
    if isinstance(rewards, Ragged) and torch.equal(rewards.lengths, responses.lengths):
        scores = rewards.like(rewards.values.float().cpu())
        seen: Sequence[Tensor] = scores.rows()
    elif isinstance(rewards, Tensor) and tuple(rewards.shape) == (len(responses), responses.width):
        seen = rewards.float().cpu().unbind()
        scores = Ragged.from_padded(rewards.float().cpu(), responses.lengths)
    else:
        got = f"a tensor of shape {tuple(rewards.shape)}" if isinstance(rewards, Tensor) else type(rewards).__name__
        shape = (len(responses), responses.width)
        raise RewardError(f"the reward function must return a tensor of shape {shape}, like the responses; got {got}")
    for i, row in enumerate(seen):
        if not torch.isfinite(row).all():
            failures[i] = failures[i] or Failure("invalid", "the reward function returned a number that is not finite")
    missing = torch.tensor([failure is not None for failure in failures], dtype=torch.bool)
    behind = [i for i, row in enumerate(seen) if failures[i] is None and row[int(responses.lengths[i]) :].any()]
    if behind:
        raise RewardError(
            f"the reward function put rewards after the end of the response, in rows {behind}: the last token of row i is at "
            "data.ragged('responses').lengths[i] - 1"
        )
    return scores.like(torch.where(torch.repeat_interleave(missing, scores.lengths), 0.0, scores.values))


def leave_out(batch: DataProto, rows: Tensor) -> None:
    """Zero the response_mask of `rows` (bool [B]): they take no part in anything that follows."""
    if rows.any():
        mask = batch.ragged("response_mask")
        kept = torch.repeat_interleave(~rows, mask.lengths)
        batch.set("response_mask", mask.like(mask.values * kept.to(mask.values)))


def baselines(batch: DataProto, greedy: DataProto, greedy_scored: Scored) -> int:
    """Reads uid. Writes reward_baselines: the score of the greedy response (`greedy`: one row per prompt) to each row's prompt.

    Rows of a prompt whose baseline is missing are left out; returns how many such prompts there are.
    """
    totals = row_sums(greedy, "token_level_scores").tolist()
    of_prompt = dict(zip(greedy.non_tensor_batch["uid"], zip(totals, greedy_scored.failures, strict=True), strict=True))
    found = [of_prompt[uid] for uid in batch.non_tensor_batch["uid"]]
    batch.set("reward_baselines", torch.tensor([total for total, _ in found], dtype=torch.float32))
    leave_out(batch, torch.tensor([failure is not None for _, failure in found], dtype=torch.bool))
    return sum(failure is not None for failure in greedy_scored.failures)


def greedy_baseline(batch: DataProto, number: int, *, rollout: Any, sampling: SamplingParams, scorer: Scorer) -> dict[str, float]:
    """Writes reward_baselines: the score of the greedy response to each prompt. `number` is that of the batch."""
    first = torch.tensor([sample == 0 for sample in batch.non_tensor_batch["sample"]])
    objects = [name for name in batch.non_tensor_batch if name != "finish_reason"]
    greedy = batch.select(["prompts"], objects).select_idxs(first)
    generate(rollout, greedy, dataclasses.replace(sampling, temperature=0.0), number)
    scored, _ = scorer.score(greedy, number)
    missing = baselines(batch, greedy, scored)
    return {"reward/baseline/mean": sum(scored.total) / len(scored.total), "reward/baseline/missing": float(missing)}


def penalise_overlong(batch: DataProto, config: OverlongConfig, max_response_length: int) -> dict[str, float]:
    """Reads responses; adds the overlong penalty to token_level_scores, on the last token."""
    if not config.enable:
        return {}
    if config.len > max_response_length:
        raise ConfigError(f"reward.overlong_buffer.len={config.len} is more than data.max_response_length={max_response_length}")
    scores, lengths = batch.ragged("token_level_scores"), batch.ragged("responses").lengths
    penalty = overlong_penalty(lengths, max_response_length, config.len, config.penalty_factor).float()
    values, filled = scores.values.clone(), lengths > 0
    values[(lengths.cumsum(0) - 1)[filled]] += penalty[filled]
    batch.set("token_level_scores", scores.like(values))
    return {"reward/overlong_penalty/mean": penalty.mean().item(), "reward/overlong_ratio": (penalty < 0).float().mean().item()}


def set_parts(batch: DataProto, scored: Scored, keys: Sequence[str]) -> None:
    """Writes reward_parts [B, K] (float), with its names in meta_info: what `keys` name of the judges' scores and the function's numbers.
    Missing rows are 0.

    Raises RewardError when a row that has a reward lacks one of them.
    """
    columns = []
    for key in keys:
        values = scored.parts.get(key) or scored.extra.get(key) or [None] * len(batch)
        lacking = [i for i, (v, f) in enumerate(zip(values, scored.failures, strict=True)) if v is None and f is None]
        if lacking:
            known = [*scored.parts, *scored.extra]
            raise RewardError(
                f"{len(lacking)} rows have no reward part {key!r} (dataset row {batch.non_tensor_batch['index'][lacking[0]]} is the "
                f"first); known parts: {', '.join(known)}. Name judges in reward.weights, or return the key from the reward function"
            )
        columns.append([0.0 if f is not None else float(v or 0.0) for v, f in zip(values, scored.failures, strict=True)])
    batch.set("reward_parts", torch.tensor(columns, dtype=torch.float32).T.contiguous())
    batch.meta_info["reward_part_names"] = list(keys)


def rows_with_signal(batch: DataProto, scored: Scored, metric: str) -> Tensor:
    """Row numbers of the groups in which `metric` differs between samples; missing rewards do not count."""
    counted = (row_sums(batch, "response_mask") > 0) & torch.tensor([f is None for f in scored.failures])
    if metric == "score":
        values = torch.tensor(scored.total, dtype=torch.float64)
    elif metric == "seq_reward":
        values = row_sums(batch, "token_level_scores")
    elif metric in scored.extra:
        said = scored.extra[metric]
        lacking = [i for i, value in enumerate(said) if counted[i] and not isinstance(value, int | float | np.number | np.bool_)]
        if lacking:
            raise RewardError(
                f"algorithm.filter_groups.metric={metric} is not a number in {len(lacking)} rows: {said[lacking[0]]!r}"
            )
        values = torch.tensor([float(value) if counted[i] else 0.0 for i, value in enumerate(said)], dtype=torch.float64)
    else:
        raise ConfigError(
            f"algorithm.filter_groups.metric={metric} is not among what the reward function returned: "
            f"{', '.join(scored.extra) or 'nothing'}; choose score, seq_reward or one of these"
        )
    group = torch.from_numpy(np.unique(batch.non_tensor_batch["uid"].astype(str), return_inverse=True)[1])
    return has_signal(values, group, counted).nonzero().flatten()


def reward_metrics(scored: Scored) -> dict[str, float]:
    """reward/{judge}/{mean, max, min}, reward/missing_ratio and reward/missing/{kind}."""
    metrics: dict[str, float] = {}
    for judge, values in scored.parts.items():
        known = [value for value in values if value is not None]
        if known:
            summary = {"mean": sum(known) / len(known), "max": max(known), "min": min(known)}
            metrics |= {f"reward/{judge}/{name}": value for name, value in summary.items()}
    kinds = Counter(failure.kind for failure in scored.failures if failure is not None)
    metrics["reward/missing_ratio"] = kinds.total() / max(len(scored.failures), 1)
    return metrics | {f"reward/missing/{kind}": float(count) for kind, count in kinds.items()}


def record_failures(run_dir: Path, number: int, batch: DataProto, scored: Scored, tokenizer: Any) -> None:
    """Append a line for each missing reward to reward_failures.jsonl, with all that is needed to try again; `number` is the batch's."""
    failed = [(i, failure) for i, failure in enumerate(scored.failures) if failure is not None]
    if not failed:
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / "reward_failures.jsonl").open("a") as file:
        for i, failure in failed:
            row: dict[str, Any] = {"batch": number, "kind": failure.kind, "error": failure.text}
            row["response"] = tokenizer.decode(batch.ragged("responses")[i].tolist(), skip_special_tokens=True)
            for name in ("index", "data_source", "raw_prompt", "reward_model"):
                row[name] = batch.non_tensor_batch[name][i] if name in batch.non_tensor_batch else None
            file.write(json.dumps(row, default=str) + "\n")


def _check_failures(batch: DataProto, scored: Scored, max_failure_rate: float) -> None:
    failed = [(i, failure) for i, failure in enumerate(scored.failures) if failure is not None]
    if len(failed) <= max_failure_rate * len(batch):
        return
    kinds = Counter(failure.kind for _, failure in failed)
    sources = batch.non_tensor_batch.get("data_source", [None] * len(batch))
    index = batch.non_tensor_batch["index"]
    examples = "\n".join(
        f"--- row {i}, dataset row {index[i]}, data_source {sources[i]!r} ({failure.kind})\n{failure.text.rstrip()}"
        for i, failure in failed[:_NUM_EXAMPLES]
    )
    raise RewardError(
        f"{len(failed)} of {len(batch)} rewards are missing ({', '.join(f'{kind}: {n}' for kind, n in kinds.items())}), more than "
        f"reward.max_failure_rate={max_failure_rate:g} allows\n{examples}"
    )
