from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny import save_tiny_model

from lockstep.config.actor_rollout_ref import POLICY_ROLES, PPO_KEYS, ActorRolloutRefConfig
from lockstep.config.critic import CriticConfig
from lockstep.config.engine import ModelConfig
from lockstep.config.reward import RewardModelConfig
from lockstep.config.stage import STAGE_KEYS
from lockstep.planner.choices import PLAIN
from lockstep.planner.count import Load
from lockstep.planner.memory import MemoryPlan
from lockstep.planner.needs import place_policy, place_training, policy_needs, settle_policy, training_needs

OPTIONS: dict[str, Any] = {"load": Load(28, 8, 4), "world_size": 1, "element": 2}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("role", "lora_rank", "expected", "generates"),
    [
        ("actor", 0, {"actor": ("old_log_prob",)}, False),
        ("rollout", 0, {}, True),
        ("actor_rollout", 0, {"actor": ("old_log_prob",)}, True),
        ("ref", 0, {"ref": ("ref",)}, False),
        ("actor_rollout_ref", 0, {"actor": ("old_log_prob",), "ref": ("ref",)}, True),
        ("actor_rollout_ref", 2, {"actor": ("old_log_prob", "ref")}, True),  # the actor without its adapters
    ],
)
def test_a_role_is_counted_with_exactly_its_models(
    path: str, role: str, lora_rank: int, expected: dict[str, tuple[str, ...]], generates: bool
) -> None:
    models, rollout = policy_needs(
        ActorRolloutRefConfig(model=ModelConfig(path=path, lora_rank=lora_rank)), POLICY_ROLES[role], **OPTIONS
    )
    assert {model.name: model.passes for model in models} == expected
    assert {model.name for model in models if model.update} == expected.keys() & {"actor"}
    assert (rollout is not None) is generates
    if rollout is not None:
        assert rollout.source == ("actor" if POLICY_ROLES[role].actor else None)


def test_what_was_decided_is_what_the_configuration_then_says(path: str, tmp_path: Path) -> None:
    """For every decision: counted again, nothing is left to decide and everything is as it was decided."""
    model = ModelConfig(path=path)
    score = ModelConfig(path=save_tiny_model(tmp_path, score_head=True))
    for weights, moments, kind in itertools.product((True, False), (True, False), ("none", "selective", "full")):
        trained, frozen = MemoryPlan(weights, moments, kind), MemoryPlan(moments, False, None)
        config = place_policy(ActorRolloutRefConfig(model=model), {"actor": trained, "ref": frozen})
        (actor, ref), _ = policy_needs(config, POLICY_ROLES["actor_rollout_ref"], **OPTIONS)
        critic = training_needs(place_training(CriticConfig(model=model), trained), **OPTIONS)
        for found in (actor, critic):
            assert (found.param_offload, found.optimizer_offload, list(found.activations)) == (weights, moments, [kind])
        judge = training_needs(place_training(RewardModelConfig(model=score), frozen), **OPTIONS)
        assert (ref.param_offload, judge.param_offload) == (moments, moments)


def test_numbers_are_told_under_keys_that_the_recipe_has() -> None:
    """Distillation named keys of PPO's rollout, and refused them."""
    parts, load = POLICY_ROLES["actor_rollout"], Load(28, 8, 4)
    (of_ppo, told), (of_stage, told_of_stage) = (
        settle_policy(ActorRolloutRefConfig(), parts, keys, load, PLAIN) for keys in (PPO_KEYS, STAGE_KEYS)
    )
    assert of_ppo == of_stage
    assert told["actor_rollout_ref.rollout.max_num_seqs"] == of_ppo.rollout.max_num_seqs
    assert list(told_of_stage) == ["engine.max_token_len_per_gpu"]
