"""The losses as engines call them: what a mini-batch gives does not depend on how its rows are cut."""

from __future__ import annotations

import inspect
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.conformance import make_rows
from helpers.engine_properties import TIED, Layout
from helpers.sft import assert_sft_equals_plain_pytorch, sft_numbers
from helpers.tiny import save_tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.algorithms.aggregation import LOSS_AGG_MODES, Denominators
from lockstep.algorithms.kl import KL_KINDS
from lockstep.algorithms.policy_losses import POLICY_LOSSES
from lockstep.algorithms.rows import Rows
from lockstep.config.actor_rollout_ref import ActorConfig, PolicyLossConfig
from lockstep.config.critic import CriticConfig
from lockstep.errors import ConfigError, NumericalError
from lockstep.models.chunked_head import TokenLoss
from lockstep.models.packing import Budget, token_rows
from lockstep.observability.metrics import merge_metrics, values
from lockstep.protocol import DataProto, Ragged
from lockstep.workers.engine.base import LossFn, TokenOutputs
from lockstep.workers.engine.pending import read
from lockstep.workers.losses import make_policy_loss, make_value_loss

SCALE = 10.0
LOW, HIGH, C = 0.1, 0.3, 1.5
ENTROPY_COEFF, KL_COEF, VALUE_CLIP = 0.02, 0.1, 0.2
NAMES = ("old_log_probs", "ref_log_prob", "advantages", "values", "returns")


def actor_config(mode: str) -> ActorConfig:
    return ActorConfig(
        loss_agg_mode=mode,
        clip_ratio_low=LOW,
        clip_ratio_high=HIGH,
        clip_ratio_c=C,
        entropy_coeff=ENTROPY_COEFF,
        use_kl_loss=True,
        kl_loss_coef=KL_COEF,
    )


def make_batch(lengths: list[int], seed: int) -> tuple[DataProto, list[Tensor]]:
    """Rows and, for each, the three outputs [3, T] of a model: log-probs, entropies, values. Masked numbers are NaN."""
    generator = torch.Generator().manual_seed(seed)
    masks = [torch.rand(length, generator=generator) > 0.3 for length in lengths]
    columns = {
        name: Ragged.from_rows([torch.randn(len(m), generator=generator).where(m, math.nan) for m in masks]) for name in NAMES
    }
    columns["response_mask"] = columns["responses"] = Ragged.from_rows([mask.long() for mask in masks])
    outputs = [torch.randn(3, length, generator=generator) for length in lengths]
    return DataProto.from_dict(columns), outputs


def denominators_of(data: DataProto) -> Denominators:
    mask = data.ragged("response_mask")
    return Denominators.of(mask.values, Rows(mask.lengths))


def policy_loss_of(config, data):
    return make_policy_loss(config, SCALE).of(denominators_of(data))


def evaluate(
    loss_fn: LossFn, data: DataProto, outputs: list[Tensor], parts: list[list[int]]
) -> tuple[float, Tensor, dict[str, float]]:
    """Loss, gradient [3, all tokens] and metrics, with the rows cut into `parts`."""
    leaves = [output.clone().requires_grad_() for output in outputs]
    total, metrics = 0.0, []
    for part in parts:
        flat = (torch.cat([leaves[row][i] for row in part]) for i in range(3))
        output = loss_fn(TokenOutputs(*flat), token_rows(data.select_idxs(part), torch.device("cpu")))
        output.loss.backward()
        total += output.loss.item()
        metrics.append(output)
    gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    return total, torch.cat(gradients, dim=1), values(merge_metrics(read(metrics)))


def policy_token(row: dict[str, Tensor], t: int, output: Tensor) -> Tensor:
    """PPO with dual clip, minus the entropy bonus, plus the k3 estimate of the KL, for one token."""
    log_prob, entropy, advantage = output[0, t], output[1, t], row["advantages"][t]
    ratio = torch.exp(log_prob - row["old_log_probs"][t])
    loss = torch.maximum(-advantage * ratio, -advantage * torch.clamp(ratio, 1 - LOW, 1 + HIGH))
    if advantage < 0:
        loss = torch.minimum(loss, -advantage * C)
    log_r = row["ref_log_prob"][t] - log_prob
    return loss - ENTROPY_COEFF * entropy + KL_COEF * (torch.exp(log_r) - log_r - 1).clamp(max=10.0)


def value_token(row: dict[str, Tensor], t: int, output: Tensor) -> Tensor:
    predicted, old, target = output[2, t], row["values"][t], row["returns"][t]
    near = torch.clamp(predicted, old - VALUE_CLIP, old + VALUE_CLIP)
    return 0.5 * torch.maximum((predicted - target) ** 2, (near - target) ** 2)


def by_hand(token, data: DataProto, outputs: list[Tensor], mode: str) -> tuple[float, Tensor]:
    """The whole mini-batch in a loop over rows and tokens."""
    counts = [int(data.ragged("response_mask")[row].sum()) for row in range(len(data))]
    tokens, sequences = max(sum(counts), 1), max(sum(count > 0 for count in counts), 1)
    leaves = [output.clone().requires_grad_() for output in outputs]
    loss = torch.zeros(())
    for number, leaf in enumerate(leaves):
        row = {name: data.ragged(name)[number] for name in (*NAMES, "response_mask")}
        divisor = {
            "token-mean": tokens,
            "token-sum": 1,
            "seq-mean-token-sum": sequences,
            "seq-mean-token-mean": sequences * max(counts[number], 1),
            "seq-mean-token-sum-norm": sequences * SCALE,
        }[mode]
        for t in row["response_mask"].nonzero().flatten().tolist():
            loss = loss + token(row, t, leaf) / divisor
    if loss.requires_grad:
        loss.backward()
    return loss.item(), torch.cat([torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves], dim=1)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    """Response lengths, and a way to deal the rows out."""
    lengths = draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    places = draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths)))
    return lengths, [part for place in range(3) if (part := [i for i, p in enumerate(places) if p == place])]


@settings(max_examples=25, deadline=None)
@given(cut=cuts(), seed=st.integers(0, 1000))
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_the_policy_loss_equals_a_loop_however_the_rows_are_cut(
    mode: str, cut: tuple[list[int], list[list[int]]], seed: int
) -> None:
    """Value, gradient and every metric; numbers under the mask, NaN here, reach none of them."""
    lengths, parts = cut
    data, outputs = make_batch(lengths, seed)
    loss_fn = policy_loss_of(actor_config(mode), data)
    whole = evaluate(loss_fn, data, outputs, [list(range(len(lengths)))])
    split = evaluate(loss_fn, data, outputs, parts)
    expected_loss, expected_gradient = by_hand(policy_token, data, outputs, mode)
    for loss, gradient, metrics in (whole, split):
        assert loss == pytest.approx(expected_loss, rel=1e-4, abs=1e-5)
        assert metrics["actor/loss"] == pytest.approx(expected_loss, rel=1e-4, abs=1e-5)
        torch.testing.assert_close(gradient, expected_gradient, atol=1e-5, rtol=1e-4)
        assert metrics == pytest.approx(whole[2], rel=1e-4, abs=1e-5, nan_ok=True)


@settings(max_examples=25, deadline=None)
@given(cut=cuts(), seed=st.integers(0, 1000))
@pytest.mark.parametrize("mode", [mode for mode in LOSS_AGG_MODES if mode != "seq-mean-token-sum-norm"])
def test_the_value_loss_equals_a_loop_however_the_rows_are_cut(
    mode: str, cut: tuple[list[int], list[list[int]]], seed: int
) -> None:
    lengths, parts = cut
    data, outputs = make_batch(lengths, seed)
    loss_fn = make_value_loss(CriticConfig(loss_agg_mode=mode, cliprange_value=VALUE_CLIP)).of(denominators_of(data))
    expected_loss, expected_gradient = by_hand(value_token, data, outputs, mode)
    for part in ([list(range(len(lengths)))], parts):
        loss, gradient, metrics = evaluate(loss_fn, data, outputs, part)
        assert loss == pytest.approx(expected_loss, rel=1e-4, abs=1e-5)
        assert metrics["critic/vf_loss"] == pytest.approx(expected_loss, rel=1e-4, abs=1e-5)
        torch.testing.assert_close(gradient, expected_gradient, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("loss_mode", sorted(POLICY_LOSSES))
@settings(max_examples=15, deadline=None)
@given(cut=cuts(), seed=st.integers(0, 1000))
def test_every_policy_loss_with_importance_weights_is_the_same_however_the_rows_are_cut(
    loss_mode: str, cut: tuple[list[int], list[list[int]]], seed: int
) -> None:
    lengths, parts = cut
    data, outputs = make_batch(lengths, seed)
    generator = torch.Generator().manual_seed(seed)
    data.set("rollout_is_weights", data.ragged("advantages").like(torch.rand(sum(lengths), generator=generator) * 2))
    data.set("cov_selected", data.ragged("advantages").like((torch.rand(sum(lengths), generator=generator) < 0.3).float()))
    config = ActorConfig(policy_loss=PolicyLossConfig(loss_mode=loss_mode))
    loss_fn = policy_loss_of(config, data)
    whole = evaluate(loss_fn, data, outputs, [list(range(len(lengths)))])
    split = evaluate(loss_fn, data, outputs, parts)
    assert split[0] == pytest.approx(whole[0], rel=1e-4, abs=1e-5)
    torch.testing.assert_close(split[1], whole[1], atol=1e-5, rtol=1e-4)
    assert split[2] == pytest.approx(whole[2], rel=1e-4, abs=1e-5, nan_ok=True)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("loss_mode", sorted(POLICY_LOSSES))
def test_a_loss_that_looks_at_tokens_alone_is_the_same_on_parts_of_rows(loss_mode: str, mode: str) -> None:
    """Value, gradient and every metric with rows in parts of at most 2 tokens; a loss of whole rows does not say that it is one."""
    data, outputs = make_batch([5, 0, 3, 4], 1)
    data.set("cov_selected", data.ragged("advantages").like((torch.arange(12) % 3 == 0).float()))
    loss_fn = policy_loss_of(ActorConfig(policy_loss=PolicyLossConfig(loss_mode=loss_mode), loss_agg_mode=mode), data)
    takes_rows = "rows" in inspect.signature(POLICY_LOSSES[loss_mode]).parameters
    assert isinstance(loss_fn, TokenLoss) == (not takes_rows and mode != "seq-mean-token-mean")
    if not isinstance(loss_fn, TokenLoss):
        return
    whole = evaluate(loss_fn, data, outputs, [[0, 1, 2, 3]])
    leaf = torch.cat(outputs, dim=1).requires_grad_()
    total, metrics, start = 0.0, [], 0
    for chunk in token_rows(data, torch.device("cpu")).chunks(2, cuts_rows=True) or []:
        end = start + chunk.rows.num_tokens
        output = loss_fn(TokenOutputs(*leaf[:, start:end]), chunk)
        output.loss.backward()
        total, start = total + output.loss.item(), end
        metrics.append(output)
    assert start == 12
    assert total == pytest.approx(whole[0], rel=1e-4, abs=1e-5)
    torch.testing.assert_close(leaf.grad, whole[1], atol=1e-5, rtol=1e-4)
    assert values(merge_metrics(read(metrics))) == pytest.approx(whole[2], rel=1e-4, abs=1e-5, nan_ok=True)


@pytest.mark.parametrize("loss_mode", sorted(POLICY_LOSSES))
@settings(max_examples=15, deadline=None)
@given(cut=cuts(), seed=st.integers(0, 1000))
def test_without_old_log_probs_they_are_the_ones_that_the_update_computes(
    loss_mode: str, cut: tuple[list[int], list[list[int]]], seed: int
) -> None:
    """As after a pass that gave exactly these; no gradient goes through them."""
    lengths, parts = cut
    data, outputs = make_batch(lengths, seed)
    data.set("cov_selected", data.ragged("advantages").like(torch.zeros(sum(lengths))))
    loss_fn = policy_loss_of(ActorConfig(policy_loss=PolicyLossConfig(loss_mode=loss_mode)), data)
    data.set("old_log_probs", Ragged.from_rows([output[0] for output in outputs]))
    after_a_pass = evaluate(loss_fn, data, outputs, parts)
    alone = evaluate(loss_fn, data.select([name for name in data.columns if name != "old_log_probs"]), outputs, parts)
    assert alone[0] == after_a_pass[0]
    assert torch.equal(alone[1], after_a_pass[1])
    assert alone[2] == pytest.approx(after_a_pass[2], abs=0, rel=0, nan_ok=True)
    assert alone[2].get("actor/log_ratio_max", 0.0) == 0.0  # none where no row has a token


def test_the_sampler_is_compared_with_the_update_token_by_token() -> None:
    """Against numpy, in float64, on the policy's tokens alone; however the rows are cut."""
    data, outputs = make_batch([5, 0, 3, 4], 1)
    mask = data.ragged("response_mask").values.bool().numpy()
    sampled = data.ragged("old_log_probs")
    data.set("rollout_log_probs", sampled)
    loss_fn = policy_loss_of(actor_config("token-mean"), data)
    new, old = (x.double().numpy()[mask] for x in (torch.cat([output[0] for output in outputs]), sampled.values))
    ratio, difference = np.exp(new - old), np.abs(np.exp(new) - np.exp(old))
    want = {
        "log_ratio_max": np.abs(new - old).max(), "ratio": ratio.mean(), "ratio_square": (ratio**2).mean(),
        "difference_max": difference.max(), "difference": difference.mean(), "difference_square": (difference**2).mean(),
    }  # fmt: skip
    for parts in ([[0, 1, 2, 3]], [[3], [0, 1], [2]]):
        metrics = evaluate(loss_fn, data, outputs, parts)[2]
        assert {name: metrics[f"sampler/{name}"] for name in want} == pytest.approx(want, rel=1e-5)


def test_no_loss_sees_the_samplers_log_probs(tmp_path: Path) -> None:
    """They are in the first update of a batch alone."""
    file = tmp_path / "mine.py"
    file.write_text(
        "def mine(*, log_prob, advantages, response_mask, rollout_log_probs=None):\n"
        "    assert rollout_log_probs is None\n"
        "    return -(advantages * log_prob).where(response_mask.bool(), 0.0), {}\n"
    )
    data, outputs = make_batch([3, 2], 0)
    data.set("rollout_log_probs", data.ragged("old_log_probs"))
    config = ActorConfig(policy_loss=PolicyLossConfig(loss_mode=f"{file}:mine"))
    assert "sampler/ratio" in evaluate(policy_loss_of(config, data), data, outputs, [[0, 1]])[2]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("log_prob", r"must return \(loss, metrics\), one number per token and a dict; it returned shape"),
        ("(log_prob.mean(), {})", r"one number per token, .*it returned shape \(\)"),
        ("(log_prob, {'x': log_prob.detach().mean()})", r"one number per token, .*it returned shape \(\)"),
        ("(log_prob.detach(), {})", "a loss without a gradient: compute it from log_prob"),
    ],
)
@pytest.mark.parametrize("rows", ["rows", ""])
def test_a_loss_that_returns_the_wrong_thing_is_told_what_is_right(tmp_path: Path, result: str, message: str, rows: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"def mine(*, log_prob, {rows}):\n    return {result}\n")
    data, outputs = make_batch([3, 2], 0)
    config = ActorConfig(policy_loss=PolicyLossConfig(loss_mode=f"{file}:mine"))
    with pytest.raises(ConfigError, match=f"policy loss 'mine'.*{message}"):
        evaluate(policy_loss_of(config, data), data, outputs, [[0, 1]])


def test_importance_weights_multiply_the_policy_loss_and_no_other_term() -> None:
    data, outputs = make_batch([3, 2], 0)
    config = actor_config("token-mean")
    plain = evaluate(policy_loss_of(config, data), data, outputs, [[0, 1]])[2]
    data.set("rollout_is_weights", data.ragged("advantages").like(torch.full((5,), 2.0)))
    doubled = evaluate(policy_loss_of(config, data), data, outputs, [[0, 1]])[2]
    assert doubled["actor/pg_loss"] == pytest.approx(2 * plain["actor/pg_loss"], rel=1e-5)
    assert doubled["actor/kl_loss"] == plain["actor/kl_loss"]
    assert doubled["actor/entropy_loss"] == plain["actor/entropy_loss"]


@pytest.mark.parametrize("loss_mode", sorted(POLICY_LOSSES))
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_log_probs_that_are_not_finite_stop_the_update_with_their_dataset_rows(loss_mode: str, bad: float) -> None:
    """A ratio is clamped, so that an infinite log-prob need not show in the loss."""
    data, outputs = make_batch([4, 5, 3], 3)
    data.set("cov_selected", data.ragged("advantages").like(torch.zeros(12)))
    data.non_tensor_batch["index"] = np.array([70, 71, 72], dtype=object)
    outputs[1][0, data.ragged("response_mask")[1].nonzero()[0]] = bad
    config = ActorConfig(policy_loss=PolicyLossConfig(loss_mode=loss_mode))
    with pytest.raises(NumericalError, match=r"log-probs: not finite in the update for 1 rows; dataset rows \[71\]"):
        evaluate(policy_loss_of(config, data), data, outputs, [[0, 1, 2]])


def test_a_loss_from_a_file_gets_its_own_arguments_and_is_stopped_when_it_is_not_finite(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def mine(*, log_prob, response_mask, power):\n    return (log_prob * response_mask) ** power, {}\n")
    data, outputs = make_batch([3, 2], 0)
    own = PolicyLossConfig(loss_mode=f"{file}:mine", loss_kwargs={"power": 2})
    loss, _, _ = evaluate(policy_loss_of(ActorConfig(policy_loss=own), data), data, outputs, [[0, 1]])
    mask = data.ragged("response_mask").values.bool()
    assert loss == pytest.approx(torch.cat([o[0] for o in outputs])[mask].square().mean().item(), rel=1e-5)
    own = PolicyLossConfig(loss_mode=f"{file}:mine", loss_kwargs={"power": 0.5})
    with pytest.raises(NumericalError, match="policy loss: not finite in the update"):
        evaluate(policy_loss_of(ActorConfig(policy_loss=own), data), data, outputs, [[0, 1]])


def test_terms_that_are_off_are_neither_computed_nor_reported() -> None:
    data, outputs = make_batch([3, 2], 0)
    data.pop(["ref_log_prob"])
    _, gradient, metrics = evaluate(policy_loss_of(ActorConfig(), data), data, outputs, [[0, 1]])
    assert not {"actor/kl_loss", "actor/kl_coef", "actor/entropy_loss"} & set(metrics)
    assert metrics["actor/loss"] == metrics["actor/pg_loss"]
    assert gradient[1].abs().sum() == 0


@pytest.mark.parametrize("kind", KL_KINDS)
def test_numbers_under_the_mask_do_not_reach_the_gradient_of_any_kl(kind: str) -> None:
    data, outputs = make_batch([4, 5], 1)
    assert torch.isnan(data.ragged("ref_log_prob").values).any()
    config = ActorConfig(use_kl_loss=True, kl_loss_type=kind)
    loss, gradient, _ = evaluate(policy_loss_of(config, data), data, outputs, [[0, 1]])
    assert math.isfinite(loss)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_updates_equal_plain_pytorch(tmp_path: Path, strategy: str, world: int) -> None:
    assert_sft_equals_plain_pytorch(Layout(strategy, world), save_tiny_model(tmp_path, "qwen2", **TIED))


@pytest.mark.parametrize("budget", [Budget(10_000, 1), Budget(10_000), Budget(14)], ids=str)
def test_the_cut_changes_nothing(tmp_path: Path, budget: Budget) -> None:
    assert_sft_equals_plain_pytorch(Layout("fsdp2", 1), save_tiny_model(tmp_path), budget)


def test_a_model_whose_logits_are_not_its_layers_alone(tmp_path: Path) -> None:
    """Cohere scales its logits: it makes them itself."""
    assert_sft_equals_plain_pytorch(Layout("fsdp2", 1), save_tiny_model(tmp_path, "cohere"))


def test_any_cut_and_two_ranks_change_only_the_last_bits(tmp_path: Path) -> None:
    """Loss and gradient norm, both float32, relative to one rank with all rows at once: 2e-7.

    Every number of rows at once and many numbers of tokens on one rank; two ranks, one of them without rows too. Over six draws of rows
    the largest difference was 1.1e-7 of a loss and 9.2e-8 (one step of float32) of a norm.
    """
    path, rows, whole = save_tiny_model(tmp_path), make_rows(12, seed=4), Budget(10_000)
    lengths = [len(row["prompts"]) + len(row["responses"]) for row in rows]
    by_rows, by_tokens = [Budget(10_000, n) for n in range(1, 12)], [Budget(n) for n in range(max(lengths), sum(lengths), 9)]
    expected, *found = sft_numbers(Layout("fsdp2", 1), path, rows, [(12, cut) for cut in (whole, *by_rows, *by_tokens)])
    divided = [(first, cut) for first in (0, 1, 5, 12) for cut in (whole, Budget(14))]
    for numbers in found + sft_numbers(Layout("fsdp2", 2), path, rows, divided):
        assert numbers == pytest.approx(expected, rel=2e-7, abs=0)
