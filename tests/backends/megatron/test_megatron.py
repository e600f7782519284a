"""The megatron engine in its layouts: the properties of helpers/engine_properties.py, and its own, on ranks with helpers/cuda_to_cpu.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import cuda_to_cpu
from helpers import engine_properties as properties
from helpers.conformance import (
    ACTOR,
    NUMBER_TOL,
    STEPS,
    TEMPERATURE,
    TWO_MICRO_BATCHES,
    assert_weights_close,
    batch_of,
    denominators_of,
    engine_step,
    make_rows,
    reference_model,
    reference_run,
    share,
    weights_of,
)
from helpers.distill import assert_a_student_learns_as_in_plain_pytorch
from helpers.engine_properties import LM, TIED, VALUE, Layout
from helpers.pairs import assert_pairs_learn_as_in_plain_pytorch
from helpers.scores import assert_scores_learn_as_in_plain_pytorch
from helpers.sft import assert_sft_equals_plain_pytorch
from helpers.tiny import save_tiny_model
from torch import Tensor

from lockstep.config import PPOConfig
from lockstep.errors import ConfigError
from lockstep.models.attention import CACHED
from lockstep.models.load import Head
from lockstep.models.packing import Budget
from lockstep.models.weight_files import WeightFiles
from lockstep.protocol import DataProto
from lockstep.workers.losses import make_policy_loss
from lockstep.workers.weight_sync.source import SharedWeights

pytest.importorskip("megatron.core")
import lockstep.backends.megatron.engine  # noqa: F401  (forked ranks have it then)

TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
LAYOUTS = {
    name: Layout("megatron", world, section, before=cuda_to_cpu.install)
    for name, (world, section) in {
        "one": (1, {}),
        "dp2": (2, {}),
        "dp2 whole optimizer": (2, {"use_distributed_optimizer": False}),
        "tp2": (2, {TP: 2}),
        "tp2 sp": (2, {TP: 2, "sequence_parallel": True}),
        "pp2": (2, {PP: 2}),
        "tp2 sp dp2": (4, {TP: 2, "sequence_parallel": True}),
        "tp2 sp pp2": (4, {TP: 2, PP: 2, "sequence_parallel": True}),
    }.items()
}

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
    "llama": ("llama", LM, {}, {"vocab_size": 37}),
    "qwen2 tied": ("qwen2", LM, {"recompute": "selective"}, {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", LM, {"recompute": "full"}, {"head_dim": 16, **_WINDOW}),
    "llama value": ("llama", VALUE, {"recompute": "full"}, {"rope_parameters": _LLAMA3}),
    "qwen3 value tied": ("qwen3", VALUE, {}, {"tie_word_embeddings": True}),
}
"""Family, head, options of the engine, changes to the config: a vocabulary that two ranks do not divide, tied and untied embeddings, heads
that are not a share of the hidden size, a window, scaled rotary embeddings."""


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
    path = save_tiny_model(tmp_path, family, value_head=head is VALUE, **changes)
    properties.assert_updates_equal_plain_pytorch(LAYOUTS[layout], path, head, **options)


@pytest.mark.parametrize(("layout", "budget"), [("pp2", Budget(10_000, 1)), ("tp2 sp", Budget(14))])
def test_the_micro_batch_budget_never_changes_an_update(tmp_path: Path, layout: str, budget: Budget) -> None:
    """A micro-batch for each row keeps a pipeline full; 14 tokens give micro-batches of lengths that two ranks do not divide."""
    properties.assert_updates_equal_plain_pytorch(LAYOUTS[layout], save_tiny_model(tmp_path), budget=budget)


def test_a_gradient_may_come_in_several_parts(tmp_path: Path) -> None:
    """Gradients are reduced over the ranks once an update, so that two passes before it add up."""
    path = save_tiny_model(tmp_path)
    model, expected = reference_run(path, LM, STEPS[:1])

    def train() -> tuple[float, dict[str, Tensor]]:
        engine = LAYOUTS["dp2"].engine(path)
        loss = make_policy_loss(ACTOR, 1.0).of(denominators_of(STEPS[0]))
        for half in (STEPS[0][:3], STEPS[0][3:]):
            mine = batch_of(share(half, 0, engine.rank, engine.world_size))
            engine.forward_backward(mine, loss, TWO_MICRO_BATCHES, TEMPERATURE, entropy_grad=True)
        return engine.optim_step().grad_norm, weights_of(engine)

    for norm, weights in LAYOUTS["dp2"].run(train):
        assert norm == pytest.approx(expected[0]["grad_norm"], rel=NUMBER_TOL)
        assert_weights_close(weights, model)


@pytest.mark.parametrize(("layout", "head"), [("tp2 sp", LM), ("pp2", VALUE)])
def test_rows_that_share_their_prompt_update_like_rows_alone(
    tmp_path: Path, layout: str, head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_tiny_model(tmp_path, value_head=head is VALUE)
    properties.assert_shared_prompts_change_nothing(LAYOUTS[layout], path, head, monkeypatch, recompute="full")


@pytest.mark.parametrize(("family", "layout"), [("llama", "tp2 sp"), ("qwen2", "pp2")])
def test_scores_equal_sequence_classification_one_row_at_a_time(tmp_path: Path, family: str, layout: str) -> None:
    properties.assert_scores_equal_one_row_at_a_time(LAYOUTS[layout], save_tiny_model(tmp_path, family, score_head=True))


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_a_value_head_that_the_folder_lacks_is_drawn_from_the_seed(tmp_path: Path, layout: str) -> None:
    properties.assert_a_missing_head_is_drawn_from_the_seed(LAYOUTS[layout], save_tiny_model(tmp_path))


def test_weights_that_cannot_be_read_in_parts_are_loaded_whole(tmp_path: Path) -> None:
    properties.assert_weights_may_come_in_another_form(LAYOUTS["tp2"], tmp_path)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("layout", ["tp2 sp", "pp2"])
def test_random_shapes_learn_as_plain_pytorch_does(tmp_path: Path, layout: str, seed: int) -> None:
    properties.assert_a_random_shape_learns(LAYOUTS[layout], tmp_path, seed)


@pytest.mark.parametrize(
    ("head", "route"),
    [(LM, ["pp2", "one", "tp2 sp"]), (VALUE, ["dp2", "pp2", "dp2 whole optimizer"])],
    ids=["tied lm", "value"],
)
def test_a_checkpoint_continues_in_another_layout(tmp_path: Path, head: Head, route: list[str]) -> None:
    path = save_tiny_model(tmp_path / "model", "qwen3", value_head=head is VALUE, vocab_size=33, **TIED)
    properties.assert_a_checkpoint_continues([LAYOUTS[layout] for layout in route], tmp_path, path, head)


def test_a_checkpoint_of_bf16_continues_exactly(tmp_path: Path) -> None:
    """The files have the float32 master weights, which the bfloat16 weights of the computation cannot stand in for."""
    path, saved, again = save_tiny_model(tmp_path / "model"), tmp_path / "saved", tmp_path / "again"

    def train(first: list[dict[str, Tensor]], load: bool) -> dict[str, Tensor]:
        engine = LAYOUTS["dp2"].engine(path, dtype="bfloat16")
        engine_step(engine, first, 0, TWO_MICRO_BATCHES)
        if load:
            engine.load(saved)
        engine.save(again if load else saved)
        engine_step(engine, STEPS[1], 1, TWO_MICRO_BATCHES)
        return weights_of(engine)

    expected = LAYOUTS["dp2"].run(train, STEPS[0], False)[0]
    weights = LAYOUTS["dp2"].run(train, make_rows(6, seed=9), True)[0]
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    files = sorted(file.relative_to(saved) for file in saved.rglob("*.safetensors"))
    assert len(files) == 6
    for file in files:
        assert (saved / file).read_bytes() == (again / file).read_bytes()


@pytest.mark.parametrize(("head", "layout"), [(LM, "tp2 sp"), (VALUE, "pp2")])
def test_a_checkpoint_is_a_hugging_face_folder(tmp_path: Path, head: Head, layout: str) -> None:
    properties.assert_a_checkpoint_is_a_hugging_face_folder(LAYOUTS[layout], tmp_path, head)


def test_saving_changes_nothing(tmp_path: Path) -> None:
    properties.assert_saving_changes_nothing(LAYOUTS["dp2"], tmp_path)


def test_saving_holds_few_weights_at_a_time(tmp_path: Path) -> None:
    properties.assert_saving_holds_few_weights(LAYOUTS["tp2"], tmp_path)


@pytest.mark.parametrize("layout", ["dp2", "tp2 sp", "pp2"])
def test_bf16_computes_near_fp32(tmp_path: Path, layout: str) -> None:
    """Weights are exported as they are computed with."""
    properties.assert_bf16_is_near_fp32(LAYOUTS[layout], save_tiny_model(tmp_path), norm_rtol=0.03, exported=torch.bfloat16)


@pytest.mark.parametrize("layout", ["one", "dp2", "dp2 whole optimizer", "tp2 sp pp2"])
def test_a_gradient_that_is_not_finite_changes_no_weight_and_leaves_no_gradient(tmp_path: Path, layout: str) -> None:
    properties.assert_a_gradient_that_is_not_finite_changes_nothing(LAYOUTS[layout], save_tiny_model(tmp_path))


@pytest.mark.parametrize("layout", ["dp2", "tp2", "tp2 sp pp2"])
def test_weights_for_generation_equal_the_folder_s_and_follow_updates(tmp_path: Path, layout: str) -> None:
    path = save_tiny_model(tmp_path, "qwen2", vocab_size=37)
    whole = {name: tensor.detach() for name, tensor in reference_model(path, LM).named_parameters()}

    def generate() -> tuple[bool, bool, int]:
        engine = LAYOUTS[layout].engine(path, decoder_attention=CACHED)
        shared = SharedWeights(engine, torch.float32)
        assert engine.decoder is not None
        with shared.borrowed() as copied:
            lent = dict(engine.decoder.named_parameters())
            same = lent.keys() == whole.keys() and all(torch.equal(lent[name], whole[name]) for name in whole)
        engine_step(engine, STEPS[0], 0, TWO_MICRO_BATCHES)
        trained = weights_of(engine)
        with shared.borrowed():
            lent = dict(engine.decoder.named_parameters())
            follows = all(torch.equal(lent[name], trained[name]) for name in trained)
        return same, follows, copied

    for same, follows, copied in LAYOUTS[layout].run(generate):
        assert same
        assert follows
        assert copied == sum(tensor.nbytes for tensor in whole.values())


def test_a_rank_reads_its_own_part_of_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of matrices that are divided by columns it reads all rows, and keeps its columns."""
    path = save_tiny_model(tmp_path)
    shapes = {name: parameter.numel() for name, parameter in reference_model(path, LM).named_parameters()}
    read: dict[str, int] = {}
    original = WeightFiles.read

    def counted(files: WeightFiles, name: str, start: int, stop: int) -> Tensor:
        rows = original(files, name, start, stop)
        read[name] = read.get(name, 0) + rows.numel()
        return rows

    monkeypatch.setattr(WeightFiles, "read", counted)

    def make() -> dict[str, int]:
        LAYOUTS["tp2 sp pp2"].engine(path)
        return read

    ranks = LAYOUTS["tp2 sp pp2"].run(make)
    for number, first in enumerate(("model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight")):
        for rank in ranks[2 * number : 2 * number + 2]:
            assert rank[first] == shapes[first] // 2
            other = f"model.layers.{1 - number}."
            assert not any(name.startswith(other) for name in rank)


def test_models_in_one_process_share_a_layout_and_another_one_is_refused(tmp_path: Path) -> None:
    """Actor, reference and critic side by side: none disturbs the others."""
    path, critic_path = save_tiny_model(tmp_path / "lm"), save_tiny_model(tmp_path / "value", value_head=True)
    actor_model, _ = reference_run(path, LM, STEPS)
    critic_model, _ = reference_run(critic_path, VALUE, STEPS)

    def train() -> tuple[dict[str, Tensor], dict[str, Tensor], DataProto, DataProto, str]:
        actor, reference = LAYOUTS["tp2 sp"].engine(path), LAYOUTS["tp2 sp"].engine(path, optim=None)
        critic = LAYOUTS["tp2 sp"].engine(critic_path, VALUE)
        mine = batch_of(share(STEPS[0], 0, actor.rank, 2))
        before = reference.forward(mine, TWO_MICRO_BATCHES)
        for update, rows in enumerate(STEPS):
            engine_step(actor, rows, update, TWO_MICRO_BATCHES)
            engine_step(critic, rows, update, TWO_MICRO_BATCHES)
        with pytest.raises(ConfigError) as error:
            LAYOUTS["pp2"].engine(path)
        return weights_of(actor), weights_of(critic), before, reference.forward(mine, TWO_MICRO_BATCHES), str(error.value)

    for actor, critic, before, after, message in LAYOUTS["tp2 sp"].run(train):
        assert_weights_close(actor, actor_model)
        assert_weights_close(critic, critic_model)
        assert torch.equal(before.ragged("log_probs").values, after.ragged("log_probs").values)
        assert "tensor_model_parallel_size=2 and pipeline_model_parallel_size=1" in message


def test_a_frozen_engine_has_no_optimizer_and_saves_and_loads_without_one(tmp_path: Path) -> None:
    properties.assert_a_frozen_engine_cannot_learn(LAYOUTS["tp2"], tmp_path)


def test_what_is_no_checkpoint_of_this_model_is_refused(tmp_path: Path) -> None:
    properties.assert_other_folders_are_refused(LAYOUTS["one"], tmp_path)


def test_a_checkpoint_of_fsdp2_continues_here_and_back(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model")
    properties.assert_a_checkpoint_continues([Layout("fsdp2", 2), LAYOUTS["tp2"], Layout("fsdp2", 1)], tmp_path, path)


def test_a_run_that_has_ended_leaves_no_layout_behind(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)

    def twice() -> tuple[dict[str, Tensor], ...]:
        rank, first = dist.get_rank(), weights_of(LAYOUTS["tp2"].engine(path))
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 2), rank=rank, world_size=2)
        return first, weights_of(LAYOUTS["pp2"].engine(path))

    for first, second in LAYOUTS["tp2"].run(twice):
        assert all(torch.equal(first[name], second[name]) for name in first)


def test_ppo_goes_as_with_fsdp2(embedded_config: Callable[..., PPOConfig]) -> None:
    properties.assert_ppo_goes_as_with_fsdp2(LAYOUTS["one"], embedded_config)


def test_supervised_updates_equal_plain_pytorch(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)
    for layout in (
        LAYOUTS["tp2 sp"],
        LAYOUTS["pp2"],
    ):
        assert_sft_equals_plain_pytorch(layout, path)


@pytest.mark.parametrize("layout", ["dp2", "tp2", "pp2"])
def test_an_update_on_preference_pairs_equals_plain_pytorch(tmp_path: Path, layout: str) -> None:
    assert_pairs_learn_as_in_plain_pytorch(LAYOUTS[layout], save_tiny_model(tmp_path))


@pytest.mark.parametrize("layout", ["dp2", "tp2", "pp2"])
def test_an_update_of_a_reward_model_equals_plain_pytorch(tmp_path: Path, layout: str) -> None:
    assert_scores_learn_as_in_plain_pytorch(LAYOUTS[layout], save_tiny_model(tmp_path / "scored", score_head=True))
    properties.assert_a_missing_head_is_drawn_from_the_seed(LAYOUTS[layout], save_tiny_model(tmp_path / "causal"), Head.SCORE)


@pytest.mark.parametrize(("layout", "changes"), [("one", TIED), ("dp2", {"padding": 2}), ("tp2", {}), ("tp2 sp", TIED)])
def test_an_update_of_a_student_equals_plain_pytorch(tmp_path: Path, layout: str, changes: dict[str, Any]) -> None:
    assert_a_student_learns_as_in_plain_pytorch(LAYOUTS[layout], tmp_path, **changes)
