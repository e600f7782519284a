import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.protocol import DataProto, Ragged
from lockstep.trainer.ppo.metrics import balance_metrics, data_metrics, peak_metrics, timing_metrics

COLUMNS = ("token_level_scores", "token_level_rewards", "advantages", "returns", "values")

shapes = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=5)
"""(prompt tokens, response tokens) of each row."""


def make_batch(shape, seed=0, with_values=True):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([t for _, t in shape])

    def column(kind):
        total = int(lengths.sum())
        values = torch.randint(0, 2, (total,), generator=generator) if kind == "mask" else torch.randn(total, generator=generator)
        return Ragged(values, lengths)

    columns = {
        "prompts": Ragged.from_rows([[1] * p for p, _ in shape], dtype=torch.int64),
        "responses": Ragged.from_rows([[1] * t for _, t in shape], dtype=torch.int64),
        "response_mask": column("mask"),
        **{name: column("numbers") for name in COLUMNS if with_values or name != "values"},
    }
    return DataProto.from_dict(columns)


def spread(name, numbers):
    numbers = list(numbers)
    return {f"{name}/mean": statistics.fmean(numbers), f"{name}/max": max(numbers), f"{name}/min": min(numbers)} if numbers else {}


@settings(max_examples=40, deadline=None)
@given(shape=shapes, seed=st.integers(0, 99), with_values=st.booleans())
def test_data_metrics_equal_a_plain_loop(shape, seed, with_values):
    batch = make_batch(shape, seed, with_values)
    rows = {name: [row.tolist() for row in batch.ragged(name).rows()] for name in batch.columns}
    kept = {
        name: [x for row, mask in zip(rows[name], rows["response_mask"], strict=True) for x, m in zip(row, mask, strict=True) if m]
        for name in COLUMNS
        if name in rows
    }
    counted = [any(mask) for mask in rows["response_mask"]]  # a response that is empty or masked as a whole has no reward
    expected = spread("critic/score", [sum(row) for row, c in zip(rows["token_level_scores"], counted, strict=True) if c])
    expected |= spread("critic/rewards", [sum(row) for row, c in zip(rows["token_level_rewards"], counted, strict=True) if c])
    expected |= spread("critic/advantages", kept["advantages"]) | spread("critic/returns", kept["returns"])
    if with_values:
        expected |= spread("critic/values", kept["values"])
        if len(kept["returns"]) > 1:
            errors = [r - v for r, v in zip(kept["returns"], kept["values"], strict=True)]
            expected["critic/vf_explained_var"] = 1 - statistics.variance(errors) / (statistics.variance(kept["returns"]) + 1e-5)
    expected |= spread("prompt_length", [p for p, _ in shape]) | spread("response_length", [t for _, t in shape])
    if written := [t for _, t in shape if t]:
        expected |= spread("response_length_non_aborted", written)
        expected["response_length_non_aborted/clip_ratio"] = sum(t >= 3 for t in written) / len(written)
    expected["prompt_length/clip_ratio"] = sum(p >= 4 for p, _ in shape) / len(shape)
    expected["response_length/clip_ratio"] = sum(t >= 3 for _, t in shape) / len(shape)
    expected["response/aborted_ratio"] = sum(t == 0 for _, t in shape) / len(shape)
    assert data_metrics(batch, max_response_length=3, max_prompt_length=4) == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_a_row_without_a_response_has_no_length():
    batch = make_batch([(1, 0), (1, 3), (1, 0), (1, 1)])
    batch.non_tensor_batch["finish_reason"] = np.array(["error", "length", "abort", "stop"], dtype=object)
    found = data_metrics(batch, 3, 3)
    assert (found["response_length/mean"], found["response_length/min"]) == (pytest.approx(4 / 3), 0.0)  # one ended before a token
    assert found["response_length/clip_ratio"] == pytest.approx(1 / 3)
    assert (found["response/error_ratio"], found["response/aborted_ratio"]) == (0.25, 0.5)
    batch.non_tensor_batch["finish_reason"] = np.array(["error"] * 4, dtype=object)
    assert not [name for name in data_metrics(batch, 3, 3) if name.startswith("response_length/")]


def test_equal_returns_have_no_variance_to_explain():
    batch = make_batch([(1, 7)])
    batch.set("response_mask", Ragged.from_rows([[1] * 7]))
    batch.set("returns", Ragged.from_rows([[0.1] * 7]))
    assert "critic/vf_explained_var" not in data_metrics(batch, 3, 3)


def test_balance_compares_rows_cut_in_order_with_rows_shared_out():
    batch = make_batch([(4, 4), (3, 3), (1, 1), (1, 0)])  # 8, 6, 2 and 1 tokens
    assert balance_metrics(batch.token_counts(), [[0], [1, 2, 3]], "global_seqlen") == {
        "global_seqlen/min": 3,
        "global_seqlen/max": 14,
        "global_seqlen/minmax_diff": 11,
        "global_seqlen/balanced_min": 8,
        "global_seqlen/balanced_max": 9,
        "global_seqlen/mean": 8.5,
    }


def test_timing_divides_by_the_tokens_each_stage_works_on():
    batch = make_batch([(2, 3), (1, 2)])  # 5 response tokens, 8 in all
    seconds = {"step": 4.0, "gen": 1.0, "update_actor": 2.0, "reward": 0.5}
    assert timing_metrics(batch, seconds, num_devices=2) == pytest.approx(
        {
            **{f"timing_s/{name}": value for name, value in seconds.items()},
            "timing_per_token_ms/gen": 200.0,
            "timing_per_token_ms/update_actor": 250.0,
            "perf/total_num_tokens": 8,
            "perf/time_per_step": 4.0,
            "perf/throughput": 1.0,
            "perf/idle_ratio": 0.125,
        }
    )


def test_no_metric_is_nan_when_every_response_is_empty():
    batch = make_batch([(1, 0), (2, 0)])
    metrics = data_metrics(batch, 3, 3) | timing_metrics(batch, {"step": 1.0, "gen": 1.0}, 1)
    assert [name for name, value in metrics.items() if not math.isfinite(value)] == []
    assert metrics["timing_per_token_ms/gen"] == 0


def test_the_peak_of_a_step_is_that_of_its_fullest_stage():
    name = "perf/max_memory_allocated_gb"
    stages = {f"{name}/gen": 3.0, f"{name}/update_critic": 5.0, f"{name}/update_actor": 4.0}
    assert peak_metrics({**stages, "perf/model_mfu/actor": 9.0}) == {name: 5.0}
    assert peak_metrics({"actor/lr": 1.0}) == {}
