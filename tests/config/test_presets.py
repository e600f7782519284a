import functools
from pathlib import Path

import pytest

from lockstep import cli
from lockstep.algorithms.advantages import ADV_ESTIMATORS
from lockstep.algorithms.policy_losses import POLICY_LOSSES
from lockstep.config.load import leaves, load_config
from lockstep.config.presets import ALGORITHMS

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
