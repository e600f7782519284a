"""The veomni engine over layouts of ranks: the properties of helpers/engine_properties.py at their tolerances, and its own."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import engine_properties as properties
from helpers.conformance import STEPS, TWO_MICRO_BATCHES, batch_of
from helpers.distill import assert_a_student_learns_as_in_plain_pytorch
from helpers.distributed import run_distributed
from helpers.engine_properties import LM, TIED, VALUE, Layout
from helpers.engines import engine_choice, make_tiny_engine
from helpers.mixtures import MIXTURES
from helpers.pairs import assert_pairs_learn_as_in_plain_pytorch
from helpers.scores import assert_scores_learn_as_in_plain_pytorch
from helpers.sft import assert_sft_equals_plain_pytorch
from helpers.tiny import save_tiny_model, tiny_config

from lockstep.backends.veomni import check as veomni_check
from lockstep.backends.veomni.build import quiet_veomni
from lockstep.errors import ConfigError
from lockstep.models.load import Head
from lockstep.protocol import DataProto
from lockstep.workers.engine import spec
from lockstep.workers.engine.registry import check_engine

with quiet_veomni():  # here once, and not in every rank
    pytest.importorskip("veomni", reason="the package veomni is not installed")
    importlib.import_module("veomni.distributed.torch_parallelize")
    for family in veomni_check.FAMILIES:
        importlib.import_module(f"veomni.models.transformers.{family}.generated.patched_modeling_{family}_gpu")


def veomni(world: int, sequence: int = 1, **section: Any) -> Layout:
    return Layout("veomni", world, {"ulysses_parallel_size": sequence, **section})


CASES = {
    "one rank": (veomni(1), "llama", LM, {"recompute": "full"}, {}),
    "dp2": (veomni(2), "qwen2", LM, {"recompute": "selective"}, TIED),
    "dp2, two copies": (veomni(2, fsdp_size=1), "qwen3", VALUE, {}, TIED),
    "sp2": (veomni(2, 2), "qwen3", LM, {"recompute": "full"}, TIED),
    "sp2 value": (veomni(2, 2), "qwen2", VALUE, {}, {}),
    "dp2 sp2": (veomni(4, 2), "llama", LM, {}, {}),
    "dp2 sp2, two copies": (veomni(4, 2, fsdp_size=2), "llama", VALUE, {}, {}),
    "mixture, one rank": (veomni(1), "qwen3_moe", LM, {"recompute": "full"}, MIXTURES["qwen3_moe"]),
    "mixture, dp2 value": (veomni(2), "qwen3_moe", VALUE, {}, MIXTURES["qwen3_moe"]),
    "mixture, sp2": (veomni(2, 2), "qwen3_moe", LM, {}, MIXTURES["qwen3_moe"] | TIED),
}


@pytest.mark.parametrize("case", CASES)
def test_two_updates_equal_plain_pytorch(tmp_path: Path, case: str) -> None:
    layout, model_type, head, options, changes = CASES[case]
    path = save_tiny_model(tmp_path, model_type, value_head=head is VALUE, **changes)
    properties.assert_updates_equal_plain_pytorch(layout, path, head, **options)


@pytest.mark.parametrize("seed", range(2))
def test_random_shapes_learn_as_plain_pytorch_does(tmp_path: Path, seed: int) -> None:
    properties.assert_a_random_shape_learns(veomni(2, 2), tmp_path, seed)


def test_rows_that_share_their_prompt_update_like_rows_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    properties.assert_shared_prompts_change_nothing(veomni(2, 2), save_tiny_model(tmp_path), LM, monkeypatch)


def test_bf16_computes_near_fp32_and_keeps_fp32_weights(tmp_path: Path) -> None:
    properties.assert_bf16_is_near_fp32(veomni(2), save_tiny_model(tmp_path))


@pytest.mark.parametrize(("layout", "model_type"), [(veomni(1), "llama"), (veomni(2), "qwen2"), (veomni(2, 2), "qwen3")])
def test_scores_equal_sequence_classification_one_row_at_a_time(tmp_path: Path, layout: Layout, model_type: str) -> None:
    properties.assert_scores_equal_one_row_at_a_time(layout, save_tiny_model(tmp_path, model_type, score_head=True))


def test_a_value_head_that_the_folder_lacks_is_drawn_from_the_seed(tmp_path: Path) -> None:
    properties.assert_a_missing_head_is_drawn_from_the_seed(veomni(2), save_tiny_model(tmp_path))


@pytest.mark.parametrize("head", [LM, VALUE])
def test_a_checkpoint_continues_in_other_layouts_and_in_another_engine(tmp_path: Path, head: Head) -> None:
    path = save_tiny_model(tmp_path / "model", value_head=head is VALUE, tie_word_embeddings=head is LM)
    properties.assert_a_checkpoint_continues([veomni(2), veomni(1), veomni(2, 2), Layout("fsdp2")], tmp_path, path, head)


def test_a_checkpoint_of_a_mixture_continues_in_another_engine(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model", "qwen3_moe", **MIXTURES["qwen3_moe"])
    properties.assert_a_checkpoint_continues([veomni(2), Layout("fsdp2"), veomni(1)], tmp_path, path)


@pytest.mark.parametrize("head", [LM, VALUE])
def test_a_checkpoint_is_a_hugging_face_folder(tmp_path: Path, head: Head) -> None:
    properties.assert_a_checkpoint_is_a_hugging_face_folder(veomni(2, 2), tmp_path, head)


def test_generation_is_each_rank_alone_and_needs_no_veomni(tmp_path: Path) -> None:
    properties.assert_a_rank_generates_alone(veomni(2, 2), save_tiny_model(tmp_path))


def test_weights_that_cannot_be_read_in_parts_are_loaded_whole(tmp_path: Path) -> None:
    properties.assert_weights_may_come_in_another_form(veomni(1), tmp_path)


def test_a_second_engine_has_the_layout_of_the_first_or_is_refused(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)

    def make() -> None:
        veomni(2, 2).engine(path)
        veomni(2, 2).engine(path, optim=None)
        with pytest.raises(ConfigError, match=r"'ulysses_size': 2.* already, not .*'ulysses_size': 1.*give all models"):
            veomni(2).engine(path, optim=None)

    run_distributed(make, 2)


def test_ranks_that_were_taken_down_and_set_up_again_get_a_layout_of_their_own(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)

    def make_twice() -> tuple[DataProto, DataProto]:
        before = make_tiny_engine(path, "veomni").forward(batch_of(STEPS[0]), TWO_MICRO_BATCHES)
        dist.destroy_process_group()
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        return before, make_tiny_engine(path, "veomni").forward(batch_of(STEPS[0]), TWO_MICRO_BATCHES)

    ((before, after),) = run_distributed(make_twice, 1)
    assert torch.equal(before.ragged("log_probs").values, after.ragged("log_probs").values)


@pytest.mark.parametrize(
    ("section", "family", "world", "words"),
    [
        ({"ulysses_parallel_size": 2}, "llama", 3, r"a\.veomni\.ulysses_parallel_size=2 must divide the 3 ranks"),
        ({"ulysses_parallel_size": 8}, "llama", 8, r"a\.veomni\.ulysses_parallel_size=8 must divide the model's 4 attention heads"),
        ({"fsdp_size": 3}, "llama", 4, r"a\.veomni\.fsdp_size=3 must divide the 4 ranks"),
        (
            {"fsdp_size": 1, "ulysses_parallel_size": 2},
            "qwen3",
            4,
            r"fsdp_size=1 .* multiple of a\.veomni\.ulysses_parallel_size=2",
        ),
        ({}, "mistral", 1, r"llama, qwen2, qwen3, qwen3_moe, and the model is a mistral; set strategy=fsdp2"),
    ],
)
def test_what_cannot_be_is_refused(section: dict[str, Any], family: str, world: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_engine(engine_choice("veomni", **section), tiny_config(family), world, "cpu", "a")
    check_engine(engine_choice("veomni", fsdp_size=2, ulysses_parallel_size=2), tiny_config(), 4, "cpu")


def test_a_missing_package_is_named_with_its_command_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_tiny_model(tmp_path)
    monkeypatch.setattr(veomni_check, "find_spec", lambda name: None)
    monkeypatch.setattr(spec, "load_on_meta", None)

    def make() -> None:
        with pytest.raises(ConfigError, match=r"needs the package veomni.*pip install --no-deps veomni"):
            make_tiny_engine(path, "veomni")

    run_distributed(make, 1)


def test_nothing_reaches_the_terminal(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)
    program = f"""
from helpers.engines import make_tiny_engine
import torch.distributed as dist
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
make_tiny_engine({path!r}, "veomni")
"""
    helpers = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {helpers!r})" + program],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_supervised_updates_equal_plain_pytorch(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)
    for layout in (veomni(2, 2),):
        assert_sft_equals_plain_pytorch(layout, path)


def test_an_update_on_preference_pairs_equals_plain_pytorch(tmp_path: Path) -> None:
    assert_pairs_learn_as_in_plain_pytorch(veomni(2, 2), save_tiny_model(tmp_path))


def test_an_update_of_a_reward_model_equals_plain_pytorch(tmp_path: Path) -> None:
    assert_scores_learn_as_in_plain_pytorch(veomni(2, 2), save_tiny_model(tmp_path / "scored", score_head=True))
    properties.assert_a_missing_head_is_drawn_from_the_seed(veomni(2), save_tiny_model(tmp_path / "causal"), Head.SCORE)


@pytest.mark.parametrize(("world", "changes"), [(1, TIED), (2, {"padding": 2})])
def test_an_update_of_a_student_equals_plain_pytorch(tmp_path: Path, world: int, changes: dict[str, Any]) -> None:
    assert_a_student_learns_as_in_plain_pytorch(veomni(world), tmp_path, **changes)
