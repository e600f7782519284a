"""From responses to scores: ask the judges, leave out rows without a reward, write the columns that algorithms read of rewards.

A missing reward is not a number: the row's response_mask becomes zero, so that the row leaves the loss, its denominators and the statistics
of its group. It is counted by kind, and its text is recorded.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from lockstep.algorithms.shaping import overlong_penalty
from lockstep.config.ppo import PPOConfig
from lockstep.config.reward import OverlongConfig
from lockstep.config.sampling import SamplingParams
from lockstep.errors import RewardError
from lockstep.observability.metrics import Max, Mean, Metric, Min, Sum
from lockstep.protocol import DataProto, Ragged
from lockstep.rewards.outcome import RETRIED_KINDS, Failure
from lockstep.trainer.ppo.interfaces import RewardFunction, RewardModel, Rollout, Scoring
from lockstep.trainer.ppo.metrics import row_sums
from lockstep.trainer.ppo.stages import generate
from lockstep.utils.files import named_errors
from lockstep.utils.json_values import as_json, is_number

OVERLONG_PART = "overlong_penalty"
"""The name of reward.overlong_buffer's penalty among the parts of a reward."""
FAILURES = "reward_failures.jsonl"
_NUM_EXAMPLES = 3
_CHANCE = 1e-3
T = TypeVar("T")


@dataclass
class Scored:
    """What the judges said of a batch; each list has one entry per row."""

    failures: list[Failure | None]
    """Why a row's reward is missing."""
    total: list[float]
    """The reward, as the judges gave it; 0 where it is missing."""
    extra: dict[str, list[Any]] = field(default_factory=dict)
    """What the reward function returned: "score" and its other keys."""
    parts: dict[str, list[float | None]] = field(default_factory=dict)
    """Judge -> its score before weighting, None if it was not asked; and the penalty for length, if the run has one."""
    retries: list[int] = field(default_factory=list)
    """How often calls for each row were retried (reward.retries); empty if the reward function does not say."""

    def select(self, rows: Sequence[int]) -> Scored:
        """Return the entries of some rows."""
        extra = {name: [values[i] for i in rows] for name, values in self.extra.items()}
        parts = {name: [values[i] for i in rows] for name, values in self.parts.items()}
        retries = [self.retries[i] for i in rows] if self.retries else []
        return Scored([self.failures[i] for i in rows], [self.total[i] for i in rows], extra, parts, retries)

    @staticmethod
    def concat(all_scored: Sequence[Scored]) -> Scored:
        """Return the entries of several batches, one after the other; None if a batch lacks a key."""
        joined = Scored([], [])
        for scored in all_scored:
            joined.failures += scored.failures
            joined.total += scored.total
        if any(scored.retries for scored in all_scored):
            for scored in all_scored:
                joined.retries += scored.retries or [0] * len(scored.failures)
        counts = [len(scored.failures) for scored in all_scored]
        joined.extra = _concat_lists([scored.extra for scored in all_scored], counts)
        joined.parts = _concat_lists([scored.parts for scored in all_scored], counts)
        return joined


def _concat_lists(named: Sequence[dict[str, list[T]]], counts: Sequence[int]) -> dict[str, list[Any]]:
    joined: dict[str, list[Any]] = {}
    names = dict.fromkeys(name for lists in named for name in lists)
    for name in names:
        joined[name] = []
        for lists, count in zip(named, counts, strict=True):
            joined[name] += lists.get(name, [None] * count)
    return joined


# -- asking the judges -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judge:
    """Asks `reward_fn` and records missing rewards."""

    reward_fn: RewardFunction
    tokenizer: Any
    max_failure_rate: float
    """Largest share of a batch whose reward may be missing."""
    run_dir: Path
    """Where missing rewards are recorded."""
    reward_model: RewardModel | None = None

    def begin(self, batch: DataProto) -> Scoring | None:
        """Start to score a batch of prompts while responses are generated; None if the reward function only takes whole batches."""
        scoring: Scoring | None = self.reward_fn.begin(batch) if hasattr(self.reward_fn, "begin") else None
        return scoring

    def judge_validated(self, batch: DataProto, number: int, scoring: Scoring | None = None) -> Scored:
        """`judge`, however many rewards are missing: `check_validated` looks at all rows of a validation together."""
        return self._judge(batch, number, scoring, 1.0)

    def judge(self, batch: DataProto, number: int, scoring: Scoring | None = None) -> Scored:
        """See `_judge`. Raise RewardError if more than `max_failure_rate` of the rewards are missing."""
        return self._judge(batch, number, scoring, self.max_failure_rate)

    def _judge(self, batch: DataProto, number: int, scoring: Scoring | None, max_failure_rate: float) -> Scored:
        """Call `score`, after the reward model has scored its rows. Missing rewards are recorded under the batch's `number`."""
        if self.reward_model is not None:
            model_scores(self.reward_model, self.reward_fn, batch, self.tokenizer)
        record = partial(record_failures, self.run_dir, number, batch, tokenizer=self.tokenizer)
        return score(self.reward_fn, batch, max_failure_rate, scoring, record, self.run_dir)


class ScoreStage(Protocol):
    """The score stage of a step."""

    def begin(self, batch: DataProto, /) -> Scoring | None:
        """See Judge."""

    def score(self, batch: DataProto, number: int, scoring: Scoring | None = None, /) -> tuple[Scored, dict[str, Metric]]:
        """See Scorer."""


@dataclass(frozen=True)
class Scorer:
    """The score stage of a step: the judges, and what the configuration adds to their scores."""

    judge: Judge | None
    """None if nothing reads rewards and nothing can judge the rows (`checks.check_rewards`)."""
    config: PPOConfig

    @classmethod
    def of(cls, reward_fn: RewardFunction | None, reward_model: RewardModel | None, tokenizer: Any, config: PPOConfig) -> Scorer:
        """Take what else is needed from the config."""
        return cls(None if reward_fn is None else judge_of(reward_fn, reward_model, tokenizer, config), config)

    def begin(self, batch: DataProto) -> Scoring | None:
        """See Judge."""
        return None if self.judge is None else self.judge.begin(batch)

    def score(self, batch: DataProto, number: int, scoring: Scoring | None = None) -> tuple[Scored, dict[str, Metric]]:
        """Read responses. Write token_level_scores, with the penalty for length, and if they are used rm_scores and reward_parts.

        `scoring` is what `begin` returned. Return what else the judges said, and metrics.
        """
        if self.judge is None:
            responses = batch.ragged("responses")
            batch.set("token_level_scores", responses.like(torch.zeros(len(responses.values))))
            return Scored([None] * len(batch), [0.0] * len(batch)), {}
        scored = self.judge.judge(batch, number, scoring)
        metrics = reward_metrics(scored)
        overlong = self.config.reward.overlong_buffer
        if overlong.enable:
            metrics |= penalise_overlong(batch, scored, overlong, self.config.data.max_response_length)
        if keys := self.config.algorithm.gdpo_reward_keys:
            set_parts(batch, scored, keys)
        return scored, metrics


def judge_of(reward_fn: RewardFunction, reward_model: RewardModel | None, tokenizer: Any, config: PPOConfig) -> Judge:
    """Return a judge with the config's values."""
    return Judge(reward_fn, tokenizer, config.reward.max_failure_rate, config.trainer.run_dir, reward_model)


def score(
    reward_fn: RewardFunction,
    batch: DataProto,
    max_failure_rate: float,
    scoring: Scoring | None = None,
    record: Callable[..., None] | None = None,
    run_dir: Path | None = None,
) -> Scored:
    """Read what the reward function reads. Write token_level_scores; zero response_mask where the reward is missing.

    A reward function takes the batch and returns a tensor like `batch.batch["responses"]`, or a dict with that as "reward_tensor" and
    "reward_extra_info" (it is asked for the dict when it has an argument `return_dict`), and, where it knows them, "failures",
    "reward_parts" and "retries" as in `Scored`. One with an argument `ragged` is asked for a Ragged instead of the padded tensor. A row
    with a number that is not finite is a failure too. `scoring` is what `reward_fn.begin` returned. `record` is called with failures,
    which it writes into `run_dir`.

    Raise RewardError for a tensor of the wrong shape, and with examples if more than `max_failure_rate` of the rewards are missing.
    """
    parameters = inspect.signature(reward_fn).parameters
    arguments: dict[str, Any] = {name: True for name in ("return_dict", "ragged") if name in parameters}
    if scoring is not None:
        arguments["scoring"] = scoring
    result = reward_fn(batch, **arguments)
    if not isinstance(result, dict):
        result = {"reward_tensor": result}
    failures = list(result.get("failures") or [None] * len(batch))
    batch.set("token_level_scores", _read_rewards(result["reward_tensor"], batch.ragged("responses"), failures))
    scored = Scored(
        failures,
        total=row_sums(batch, "token_level_scores").tolist(),
        extra=result.get("reward_extra_info") or {},
        parts=result.get("reward_parts") or {},
        retries=list(result.get("retries") or []),
    )
    if any(failures):
        if record is not None:
            record(scored=scored)
        check_failures(batch, scored, max_failure_rate, run_dir)
        leave_out(batch, torch.tensor([failure is not None for failure in failures]))
    return scored


def _read_rewards(rewards: Any, responses: Ragged, failures: list[Failure | None]) -> Ragged:
    """Return the rewards as float32 on the CPU, zero for rows that are failures. Rows with a number that is not finite become failures, in
    place. Raise RewardError unless there is one number for each token of the responses, or of their padded view."""
    if isinstance(rewards, Ragged) and torch.equal(rewards.lengths, responses.lengths):
        scores = rewards.like(rewards.values.float().cpu())
        rows: Sequence[Tensor] = scores.rows()
    elif isinstance(rewards, Tensor) and tuple(rewards.shape) == (len(responses), responses.width):
        padded = rewards.float().cpu()
        scores = Ragged.from_padded(padded, responses.lengths)
        rows = padded.unbind()
    else:
        got = f"a tensor of shape {tuple(rewards.shape)}" if isinstance(rewards, Tensor) else type(rewards).__name__
        shape = (len(responses), responses.width)
        raise RewardError(f"the reward function must return a tensor of shape {shape}, like the responses; got {got}")
    for i, row in enumerate(rows):
        if not torch.isfinite(row).all():
            failures[i] = failures[i] or Failure("invalid", "the reward function returned a number that is not finite")
    behind = [i for i, row in enumerate(rows) if failures[i] is None and row[int(responses.lengths[i]) :].any()]
    if behind:
        raise RewardError(
            f"the reward function put rewards after the end of the response, in rows {behind}: the last token of row i is at "
            "data.ragged('responses').lengths[i] - 1"
        )
    missing = torch.tensor([failure is not None for failure in failures], dtype=torch.bool)
    return scores.like(torch.where(torch.repeat_interleave(missing, scores.lengths), 0.0, scores.values))


def reward_metrics(scored: Scored) -> dict[str, Metric]:
    """Return reward/{judge}/{mean, max, min}, reward/missing, reward/missing_ratio, reward/missing/{kind}, and reward/retries if calls
    were retried."""
    metrics: dict[str, Metric] = {}
    for judge, values in scored.parts.items():
        known = [value for value in values if value is not None]
        if known:
            metrics[f"reward/{judge}/mean"] = Mean(sum(known), len(known))
            metrics[f"reward/{judge}/max"] = Max(max(known))
            metrics[f"reward/{judge}/min"] = Min(min(known))
    if any(scored.retries):
        metrics["reward/retries"] = Sum(float(sum(scored.retries)))
    kinds = Counter(failure.kind for failure in scored.failures if failure is not None)
    metrics["reward/missing"] = Sum(float(kinds.total()))
    metrics["reward/missing_ratio"] = Mean(kinds.total(), len(scored.failures))
    for kind, count in kinds.items():
        metrics[f"reward/missing/{kind}"] = Sum(float(count))
    return metrics


# -- missing rewards -------------------------------------------------------------------------------------------------------


def leave_out(batch: DataProto, rows: Tensor) -> None:
    """Zero the response_mask of `rows` (bool [B]): they take no part in anything that follows."""
    if rows.any():
        mask = batch.ragged("response_mask")
        stays = torch.repeat_interleave(~rows, mask.lengths)
        batch.set("response_mask", mask.like(mask.values * stays.to(mask.values)))


def check_failures(batch: DataProto, scored: Scored, max_failure_rate: float, run_dir: Path | None = None) -> None:
    """Raise RewardError, with examples, if more than `max_failure_rate` of the rewards are missing. They are recorded in `run_dir`."""
    num_missing = sum(failure is not None for failure in scored.failures)
    if num_missing > max_failure_rate * len(batch):
        raise _too_many(batch, scored, max_failure_rate, run_dir)


def check_validated(batch: DataProto, scored: Scored, max_failure_rate: float, run_dir: Path | None = None) -> None:
    """`check_failures` for the rows of a validation, which may be few: raise RewardError if all rewards are missing, or so many that
    chance explains it in less than one of 1,000 validations in which each is missing with the probability `max_failure_rate`."""
    num_missing = sum(failure is not None for failure in scored.failures)
    are_all = num_missing == len(batch) and max_failure_rate < 1.0
    if num_missing and (are_all or chance_of(num_missing, len(batch), max_failure_rate) < _CHANCE):
        raise _too_many(batch, scored, max_failure_rate, run_dir)


def chance_of(count: int, num_rows: int, rate: float) -> float:
    """Return the probability that `count` rows or more of `num_rows` fail, if each fails with the probability `rate`."""
    if rate <= 0.0 or rate >= 1.0:
        return float(count <= 0 or rate >= 1.0)
    log_ways = math.lgamma(num_rows + 1)
    logs = (
        log_ways - math.lgamma(k + 1) - math.lgamma(num_rows - k + 1) + k * math.log(rate) + (num_rows - k) * math.log1p(-rate)
        for k in range(count, num_rows + 1)
    )
    return min(1.0, math.fsum(map(math.exp, logs)))


def _too_many(batch: DataProto, scored: Scored, max_failure_rate: float, run_dir: Path | None) -> RewardError:
    failed = [(i, failure) for i, failure in enumerate(scored.failures) if failure is not None]
    kinds = Counter(failure.kind for _, failure in failed)
    sources = batch.non_tensor_batch.get("data_source", [None] * len(batch))
    index = batch.non_tensor_batch["index"]
    examples = "\n".join(
        f"--- row {i}, dataset row {index[i]}, data_source {sources[i]!r} ({failure.kind})\n{failure.text.rstrip()}"
        for i, failure in failed[:_NUM_EXAMPLES]
    )
    everything = "" if run_dir is None else f"all failures: {run_dir / FAILURES}"
    rate = math.ceil(20 * len(failed) / len(batch)) / 20  # the next of 0.05, 0.1, ...
    cures = [f"allow more with reward.max_failure_rate={rate:g}"]
    if "environment" in kinds:
        cures.insert(0, "set agent.retries higher")
    if set(kinds) & set(RETRIED_KINDS):
        cures.insert(0, "raise reward.retries" if any(scored.retries) else "set reward.retries=3")
    return RewardError(
        f"{len(failed)} of {len(batch)} rewards are missing ({', '.join(f'{kind}: {n}' for kind, n in kinds.items())}), more than "
        f"reward.max_failure_rate={max_failure_rate:g} allows; {', or '.join(cures)}\n{everything}\n{examples}\n"
        f"--- {min(_NUM_EXAMPLES, len(failed))} of {len(failed)} failures are shown; the cure stands above them. {everything}"
    )


def record_failures(run_dir: Path, number: int, batch: DataProto, scored: Scored, tokenizer: Any) -> None:
    """Append a line for each missing reward to reward_failures.jsonl, with all that is needed to try again; `number` is the batch's."""
    failed = [(i, failure) for i, failure in enumerate(scored.failures) if failure is not None]
    if not failed:
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    objects = batch.non_tensor_batch
    with named_errors(run_dir / FAILURES), (run_dir / FAILURES).open("a") as file:
        for i, failure in failed:
            row: dict[str, Any] = {"batch": number, "kind": failure.kind, "error": failure.text, "retries": failure.num_retries}
            row["response"] = tokenizer.decode(batch.ragged("responses")[i].tolist(), skip_special_tokens=True)
            for name in ("index", "data_source", "raw_prompt", "reward_model"):
                row[name] = objects[name][i] if name in objects else None
            file.write(json.dumps(as_json(row), allow_nan=False) + "\n")


# -- columns that some runs need -------------------------------------------------------------------------------------------


def model_scores(reward_model: RewardModel, reward_fn: RewardFunction | None, batch: DataProto, tokenizer: Any) -> None:
    """Read responses, raw_prompt. Write rm_scores, and rm_judged (bool): the rows that `reward_fn` wants the model to score."""
    if reward_fn is not None and hasattr(reward_fn, "wants_model"):
        judged = reward_fn.wants_model(batch)
    else:
        judged = torch.ones(len(batch), dtype=torch.bool)
    responses = batch.ragged("responses")
    scores = responses.like(torch.zeros(len(responses.values)))
    if judged.any():
        data = batch.select(["responses"], ["raw_prompt"]).select_idxs(judged)
        ids = [row.tolist() for row in data.ragged("responses").rows()]
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        data.non_tensor_batch["response_text"] = np.array(texts, dtype=object)
        given = reward_model.compute_rm_score(data).ragged("rm_scores").rows()
        rows = list(scores.rows())
        for i, row in zip(judged.nonzero().flatten().tolist(), given, strict=True):
            rows[i] = row
        scores = Ragged.from_rows(rows, dtype=torch.float32)
    batch.set("rm_scores", scores)
    batch.set("rm_judged", judged)


def penalise_overlong(batch: DataProto, scored: Scored, config: OverlongConfig, max_response_length: int) -> dict[str, Metric]:
    """Read responses. Add the overlong penalty to token_level_scores, on the last token, and to the parts of `scored`."""
    scores = batch.ragged("token_level_scores")
    lengths = batch.ragged("responses").lengths
    penalty = overlong_penalty(lengths, max_response_length, config.num_tokens(max_response_length), config.penalty_factor).float()
    values = scores.values.clone()
    has_tokens = lengths > 0
    values[(lengths.cumsum(0) - 1)[has_tokens]] += penalty[has_tokens]
    batch.set("token_level_scores", scores.like(values))
    scored.parts[OVERLONG_PART] = penalty.tolist()
    return {
        "reward/overlong_penalty/mean": Mean(penalty.double().sum().item(), len(penalty)),
        "reward/overlong_ratio": Mean(int((penalty < 0).sum()), len(penalty)),
    }


def set_parts(batch: DataProto, scored: Scored, keys: Sequence[str]) -> None:
    """Write reward_parts [B, K] (float): the judges' scores and the function's numbers that `keys` name, 0 for missing rewards. Their names
    go to meta_info.

    Raise RewardError if a row that has a reward lacks one of them, or has something that is not a finite number.
    """
    columns = []
    for key in keys:
        values = scored.parts.get(key) or scored.extra.get(key) or [None] * len(batch)
        with_reward = [i for i, failure in enumerate(scored.failures) if failure is None]
        lacking = [i for i in with_reward if values[i] is None]
        if lacking:
            known = [*scored.parts, *scored.extra]
            raise RewardError(
                f"{len(lacking)} rows have no reward part {key!r} (dataset row {batch.non_tensor_batch['index'][lacking[0]]} is the "
                f"first); known parts: {', '.join(known)}. Name judges in reward.weights, or return the key from the reward function"
            )
        wrong = [values[i] for i in with_reward if not is_number(values[i])]
        if wrong:
            raise RewardError(
                f"algorithm.gdpo_reward_keys names {key!r}, which is not a finite number in {len(wrong)} rows, but {wrong[0]!r}: name "
                "judges, or keys with numbers"
            )
        column = [0.0] * len(batch)
        for i in with_reward:
            column[i] = float(values[i] or 0.0)
        columns.append(column)
    batch.set("reward_parts", torch.tensor(columns, dtype=torch.float32).T.contiguous())
    batch.meta_info["reward_part_names"] = list(keys)


def baselines(batch: DataProto, greedy: DataProto, greedy_scored: Scored) -> int:
    """Read uid. Write reward_baselines: the score of the greedy response (`greedy`: one row per prompt) to each row's prompt.

    Rows of a prompt whose baseline is missing are left out; return the number of such prompts.
    """
    totals = dict(zip(greedy.non_tensor_batch["uid"], row_sums(greedy, "token_level_scores").tolist(), strict=True))
    failures = dict(zip(greedy.non_tensor_batch["uid"], greedy_scored.failures, strict=True))
    uids = batch.non_tensor_batch["uid"]
    batch.set("reward_baselines", torch.tensor([totals[uid] for uid in uids], dtype=torch.float32))
    leave_out(batch, torch.tensor([failures[uid] is not None for uid in uids], dtype=torch.bool))
    return sum(failure is not None for failure in greedy_scored.failures)


def greedy_baseline(
    batch: DataProto, number: int, *, rollout: Rollout, sampling: SamplingParams, scorer: ScoreStage
) -> dict[str, Metric]:
    """Write reward_baselines: the score of the greedy response to each prompt. `number` is the batch's."""
    first = torch.tensor([sample == 0 for sample in batch.non_tensor_batch["sample"]])
    objects = [name for name in batch.non_tensor_batch if name not in ("finish_reason", "episode")]
    greedy = batch.select(["prompts"], objects).select_idxs(first)
    generate(rollout, greedy, dataclasses.replace(sampling, temperature=0.0), number)
    scored, _ = scorer.score(greedy, number)
    missing = baselines(batch, greedy, scored)
    known = [total for total, failure in zip(scored.total, scored.failures, strict=True) if failure is None]
    return {"reward/baseline/mean": Mean(sum(known), len(known)), "reward/baseline/missing": Sum(float(missing))}
