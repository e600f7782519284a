"""Numbers about one batch and one step, under the names that users of other systems know."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lockstep.algorithms.rows import Rows
from lockstep.observability.metrics import merge_metrics, values
from lockstep.protocol import DataProto

_AROUND_STAGES = ("step", "testing", "save_checkpoint")
"""The step itself, and what is timed beside it."""


def data_metrics(batch: DataProto, max_response_length: int, max_prompt_length: int, judged: bool = True) -> dict[str, float]:
    """Return critic/*, response_length/* (without rows that failed), response_length_non_aborted/* (without empty responses),
    prompt_length/*; docs/metrics.md has them all. Scores are of rows that are trained on, if they were `judged`."""
    mask = batch.ragged("response_mask").values.bool()
    # A row without a token of the policy was left out, because its reward is missing; an empty response has no token to hold a score.
    counted = row_sums(batch, "response_mask") > 0
    metrics: dict[str, float] = {}
    if judged:
        metrics |= _spread("critic/score", row_sums(batch, "token_level_scores")[counted])
        metrics |= _spread("critic/rewards", row_sums(batch, "token_level_rewards")[counted])
    metrics |= _spread("critic/advantages", batch.ragged("advantages").values[mask])
    metrics |= _spread("critic/returns", batch.ragged("returns").values[mask])
    if "values" in batch:
        # In float64 equal returns have a variance of exactly 0: there is nothing to explain.
        values = batch.ragged("values").values[mask].double()
        returns = batch.ragged("returns").values[mask].double()
        metrics |= _spread("critic/values", values)
        variance = returns.var() if len(returns) > 1 else 0.0
        if variance > 0:
            metrics["critic/vf_explained_var"] = (1 - (returns - values).var() / (variance + 1e-5)).item()
    responses = batch.ragged("responses").lengths.float()
    reasons = batch.non_tensor_batch.get("finish_reason")
    finished = responses if reasons is None else responses[torch.tensor(reasons != "error")]
    metrics |= _length_metrics("response_length", finished, max_response_length)
    metrics |= _length_metrics("response_length_non_aborted", responses[responses > 0], max_response_length)
    metrics |= _length_metrics("prompt_length", batch.ragged("prompts").lengths.float(), max_prompt_length)
    if reasons is not None:
        metrics["response/error_ratio"] = float((reasons == "error").mean())
    metrics["response/aborted_ratio"] = (responses == 0).float().mean().item()
    return metrics


def balance_metrics(counts: Tensor, shares: list[list[int]], name: str) -> dict[str, float]:
    """Return {name}/*: tokens per rank (`counts` per row) if rows were cut in order, and as they are shared out (`shares`: row numbers)."""
    in_order = [int(part.sum()) for part in counts.tensor_split(len(shares))]
    balanced = [int(counts[rows].sum()) for rows in shares]
    return {
        f"{name}/min": min(in_order),
        f"{name}/max": max(in_order),
        f"{name}/minmax_diff": max(in_order) - min(in_order),
        f"{name}/balanced_min": min(balanced),
        f"{name}/balanced_max": max(balanced),
        f"{name}/mean": sum(in_order) / len(in_order),
    }


def timing_metrics(batch: DataProto, seconds: Mapping[str, float], num_devices: int) -> dict[str, float]:
    """Return timing_s/*, timing_per_token_ms/* (generation by response tokens, the rest by all tokens; 0 without tokens), and perf/*.

    perf/idle_ratio is the share of the step in none of its stages.
    """
    metrics = {f"timing_s/{name}": value for name, value in seconds.items()}
    response_tokens = int(batch.ragged("responses").lengths.sum())
    tokens = int(batch.token_counts().sum())
    per_token = {"gen": response_tokens} | dict.fromkeys(("ref", "values", "adv", "update_critic", "update_actor"), tokens)
    for name, count in per_token.items():
        if name in seconds:
            metrics[f"timing_per_token_ms/{name}"] = seconds[name] * 1000 / count if count else 0.0
    metrics["perf/total_num_tokens"] = tokens
    metrics["perf/time_per_step"] = seconds["step"]
    in_stages = sum(value for name, value in seconds.items() if name not in _AROUND_STAGES)
    metrics["perf/idle_ratio"] = 1 - in_stages / seconds["step"]
    metrics["perf/throughput"] = tokens / (seconds["step"] * num_devices)
    return metrics


def silent_peaks(groups: Iterable[Any]) -> dict[str, float]:
    """Return peaks of GPU memory of worker groups (or None) that return no metrics: a rollout, a reference, a reward model."""
    peaks = []
    for group in groups:
        if hasattr(group, "take_peaks"):
            peaks += group.take_peaks()
    return values(merge_metrics(peaks))


def peak_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return perf/max_memory_{allocated,reserved}_gb: the largest of the stages' peaks, if there are any."""
    names = ("perf/max_memory_allocated_gb", "perf/max_memory_reserved_gb")
    stages = {name: [value for key, value in metrics.items() if key.startswith(f"{name}/")] for name in names}
    return {name: max(values) for name, values in stages.items() if values}


def row_sums(batch: DataProto, name: str) -> Tensor:
    """Return the sum [B] of a ragged column over each row."""
    column = batch.ragged(name)
    return Rows(column.lengths).sum(column.values)


def _length_metrics(name: str, lengths: Tensor, limit: int) -> dict[str, float]:
    if not len(lengths):
        return {}
    return _spread(name, lengths) | {f"{name}/clip_ratio": (lengths >= limit).float().mean().item()}


def _spread(name: str, values: Tensor) -> dict[str, float]:
    if not len(values):
        return {}
    exact = values.to(torch.float64)
    return {f"{name}/mean": exact.mean().item(), f"{name}/max": exact.max().item(), f"{name}/min": exact.min().item()}
