"""torchtitan at one, two and four ranks, in every layout: the properties of helpers/engine_properties.py, and its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import engine_properties as properties
from helpers.conformance import (
    COLUMN_ATOL,
    STEPS,
    TEMPERATURE,
    TWO_MICRO_BATCHES,
    assert_weights_close,
    batch_of,
    engine_step,
    make_rows,
    reference_columns,
    reference_model,
    reference_run,
    weights_of,
)
from helpers.distill import assert_a_student_learns_as_in_plain_pytorch
from helpers.distributed import run_distributed
from helpers.engine_properties import LM, TIED, VALUE, Layout
from helpers.engines import make_tiny_engine
from helpers.pairs import assert_pairs_learn_as_in_plain_pytorch
from helpers.scores import assert_scores_learn_as_in_plain_pytorch
from helpers.sft import assert_sft_equals_plain_pytorch
from helpers.tiny import save_tiny_model
from torch import Tensor

from lockstep.backends.torchtitan.compat import prepare_import
from lockstep.config import PPOConfig
from lockstep.errors import ConfigError
from lockstep.models.load import Head
from lockstep.models.packing import Budget
from lockstep.workers.weight_sync.source import SharedWeights

pytest.importorskip("torchtitan")
prepare_import(torch.device("cpu"))
titan_engine = pytest.importorskip("lockstep.backends.torchtitan.engine")  # imported once, before ranks are forked

LAYOUTS = {
    name: Layout("torchtitan", world, {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline})
    for name, world, tensor, pipeline in (
        ("1", 1, 1, 1), ("dp2", 2, 1, 1), ("tp2", 2, 2, 1), ("pp2", 2, 1, 2), ("dp2 tp2", 4, 2, 1), ("pp4", 4, 1, 4), ("tp2 pp2", 4, 2, 2),
    )
}  # fmt: skip
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
    capfd.readouterr()
    properties.assert_updates_equal_plain_pytorch(LAYOUTS[layout], path, head, **options)
    assert capfd.readouterr() == ("", ""), "nothing that torchtitan or torch says reaches the user"


@pytest.mark.parametrize(("layout", "budget"), [("dp2", Budget(14)), ("pp4", Budget(10_000, 1)), ("pp2", Budget(10_000))])
def test_the_micro_batch_budget_never_changes_an_update(tmp_path: Path, layout: str, budget: Budget) -> None:
    path = save_tiny_model(tmp_path, num_hidden_layers=4 if layout == "pp4" else 2)
    properties.assert_updates_equal_plain_pytorch(LAYOUTS[layout], path, budget=budget)


@pytest.mark.parametrize(("layout", "head"), [("tp2", LM), ("pp2", VALUE)])
def test_rows_that_share_their_prompt_update_like_rows_alone(
    tmp_path: Path, layout: str, head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_tiny_model(tmp_path, value_head=head is VALUE)
    properties.assert_shared_prompts_change_nothing(LAYOUTS[layout], path, head, monkeypatch)


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
        return (
            LAYOUTS["1"]
            .engine(path, optim=None)
            .forward(batch_of([row]), TWO_MICRO_BATCHES, TEMPERATURE)
            .ragged("log_probs")
            .values
        )

    found, want = run_distributed(score, 1)[0], reference_columns(model, LM, row)["log_probs"].detach()
    torch.testing.assert_close(found, want, atol=COLUMN_ATOL, rtol=0)
    assert (want - reference_columns(plain, LM, row)["log_probs"]).abs().max() > 1e-3, "the variant makes no difference here"


@pytest.mark.parametrize(("layout", "model_type"), [("tp2", "llama"), ("pp2", "qwen2")])
def test_scores_equal_sequence_classification_one_row_at_a_time(tmp_path: Path, layout: str, model_type: str) -> None:
    properties.assert_scores_equal_one_row_at_a_time(LAYOUTS[layout], save_tiny_model(tmp_path, model_type, score_head=True))


@pytest.mark.parametrize(
    ("head", "route"),
    [(LM, ["dp2", "1", "tp2", "pp2"]), (VALUE, ["pp2", "1", "dp2 tp2"])],
    ids=["tied lm", "value"],
)
def test_a_checkpoint_continues_in_every_layout(tmp_path: Path, head: Head, route: list[str]) -> None:
    path = save_tiny_model(tmp_path / "model", value_head=head is VALUE, tie_word_embeddings=head is LM)
    properties.assert_a_checkpoint_continues([LAYOUTS[layout] for layout in route], tmp_path, path, head)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_random_shapes_learn_as_plain_pytorch_does(tmp_path: Path, layout: str, seed: int) -> None:
    properties.assert_a_random_shape_learns(LAYOUTS[layout], tmp_path, seed)


def test_a_checkpoint_of_fsdp2_continues_here(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model")
    properties.assert_a_checkpoint_continues([Layout("fsdp2", 2), LAYOUTS["dp2"]], tmp_path, path)


@pytest.mark.parametrize(("layout", "head"), [("pp2", LM), ("dp2", VALUE)])
def test_a_checkpoint_is_a_hugging_face_folder(tmp_path: Path, layout: str, head: Head) -> None:
    properties.assert_a_checkpoint_is_a_hugging_face_folder(LAYOUTS[layout], tmp_path, head)


@pytest.mark.parametrize("layout", ["1", "pp2"])
def test_a_decoder_of_the_engine_has_its_present_weights(tmp_path: Path, layout: str) -> None:
    path = save_tiny_model(tmp_path, "qwen2", **TIED)
    model, _ = reference_run(path, LM, STEPS[:1])
    ids = torch.arange(2, 9)[None]

    def decode() -> tuple[Tensor, int]:
        engine = LAYOUTS[layout].engine(path, decoder_attention="sdpa")
        engine_step(engine, STEPS[0], 0, TWO_MICRO_BATCHES)
        with torch.no_grad(), SharedWeights(engine, torch.float32).borrowed() as copied:
            return engine.decoder(input_ids=ids).logits, copied

    with torch.no_grad():
        expected = model(input_ids=ids).logits
    for logits, copied in LAYOUTS[layout].run(decode):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
        assert (copied == 0) == (layout == "1"), "on one rank the decoder's weights are the engine's"


def test_saving_changes_nothing(tmp_path: Path) -> None:
    properties.assert_saving_changes_nothing(LAYOUTS["pp2"], tmp_path)


def test_saving_holds_few_weights_at_a_time(tmp_path: Path) -> None:
    properties.assert_saving_holds_few_weights(LAYOUTS["dp2"], tmp_path)


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_bf16_computes_near_fp32_and_keeps_fp32_weights(tmp_path: Path, layout: str) -> None:
    properties.assert_bf16_is_near_fp32(LAYOUTS[layout], save_tiny_model(tmp_path))


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
    properties.assert_a_gradient_that_is_not_finite_changes_nothing(LAYOUTS[layout], save_tiny_model(tmp_path))


def test_a_loss_that_is_not_finite_names_its_rows_and_changes_no_weight(tmp_path: Path) -> None:
    properties.assert_a_loss_that_is_not_finite_names_its_rows(LAYOUTS["tp2"], save_tiny_model(tmp_path))


def test_a_value_head_that_the_folder_lacks_is_drawn_from_the_seed(tmp_path: Path) -> None:
    properties.assert_a_missing_head_is_drawn_from_the_seed(LAYOUTS["tp2"], save_tiny_model(tmp_path))


def test_weights_that_cannot_be_read_in_parts_are_loaded_whole(tmp_path: Path) -> None:
    properties.assert_weights_may_come_in_another_form(LAYOUTS["dp2"], tmp_path)


def test_a_frozen_engine_has_no_optimizer_and_saves_and_loads_without_one(tmp_path: Path) -> None:
    properties.assert_a_frozen_engine_cannot_learn(LAYOUTS["dp2"], tmp_path)


def test_what_is_not_a_checkpoint_of_this_model_is_refused(tmp_path: Path) -> None:
    properties.assert_other_folders_are_refused(LAYOUTS["1"], tmp_path)


def test_a_layout_that_cannot_be_is_refused_when_the_engine_is_made(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)

    def refuse() -> None:
        with pytest.raises(ConfigError, match="must divide the 1 ranks"):
            LAYOUTS["tp2"].engine(path)

    run_distributed(refuse, 1)


def test_ppo_goes_as_with_fsdp2(embedded_config: Callable[..., PPOConfig]) -> None:
    properties.assert_ppo_goes_as_with_fsdp2(LAYOUTS["1"], embedded_config)


def test_supervised_updates_equal_plain_pytorch(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)
    for layout in (
        LAYOUTS["tp2"],
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


@pytest.mark.parametrize(("layout", "changes"), [("1", TIED), ("dp2", {"padding": 2}), ("tp2", {})])
def test_an_update_of_a_student_equals_plain_pytorch(tmp_path: Path, layout: str, changes: dict[str, Any]) -> None:
    assert_a_student_learns_as_in_plain_pytorch(LAYOUTS[layout], tmp_path, **changes)
