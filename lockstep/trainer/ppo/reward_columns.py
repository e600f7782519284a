"""What some runs need of rewards beyond the score: a reward model, a penalty for length, parts, a baseline, groups with a signal."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.algorithms.shaping import has_signal, overlong_penalty
from lockstep.config.reward import OverlongConfig
from lockstep.config.sampling import SamplingParams
from lockstep.errors import ConfigError, RewardError
from lockstep.observability.metrics import Mean, Metric, Sum
from lockstep.protocol import DataProto, Ragged
from lockstep.trainer.ppo.metrics import row_sums
from lockstep.trainer.ppo.missing_rewards import leave_out
from lockstep.trainer.ppo.plain import is_number
from lockstep.trainer.ppo.scored import OVERLONG_PART, Scored
from lockstep.trainer.ppo.stages import generate


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


def penalise_overlong(batch: DataProto, scored: Scored, config: OverlongConfig, max_response_length: int) -> dict[str, Metric]:
    """Reads responses; adds the overlong penalty to token_level_scores, on the last token, and to the parts of `scored`."""
    scores, lengths = batch.ragged("token_level_scores"), batch.ragged("responses").lengths
    penalty = overlong_penalty(lengths, max_response_length, config.num_tokens(max_response_length), config.penalty_factor).float()
    values, filled = scores.values.clone(), lengths > 0
    values[(lengths.cumsum(0) - 1)[filled]] += penalty[filled]
    batch.set("token_level_scores", scores.like(values))
    scored.parts[OVERLONG_PART] = penalty.tolist()
    return {
        "reward/overlong_penalty/mean": Mean(penalty.double().sum().item(), len(penalty)),
        "reward/overlong_ratio": Mean(int((penalty < 0).sum()), len(penalty)),
    }


def set_parts(batch: DataProto, scored: Scored, keys: Sequence[str]) -> None:
    """Writes reward_parts [B, K] (float), with its names in meta_info: what `keys` name of the judges' scores and the function's numbers.
    Missing rows are 0.

    Raises RewardError when a row that has a reward lacks one of them, or has something that is not a finite number.
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
        wrong = [v for v, f in zip(values, scored.failures, strict=True) if f is None and not is_number(v)]
        if wrong:
            raise RewardError(
                f"algorithm.gdpo_reward_keys names {key!r}, which is not a finite number in {len(wrong)} rows, but {wrong[0]!r}: name "
                "judges, or keys with numbers"
            )
        columns.append([0.0 if f is not None else float(v or 0.0) for v, f in zip(values, scored.failures, strict=True)])
    batch.set("reward_parts", torch.tensor(columns, dtype=torch.float32).T.contiguous())
    batch.meta_info["reward_part_names"] = list(keys)


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


def greedy_baseline(batch: DataProto, number: int, *, rollout: Any, sampling: SamplingParams, scorer: Any) -> dict[str, Metric]:
    """Writes reward_baselines: the score of the greedy response to each prompt. `number` is that of the batch, `scorer` a `Scorer`."""
    first = torch.tensor([sample == 0 for sample in batch.non_tensor_batch["sample"]])
    objects = [name for name in batch.non_tensor_batch if name not in ("finish_reason", "episode")]
    greedy = batch.select(["prompts"], objects).select_idxs(first)
    generate(rollout, greedy, dataclasses.replace(sampling, temperature=0.0), number)
    scored, _ = scorer.score(greedy, number)
    missing = baselines(batch, greedy, scored)
    known = [total for total, failure in zip(scored.total, scored.failures, strict=True) if failure is None]
    return {"reward/baseline/mean": Mean(sum(known), len(known)), "reward/baseline/missing": Sum(float(missing))}


def rows_with_signal(batch: DataProto, scored: Scored, metric: str) -> Tensor:
    """Row numbers of the groups in which `metric` differs between samples; missing rewards do not count."""
    counted = (row_sums(batch, "response_mask") > 0) & torch.tensor([f is None for f in scored.failures])
    if metric == "score":
        values = torch.tensor(scored.total, dtype=torch.float64)
    elif metric == "seq_reward":
        values = row_sums(batch, "token_level_scores")
    elif metric in scored.extra:
        said = scored.extra[metric]
        lacking = [i for i, value in enumerate(said) if counted[i] and not is_number(value)]
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
