"""torchtitan at one, two and four ranks, in every layout, against plain PyTorch (helpers/conformance.py).

Weights are held to 1e-5, twice as far as fsdp's: with tensor parallelism products are summed in parts, and AdamW turns a gradient that is
0 but for rounding into a step of any size. The largest seen is 7.5e-6 (4 ranks, value head); without tensor parallelism 2e-6.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
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
    weights_of,
)
from helpers.distributed import run_distributed
from helpers.engines import make_tiny_engine
from helpers.run import roles, train
from helpers.tiny import save_tiny_model
from torch import Tensor

from lockstep.config import PPOConfig
from lockstep.config.engine import ModelConfig
from lockstep.errors import ConfigError, DataError, NumericalError
from lockstep.models.load import Head, load_model
from lockstep.observability.metrics import merge_metrics, values
from lockstep.protocol import DataProto, Ragged
from lockstep.workers.engine import order, packing
from lockstep.workers.engine.base import TokenOutputs, TrainEngine
from lockstep.workers.engine.packing import Budget
from lockstep.workers.engine.torchtitan.compat import prepare_import
from lockstep.workers.losses import make_policy_loss
from lockstep.workers.weight_sync.shared import SharedWeights

pytest.importorskip("torchtitan")
prepare_import(torch.device("cpu"))
titan_engine = pytest.importorskip("lockstep.workers.engine.torchtitan.engine")  # imported once, before ranks are forked

WEIGHT_ATOL = 1e-5
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "dp2": (2, {}),
    "tp2": (2, {"tensor_parallel_size": 2}),
    "pp2": (2, {"pipeline_parallel_size": 2}),
    "dp2 tp2": (4, {"tensor_parallel_size": 2}),
    "pp4": (4, {"pipeline_parallel_size": 4}),
    "tp2 pp2": (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
}
TIED = {"tie_word_embeddings": True}
LM, VALUE = Head.LANGUAGE_MODEL, Head.VALUE
CASES: list[tuple[str, str, Head, dict[str, Any], dict[str, Any]]] = [
    ("1", "qwen3", LM, {"recompute": "full"}, {}),
    ("1", "llama", VALUE, {"recompute": "selective"}, {}),
    ("dp2", "qwen2", LM, {"recompute": "selective"}, TIED),
    ("dp2", "llama", VALUE, {}, {}),
    ("tp2", "llama", LM, {"recompute": "full"}, {"attention_bias": True, "mlp_bias": True}),
    ("tp2", "qwen3", VALUE, {}, TIED),
    ("pp2", "llama", LM, {"recompute": "full"}, {}),
    ("pp2", "qwen2", LM, {"recompute": "selective"}, TIED),
    ("pp2", "qwen3", VALUE, {}, {}),
    ("dp2 tp2", "qwen2", LM, {"recompute": "selective"}, TIED),
    ("tp2 pp2", "llama", VALUE, {}, {}),
]


def _titan(layout: str, **options: Any) -> tuple[int, dict[str, Any]]:
    """The ranks of a layout, and the options of make_tiny_engine for it."""
    world, section = LAYOUTS[layout]
    return world, {"section": section} | options


def _engine(path: str, layout: str, head: Head = LM, **options: Any) -> TrainEngine:
    return make_tiny_engine(path, "torchtitan", head, **_titan(layout, **options)[1])


@pytest.mark.parametrize(
    ("layout", "model_type", "head", "options", "changes"), CASES, ids=[f"{c[0]}-{c[1]}-{c[2].name.lower()}" for c in CASES]
)
def test_two_updates_equal_plain_pytorch(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    layout: str,
    model_type: str,
    head: Head,
    options: dict[str, Any],
    changes: dict[str, Any],
) -> None:
    path = save_tiny_model(tmp_path, model_type, value_head=head is VALUE, **changes)
    start = reference_model(path, head)
    expected_columns = [reference_columns(start, head, row) for row in STEPS[0]]
    model, expected = reference_run(path, head, STEPS)
    world, options = _titan(layout, **options)

    capfd.readouterr()
    ranks = run_distributed(engine_run, world, path, "torchtitan", head, STEPS, TWO_MICRO_BATCHES, options)
    assert capfd.readouterr() == ("", ""), "nothing that torchtitan or torch says reaches the user"

    columns = DataProto.concat([columns for columns, _, _ in ranks])
    for name in expected_columns[0]:
        for row, want in zip(columns.ragged(name).rows(), expected_columns, strict=True):
            torch.testing.assert_close(row, want[name].detach(), atol=COLUMN_ATOL, rtol=0)
    for update, want in enumerate(expected):
        metrics = values(merge_metrics([results[update][0] for _, results, _ in ranks]))
        for name, number in want.items():
            if name not in ("grad_norm", "lr"):
                assert metrics[name] == pytest.approx(number, abs=METRIC_ATOL), name
        for _, results, _ in ranks:
            assert results[update][1]["grad_norm"] == pytest.approx(want["grad_norm"], rel=GRAD_NORM_RTOL)
            assert results[update][1]["lr"] == pytest.approx(want["lr"], rel=1e-12)
    for _, _, weights in ranks:
        assert_weights_close(weights, model, WEIGHT_ATOL)
    moved = max((a - b).abs().max().item() for a, b in zip(model.parameters(), start.parameters(), strict=True))
    assert moved > 10 * WEIGHT_ATOL, "the weights hardly moved, so their comparison says nothing"


@pytest.mark.parametrize(("layout", "budget"), [("dp2", Budget(14)), ("pp4", Budget(10_000, 1)), ("pp2", Budget(10_000))])
def test_the_micro_batch_budget_never_changes_an_update(tmp_path: Path, layout: str, budget: Budget) -> None:
    path = save_tiny_model(tmp_path, num_hidden_layers=4 if layout == "pp4" else 2)
    model, expected = reference_run(path, LM, STEPS)
    world, options = _titan(layout)
    for _, results, weights in run_distributed(engine_run, world, path, "torchtitan", LM, STEPS, budget, options):
        assert_weights_close(weights, model, WEIGHT_ATOL)
        assert [r["grad_norm"] for _, r in results] == pytest.approx([e["grad_norm"] for e in expected], rel=GRAD_NORM_RTOL)


@pytest.mark.parametrize(("layout", "head"), [("tp2", LM), ("pp2", VALUE)])
def test_rows_that_share_their_prompt_update_like_rows_alone(
    tmp_path: Path, layout: str, head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights within 1e-4 of updates of about 2e-3 (seen 7e-5 in one entry of 1024); see the top of the file, and fsdp's 5e-5."""
    monkeypatch.setattr(packing, "MIN_SHARED", 1)
    path = save_tiny_model(tmp_path, value_head=head is VALUE)
    steps = [make_rows(6, seed=3), make_rows(6, seed=4)]
    for rows in steps:
        for again, first in ((1, 0), (2, 0), (4, 3)):
            rows[again]["prompts"] = rows[first]["prompts"]
    model, expected = reference_run(path, head, steps)
    world, options = _titan(layout)
    for _, results, weights in run_distributed(engine_run, world, path, "torchtitan", head, steps, TWO_MICRO_BATCHES, options):
        assert_weights_close(weights, model, atol=1e-4)
        assert [r["grad_norm"] for _, r in results] == pytest.approx([e["grad_norm"] for e in expected], rel=GRAD_NORM_RTOL)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 16,
                }
            },
        ),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
    ],
    ids=["scaled rotary", "sliding window"],
)  # fmt: skip
def test_variants_of_a_family_give_their_own_log_probs(tmp_path: Path, model_type: str, changes: dict[str, Any]) -> None:
    path = save_tiny_model(tmp_path / "variant", model_type, **changes)
    plain = reference_model(save_tiny_model(tmp_path / "plain", model_type), LM)
    model = reference_model(path, LM)
    row = make_rows(3)[2]

    def score() -> Tensor:
        return _engine(path, "1", optim=None).forward(batch_of([row]), TWO_MICRO_BATCHES, TEMPERATURE).ragged("log_probs").values

    found, want = run_distributed(score, 1)[0], reference_columns(model, LM, row)["log_probs"].detach()
    torch.testing.assert_close(found, want, atol=COLUMN_ATOL, rtol=0)
    assert (want - reference_columns(plain, LM, row)["log_probs"]).abs().max() > 1e-3, "the variant makes no difference here"


@pytest.mark.parametrize(("layout", "model_type"), [("tp2", "llama"), ("pp2", "qwen2")])
def test_scores_equal_sequence_classification_one_row_at_a_time(tmp_path: Path, layout: str, model_type: str) -> None:
    path = save_tiny_model(tmp_path, model_type, score_head=True)
    sequences = [torch.cat([row["prompts"], row["responses"]]) for row in make_rows(5)]
    sequences += [torch.tensor([5, 0, 9]), torch.tensor([5, 9, 0])]  # with the padding token inside and at the end

    def score() -> Tensor:
        engine = _engine(path, layout, Head.SCORE, optim=None, pad_token_id=0)
        mine = sequences[:1] if engine.rank == 0 else sequences[1:]
        nothing = engine.score(Ragged.from_rows([], dtype=torch.int64), Budget(20), pad_token_id=0)
        assert nothing.shape == (0,)
        return engine.score(Ragged.from_rows(mine), Budget(20), pad_token_id=0)

    scores = torch.cat(run_distributed(score, 2))
    model = reference_model(path, Head.SCORE)
    with torch.no_grad():
        expected = torch.stack([model(input_ids=ids[None]).logits[0, 0] for ids in sequences])
    torch.testing.assert_close(scores, expected, atol=COLUMN_ATOL, rtol=0)


@pytest.mark.parametrize(
    ("head", "route"),
    [(LM, ["dp2", "1", "tp2", "pp2"]), (VALUE, ["pp2", "1", "dp2 tp2"])],
    ids=["tied lm", "value"],
)
def test_a_checkpoint_continues_in_every_layout(tmp_path: Path, head: Head, route: list[str]) -> None:
    """One update and a checkpoint in the first layout; each further one loads what the one before saved, saves it, and does update 2."""
    path = save_tiny_model(tmp_path / "model", value_head=head is VALUE, tie_word_embeddings=head is LM)
    model, _ = reference_run(path, head, STEPS)

    def train(layout: str, number: int) -> dict[str, Tensor]:
        engine = _engine(path, layout, head)
        if number == 0:
            engine_step(engine, STEPS[0], 0, TWO_MICRO_BATCHES)
        else:
            engine_step(
                engine, make_rows(6, seed=9), 0, TWO_MICRO_BATCHES
            )  # elsewhere, so that everything has to come from the file
            engine.load(tmp_path / str(number - 1))
        engine.save(tmp_path / str(number))
        engine_step(engine, STEPS[1], 1, TWO_MICRO_BATCHES)
        return weights_of(engine)

    for number, layout in enumerate(route):
        for weights in run_distributed(train, LAYOUTS[layout][0], layout, number):
            assert_weights_close(weights, model, WEIGHT_ATOL)


def test_a_checkpoint_of_fsdp2_continues_here(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model")
    model, _ = reference_run(path, LM, STEPS)

    def begin() -> None:
        engine = make_tiny_engine(path, "fsdp2")
        engine_step(engine, STEPS[0], 0, TWO_MICRO_BATCHES)
        engine.save(tmp_path / "saved")

    def go_on() -> dict[str, Tensor]:
        engine = _engine(path, "dp2")
        engine.load(tmp_path / "saved")
        engine_step(engine, STEPS[1], 1, TWO_MICRO_BATCHES)
        return weights_of(engine)

    run_distributed(begin, 2)
    assert_weights_close(run_distributed(go_on, 2)[0], model, WEIGHT_ATOL)


@pytest.mark.parametrize(("layout", "head"), [("pp2", LM), ("dp2", VALUE)])
def test_a_checkpoint_is_a_hugging_face_folder(tmp_path: Path, layout: str, head: Head) -> None:
    path = save_tiny_model(tmp_path / "model", "qwen2", value_head=head is VALUE, tie_word_embeddings=head is LM)
    row = make_rows(1)[0]

    def train() -> DataProto:
        engine = _engine(path, layout, head)
        engine_step(engine, STEPS[0], 0, TWO_MICRO_BATCHES)
        engine.save(tmp_path / "saved")
        return engine.forward(batch_of([row]), TWO_MICRO_BATCHES, TEMPERATURE)

    columns = run_distributed(train, 2)[0]
    expected = reference_columns(reference_model(str(tmp_path / "saved"), head), head, row)
    for name, values_of_row in expected.items():
        torch.testing.assert_close(columns.ragged(name)[0], values_of_row.detach(), atol=COLUMN_ATOL, rtol=0)


@pytest.mark.parametrize("layout", ["1", "pp2"])
def test_a_decoder_of_the_engine_has_its_present_weights(tmp_path: Path, layout: str) -> None:
    path = save_tiny_model(tmp_path, "qwen2", **TIED)
    model, _ = reference_run(path, LM, STEPS[:1])
    ids = torch.arange(2, 9)[None]

    def decode() -> tuple[Tensor, int]:
        engine = _engine(path, layout, decoder_attention="sdpa")
        engine_step(engine, STEPS[0], 0, TWO_MICRO_BATCHES)
        with torch.no_grad(), SharedWeights(engine, torch.float32).lent() as copied:
            return engine.decoder(input_ids=ids).logits, copied

    with torch.no_grad():
        expected = model(input_ids=ids).logits
    for logits, copied in run_distributed(decode, LAYOUTS[layout][0]):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
        assert (copied == 0) == (layout == "1"), "on one rank the decoder's weights are the engine's"


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_bf16_computes_near_fp32_and_keeps_fp32_weights(tmp_path: Path, layout: str) -> None:
    """bfloat16 has 8 significant bits: log-probs of this model move by up to a few hundredths, the gradient's norm by a few percent."""
    path = save_tiny_model(tmp_path)
    model = reference_model(path, LM)
    expected_columns = [reference_columns(model, LM, row) for row in STEPS[0]]
    _, expected = reference_run(path, LM, STEPS)
    world, options = _titan(layout, dtype="bfloat16")
    ranks = run_distributed(engine_run, world, path, "torchtitan", LM, STEPS, TWO_MICRO_BATCHES, options)
    columns = DataProto.concat([columns for columns, _, _ in ranks]).ragged("log_probs")
    differences = columns.values - torch.cat([want["log_probs"].detach() for want in expected_columns])
    assert 1e-4 < differences.abs().max() < 0.05
    for _, results, weights in ranks:
        assert results[0][1]["grad_norm"] == pytest.approx(expected[0]["grad_norm"], rel=0.02)
        assert all(tensor.dtype == torch.float32 for tensor in weights.values())


def test_compiled_layers_update_like_plain_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced and sharded, but run by torch without its code generator, which would take a minute."""
    monkeypatch.setattr(titan_engine, "compile_layers", functools.partial(titan_engine.compile_layers, backend="eager"))
    path = save_tiny_model(tmp_path, num_hidden_layers=1)
    model, _ = reference_run(path, LM, STEPS[:1])

    def train() -> dict[str, Tensor]:
        engine = make_tiny_engine(path, "torchtitan", recompute="full", section={"use_torch_compile": True})
        engine_step(engine, STEPS[0], 0, TWO_MICRO_BATCHES)
        return weights_of(engine)

    assert_weights_close(run_distributed(train, 1)[0], model)


@pytest.mark.parametrize("layout", ["dp2", "pp2"])
def test_a_gradient_that_is_not_finite_changes_no_weight_and_leaves_no_gradient(tmp_path: Path, layout: str) -> None:
    """The failed step is as if it had never been: the next one equals the reference's first."""
    path = save_tiny_model(tmp_path)
    model, _ = reference_run(path, LM, STEPS[:1])

    def poisoned(outputs: TokenOutputs, rows: DataProto) -> tuple[Tensor, dict[str, Any]]:
        # sqrt has a finite value and an infinite derivative at 0; the product with 0 is a NaN gradient of a finite loss.
        return torch.sqrt(outputs.log_probs.sum() * 0.0), {}

    def train() -> tuple[str, dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        engine = _engine(path, layout)
        before = weights_of(engine)
        engine.forward_backward(batch_of(STEPS[0]), poisoned, TWO_MICRO_BATCHES)
        with pytest.raises(NumericalError) as error:
            engine.optim_step()
        after = weights_of(engine)
        engine_step(engine, STEPS[0], 0, TWO_MICRO_BATCHES)
        return str(error.value), before, after, weights_of(engine)

    for message, before, after, trained in run_distributed(train, 2):
        assert "gradient norm is nan at update 0" in message
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert_weights_close(trained, model, WEIGHT_ATOL)


def test_a_loss_that_is_not_finite_names_its_rows(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)

    def train() -> str:
        engine = _engine(path, "tp2")
        rows = make_rows(6)
        rows[4]["advantages"][0] = math.nan
        data = batch_of(rows).union(DataProto.from_dict(non_tensors={"index": list(range(100, 106))}))
        mine = data if engine.rank == 0 else data.select_idxs([])
        with pytest.raises(NumericalError) as error:
            engine.forward_backward(mine, make_policy_loss(ACTOR, denominators_of(rows), 1.0), Budget(10_000, 2))
        return str(error.value)

    for message in run_distributed(train, 2):  # both ranks compute all rows, so neither waits for the other
        assert "dataset rows [104]" in message


def test_a_value_head_that_the_folder_lacks_is_drawn_from_the_seed(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)
    expected = dict(load_model(ModelConfig(path=path), VALUE, seed=7).named_parameters())

    def make_critic() -> dict[str, Tensor]:
        return weights_of(_engine(path, "tp2", VALUE))

    for weights in run_distributed(make_critic, 2):
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], expected[name].detach()) for name in expected)


def test_weights_that_cannot_be_read_in_parts_are_taken_from_the_loaded_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order, "load_on_meta", lambda *args: None)
    path = save_tiny_model(tmp_path, **TIED)
    model = reference_model(path, LM)

    def make_actor() -> dict[str, Tensor]:
        return weights_of(_engine(path, "dp2"))

    assert_weights_close(run_distributed(make_actor, 2)[1], model, atol=0.0)


def test_a_frozen_engine_has_no_optimizer_and_saves_and_loads_without_one(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model")

    def use() -> bool:
        engine = _engine(path, "dp2", optim=None)
        assert not any(parameter.requires_grad for parameter in engine.module.parameters())
        with pytest.raises(AssertionError, match="frozen"):
            engine.optim_step()
        engine.save(tmp_path / "saved")
        dist.barrier()  # rank 0 writes
        engine.load(tmp_path / "saved")
        return engine.forward(batch_of(STEPS[0]), TWO_MICRO_BATCHES).ragged("log_probs").values.requires_grad

    assert run_distributed(use, 2) == [False, False]
    assert not (tmp_path / "saved" / "optimizer").exists()


def test_what_is_not_a_checkpoint_of_this_model_is_refused(tmp_path: Path) -> None:
    path, other = save_tiny_model(tmp_path / "model"), save_tiny_model(tmp_path / "other", intermediate_size=40)

    def load() -> None:
        engine = _engine(path, "1")
        with pytest.raises(DataError, match=r"model.safetensors is missing"):
            engine.load(tmp_path)
        with pytest.raises(DataError, match=r"another architecture: 6 of 21 weights.*mlp.*\(40, 32\) instead of \(48, 32\)"):
            engine.load(Path(other))

    run_distributed(load, 1)


def test_a_layout_that_cannot_be_is_refused_when_the_engine_is_made(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)

    def refuse() -> None:
        with pytest.raises(ConfigError, match="must divide the 1 ranks"):
            _engine(path, "tp2")

    run_distributed(refuse, 1)


def test_ppo_goes_as_with_fsdp2(embedded_config: Callable[..., PPOConfig]) -> None:
    """Actor, rollout, reference and critic for two steps: the same responses, and norms that differ by rounding alone."""

    def run(strategy: str) -> list[dict[str, Any]]:
        keys = [f"{role}.strategy={strategy}" for role in ("actor_rollout_ref.actor", "critic")]
        folder = f"trainer.experiment_name={strategy}"
        config = embedded_config(*keys, folder, "trainer.total_training_steps=2", "trainer.val_before_train=false")
        return train(config, {"global_pool": [1]}, roles("ActorRolloutRef", "Critic"))

    expected, steps = (run_distributed(run, 1, strategy)[0] for strategy in ("fsdp2", "torchtitan"))
    assert len(steps) == len(expected) == 2
    for step, want in zip(steps, expected, strict=True):
        assert step["critic/score/mean"] == want["critic/score/mean"]
        assert step["response_length/mean"] == want["response_length/mean"]
        assert step["actor/grad_norm"] == pytest.approx(want["actor/grad_norm"], rel=1e-5)
        assert step["critic/grad_norm"] == pytest.approx(want["critic/grad_norm"], rel=1e-5)
