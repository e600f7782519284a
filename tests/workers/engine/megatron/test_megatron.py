"""The megatron engine in its layouts against plain PyTorch (helpers/conformance.py), on gloo ranks with helpers/cuda_to_cpu.py.

Tolerances in float32 are the helper's for columns (5e-6), metrics and gradient norm (1e-5). Weights may differ by 2e-5 after updates of
2e-3: norms and joined projections add up in another order than transformers' do, and AdamW turns a gradient that is 0 but for rounding
into a step of any size. Largest seen: columns 1.2e-6, metrics 5e-7, norm 3e-7, weights 5.9e-6 (one number of 1536; 1.9e-6 elsewhere).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import cuda_to_cpu
from helpers.conformance import (
    ACTOR,
    COLUMN_ATOL,
    GRAD_NORM_RTOL,
    METRIC_ATOL,
    STEPS,
    TEMPERATURE,
    TWO_MICRO_BATCHES,
    assert_weights_close,
    batch_of,
    denominators_of,
    engine_run,
    engine_step,
    make_rows,
    reference_columns,
    reference_model,
    reference_run,
    share,
    weights_of,
)
from helpers.distributed import run_distributed
from helpers.engines import make_tiny_engine
from helpers.run import roles, train
from helpers.tiny import save_tiny_model
from torch import Tensor

from lockstep.config import PPOConfig
from lockstep.errors import ConfigError, DataError, NumericalError
from lockstep.models.attention import CACHED
from lockstep.models.load import Head
from lockstep.models.meta import WeightFiles
from lockstep.observability.metrics import merge_metrics, values
from lockstep.protocol import DataProto, Ragged
from lockstep.workers.engine import packing
from lockstep.workers.engine.base import TokenOutputs, TrainEngine
from lockstep.workers.engine.packing import Budget
from lockstep.workers.losses import make_policy_loss
from lockstep.workers.weight_sync.shared import SharedWeights

pytest.importorskip("megatron.core")
import lockstep.workers.engine.megatron.engine  # noqa: F401  (forked ranks have it then)

TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
WEIGHT_ATOL = 2e-5
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp2": (2, {}),
    "dp2 whole optimizer": (2, {"use_distributed_optimizer": False}),
    "tp2": (2, {TP: 2}),
    "tp2 sp": (2, {TP: 2, "sequence_parallel": True}),
    "pp2": (2, {PP: 2}),
    "tp2 sp dp2": (4, {TP: 2, "sequence_parallel": True}),
    "tp2 sp pp2": (4, {TP: 2, PP: 2, "sequence_parallel": True}),
}
"""Ranks, and keys of the megatron section."""

_WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}  # in the second layer
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 2.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
MODELS: dict[str, tuple[str, Head, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", Head.LANGUAGE_MODEL, {}, {"vocab_size": 37}),
    "qwen2 tied": ("qwen2", Head.LANGUAGE_MODEL, {"recompute": "selective"}, {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", Head.LANGUAGE_MODEL, {"recompute": "full"}, {"head_dim": 16, **_WINDOW}),
    "llama value": ("llama", Head.VALUE, {"recompute": "full"}, {"rope_parameters": _LLAMA3}),
    "qwen3 value tied": ("qwen3", Head.VALUE, {}, {"tie_word_embeddings": True}),
}
"""Family, head, options of the engine, changes to the config: a vocabulary that two ranks do not divide, tied and untied embeddings, heads
that are not a share of the hidden size, a window, scaled rotary embeddings."""


def on_ranks(layout: str, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(*args)` on the ranks of a layout, where CUDA means the CPU."""

    def run() -> Any:
        cuda_to_cpu.install()
        return function(*args)

    return run_distributed(run, LAYOUTS[layout][0])


def engine_in(layout: str, path: str, head: Head = Head.LANGUAGE_MODEL, **options: Any) -> TrainEngine:
    return make_tiny_engine(path, "megatron", head, section=LAYOUTS[layout][1], **options)


def run_in(layout: str, path: str, head: Head, steps: list[Any], budget: Budget = TWO_MICRO_BATCHES, **options: Any) -> list[Any]:
    return on_ranks(layout, engine_run, path, "megatron", head, steps, budget, {"section": LAYOUTS[layout][1], **options})


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("llama", "one"),
        ("llama", "tp2"),
        ("llama", "tp2 sp pp2"),
        ("qwen2 tied", "dp2"),
        ("qwen2 tied", "tp2 sp"),
        ("qwen2 tied", "pp2"),
        ("qwen2 tied", "tp2 sp pp2"),
        ("qwen3", "dp2 whole optimizer"),
        ("qwen3", "tp2 sp"),
        ("qwen3", "pp2"),
        ("qwen3", "tp2 sp dp2"),
        ("llama value", "tp2 sp"),
        ("llama value", "dp2"),
        ("qwen3 value tied", "pp2"),
    ],
)
def test_two_updates_equal_plain_pytorch(tmp_path: Path, model: str, layout: str) -> None:
    family, head, options, changes = MODELS[model]
    path = save_tiny_model(tmp_path, family, value_head=head is Head.VALUE, **changes)
    start = reference_model(path, head)
    expected_columns = [reference_columns(start, head, row) for row in STEPS[0]]
    reference, expected = reference_run(path, head, STEPS)

    ranks = run_in(layout, path, head, STEPS, **options)

    columns = DataProto.concat([columns for columns, _, _ in ranks])
    for name in expected_columns[0]:
        for row, want in zip(columns.ragged(name).rows(), expected_columns, strict=True):
            torch.testing.assert_close(row, want[name].detach(), atol=COLUMN_ATOL, rtol=0)
    for update, wanted in enumerate(expected):
        metrics = values(merge_metrics([results[update][0] for _, results, _ in ranks]))
        for name, number in wanted.items():
            if name not in ("grad_norm", "lr"):
                assert metrics[name] == pytest.approx(number, abs=METRIC_ATOL), name
        for _, results, _ in ranks:
            assert results[update][1]["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=GRAD_NORM_RTOL)
            assert results[update][1]["lr"] == pytest.approx(wanted["lr"], rel=1e-12)
    for _, _, weights in ranks:
        assert_weights_close(weights, reference, atol=WEIGHT_ATOL)
    moved = max((a - b).abs().max().item() for a, b in zip(reference.parameters(), start.parameters(), strict=True))
    assert moved > 10 * WEIGHT_ATOL, "the weights hardly moved, so their comparison says nothing"


@pytest.mark.parametrize(("layout", "budget"), [("pp2", Budget(10_000, 1)), ("tp2 sp", Budget(14))])
def test_the_micro_batch_budget_never_changes_an_update(tmp_path: Path, layout: str, budget: Budget) -> None:
    """A micro-batch for each row keeps a pipeline full; 14 tokens give micro-batches of lengths that two ranks do not divide."""
    path = save_tiny_model(tmp_path)
    model, expected = reference_run(path, Head.LANGUAGE_MODEL, STEPS)
    for _, results, weights in run_in(layout, path, Head.LANGUAGE_MODEL, STEPS, budget):
        assert_weights_close(weights, model, WEIGHT_ATOL)
        assert [r["grad_norm"] for _, r in results] == pytest.approx([e["grad_norm"] for e in expected], rel=GRAD_NORM_RTOL)


def test_a_gradient_may_come_in_several_parts(tmp_path: Path) -> None:
    """Gradients are reduced over the ranks once an update, so that two passes before it add up."""
    path = save_tiny_model(tmp_path)
    model, expected = reference_run(path, Head.LANGUAGE_MODEL, STEPS[:1])

    def train() -> tuple[float, dict[str, Tensor]]:
        engine = engine_in("dp2", path)
        loss = make_policy_loss(ACTOR, denominators_of(STEPS[0]), 1.0)
        for half in (STEPS[0][:3], STEPS[0][3:]):
            mine = batch_of(share(half, 0, engine.rank, engine.world_size))
            engine.forward_backward(mine, loss, TWO_MICRO_BATCHES, TEMPERATURE, entropy_grad=True)
        return engine.optim_step().grad_norm, weights_of(engine)

    for norm, weights in on_ranks("dp2", train):
        assert norm == pytest.approx(expected[0]["grad_norm"], rel=GRAD_NORM_RTOL)
        assert_weights_close(weights, model, WEIGHT_ATOL)


@pytest.mark.parametrize(("layout", "head"), [("tp2 sp", Head.LANGUAGE_MODEL), ("pp2", Head.VALUE)])
def test_rows_that_share_their_prompt_update_like_rows_alone(
    tmp_path: Path, layout: str, head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights within 5e-5 of updates of about 2e-3: AdamW turns a gradient that is 0 but for rounding into a step of any size."""
    monkeypatch.setattr(packing, "MIN_SHARED", 1)
    path = save_tiny_model(tmp_path, value_head=head is Head.VALUE)
    steps = [make_rows(6, seed=3), make_rows(6, seed=4)]
    for rows in steps:
        for again, first in ((1, 0), (2, 0), (4, 3)):
            rows[again]["prompts"] = rows[first]["prompts"]
    model, expected = reference_run(path, head, steps)
    wanted = [reference_columns(reference_model(path, head), head, row) for row in steps[0]]
    ranks = run_in(layout, path, head, steps, recompute="full")
    columns = DataProto.concat([columns for columns, _, _ in ranks])
    for name in wanted[0]:
        torch.testing.assert_close(
            columns.ragged(name).values, torch.cat([w[name].detach() for w in wanted]), atol=COLUMN_ATOL, rtol=0
        )
    for _, results, weights in ranks:
        assert_weights_close(weights, model, atol=5e-5)
        assert [r["grad_norm"] for _, r in results] == pytest.approx([e["grad_norm"] for e in expected], rel=GRAD_NORM_RTOL)


@pytest.mark.parametrize(("family", "layout"), [("llama", "tp2 sp"), ("qwen2", "pp2")])
def test_scores_equal_sequence_classification_one_row_at_a_time(tmp_path: Path, family: str, layout: str) -> None:
    path = save_tiny_model(tmp_path, family, score_head=True)
    sequences = [torch.cat([row["prompts"], row["responses"]]) for row in make_rows(5)]
    sequences += [torch.tensor([5, 0, 9]), torch.tensor([5, 9, 0])]  # with the padding token inside and at the end

    def score() -> Tensor:
        engine = engine_in(layout, path, Head.SCORE, optim=None, pad_token_id=0)
        nothing = engine.score(Ragged.from_rows([], dtype=torch.int64), Budget(20), pad_token_id=0)
        assert nothing.shape == (0,)
        mine = sequences[:1] if engine.rank == 0 else sequences[1:]
        return engine.score(Ragged.from_rows(mine), Budget(20), pad_token_id=0)

    scores = torch.cat(on_ranks(layout, score))
    model = reference_model(path, Head.SCORE)
    with torch.no_grad():
        expected = torch.stack([model(input_ids=ids[None]).logits[0, 0] for ids in sequences])
    torch.testing.assert_close(scores, expected, atol=COLUMN_ATOL, rtol=0)


def test_a_value_head_that_the_folder_lacks_is_drawn_from_the_seed(tmp_path: Path) -> None:
    """Like fsdp2's, whatever the layout."""
    path = save_tiny_model(tmp_path)

    def drawn(layout: str) -> Callable[[], dict[str, Tensor]]:
        return lambda: weights_of(engine_in(layout, path, Head.VALUE))

    wanted = run_distributed(lambda: weights_of(make_tiny_engine(path, "fsdp2", Head.VALUE)), 2)[0]
    for layout in ("tp2", "pp2"):
        for weights in on_ranks(layout, drawn(layout)):
            assert weights.keys() == wanted.keys()
            assert all(torch.equal(weights[name], wanted[name]) for name in wanted)


def _train_and_save(layout: str, path: str, head: Head, dtype: str, folder: Path) -> dict[str, Tensor]:
    """One update, a checkpoint, one more update; the weights after it."""
    engine = engine_in(layout, path, head, dtype=dtype)
    engine_step(engine, STEPS[0], 0, TWO_MICRO_BATCHES)
    engine.save(folder)
    engine_step(engine, STEPS[1], 1, TWO_MICRO_BATCHES)
    return weights_of(engine)


def _load_and_train(layout: str, path: str, head: Head, dtype: str, folder: Path, again: Path) -> dict[str, Tensor]:
    """The checkpoint in an engine that starts elsewhere, saved once more, and one update; the weights after it."""
    engine = engine_in(layout, path, head, dtype=dtype)
    engine_step(engine, make_rows(6, seed=9), 0, TWO_MICRO_BATCHES)
    engine.load(folder)
    engine.save(again)
    engine_step(engine, STEPS[1], 1, TWO_MICRO_BATCHES)
    return weights_of(engine)


@pytest.mark.parametrize(
    ("head", "layouts"),
    [(Head.LANGUAGE_MODEL, ["pp2", "one", "tp2 sp"]), (Head.VALUE, ["dp2", "pp2", "dp2 whole optimizer"])],
    ids=["tied lm", "value"],
)
def test_a_checkpoint_continues_in_another_layout(tmp_path: Path, head: Head, layouts: list[str]) -> None:
    path = save_tiny_model(tmp_path / "model", "qwen3", value_head=head is Head.VALUE, tie_word_embeddings=True, vocab_size=33)
    folders = [tmp_path / layout for layout in layouts]
    expected = on_ranks(layouts[0], _train_and_save, layouts[0], path, head, "float32", folders[0])[0]
    for number, layout in enumerate(layouts[1:]):
        weights = on_ranks(layout, _load_and_train, layout, path, head, "float32", folders[number], folders[number + 1])[0]
        assert set(weights) == set(expected)
        for name in expected:
            torch.testing.assert_close(weights[name], expected[name], atol=WEIGHT_ATOL, rtol=0)


def test_a_checkpoint_of_bf16_continues_exactly(tmp_path: Path) -> None:
    """The files have the float32 master weights, which the bfloat16 weights of the computation cannot stand in for."""
    path = save_tiny_model(tmp_path / "model")
    options = (path, Head.LANGUAGE_MODEL, "bfloat16")
    expected = on_ranks("dp2", _train_and_save, "dp2", *options, tmp_path / "saved")[0]
    weights = on_ranks("dp2", _load_and_train, "dp2", *options, tmp_path / "saved", tmp_path / "again")[0]
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    for file in ("model.safetensors", "optimizer/exp_avg.safetensors", "optimizer/exp_avg_sq.safetensors"):
        assert (tmp_path / "saved" / file).read_bytes() == (tmp_path / "again" / file).read_bytes()


@pytest.mark.parametrize(("head", "layout"), [(Head.LANGUAGE_MODEL, "tp2 sp"), (Head.VALUE, "pp2")])
def test_a_checkpoint_is_a_hugging_face_folder(tmp_path: Path, head: Head, layout: str) -> None:
    is_lm = head is Head.LANGUAGE_MODEL
    path = save_tiny_model(tmp_path / "model", "qwen2", value_head=not is_lm, tie_word_embeddings=is_lm)
    row = make_rows(1)[0]

    def train() -> DataProto:
        engine = engine_in(layout, path, head)
        engine_step(engine, STEPS[0], 0, TWO_MICRO_BATCHES)
        engine.save(tmp_path / "saved")
        return engine.forward(batch_of([row] if engine.rank == 0 else []), TWO_MICRO_BATCHES, TEMPERATURE)

    columns = on_ranks(layout, train)[0]
    expected = reference_columns(reference_model(str(tmp_path / "saved"), head), head, row)
    for name, values_of_row in expected.items():
        torch.testing.assert_close(columns.ragged(name)[0], values_of_row.detach(), atol=COLUMN_ATOL, rtol=0)


@pytest.mark.parametrize("layout", ["dp2", "tp2 sp", "pp2"])
def test_bf16_computes_near_fp32(tmp_path: Path, layout: str) -> None:
    """bfloat16 has 8 significant bits: log-probs of this model move by up to a few hundredths, the gradient's norm by a few percent.

    Weights are exported as they are computed with: rounded to 8 bits (4e-3 of numbers up to 1), after two updates of at most 1e-3 that
    may go the other way.
    """
    path = save_tiny_model(tmp_path)
    head = Head.LANGUAGE_MODEL
    expected_columns = [reference_columns(reference_model(path, head), head, row) for row in STEPS[0]]
    model, expected = reference_run(path, head, STEPS)
    ranks = run_in(layout, path, head, STEPS, dtype="bfloat16")
    columns = DataProto.concat([columns for columns, _, _ in ranks]).ragged("log_probs")
    differences = columns.values - torch.cat([want["log_probs"].detach() for want in expected_columns])
    assert 1e-4 < differences.abs().max() < 0.05
    for _, results, weights in ranks:
        assert results[0][1]["grad_norm"] == pytest.approx(expected[0]["grad_norm"], rel=0.03)
        assert all(tensor.dtype == torch.bfloat16 for tensor in weights.values())
        assert_weights_close({name: tensor.float() for name, tensor in weights.items()}, model, atol=8e-3)


@pytest.mark.parametrize("layout", ["one", "dp2", "dp2 whole optimizer", "tp2 sp pp2"])
def test_a_gradient_that_is_not_finite_changes_no_weight_and_leaves_no_gradient(tmp_path: Path, layout: str) -> None:
    """The failed step is as if it had never been: the next one equals the reference's first."""
    path = save_tiny_model(tmp_path)
    model, _ = reference_run(path, Head.LANGUAGE_MODEL, STEPS[:1])

    def poisoned(outputs: TokenOutputs, rows: DataProto) -> tuple[Tensor, dict[str, Any]]:
        # sqrt has a finite value and an infinite derivative at 0; the product with 0 is a NaN gradient of a finite loss.
        assert outputs.log_probs is not None
        return torch.sqrt(outputs.log_probs.sum() * 0.0), {}

    def train() -> tuple[str, dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        engine = engine_in(layout, path)
        before = weights_of(engine)
        engine.forward_backward(batch_of(STEPS[0]), poisoned, TWO_MICRO_BATCHES)
        with pytest.raises(NumericalError) as error:
            engine.optim_step()
        after = weights_of(engine)
        engine_step(engine, STEPS[0], 0, TWO_MICRO_BATCHES)
        return str(error.value), before, after, weights_of(engine)

    for message, before, after, trained in on_ranks(layout, train):
        assert "gradient norm is nan at update 0" in message
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert_weights_close(trained, model, WEIGHT_ATOL)


@pytest.mark.parametrize("layout", ["dp2", "tp2", "tp2 sp pp2"])
def test_weights_for_generation_equal_the_folder_s_and_follow_updates(tmp_path: Path, layout: str) -> None:
    path = save_tiny_model(tmp_path, "qwen2", vocab_size=37)
    whole = {name: tensor.detach() for name, tensor in reference_model(path, Head.LANGUAGE_MODEL).named_parameters()}

    def generate() -> tuple[bool, bool, int]:
        engine = engine_in(layout, path, decoder_attention=CACHED)
        shared = SharedWeights(engine, torch.float32)
        assert engine.decoder is not None
        with shared.lent() as copied:
            lent = dict(engine.decoder.named_parameters())
            same = lent.keys() == whole.keys() and all(torch.equal(lent[name], whole[name]) for name in whole)
        engine_step(engine, STEPS[0], 0, TWO_MICRO_BATCHES)
        trained = weights_of(engine)
        with shared.lent():
            lent = dict(engine.decoder.named_parameters())
            follows = all(torch.equal(lent[name], trained[name]) for name in trained)
        return same, follows, copied

    for same, follows, copied in on_ranks(layout, generate):
        assert same
        assert follows
        assert copied == sum(tensor.nbytes for tensor in whole.values())


def test_a_rank_reads_its_own_part_of_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of matrices that are divided by columns it reads all rows, and keeps its columns."""
    path = save_tiny_model(tmp_path)
    shapes = {name: parameter.numel() for name, parameter in reference_model(path, Head.LANGUAGE_MODEL).named_parameters()}
    read: dict[str, int] = {}
    original = WeightFiles.read

    def counted(files: WeightFiles, name: str, start: int, stop: int) -> Tensor:
        rows = original(files, name, start, stop)
        read[name] = read.get(name, 0) + rows.numel()
        return rows

    monkeypatch.setattr(WeightFiles, "read", counted)

    def make() -> dict[str, int]:
        engine_in("tp2 sp pp2", path)
        return read

    ranks = on_ranks("tp2 sp pp2", make)
    for number, first in enumerate(("model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight")):
        for rank in ranks[2 * number : 2 * number + 2]:
            assert rank[first] == shapes[first] // 2
            other = f"model.layers.{1 - number}."
            assert not any(name.startswith(other) for name in rank)


def test_models_in_one_process_share_a_layout_and_another_one_is_refused(tmp_path: Path) -> None:
    """Actor, reference and critic side by side: none disturbs the others."""
    path, critic_path = save_tiny_model(tmp_path / "lm"), save_tiny_model(tmp_path / "value", value_head=True)
    actor_model, _ = reference_run(path, Head.LANGUAGE_MODEL, STEPS)
    critic_model, _ = reference_run(critic_path, Head.VALUE, STEPS)

    def train() -> tuple[dict[str, Tensor], dict[str, Tensor], DataProto, DataProto, str]:
        actor, reference = engine_in("tp2 sp", path), engine_in("tp2 sp", path, optim=None)
        critic = engine_in("tp2 sp", critic_path, Head.VALUE)
        mine = batch_of(share(STEPS[0], 0, actor.rank, 2))
        before = reference.forward(mine, TWO_MICRO_BATCHES)
        for update, rows in enumerate(STEPS):
            engine_step(actor, rows, update, TWO_MICRO_BATCHES)
            engine_step(critic, rows, update, TWO_MICRO_BATCHES)
        with pytest.raises(ConfigError) as error:
            engine_in("pp2", path)
        return weights_of(actor), weights_of(critic), before, reference.forward(mine, TWO_MICRO_BATCHES), str(error.value)

    for actor, critic, before, after, message in on_ranks("tp2 sp", train):
        assert_weights_close(actor, actor_model, WEIGHT_ATOL)
        assert_weights_close(critic, critic_model, WEIGHT_ATOL)
        assert torch.equal(before.ragged("log_probs").values, after.ragged("log_probs").values)
        assert "tensor_model_parallel_size=2 and pipeline_model_parallel_size=1" in message


def test_a_frozen_engine_has_no_optimizer_and_saves_and_loads_without_one(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model")

    def use() -> bool:
        engine = engine_in("tp2", path, optim=None)
        assert not any(parameter.requires_grad for parameter in engine.module.parameters())
        with pytest.raises(AssertionError, match="frozen"):
            engine.optim_step()
        engine.save(tmp_path / "saved")
        engine.load(tmp_path / "saved")
        return engine.forward(batch_of(STEPS[0]), TWO_MICRO_BATCHES).ragged("log_probs").values.requires_grad

    assert on_ranks("tp2", use) == [False, False]
    assert not (tmp_path / "saved" / "optimizer").exists()


def test_what_is_no_checkpoint_of_this_model_and_engine_is_refused(tmp_path: Path) -> None:
    path, other = save_tiny_model(tmp_path / "model"), save_tiny_model(tmp_path / "other", intermediate_size=40)

    def load() -> bool:
        engine = engine_in("one", path)
        before = weights_of(engine)
        with pytest.raises(DataError, match=r"model.safetensors is missing"):
            engine.load(tmp_path)
        with pytest.raises(DataError, match=r"another architecture: 6 of 21 weights.*mlp.*\(40, 32\) instead of \(48, 32\)"):
            engine.load(Path(other))
        with pytest.raises(DataError, match="no exp_avg of a megatron engine"):
            engine.load(Path(path))
        after = weights_of(engine)
        return all(torch.equal(before[name], after[name]) for name in before)

    assert on_ranks("one", load) == [True]


def test_a_run_that_has_ended_leaves_no_layout_behind(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)

    def twice() -> tuple[dict[str, Tensor], ...]:
        rank, first = dist.get_rank(), weights_of(engine_in("tp2", path))
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 2), rank=rank, world_size=2)
        return first, weights_of(engine_in("pp2", path))

    for first, second in on_ranks("tp2", twice):
        assert all(torch.equal(first[name], second[name]) for name in first)


def test_ppo_goes_as_with_fsdp2(embedded_config: Callable[..., PPOConfig]) -> None:
    """Actor, rollout, reference and critic for three steps: the same responses, and norms that differ by rounding alone."""

    def run(strategy: str) -> Callable[[], list[dict[str, Any]]]:
        keys = [f"{role}.strategy={strategy}" for role in ("actor_rollout_ref.actor", "critic")]
        folder = f"trainer.experiment_name={strategy}"
        config = embedded_config(*keys, folder, "trainer.total_training_steps=3", "trainer.val_before_train=false")
        return lambda: train(config, {"global_pool": [1]}, roles("ActorRolloutRef", "Critic"))

    expected = run_distributed(run("fsdp2"), 1)[0]
    steps = on_ranks("one", run("megatron"))[0]
    assert len(steps) == len(expected) == 3
    for step, want in zip(steps, expected, strict=True):
        assert step["critic/score/mean"] == want["critic/score/mean"]
        assert step["response_length/mean"] == want["response_length/mean"]
        assert step["actor/grad_norm"] == pytest.approx(want["actor/grad_norm"], rel=1e-5)
        assert step["critic/grad_norm"] == pytest.approx(want["critic/grad_norm"], rel=1e-5)
