"""The stage of a step that turns responses into scores.

A reward that is missing is no number: the row's response_mask becomes zero, so that it leaves the loss, its denominators and the statistics
of its group alike; it is counted by kind and its text is recorded.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.config.ppo import PPOConfig
from lockstep.errors import RewardError
from lockstep.observability.metrics import Max, Mean, Metric, Min, Sum
from lockstep.protocol import DataProto, Ragged
from lockstep.rewards.outcome import Failure
from lockstep.trainer.ppo.metrics import row_sums
from lockstep.trainer.ppo.missing_rewards import check_failures, leave_out, record_failures
from lockstep.trainer.ppo.reward_columns import model_scores, penalise_overlong, set_parts
from lockstep.trainer.ppo.scored import Scored


@dataclass(frozen=True)
class Judge:
    """Asks `reward_fn`, and writes down which rewards are missing."""

    reward_fn: Any
    tokenizer: Any
    max_failure_rate: float
    """Largest share of a batch whose reward may be missing."""
    run_dir: Path
    """Where missing rewards are recorded."""
    reward_model: Any = None

    def begin(self, batch: DataProto) -> Any:
        """Start scoring a batch of prompts while it is generated: `add(row, token ids)` of what is returned takes a response.

        None where the reward function only takes whole batches.
        """
        return self.reward_fn.begin(batch) if hasattr(self.reward_fn, "begin") else None

    def judge_validated(self, batch: DataProto, number: int, scoring: Any = None) -> Scored:
        """`judge`, however many rewards are missing: `check_validated` looks at all rows of a validation together."""
        return self._judge(batch, number, scoring, 1.0)

    def judge(self, batch: DataProto, number: int, scoring: Any = None) -> Scored:
        """See `_judge`. Raises RewardError when more than `max_failure_rate` of the rewards are missing."""
        return self._judge(batch, number, scoring, self.max_failure_rate)

    def _judge(self, batch: DataProto, number: int, scoring: Any, max_failure_rate: float) -> Scored:
        """`score` with the reward function, and with the reward model, where there is one, the rows that it is to judge; missing rewards
        are recorded under the batch's `number`."""
        if self.reward_model is not None:
            model_scores(self.reward_model, self.reward_fn, batch, self.tokenizer)
        record = partial(record_failures, self.run_dir, number, batch, tokenizer=self.tokenizer)
        return score(self.reward_fn, batch, max_failure_rate, scoring, record, self.run_dir)


@dataclass(frozen=True)
class Scorer(Judge):
    """The score stage of a step: the reward model (or None), the function, and what the configuration adds."""

    config: PPOConfig = field(kw_only=True)

    @classmethod
    def of(cls, reward_fn: Any, reward_model: Any, tokenizer: Any, config: PPOConfig) -> Scorer:
        """With the config's values."""
        return cls(reward_fn, tokenizer, config.reward.max_failure_rate, config.trainer.run_dir, reward_model, config=config)

    def score(self, batch: DataProto, number: int, scoring: Any = None) -> tuple[Scored, dict[str, Metric]]:
        """Reads responses. Writes token_level_scores, with the penalty for length, and where they are used rm_scores and reward_parts.

        `scoring` is what `begin` returned. Returns what else the judges said, and metrics.
        """
        if self.reward_fn is None:  # nothing reads rewards, and nothing judges these rows (checks.check_rewards)
            batch.set("token_level_scores", batch.ragged("responses").like(torch.zeros(len(batch.ragged("responses").values))))
            return Scored([None] * len(batch), [0.0] * len(batch)), {}
        scored = self.judge(batch, number, scoring)
        metrics = reward_metrics(scored)
        overlong = self.config.reward.overlong_buffer
        if overlong.enable:
            metrics |= penalise_overlong(batch, scored, overlong, self.config.data.max_response_length)
        if keys := self.config.algorithm.gdpo_reward_keys:
            set_parts(batch, scored, keys)
        return scored, metrics


def score(
    reward_fn: Callable[..., Any],
    batch: DataProto,
    max_failure_rate: float,
    scoring: Any = None,
    record: Any = None,
    run_dir: Path | None = None,
) -> Scored:
    """Reads what the reward function reads. Writes token_level_scores; zeroes response_mask where the reward is missing.

    A reward function takes the batch and returns a tensor like `batch.batch["responses"]`, or a dict with that as "reward_tensor" and
    "reward_extra_info" (it is asked for the dict when it has an argument `return_dict`), and, where it knows them, "failures",
    "reward_parts" and "retries" as in `Scored`. One with an argument `ragged` is asked for a Ragged instead of the padded tensor. A row
    with a number that is not finite is a failure too. `scoring` is what `reward_fn.begin` returned. `record` hears of failures, which it
    writes into `run_dir`.

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
    scored.retries = list(result.get("retries") or [])
    if any(failures):
        if record is not None:
            record(scored=scored)
        check_failures(batch, scored, max_failure_rate, run_dir)
        leave_out(batch, torch.tensor([failure is not None for failure in failures]))
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


def reward_metrics(scored: Scored) -> dict[str, Metric]:
    """reward/{judge}/{mean, max, min}, reward/missing, reward/missing_ratio, reward/missing/{kind}, and reward/retries where calls were
    made again."""
    metrics: dict[str, Metric] = {}
    for judge, values in scored.parts.items():
        known = [value for value in values if value is not None]
        if known:
            summary: dict[str, Metric] = {"mean": Mean(sum(known), len(known)), "max": Max(max(known)), "min": Min(min(known))}
            metrics |= {f"reward/{judge}/{name}": value for name, value in summary.items()}
    kinds = Counter(failure.kind for failure in scored.failures if failure is not None)
    if any(scored.retries):
        metrics["reward/retries"] = Sum(float(sum(scored.retries)))
    metrics["reward/missing"] = Sum(float(kinds.total()))
    metrics["reward/missing_ratio"] = Mean(kinds.total(), len(scored.failures))
    return metrics | {f"reward/missing/{kind}": Sum(float(count)) for kind, count in kinds.items()}
