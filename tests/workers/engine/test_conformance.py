"""fsdp and fsdp2, at one and two ranks: the properties of helpers/engine_properties.py, and their own."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import engine_properties as properties
from helpers.conformance import (
    ACTOR,
    STEPS,
    TWO_MICRO_BATCHES,
    assert_weights_close,
    batch_of,
    engine_step,
    reference_model,
    reference_run,
    weights_of,
)
from helpers.distributed import run_distributed
from helpers.engine_properties import LM, SCORE, TIED, VALUE, Layout
from helpers.engines import make_tiny_engine
from helpers.tiny import save_tiny_model
from torch import Tensor

from lockstep.algorithms.aggregation import Denominators
from lockstep.algorithms.rows import Rows
from lockstep.models import chunked_head
from lockstep.models.chunked_head import LossPass
from lockstep.models.fast_layers import compile_layers
from lockstep.models.load import Head
from lockstep.models.packing import Budget, TokenRows
from lockstep.models.weight_files import WeightFiles
from lockstep.workers.engine.fsdp import engine as fsdp_engine
from lockstep.workers.engine.fsdp import make as fsdp_make
from lockstep.workers.engine.offload import move_state
from lockstep.workers.losses import make_policy_loss

STRATEGIES = ("fsdp", "fsdp2")
WORLDS = (1, 2)

KEPT = {"reshard_after_forward": False}
CASES: dict[str, tuple[str, Head, dict[str, Any], str | None, dict[str, Any]]] = {
    "llama": ("llama", LM, {}, "full", {}),
    "llama tied": ("llama", LM, {}, None, TIED),
    "qwen2 tied": ("qwen2", LM, {}, "selective", TIED),
    "qwen3": ("qwen3", LM, KEPT, None, {}),
    "llama value": ("llama", VALUE, {}, "full", {}),
    "qwen2 value": ("qwen2", VALUE, KEPT, None, {}),
    "qwen3 value tied": ("qwen3", VALUE, {}, None, TIED),
    "seed_oss with dropout": ("seed_oss", LM, {}, "full", {"head_dim": 8, "residual_dropout": 0.5, "attention_dropout": 0.5}),
}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", CASES)
def test_two_updates_equal_plain_pytorch(tmp_path: Path, case: str, strategy: str, world: int) -> None:
    model_type, head, section, recompute, changes = CASES[case]
    path = save_tiny_model(tmp_path, model_type, value_head=head is VALUE, **changes)
    properties.assert_updates_equal_plain_pytorch(Layout(strategy, world, section), path, head, recompute=recompute)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_micro_batch_budget_never_changes_an_update(tmp_path: Path, strategy: str, world: int) -> None:
    path = save_tiny_model(tmp_path)
    for budget in (Budget(10_000, 1), Budget(10_000), Budget(14)):
        properties.assert_updates_equal_plain_pytorch(Layout(strategy, world), path, budget=budget)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_copies_of_the_model_learn_as_one(tmp_path: Path, strategy: str) -> None:
    """With a shard size of 1 FSDP1's own hybrid strategy reduces no gradient; the copies would be two models."""
    properties.assert_updates_equal_plain_pytorch(Layout(strategy, 2, {"fsdp_size": 1}), save_tiny_model(tmp_path))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_layers_that_stay_gathered_between_forward_and_backward_learn_the_same(tmp_path: Path, strategy: str) -> None:
    """A forward pass without a backward pass must not leave the optimizer, or an export, with anything but the shards."""
    path, layout = save_tiny_model(tmp_path), Layout(strategy, 2, KEPT)
    properties.assert_updates_equal_plain_pytorch(layout, path)
    whole = {name: tensor.detach() for name, tensor in reference_model(path, LM).named_parameters()}

    def export() -> dict[str, Tensor]:
        engine = layout.engine(path)
        engine.forward(batch_of(STEPS[0]), TWO_MICRO_BATCHES)
        return weights_of(engine)

    for weights in layout.run(export):
        assert all(torch.equal(weights[name], whole[name]) for name in whole)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_offloaded_moments_are_on_the_device_for_the_step_and_on_the_host_after_it(
    tmp_path: Path, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU device and host are one, so what is checked is that the moves happen, around an update that stays the same."""
    path = save_tiny_model(tmp_path)
    model, _ = reference_run(path, LM, STEPS)
    moves: list[torch.device] = []

    def moved(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        moves.append(device)
        move_state(optimizer, device)

    monkeypatch.setattr(fsdp_engine, "move_state", moved)

    def train() -> tuple[int, dict[str, Tensor]]:
        engine = make_tiny_engine(path, strategy, section={"optimizer_offload": True})
        for update, rows in enumerate(STEPS):
            engine_step(engine, rows, update, TWO_MICRO_BATCHES)
        return len(moves), weights_of(engine)

    for count, weights in run_distributed(train, 2):
        assert count == 2 * len(STEPS)
        assert_weights_close(weights, model)


def test_compiled_layers_update_like_plain_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced and sharded, but run by torch without its code generator, which would take a minute."""
    monkeypatch.setattr(fsdp_make, "compile_layers", functools.partial(compile_layers, backend="eager"))
    path = save_tiny_model(tmp_path, num_hidden_layers=1)
    model, _ = reference_run(path, LM, STEPS[:1])

    def train() -> dict[str, Tensor]:
        engine = make_tiny_engine(path, section={"use_torch_compile": True})
        engine_step(engine, STEPS[0], 0, TWO_MICRO_BATCHES)
        return weights_of(engine)

    assert_weights_close(run_distributed(train, 1)[0], model)


@pytest.mark.parametrize("layout", [Layout("fsdp"), Layout(world=2), Layout(world=2, section={"tensor_parallel_size": 2})])
@pytest.mark.parametrize(("at_once", "cuts_rows", "parts"), [(8, False, [1, 2, 1]), (5, False, None), (5, True, [1, 1, 1, 1, 1])])
def test_how_many_logits_exist_at_once_never_changes_an_update(
    tmp_path: Path, layout: Layout, at_once: int, cuts_rows: bool, parts: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of some rows at a time while their logits are there; where a row has more tokens, of its parts; or, for a loss that looks at
    whole rows, of log-probs."""
    path = save_tiny_model(tmp_path)
    vocabulary = reference_model(path, LM).config.vocab_size
    monkeypatch.setitem(chunked_head.MAX_LOGITS, "cpu", at_once * vocabulary)
    assert layout.run(lambda: layout.engine(path).tokens_at_once) == [at_once] * layout.world
    assert LossPass(make_policy_loss(ACTOR, 1.0).of(Denominators(1, 1)), 1.0, False).by_token
    monkeypatch.setattr(LossPass, "by_token", cuts_rows)
    chunks = TokenRows(Rows(torch.tensor([8, 3, 5, 1])), {}, range(4)).chunks(at_once, cuts_rows)
    assert (chunks and [len(chunk.rows) for chunk in chunks]) == parts
    properties.assert_updates_equal_plain_pytorch(layout, path, budget=Budget(100))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("head", [LM, VALUE])
def test_rows_that_share_their_prompt_update_like_rows_alone(
    tmp_path: Path, head: Head, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_tiny_model(tmp_path, value_head=head is VALUE)
    properties.assert_shared_prompts_change_nothing(Layout("fsdp2", world), path, head, monkeypatch)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_scores_equal_sequence_classification_one_row_at_a_time(tmp_path: Path, model_type: str, strategy: str, world: int) -> None:
    path = save_tiny_model(tmp_path, model_type, score_head=True)
    properties.assert_scores_equal_one_row_at_a_time(Layout(strategy, world), path)


@pytest.mark.parametrize(
    ("strategy", "other"), [("fsdp", "fsdp"), ("fsdp2", "fsdp2"), ("fsdp", "fsdp2")], ids=["fsdp", "fsdp2", "fsdp to fsdp2"]
)
@pytest.mark.parametrize("head", [LM, VALUE], ids=["tied lm", "value"])
def test_a_checkpoint_of_two_ranks_continues_on_one_and_back(tmp_path: Path, strategy: str, other: str, head: Head) -> None:
    path = save_tiny_model(tmp_path / "model", value_head=head is VALUE, tie_word_embeddings=head is LM)
    route = [Layout(strategy, 2), Layout(other, 1), Layout(strategy, 2)]
    properties.assert_a_checkpoint_continues(route, tmp_path, path, head)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("head", [LM, VALUE])
def test_a_checkpoint_is_a_hugging_face_folder(tmp_path: Path, head: Head, strategy: str, world: int) -> None:
    properties.assert_a_checkpoint_is_a_hugging_face_folder(Layout(strategy, world), tmp_path, head)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bf16_computes_near_fp32_and_keeps_fp32_weights(tmp_path: Path, strategy: str, world: int) -> None:
    properties.assert_bf16_is_near_fp32(Layout(strategy, world), save_tiny_model(tmp_path))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "layout", [Layout("fsdp", 1), Layout("fsdp", 2), Layout("fsdp2", 2), Layout("fsdp2", 2, {"tensor_parallel_size": 2})]
)
def test_random_shapes_learn_as_plain_pytorch_does(tmp_path: Path, layout: Layout, seed: int) -> None:
    properties.assert_a_random_shape_learns(layout, tmp_path, seed)


@pytest.mark.parametrize(("world", "section"), [(1, {}), (2, {}), (2, {"fsdp_size": 1})])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tied_weights_learn_in_bf16_too(tmp_path: Path, strategy: str, world: int, section: dict[str, Any]) -> None:
    properties.assert_bf16_is_near_fp32(Layout(strategy, world, section), save_tiny_model(tmp_path, "qwen2", **TIED))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_gradient_that_is_not_finite_changes_no_weight_and_leaves_no_gradient(tmp_path: Path, strategy: str, world: int) -> None:
    properties.assert_a_gradient_that_is_not_finite_changes_nothing(Layout(strategy, world), save_tiny_model(tmp_path))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_loss_that_is_not_finite_names_its_rows_and_changes_no_weight(tmp_path: Path, strategy: str) -> None:
    properties.assert_a_loss_that_is_not_finite_names_its_rows(Layout(strategy), save_tiny_model(tmp_path))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_frozen_engine_has_no_optimizer_and_saves_and_loads_without_one(tmp_path: Path, strategy: str) -> None:
    properties.assert_a_frozen_engine_cannot_learn(Layout(strategy), tmp_path)


@pytest.mark.parametrize(
    "layout",
    [
        Layout("fsdp2", 1),
        Layout("fsdp2", 2),
        Layout("fsdp2", 2, {"tensor_parallel_size": 2}),
        Layout("fsdp2", 1, {"optimizer_offload": True, "param_offload": True}),
        Layout("fsdp", 2),
    ],
)
def test_saving_changes_nothing_before_or_after_the_first_update(tmp_path: Path, layout: Layout) -> None:
    properties.assert_saving_changes_nothing(layout, tmp_path)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_saving_holds_few_weights_at_a_time(tmp_path: Path, strategy: str) -> None:
    properties.assert_saving_holds_few_weights(Layout(strategy, 2), tmp_path)


def test_what_is_not_a_checkpoint_of_this_model_is_refused(tmp_path: Path) -> None:
    properties.assert_other_folders_are_refused(Layout(), tmp_path)


def test_a_value_head_that_the_folder_lacks_is_drawn_from_the_seed(tmp_path: Path) -> None:
    properties.assert_a_missing_head_is_drawn_from_the_seed(Layout("fsdp2", 2), save_tiny_model(tmp_path))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_that_cannot_be_read_in_parts_are_loaded_whole(tmp_path: Path, strategy: str, world: int) -> None:
    properties.assert_weights_may_come_in_another_form(Layout(strategy, world), tmp_path)


@pytest.mark.parametrize("head", [LM, VALUE, SCORE])
def test_a_rank_reads_its_own_part_of_the_weights_and_nothing_else(
    tmp_path: Path, head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_tiny_model(tmp_path, value_head=head is VALUE, score_head=head is SCORE)
    whole = {name: tensor.detach() for name, tensor in reference_model(path, head).named_parameters()}
    read: list[int] = []
    original = WeightFiles.read

    def counted(files: WeightFiles, name: str, start: int, stop: int) -> Tensor:
        rows = original(files, name, start, stop)
        read.append(rows.numel())
        return rows

    monkeypatch.setattr(WeightFiles, "read", counted)

    def make() -> tuple[int, dict[str, Tensor]]:
        engine = make_tiny_engine(path, "fsdp2", head, pad_token_id=0)
        return sum(read), weights_of(engine)

    ranks = run_distributed(make, 2)
    total = sum(tensor.numel() for tensor in whole.values())
    assert sum(numbers for numbers, _ in ranks) == total
    assert all(0.4 * total < numbers < 0.6 * total for numbers, _ in ranks)
    for _, weights in ranks:
        assert weights.keys() == whole.keys()
        assert all(torch.equal(weights[name], whole[name]) for name in whole)
