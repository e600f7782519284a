"""Sizes that the user did not set follow those that the user set: they are never the reason of an error."""

import functools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.algorithms.advantages import ADV_ESTIMATORS, required_inputs
from lockstep.config import follow
from lockstep.config.load import as_config, load_config, load_recipe, with_changes
from lockstep.config.presets import ALGORITHMS
from lockstep.config.reference import ROOTS
from lockstep.errors import ConfigError

ACTOR, CRITIC = "actor_rollout_ref.actor", "critic"
OWN = ("data.train_files=train.parquet", "actor_rollout_ref.model.path=model")
SIZES = {
    "data.train_batch_size": (1, 200), "data.train_max_samples": (1, 300), "data.val_batch_size": (1, 64),
    "data.max_prompt_length": (1, 2000), "data.max_response_length": (1, 2000),
    f"{ACTOR}.ppo_mini_batch_size": (1, 100), f"{CRITIC}.ppo_mini_batch_size": (1, 100),
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": (1, 8), f"{ACTOR}.ppo_max_token_len_per_gpu": (2, 3000),
    f"{CRITIC}.ppo_max_token_len_per_gpu": (2, 3000), "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": (2, 3000),
    "actor_rollout_ref.rollout.n": (1, 16), "actor_rollout_ref.rollout.max_num_seqs": (1, 64),
    "reward.overlong_buffer.len": (1, 1000), "algorithm.kl_ctrl.horizon": (10, 20000),
    "trainer.n_gpus_per_node": (1, 8), "trainer.total_training_steps": (1, 5),
    f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": (1, 4),
}  # fmt: skip
STAGE_SIZES = {
    "data.train_batch_size": (1, 200), "data.train_max_samples": (1, 300), "data.val_max_samples": (1, 64), "data.max_length": (2, 5000),
    "engine.max_token_len_per_gpu": (4, 5000), "engine.micro_batch_size_per_gpu": (2, 8), "trainer.n_gpus_per_node": (1, 8),
    "engine.fsdp_config.ulysses_sequence_parallel_size": (1, 4), "distill.max_response_length": (1, 3000),
}  # fmt: skip


def value_of(config, key):
    return functools.reduce(getattr, key.split("."), config)


@functools.cache
def _plain(algorithm):
    return load_config(OWN, algorithm=algorithm)


@st.composite
def some_sizes(draw, sizes):
    keys = draw(st.lists(st.sampled_from(sorted(sizes)), min_size=1, max_size=3, unique=True))
    return {key: draw(st.integers(*sizes[key])) for key in keys}


def user_conflict(config, said):
    """Whether what the user said cannot be true together, whatever the other values are."""
    batch = said.get("data.train_batch_size")
    minis = [f"{ACTOR}.ppo_mini_batch_size"] + ([f"{CRITIC}.ppo_mini_batch_size"] if config["critic"] else [])
    sizes = [said[key] for key in minis if key in said]
    if batch and any(batch % size for size in sizes):
        return True
    response, buffer = said.get("data.max_response_length"), said.get("reward.overlong_buffer.len", 1) if config["overlong"] else 1
    if response and response < buffer:
        return True
    ranks = said.get(f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size", 1)
    budgets = [said.get(f"{ACTOR}.ppo_max_token_len_per_gpu", math.inf) * ranks]
    budgets.append(said.get("actor_rollout_ref.ref.log_prob_max_token_len_per_gpu", math.inf) * ranks)
    if config["critic"]:
        budgets.append(said.get(f"{CRITIC}.ppo_max_token_len_per_gpu", math.inf))
    if said.get("data.max_prompt_length", 1) + (response or buffer) > min(budgets):
        return True
    prompts, samples = batch or math.lcm(*sizes), said.get("actor_rollout_ref.rollout.n", 2)
    return (
        config["adaptive"] and "algorithm.kl_ctrl.horizon" in said and 0.2 * prompts * samples >= said["algorithm.kl_ctrl.horizon"]
    )


@settings(max_examples=30, deadline=None)
@given(said=some_sizes(SIZES), algorithm=st.sampled_from(list(ALGORITHMS)), own=st.booleans(), adaptive=st.booleans())
def test_a_ppo_run_never_fails_because_of_a_size_that_was_not_set(said, algorithm, own, adaptive):
    words = [*(OWN if own else ()), *(f"{key}={value}" for key, value in said.items())]
    words += ["algorithm.kl_ctrl.type=adaptive"] if adaptive else []
    plain = _plain(algorithm)
    traits = {
        "critic": plain.use_critic, "overlong": plain.reward.overlong_buffer.enable,
        "adaptive": adaptive and (plain.algorithm.use_kl_in_reward or (not own and algorithm == "ppo")),
    }  # fmt: skip
    try:
        config = load_config(words, algorithm=algorithm)
    except ConfigError:
        assert user_conflict(traits, said), words
        return
    assert {key: value_of(config, key) for key in said} == said
    rows = follow.for_rows(config, 7)
    minis = [said[key] for key in (f"{ACTOR}.ppo_mini_batch_size", f"{CRITIC}.ppo_mini_batch_size") if key in said]
    if "data.train_batch_size" not in said and all(7 % mini == 0 for mini in minis):
        config = with_changes(config, rows)
        assert config.data.train_batch_size <= 7
    floor = said.get("reward.overlong_buffer.len", 1) if traits["overlong"] else 1
    if said.get("data.max_prompt_length", 1) + said.get("data.max_response_length", floor) <= 300:
        config = with_changes(config, follow.for_context(config, 300))
        assert config.data.max_prompt_length + config.data.max_response_length <= 300
    assert {key: value_of(config, key) for key in said} == said


@settings(max_examples=30, deadline=None)
@given(said=some_sizes(STAGE_SIZES), command=st.sampled_from([name for name in ROOTS if name != "ppo"]))
def test_another_recipe_never_fails_because_of_a_size_that_was_not_set(said, command):
    said = {key: value for key, value in said.items() if command == "distill" or not key.startswith("distill.")}
    words = ["model.path=model", "data.train_files=rows.jsonl", *(f"{key}={value}" for key, value in said.items())]
    if command == "distill":  # which does not divide rows
        said.pop("engine.fsdp_config.ulysses_sequence_parallel_size", None)
        words = [*(word for word in words if "ulysses" not in word), "teacher.path=teacher"]
    budget = said.get("engine.max_token_len_per_gpu", math.inf) * said.get("engine.fsdp_config.ulysses_sequence_parallel_size", 1)
    rows = 2 if command in ("dpo", "reward-model") else 1
    longest = said.get("data.max_length", 2) * rows + (said.get("distill.max_response_length", 1) if command == "distill" else 0)
    try:
        config = load_recipe(ROOTS[command], words)
    except ConfigError:
        assert longest > budget, words
        assert "engine.micro_batch_size_per_gpu" not in said, words
        return
    config = with_changes(config, follow.for_rows(config, 7))
    assert "data.train_batch_size" in said or config.data.train_batch_size <= 7
    if longest <= 300:
        config = with_changes(config, follow.for_context(config, 300))
        assert getattr(config, "longest", config.data.max_length) <= 300
    assert {key: value_of(config, key) for key in said} == said


@pytest.mark.parametrize("batch", [1, 4, 48, 50, 97])
def test_the_embedded_mini_batch_follows_the_batch_as_near_as_it_can(batch):
    config = load_config([f"data.train_batch_size={batch}"])
    assert (config.data.train_batch_size, config.actor_mini_batch_prompts) == (batch, {48: 24, 50: 25}.get(batch, batch))


def test_processes_are_as_many_as_a_model_is_divided_among():
    ulysses = f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size"
    assert load_config([*OWN, f"{ulysses}=4"]).trainer.n_gpus_per_node == 4
    assert load_config([*OWN, f"{ulysses}=4", "trainer.nnodes=2"]).trainer.n_gpus_per_node == 2
    assert load_config([*OWN, f"{ulysses}=4", "trainer.n_gpus_per_node=3"]).trainer.n_gpus_per_node == 3
    megatron = [f"{ACTOR}.strategy=megatron", f"{ACTOR}.megatron.tensor_model_parallel_size=2"]
    assert load_config([*OWN, *megatron, f"{ACTOR}.megatron.pipeline_model_parallel_size=3"]).trainer.n_gpus_per_node == 6
    assert load_config([*OWN, f"{ulysses}=1"]).trainer.n_gpus_per_node == 1


def test_the_estimators_that_get_groups_are_those_that_compare_samples():
    compared = {name for name, function in ADV_ESTIMATORS.items() if {"group", "index"} & set(required_inputs(function))}
    assert set(follow.GROUP_ESTIMATORS) == compared
    for name in compared - {"optimal_token_baseline", "tir_optimal_token_baseline"}:
        assert load_config([*OWN, f"algorithm.adv_estimator={name}"]).actor_rollout_ref.rollout.n == follow.GROUP_SIZE
    assert load_config([*OWN, "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=3"]).actor_rollout_ref.rollout.n == 3


def test_a_mapping_of_a_program_follows_too():
    given = {"actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 48}}}
    assert as_config(given).data.train_batch_size == 48
    assert as_config(as_config(given)).data.given == {f"{ACTOR}.ppo_mini_batch_size"}


def test_a_whole_configuration_is_all_the_users(tmp_path):
    from lockstep.config.load import to_yaml

    (tmp_path / "config.yaml").write_text(to_yaml(load_config(OWN)))
    config = load_config(config_file=tmp_path / "config.yaml")
    assert follow.for_context(config, 10) == follow.for_rows(config, 10) == {}
