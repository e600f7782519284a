import functools
from pathlib import Path

import pytest

from lockstep import cli
from lockstep.algorithms.advantages import ADV_ESTIMATORS
from lockstep.algorithms.policy_losses import POLICY_LOSSES
from lockstep.config.identity import kept_values
from lockstep.config.keys import check_key, valid_keys
from lockstep.config.load import leaves, load_config, load_recipe, of_layers, read_layers
from lockstep.config.ppo import PPOConfig
from lockstep.config.presets import (
    ALGORITHMS,
    FIRST_RUN,
    SIZES,
    STAGE_SIZES,
    first_run_in_words,
    first_run_on_cpu,
    first_stage_in_words,
)
from lockstep.config.reference import ROOTS

NAMED = ["data.train_files=train.parquet", "actor_rollout_ref.model.path=model"]
EXAMPLES = sorted((Path(__file__).parents[2] / "examples/algorithms").glob("*.yaml"))


def test_every_preset_is_a_command_and_every_algorithm_has_one():
    assert ["ppo", *cli.ALGORITHMS] == list(ALGORITHMS)
    configs = [load_config(NAMED, algorithm=name) for name in ALGORITHMS]
    estimators = {config.algorithm.adv_estimator for config in configs}
    losses = {config.actor_rollout_ref.actor.policy_loss.loss_mode for config in configs}
    # distill needs a teacher, dro has no paper's recipe here, dppo_kl is dppo's other measure, tir_... is another name of the same.
    assert set(ADV_ESTIMATORS) - estimators == {"distill", "tir_optimal_token_baseline"}
    assert set(POLICY_LOSSES) - losses == {"dro", "dppo_kl"}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_preset_lies_between_the_defaults_and_the_user(name):
    whole = load_config(NAMED, algorithm=name)
    for key, value in leaves(ALGORITHMS[name]):
        assert functools.reduce(getattr, key.split("."), whole) == value, key
    config = load_config([*NAMED, "actor_rollout_ref.rollout.n=3", "data.max_response_length=64"], algorithm=name)
    assert config.actor_rollout_ref.rollout.n == 3


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_command_is_the_example_on_the_embedded_task(example):
    assert load_config(algorithm=example.stem) == load_config(config_file=example)


def test_the_docs_name_every_command():
    text = (EXAMPLES[0].parents[2] / "docs/algorithms/index.md").read_text()
    assert [name for name in ALGORITHMS if f"`{name}`" not in text] == []


def loaded(*overrides, device="cpu", algorithm="ppo", file=None):
    """The configuration and the origins of its layers, on a machine whose best device is `device`."""
    layers = read_layers(PPOConfig, overrides, file, algorithm, lambda name: device if name == "auto" else name)
    return of_layers(PPOConfig, layers), [layer.origin for layer in layers]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_on_a_cpu_a_step_has_32_responses_whatever_the_group(algorithm):
    config, origins = loaded(*NAMED, algorithm=algorithm)
    assert FIRST_RUN in origins
    assert config.data.train_batch_size * config.actor_rollout_ref.rollout.n == 32
    assert (config.data.max_response_length, config.trainer.total_training_steps) == (128, 6)


def test_it_is_never_asked_of_a_gpu_nor_where_a_size_is_named_nor_by_a_program(tmp_path):
    usual = load_config(NAMED)
    assert usual.data.train_batch_size == 64
    assert loaded(*NAMED, device="cuda") == (usual, ["command line"])
    for key in SIZES:
        check_key(key)
        value = "[calculator]" if key == "agent.tools" else 2
        layers = read_layers(PPOConfig, [*NAMED, f"{key}={value}"], device_of=lambda name: pytest.fail("the device was asked for"))
        assert FIRST_RUN not in [layer.origin for layer in layers], key
    (tmp_path / "keys.yaml").write_text("data: {max_response_length: 512}\n")
    assert loaded(*NAMED, file=tmp_path / "keys.yaml")[0] == usual
    embedded, origins = loaded()
    assert embedded == load_config()
    assert FIRST_RUN not in origins


def test_a_model_of_ones_own_is_enough():
    """As docs/generation.md has it, on the embedded task's words: 32 steps of 64 responses of 512 tokens would take a CPU hours."""
    config, origins = loaded("actor_rollout_ref.model.path=model")
    assert FIRST_RUN in origins
    assert (config.data.train_files, config.data.train_batch_size, config.trainer.total_training_steps) == ("embedded", 32, 6)


def test_the_device_that_was_named_decides():
    assert FIRST_RUN in loaded(*NAMED, "trainer.device=cpu", device="cuda")[1]
    assert FIRST_RUN not in loaded(*NAMED, "trainer.device=cuda")[1]


def test_it_has_a_folder_of_its_own_and_goes_on_with_its_keys_and_more_steps():
    config, _ = loaded(*NAMED, algorithm="grpo")
    keys = dict(leaves(first_run_on_cpu("grpo"))) | {"trainer.total_training_steps": 100}
    longer = load_config([*NAMED, *(f"{key}={value}" for key, value in keys.items())], algorithm="grpo")
    assert kept_values(longer) == kept_values(config)
    assert longer.trainer.run_dir == config.trainer.run_dir
    assert loaded(*NAMED, device="cuda", algorithm="grpo")[0].trainer.run_dir != config.trainer.run_dir


def test_its_words_are_keys_to_copy():
    words = first_run_in_words("grpo")
    assert all(f"{key}={value}" in words for key, value in leaves(first_run_on_cpu("grpo")))


def test_the_docs_say_the_keys_that_the_program_prints():
    page = (Path(__file__).parents[2] / "docs/recipes.md").read_text()
    assert "\n".join(first_run_in_words("grpo").splitlines()[:2]) in page
    assert all(f"`{key}`" in page for key in SIZES if key.startswith(("data.", "actor_rollout_ref.rollout", "trainer.total")))


STAGES = [root for command, root in ROOTS.items() if command != "ppo"]
STAGE_KEYS = ("model.path=model", "data.train_files=rows.jsonl")


def loaded_stage(root, *overrides, device="cpu"):
    needed = [*STAGE_KEYS, *(["teacher.path=teacher"] if "teacher.path" in valid_keys(root) else [])]
    layers = read_layers(root, [*needed, *overrides], device_of=lambda name: device if name == "auto" else name)
    return of_layers(root, layers), {layer.origin: layer for layer in layers}, load_recipe(root, [*needed, *overrides])


@pytest.mark.parametrize("root", STAGES, ids=lambda root: root.command)
def test_other_recipes_are_small_on_a_cpu_too(root):
    config, layers, usual = loaded_stage(root)
    assert (config.data.train_batch_size, config.data.max_length, config.trainer.total_training_steps) == (8, 512, 10)
    assert config.data.filter_overlong_rows
    assert usual.data.train_batch_size == 64
    assert loaded_stage(root, device="cuda")[0] == usual
    for key, value in leaves(layers[FIRST_RUN].values):
        check_key(key, root)
        assert f"{key}={value}".lower() in first_stage_in_words(layers[FIRST_RUN].values).lower()
    assert "\n" not in first_stage_in_words(layers[FIRST_RUN].values)
    for key in set(STAGE_SIZES) & set(valid_keys(root)):
        config, layers, usual = loaded_stage(root, f"{key}=4")
        assert FIRST_RUN not in layers, key
        assert config == usual
    config, layers, _ = loaded_stage(root, "data.truncation=left")
    assert FIRST_RUN in layers
    assert not config.data.filter_overlong_rows  # rows are cut, as the user says
    assert loaded_stage(root, "engine.max_token_len_per_gpu=300")[0].data.max_length <= 300
    if "sampled.files" in valid_keys(root):
        assert loaded_stage(root, "sampled.files=prompts.parquet")[0].sampled.max_samples == 8
