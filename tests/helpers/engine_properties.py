"""What every training engine does, whatever its backend and layout: a function for each property, which the tests of the engines call.

The reference and the tolerances are those of conformance.py.
"""

from __future__ import annotations

import math
import random
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from helpers.conformance import (
    ACTOR,
    COLUMN_ATOL,
    NUMBER_TOL,
    STEPS,
    TEMPERATURE,
    TWO_MICRO_BATCHES,
    WEIGHT_ATOL,
    assert_weights_close,
    batch_of,
    denominators_of,
    engine_step,
    make_rows,
    reference_columns,
    reference_model,
    reference_run,
    reference_step,
    share,
    weights_of,
)
from helpers.distributed import run_distributed
from helpers.engines import make_tiny_engine
from helpers.run import roles, train
from helpers.tiny import save_tiny_model
from lockstep.config import PPOConfig
from lockstep.config.engine import ModelConfig
from lockstep.errors import DataError, NumericalError
from lockstep.models import packing
from lockstep.models.chunked_head import LossOutput
from lockstep.models.load import Head, load_model
from lockstep.models.packing import Budget
from lockstep.models.weight_files import Tensors, write_weights
from lockstep.observability.metrics import merge_metrics, values
from lockstep.protocol import DataProto, Ragged
from lockstep.workers.engine.base import TokenOutputs, TokenRows, TrainEngine
from lockstep.workers.engine.checkpoint import MOMENTS
from lockstep.workers.losses import make_policy_loss
from lockstep.workers.training_worker import score_rows
from lockstep.workers.weight_sync.source import SharedWeights

LM, VALUE, SCORE = Head.LANGUAGE_MODEL, Head.VALUE, Head.SCORE
TIED = {"tie_word_embeddings": True}

Rows = list[dict[str, Tensor]]
Updates = tuple[DataProto, list[tuple[dict[str, Any], dict[str, float]]], dict[str, Tensor]]
"""One rank's columns before the updates, its metrics and what its optimizer said in each, its weights after them."""


@dataclass(frozen=True)
class Layout:
    """An engine on gloo ranks of this machine."""

    strategy: str = "fsdp2"
    world: int = 1
    section: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the strategy's section."""
    before: Callable[[], None] = lambda: None
    """Called on each rank before anything else."""

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(*args)` on the ranks."""

        def on_rank() -> Any:
            self.before()
            return function(*args)

        return run_distributed(on_rank, self.world)

    def engine(self, path: str, head: Head = LM, **options: Any) -> TrainEngine:
        """The engine, on a rank."""
        return make_tiny_engine(path, self.strategy, head, section=dict(self.section), **options)

    def train(
        self, path: str, head: Head = LM, steps: Sequence[Rows] = STEPS, budget: Budget = TWO_MICRO_BATCHES, **options: Any
    ) -> list[Updates]:
        """An update for each of `steps`, in a new engine, of which no warning is heard."""

        def updates() -> Updates:
            with warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)
                engine = self.engine(path, head, **options)
                columns = engine.forward(batch_of(share(steps[0], 0, engine.rank, engine.world_size)), budget, TEMPERATURE)
                results = [engine_step(engine, rows, update, budget) for update, rows in enumerate(steps)]
                return columns, results, weights_of(engine)

        return self.run(updates)


# -- updates ---------------------------------------------------------------------------------------------------------------


def assert_updates_equal_plain_pytorch(
    layout: Layout, path: str, head: Head = LM, *, steps: Sequence[Rows] = STEPS, **options: Any
) -> None:
    """Columns, metrics, gradient norms, learning rates and weights. `options` go to `Layout.train`."""
    start = reference_model(path, head)
    wanted_columns = [reference_columns(start, head, row) for row in steps[0]]
    model, expected = reference_run(path, head, list(steps))
    ranks = layout.train(path, head, steps, **options)
    columns = DataProto.concat([columns for columns, _, _ in ranks])
    for name in wanted_columns[0]:
        want = torch.cat([row[name].detach() for row in wanted_columns])
        torch.testing.assert_close(columns.ragged(name).values, want, atol=COLUMN_ATOL, rtol=0)
    assert_metrics_equal(ranks, expected, reference_run(path, head, list(steps), torch.float64)[1])
    for _, _, weights in ranks:
        assert_weights_close(weights, model)
    moved = max((a - b).abs().max().item() for a, b in zip(model.parameters(), start.parameters(), strict=True))
    assert moved > 10 * WEIGHT_ATOL, "the weights hardly moved, so their comparison says nothing"


def random_case(seed: int) -> tuple[str, dict[str, Any], Head, dict[str, Any]]:
    """A family, keys of its config, a head, and options of `Layout.train`, for layouts of two ranks."""
    draw = random.Random(seed)
    family, groups, size = draw.choice(("llama", "qwen2", "qwen3")), draw.choice((2, 4)), draw.choice((4, 8, 12, 16))
    heads = groups * draw.choice((1, 2, 3))
    changes: dict[str, Any] = {
        "vocab_size": draw.choice((32, 37, 50, 101)),
        "hidden_size": heads * size,
        "intermediate_size": draw.choice((24, 40, 64)),
        "num_hidden_layers": draw.choice((2, 4)),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "tie_word_embeddings": draw.random() < 0.5,
        "rms_norm_eps": draw.choice((1e-6, 1e-5)),
    }
    if family == "qwen3" or (family == "llama" and draw.random() < 0.4):
        changes["head_dim"] = size if family == "qwen3" else draw.choice((4, 8, 16))
    return family, changes, draw.choice((LM, LM, VALUE)), {"recompute": draw.choice((None, "full", "selective"))}


def assert_a_random_shape_learns(layout: Layout, folder: Path, seed: int) -> None:
    """In float32 as plain PyTorch does and, the language model, in bfloat16 near to it."""
    family, changes, head, options = random_case(seed)
    path = save_tiny_model(folder / "fp32", family, seed, value_head=head is VALUE, **changes)
    assert_updates_equal_plain_pytorch(layout, path, head, **options)
    exported = torch.bfloat16 if layout.strategy == "megatron" else torch.float32
    assert_bf16_is_near_fp32(layout, save_tiny_model(folder / "bf16", family, seed, **changes), exported=exported)


def assert_metrics_equal(
    ranks: Sequence[Updates], expected: Sequence[dict[str, float]], exact: Sequence[dict[str, float]] | None = None
) -> None:
    """Metrics of all ranks together, gradient norm and learning rate on each, to NUMBER_TOL.

    `exact` are the expected ones in float64: where plain float32 is itself further off than that (after an update, whose rounding AdamW
    scales up), an engine may be three times as far.
    """
    for update, numbers in enumerate(expected):
        least = dict.fromkeys(numbers, NUMBER_TOL) | {"grad_norm": NUMBER_TOL * numbers["grad_norm"]}
        rounding = {name: abs(number - (exact or expected)[update][name]) for name, number in numbers.items()}
        allowed = {name: max(least[name], 3 * rounding[name]) for name in numbers}
        metrics = values(merge_metrics([results[update][0] for _, results, _ in ranks if results[update][0]]))
        for name in numbers.keys() - {"grad_norm", "lr"}:
            assert metrics[name] == pytest.approx(numbers[name], rel=0, abs=allowed[name]), name
        for _, results, _ in ranks:
            assert results[update][1]["grad_norm"] == pytest.approx(numbers["grad_norm"], rel=0, abs=allowed["grad_norm"])
            assert results[update][1]["lr"] == pytest.approx(numbers["lr"], rel=1e-12)


def assert_shared_prompts_change_nothing(
    layout: Layout, path: str, head: Head, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> None:
    """Rows that share their prompt update like rows alone."""
    monkeypatch.setattr(packing, "MIN_SHARED", 1)
    monkeypatch.setattr(packing, "MAX_LONGER", 1 << 30)
    steps = [make_rows(6, seed=3), make_rows(6, seed=4)]
    for rows in steps:
        for again, first in ((1, 0), (2, 0), (4, 3)):
            rows[again]["prompts"] = rows[first]["prompts"]
    assert_updates_equal_plain_pytorch(layout, path, head, steps=steps, **options)


def assert_bf16_is_near_fp32(layout: Layout, path: str, norm_rtol: float = 0.02, exported: torch.dtype = torch.float32) -> None:
    """bfloat16 has 8 significant bits: log-probs of a tiny model move by up to a few hundredths, the gradient's norm by a few percent;
    where plain PyTorch in bfloat16 is further off, by twice as much as there.

    Weights: two updates of at most 1e-3 that may go the other way and, where they are exported in bfloat16, rounding of numbers up to 1.
    """
    start = reference_model(path, LM)
    wanted = torch.cat([reference_columns(start, LM, row)["log_probs"].detach() for row in STEPS[0]])
    model, expected = reference_run(path, LM, STEPS)
    plain = reference_model(path, LM).bfloat16()
    rounded = torch.cat([reference_columns(plain, LM, row)["log_probs"].detach().float() for row in STEPS[0]])
    norm = reference_step(plain, LM, torch.optim.AdamW(plain.parameters()), STEPS[0], 0)["grad_norm"]
    ranks = layout.train(path, dtype="bfloat16")
    columns = DataProto.concat([columns for columns, _, _ in ranks])
    assert 1e-4 < (columns.ragged("log_probs").values - wanted).abs().max() < max(0.05, 2 * (rounded - wanted).abs().max())
    for _, results, weights in ranks:
        rel = max(norm_rtol, 2 * abs(norm / expected[0]["grad_norm"] - 1))
        assert results[0][1]["grad_norm"] == pytest.approx(expected[0]["grad_norm"], rel=rel)
        assert all(tensor.dtype == exported for tensor in weights.values())
        assert_weights_close({name: tensor.float() for name, tensor in weights.items()}, model, atol=8e-3)


def assert_a_gradient_that_is_not_finite_changes_nothing(layout: Layout, path: str) -> None:
    """The failed step is as if it had never been: the next one equals the reference's first."""
    model, _ = reference_run(path, LM, STEPS[:1])

    def poisoned(outputs: TokenOutputs, tokens: TokenRows) -> LossOutput:
        # sqrt has a finite value and an infinite derivative at 0; the product with 0 is a NaN gradient of a finite loss.
        assert outputs.log_probs is not None
        return LossOutput(torch.sqrt(outputs.log_probs.sum() * 0.0), {})

    def fail_and_go_on() -> tuple[str, dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        engine = layout.engine(path)
        before = weights_of(engine)
        engine.forward_backward(batch_of(STEPS[0]), poisoned, TWO_MICRO_BATCHES)
        with pytest.raises(NumericalError) as error:
            engine.optim_step()
        after = weights_of(engine)
        engine_step(engine, STEPS[0], 0, TWO_MICRO_BATCHES)
        return str(error.value), before, after, weights_of(engine)

    for message, before, after, trained in layout.run(fail_and_go_on):
        assert "gradient norm is nan at update 0" in message
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert_weights_close(trained, model)


def assert_a_loss_that_is_not_finite_names_its_rows(layout: Layout, path: str) -> None:
    """On every rank of one model, so that none waits for another; no weight changes."""

    def fail() -> tuple[str, bool]:
        engine = layout.engine(path)
        before = weights_of(engine)
        rows = make_rows(6)
        rows[4]["advantages"][0] = math.nan
        data = batch_of(rows).union(DataProto.from_dict(non_tensors={"index": list(range(100, 106))}))
        mine = data if engine.rank == 0 else data.select_idxs([])
        with pytest.raises(NumericalError) as error:
            engine.forward_backward(mine, make_policy_loss(ACTOR, 1.0).of(denominators_of(rows)), Budget(10_000, 2))
        after = weights_of(engine)
        return str(error.value), all(torch.equal(before[name], after[name]) for name in before)

    for message, unchanged in layout.run(fail):
        assert "dataset rows [104]" in message
        assert unchanged


# -- other heads, and engines that do not learn ----------------------------------------------------------------------------


def assert_scores_equal_one_row_at_a_time(layout: Layout, path: str, budget: Budget = Budget(20)) -> None:  # noqa: B008
    """A score head against transformers' sequence classification, on one or two ranks."""
    sequences = [torch.cat([row["prompts"], row["responses"]]) for row in make_rows(5)]
    sequences += [torch.tensor([5, 0, 9]), torch.tensor([5, 9, 0])]  # with the padding token inside and at the end

    def score() -> Tensor:
        engine = layout.engine(path, SCORE, optim=None, pad_token_id=0)
        nothing = score_rows(engine, Ragged.from_rows([], dtype=torch.int64), budget, pad_token_id=0)
        assert nothing.shape == (0,)
        mine = sequences if layout.world == 1 else (sequences[:1] if engine.rank == 0 else sequences[1:])
        return score_rows(engine, Ragged.from_rows(mine), budget, pad_token_id=0)

    scores = torch.cat(layout.run(score))
    model = reference_model(path, SCORE)
    with torch.no_grad():
        expected = torch.stack([model(input_ids=ids[None]).logits[0, 0] for ids in sequences])
    torch.testing.assert_close(scores, expected, atol=COLUMN_ATOL, rtol=0)


def assert_a_missing_head_is_drawn_from_the_seed(layout: Layout, path: str, head: Head = VALUE) -> None:
    """The same on every rank and in every engine; the other weights are the folder's."""
    expected = dict(load_model(ModelConfig(path=path), head, seed=7, trained=True).named_parameters())
    for weights in layout.run(lambda: weights_of(layout.engine(path, head))):
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], expected[name].detach()) for name in expected)


def assert_weights_may_come_in_another_form(layout: Layout, folder: Path, model_type: str = "llama", **changes: Any) -> None:
    """Weights that are not safetensors, of which no part can be read alone, make the same engine and the same decoder."""
    path = save_tiny_model(folder, model_type, **TIED | changes)
    model = reference_model(path, LM)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()

    def make() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        engine = layout.engine(path, decoder_attention="sdpa")
        assert engine.decoder is not None
        with SharedWeights(engine, torch.float32).borrowed():
            lent = {name: parameter.detach().clone() for name, parameter in engine.decoder.named_parameters()}
        return weights_of(engine), lent

    for weights, lent in layout.run(make):
        assert_weights_close(weights, model, atol=0.0)
        assert_weights_close(lent, model, atol=0.0)


def assert_a_frozen_engine_cannot_learn(layout: Layout, folder: Path) -> None:
    """It has no optimizer, and saves and loads without one."""
    path = save_tiny_model(folder / "model")

    def use() -> bool:
        engine = layout.engine(path, optim=None)
        assert not any(parameter.requires_grad for parameter in engine.module.parameters())
        with pytest.raises(AssertionError, match="frozen"):
            engine.optim_step()
        engine.save(folder / "saved")
        dist.barrier()  # rank 0 writes
        engine.load(folder / "saved")
        return engine.forward(batch_of(STEPS[0]), TWO_MICRO_BATCHES).ragged("log_probs").values.requires_grad

    assert layout.run(use) == [False] * layout.world
    assert not (folder / "saved" / "optimizer").exists()


# -- checkpoints -----------------------------------------------------------------------------------------------------------


def assert_a_checkpoint_continues(route: Sequence[Layout], folder: Path, path: str, head: Head = LM) -> None:
    """One update and a checkpoint in the first layout. Each further one starts elsewhere, loads what the one before it saved, saves it
    again, and goes on: everything has to come from the files."""
    model, _ = reference_run(path, head, STEPS)

    def go_on(layout: Layout, number: int) -> dict[str, Tensor]:
        engine = layout.engine(path, head)
        engine_step(engine, STEPS[0] if number == 0 else make_rows(6, seed=9), 0, TWO_MICRO_BATCHES)
        if number:
            engine.load(folder / str(number - 1))
        engine.save(folder / str(number))
        engine_step(engine, STEPS[1], 1, TWO_MICRO_BATCHES)
        return weights_of(engine)

    for number, layout in enumerate(route):
        for weights in layout.run(go_on, layout, number):
            assert_weights_close(weights, model)


def assert_a_checkpoint_is_a_hugging_face_folder(layout: Layout, folder: Path, head: Head) -> None:
    """transformers computes with it what the engine computed when it was saved."""
    path = save_tiny_model(folder / "model", "qwen2", value_head=head is VALUE, tie_word_embeddings=head is LM)
    row = make_rows(1)[0]

    def save() -> DataProto:
        engine = layout.engine(path, head)
        engine_step(engine, STEPS[0], 0, TWO_MICRO_BATCHES)
        engine.save(folder / "saved")
        return engine.forward(batch_of([row] if engine.rank == 0 else []), TWO_MICRO_BATCHES, TEMPERATURE)

    columns = layout.run(save)[0]
    for name, want in reference_columns(reference_model(str(folder / "saved"), head), head, row).items():
        torch.testing.assert_close(columns.ragged(name)[0], want.detach(), atol=COLUMN_ATOL, rtol=0)


def assert_saving_changes_nothing(layout: Layout, folder: Path) -> None:
    """An engine that saves, before or after its first update, one that saves and loads that, and one that does neither go on alike, to
    the bit."""
    path = save_tiny_model(folder / "model")

    def state_after(updates: int, saves: bool, loads: bool) -> dict[str, Tensor]:
        engine = layout.engine(path)
        for number in range(updates):
            engine_step(engine, STEPS[number], number, TWO_MICRO_BATCHES)
        if saves:
            engine.save(folder / f"saved {updates}")
        if loads:
            engine.load(folder / f"saved {updates}")
        engine_step(engine, STEPS[1], 1, TWO_MICRO_BATCHES)
        moments = {f"{kind} {name}": tensor.clone() for kind in MOMENTS for name, tensor in engine._export_moments(kind)}
        return weights_of(engine) | moments

    def different() -> list[str]:
        found = []
        for updates in (0, 1):
            expected = state_after(updates, saves=False, loads=False)
            for loads in (False, True):
                state = state_after(updates, saves=True, loads=loads)
                found += [name for name in expected if not torch.equal(expected[name], state[name])]
        return found

    assert layout.run(different) == [[]] * layout.world


def assert_saving_holds_few_weights(layout: Layout, folder: Path) -> None:
    """Weights are gathered and written one by one (megatron: those that it keeps as one), so no rank has the whole model."""
    path = save_tiny_model(folder / "model")
    most = 0

    def watched(file: Path, specs: Any, tensors: Tensors) -> None:
        def watch() -> Iterator[tuple[str, Tensor]]:
            nonlocal most
            given: list[weakref.ref[Tensor]] = []
            for name, tensor in tensors:
                given.append(weakref.ref(tensor))
                most = max(most, sum(ref() is not None for ref in given))
                yield name, tensor
                del tensor

        write_weights(file, specs, watch())

    def save() -> int:
        layout.engine(path).save(folder / "saved", watched)
        return most

    assert 1 <= layout.run(save)[0] <= 3


def assert_other_folders_are_refused(layout: Layout, folder: Path) -> None:
    """What is no checkpoint, one of another model, or a model without an optimizer changes no weight."""
    path, other = save_tiny_model(folder / "model"), save_tiny_model(folder / "other", intermediate_size=40)

    def load() -> bool:
        engine = layout.engine(path)
        before = weights_of(engine)
        with pytest.raises(DataError, match=r"model.safetensors is missing"):
            engine.load(folder)
        with pytest.raises(DataError, match=r"another architecture: 6 of 21 weights.*mlp.*\(40, 32\) instead of \(48, 32\)"):
            engine.load(Path(other))
        with pytest.raises(DataError, match=r"no exp_avg for 21 of 21 weights.*as model.path"):
            engine.load(Path(path))
        after = weights_of(engine)
        return all(torch.equal(before[name], after[name]) for name in before)

    assert all(layout.run(load))


# -- with the rest ---------------------------------------------------------------------------------------------------------


def assert_a_rank_generates_alone(layout: Layout, path: str) -> None:
    """While the others do nothing: one that waited for them would wait for ever. The decoder is a module of transformers."""
    ids = torch.arange(2, 6)[None]

    def decode() -> Tensor:
        engine = layout.engine(path, decoder_attention="sdpa")
        assert engine.decoder is not None
        assert type(engine.decoder).__module__.startswith("transformers.")
        with torch.no_grad(), SharedWeights(engine, torch.float32).borrowed():
            return engine.decoder(input_ids=ids).logits if engine.rank else torch.empty(0)

    *_, logits = layout.run(decode)
    with torch.no_grad():
        torch.testing.assert_close(logits, reference_model(path, LM)(input_ids=ids).logits, atol=COLUMN_ATOL, rtol=0)


def assert_ppo_goes_as_with_fsdp2(layout: Layout, embedded_config: Callable[..., PPOConfig]) -> None:
    """Actor, rollout, reference and critic for two steps: the same responses, and norms that differ by rounding alone."""

    def ppo(strategy: str) -> list[dict[str, Any]]:
        keys = [f"{role}.strategy={strategy}" for role in ("actor_rollout_ref.actor", "critic")]
        folder = f"trainer.experiment_name={strategy}"
        config = embedded_config(*keys, folder, "trainer.total_training_steps=2", "trainer.val_before_train=false")
        return train(config, {"global_pool": [1]}, roles("ActorRolloutRef", "Critic"))

    (expected,), (steps,) = run_distributed(ppo, 1, "fsdp2"), layout.run(ppo, layout.strategy)
    assert len(steps) == len(expected) == 2
    for step, want in zip(steps, expected, strict=True):
        assert step["critic/score/mean"] == want["critic/score/mean"]
        assert step["response_length/mean"] == want["response_length/mean"]
        assert step["actor/grad_norm"] == pytest.approx(want["actor/grad_norm"], rel=1e-5)
        assert step["critic/grad_norm"] == pytest.approx(want["critic/grad_norm"], rel=1e-5)
