"""A run on a CPU that does not say how large it is: small there, as usual everywhere else."""

from pathlib import Path

import pytest

from lockstep.config.first_run import ORIGIN, SIZES, STAGE_SIZES, first_run_on_cpu, in_words, stage_in_words
from lockstep.config.load import check_key, leaves, load_config, load_recipe, of_layers, read_layers, valid_keys
from lockstep.config.ppo import PPOConfig
from lockstep.config.presets import ALGORITHMS
from lockstep.config.reference import ROOTS
from lockstep.config.resume import kept_values

NAMED = ["data.train_files=train.parquet", "actor_rollout_ref.model.path=model"]


def loaded(*overrides, device="cpu", algorithm="ppo", file=None):
    """The configuration and the origins of its layers, on a machine whose best device is `device`."""
    layers = read_layers(PPOConfig, overrides, file, algorithm, lambda name: device if name == "auto" else name)
    return of_layers(PPOConfig, layers), [layer.origin for layer in layers]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_on_a_cpu_a_step_has_32_responses_whatever_the_group(algorithm):
    config, origins = loaded(*NAMED, algorithm=algorithm)
    assert ORIGIN in origins
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
        assert ORIGIN not in [layer.origin for layer in layers], key
    (tmp_path / "keys.yaml").write_text("data: {max_response_length: 512}\n")
    assert loaded(*NAMED, file=tmp_path / "keys.yaml")[0] == usual
    embedded, origins = loaded()
    assert embedded == load_config()
    assert ORIGIN not in origins


def test_a_model_of_ones_own_is_enough():
    """As docs/generation.md has it, on the embedded task's words: 32 steps of 64 responses of 512 tokens would take a CPU hours."""
    config, origins = loaded("actor_rollout_ref.model.path=model")
    assert ORIGIN in origins
    assert (config.data.train_files, config.data.train_batch_size, config.trainer.total_training_steps) == ("embedded", 32, 6)


def test_the_device_that_was_named_decides():
    assert ORIGIN in loaded(*NAMED, "trainer.device=cpu", device="cuda")[1]
    assert ORIGIN not in loaded(*NAMED, "trainer.device=cuda")[1]


def test_it_has_a_folder_of_its_own_and_goes_on_with_its_keys_and_more_steps():
    config, _ = loaded(*NAMED, algorithm="grpo")
    keys = dict(leaves(first_run_on_cpu("grpo"))) | {"trainer.total_training_steps": 100}
    longer = load_config([*NAMED, *(f"{key}={value}" for key, value in keys.items())], algorithm="grpo")
    assert kept_values(longer) == kept_values(config)
    assert longer.trainer.run_dir == config.trainer.run_dir
    assert loaded(*NAMED, device="cuda", algorithm="grpo")[0].trainer.run_dir != config.trainer.run_dir


def test_its_words_are_keys_to_copy():
    words = in_words("grpo")
    assert all(f"{key}={value}" in words for key, value in leaves(first_run_on_cpu("grpo")))


def test_the_docs_say_the_keys_that_the_program_prints():
    page = (Path(__file__).parents[2] / "docs/recipes.md").read_text()
    assert "\n".join(in_words("grpo").splitlines()[:2]) in page
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
    for key, value in leaves(layers[ORIGIN].values):
        check_key(key, root)
        assert f"{key}={value}".lower() in stage_in_words(layers[ORIGIN].values).lower()
    assert "\n" not in stage_in_words(layers[ORIGIN].values)
    for key in set(STAGE_SIZES) & set(valid_keys(root)):
        config, layers, usual = loaded_stage(root, f"{key}=4")
        assert ORIGIN not in layers, key
        assert config == usual
    config, layers, _ = loaded_stage(root, "data.truncation=left")
    assert ORIGIN in layers
    assert not config.data.filter_overlong_rows  # rows are cut, as the user says
    assert loaded_stage(root, "engine.max_token_len_per_gpu=300")[0].data.max_length <= 300
    if "sampled.files" in valid_keys(root):
        assert loaded_stage(root, "sampled.files=prompts.parquet")[0].sampled.max_samples == 8
