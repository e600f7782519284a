"""verl's metrics and corrections over Lockstep's, with verl's arguments. Batches are a DataProto, or have padded `batch` tensors."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.algorithms import mismatch
from lockstep.algorithms.rows import Rows
from lockstep.protocol import DataProto, Ragged
from lockstep.trainer.ppo import metrics
from lockstep.trainer.ppo.validation import validation_metrics

SUPPORTED_ROLLOUT_RS_OPTIONS = {kind for kind in mismatch.RS_KINDS if not kind.startswith("group")}


def _compute_response_info(batch: Any) -> dict[str, Tensor]:
    """Return the lengths of prompts and responses, and the mask of the responses."""
    attention = batch.batch["attention_mask"].float()
    width = batch.batch["responses"].shape[-1]
    prompt = attention[:, :-width]
    response = attention[:, -width:]
    return {"response_mask": response, "prompt_length": prompt.sum(-1), "response_length": response.sum(-1)}


def _as_rows(batch: Any) -> DataProto:
    info = _compute_response_info(batch)
    blocks = batch.batch
    lengths = info["response_length"].long()
    prompts = info["prompt_length"].long()
    names = ("token_level_scores", "token_level_rewards", "advantages", "returns", "values", "response_mask", "responses")
    columns: dict[str, Tensor | Ragged] = {name: Ragged.from_padded(blocks[name], lengths) for name in names if name in blocks}
    return DataProto(columns | {"prompts": Ragged(torch.zeros(int(prompts.sum())), prompts)})


def compute_data_metrics(batch: Any, use_critic: bool = True) -> dict[str, float]:
    """Return `trainer.ppo.metrics.data_metrics`; the limits are the widths of the padded blocks."""
    rows = _as_rows(batch)
    if not use_critic:
        rows.columns.pop("values", None)
    return metrics.data_metrics(rows, batch.batch["responses"].shape[-1], batch.batch["prompts"].shape[-1])


def compute_timing_metrics(batch: Any, timing_raw: Mapping[str, float]) -> dict[str, float]:
    """Return timing_s/* and timing_per_token_ms/* of `trainer.ppo.metrics.timing_metrics`."""
    found = metrics.timing_metrics(_as_rows(batch), {"step": 1.0} | dict(timing_raw), 1)
    return {name: value for name, value in found.items() if name.startswith("timing_") and name.partition("/")[2] in timing_raw}


def compute_throughout_metrics(batch: Any, timing_raw: Mapping[str, float], n_gpus: int) -> dict[str, float]:
    """Return perf/total_num_tokens, time_per_step and throughput of `batch.meta_info["global_token_num"]`."""
    tokens = sum(batch.meta_info["global_token_num"])
    seconds = timing_raw["step"]
    return {"perf/total_num_tokens": tokens, "perf/time_per_step": seconds, "perf/throughput": tokens / (seconds * n_gpus)}


def reduce_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the largest value if the name has max in it, the smallest if it has min, else the mean."""
    reduced = {}
    for name, values in metrics.items():
        if "max" in name:
            reduced[name] = np.max(values)
        elif "min" in name:
            reduced[name] = np.min(values)
        else:
            reduced[name] = np.mean(values)
    return reduced


def process_validation_metrics(
    data_sources: Sequence[str], sample_uids: Sequence[Any], infos_dict: dict[str, list[Any]], seed: int = 42
) -> dict[str, Any]:
    """Return `validation.validation_metrics` as source -> variable -> name -> value."""
    numbers = {uid: i for i, uid in enumerate(dict.fromkeys(sample_uids))}
    found: dict[str, Any] = defaultdict(lambda: defaultdict(dict))
    for name, value in validation_metrics(data_sources, [numbers[uid] for uid in sample_uids], infos_dict).items():
        source = next(source for source in data_sources if name.split("/", 1)[1].startswith(f"{source}/"))
        variable, _, rest = name.split("/", 1)[1].removeprefix(f"{source}/").partition("/")
        found[source][variable][rest] = value
    return found


def compute_offpolicy_metrics(old_log_prob: Tensor, rollout_log_prob: Tensor | None, response_mask: Tensor) -> dict[str, float]:
    """Return `mismatch.mismatch_metrics` of padded blocks; without `rollout_log_prob` those of the trainer's policy alone."""
    other = old_log_prob if rollout_log_prob is None else rollout_log_prob
    rows = Rows.of_padded(response_mask)
    found = mismatch.mismatch_metrics(old_log_prob.flatten(), other.flatten(), response_mask.flatten(), rows)
    return {name: value for name, value in found.items() if rollout_log_prob is not None or name.startswith("training")}


def compute_rollout_correction_and_rejection_mask(
    old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor, rollout_is: str | None = None,
    rollout_is_threshold: float | str | None = 2.0, rollout_is_batch_normalize: bool = False, rollout_rs: str | None = None,
    rollout_rs_threshold: float | str | None = None,
) -> tuple[DataProto | None, Tensor, dict[str, float]]:  # fmt: skip
    """Return the weights (or None), the new mask and the metrics of `mismatch.correct`. Raise TypeError for a threshold that is a bool."""
    if isinstance(rollout_is_threshold, bool):
        raise TypeError("rollout_is_threshold must be a float or a string threshold specification, not a boolean")
    options = (rollout_is, rollout_is_threshold or 2.0, rollout_is_batch_normalize, rollout_rs, rollout_rs_threshold)
    columns = old_log_prob.flatten(), rollout_log_prob.flatten(), response_mask.flatten().bool()
    rows = Rows.of_padded(response_mask)
    weights, kept, found = mismatch.correct(mismatch.make_correction(*options), *columns, rows, torch.arange(len(rows)))
    added = None if weights is None else DataProto({"rollout_is_weights": weights.view_as(old_log_prob)})
    return added, kept.view_as(response_mask).to(response_mask.dtype), {f"rollout_corr/{key}": x for key, x in found.items()}


def compute_is_metrics(
    rollout_is_weights: Tensor, raw_rollout_is_weights: Tensor, log_ratio_for_metrics: Tensor, response_mask: Tensor, rollout_is: str,
    rollout_is_threshold: float, rollout_is_threshold_lower: float | None = None,
) -> dict[str, float]:  # fmt: skip
    """Return `mismatch.weight_metrics` of padded blocks; the truncated weights follow from the raw ones."""
    band = mismatch.Bounds(rollout_is_threshold_lower or 0.0, rollout_is_threshold)
    rows = Rows.of_padded(response_mask)
    return mismatch.weight_metrics(raw_rollout_is_weights.flatten(), response_mask.flatten(), rows, rollout_is, band)


def compute_rollout_correction_and_add_to_batch(batch: Any, rollout_corr_config: Any) -> tuple[Any, dict[str, float]]:
    """Replace response_mask and add rollout_is_weights, if there are any. Return the batch and the metrics."""
    names = ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize", "rollout_rs", "rollout_rs_threshold")
    read = rollout_corr_config.get if hasattr(rollout_corr_config, "get") else lambda name: getattr(rollout_corr_config, name, None)
    options: dict[str, Any] = {name: read(name) for name in names if read(name) is not None}
    blocks = batch.batch
    weights, mask, found = compute_rollout_correction_and_rejection_mask(
        blocks["old_log_probs"], blocks["rollout_log_probs"], blocks["response_mask"], **options
    )
    blocks["response_mask"] = mask
    return (batch if weights is None else batch.union(weights)), found


def bootstrap_metric(
    data: Sequence[Any], subset_size: int, reduce_fns: Sequence[Callable[..., float]], n_bootstrap: int = 1000, seed: int = 42
) -> list[tuple[float, float]]:
    """Return mean and standard deviation of each function over subsets drawn with replacement."""
    drawn = np.random.default_rng(seed).choice(len(data), size=(n_bootstrap, subset_size))
    found = np.array([[function([data[i] for i in subset]) for function in reduce_fns] for subset in drawn])
    return [(float(column.mean()), float(column.std())) for column in found.T]


def calc_maj_val(data: Sequence[Mapping[str, Any]], vote_key: str, val_key: str) -> float:
    """Return the value of the first entry with the most frequent vote."""
    winner = statistics.mode(entry[vote_key] for entry in data)
    return float(next(entry[val_key] for entry in data if entry[vote_key] == winner))
