"""Checks of a run before any process is started or any model loaded."""

import inspect
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch

from lockstep.algorithms.advantages import get_adv_estimator, required_inputs
from lockstep.algorithms.aggregation import LOSS_AGG_MODES
from lockstep.algorithms.kl import KL_KINDS
from lockstep.algorithms.policy_losses import check_numbers, get_policy_loss, loss_inputs, missing_numbers
from lockstep.algorithms.rows import Rows
from lockstep.config.actor_rollout_ref import ActorConfig
from lockstep.config.algorithm import AlgorithmConfig
from lockstep.config.check import one_of
from lockstep.config.data import DataConfig
from lockstep.config.engine import ModelConfig
from lockstep.config.ppo import PPOConfig
from lockstep.errors import ConfigError, DataError, MissingReward
from lockstep.models.hf_config import context_limit, read_model_config
from lockstep.trainer.ppo.algorithm import Estimation, correction_of, reads_rewards
from lockstep.trainer.ppo.interfaces import RewardFunction
from lockstep.trainer.ppo.rewards import OVERLONG_PART
from lockstep.utils.files import load_reference
from lockstep.utils.tokenizer import check_same_tokenizer, has_tokenizer

ESTIMATOR_INPUTS = {
    "rows", "token_level_rewards", "response_mask", "values", "group", "reward_baselines", "reward_parts", "reward_part_weights",
    "old_log_probs", "ref_log_prob", "gamma", "lam", "norm_adv_by_std_in_grpo", "index", "config",
}  # fmt: skip
"""The inputs of `stages.estimate`: always, or with a critic (values), or with algorithm.gdpo_reward_keys (reward_parts)."""
_STEP_COLUMNS = frozenset(
    [
        "response_mask",
        "rollout_log_probs",
        "finish_reason",
        "experts",
        "turn",
        "restarts",
        "turn_rewards",
        "last_turn",
        "episode",
        "rm_scores",
        "rm_judged",
        "token_level_scores",
        "reward_baselines",
        "reward_parts",
        "old_log_probs",
        "entropys",
        "ref_log_prob",
        "values",
        "rollout_is_weights",
        "token_level_rewards",
        "advantages",
        "returns",
        "input_ids",
        "attention_mask",
        "position_ids",
    ]
)
"""The columns that a step adds to the data and may look for by name. (Nothing asks whether there are prompts and responses.)"""
_POLICY = ("Actor", "ActorRollout", "ActorRolloutRef")


def check_algorithm(config: PPOConfig) -> None:
    """Raise ConfigError unless the named algorithms exist and the run has what they read."""
    actor = config.actor_rollout_ref.actor
    algorithm = config.algorithm
    _check_policy_loss(actor)
    correction = algorithm.rollout_correction
    rollout = config.actor_rollout_ref.rollout
    if (correction_of(correction) is not None or correction.bypass_mode) and not rollout.has_log_probs:
        raise ConfigError(
            f"algorithm.rollout_correction reads the sampler's log-probs, which rollout.name={rollout.name} cannot give for this sampling "
            "(temperature together with top_k, top_p, min_p or repetition_penalty); sample plainly, or use rollout.name=native"
        )
    one_of("actor_rollout_ref.actor.loss_agg_mode", actor.loss_agg_mode, LOSS_AGG_MODES)
    one_of("critic.loss_agg_mode", config.critic.loss_agg_mode, [m for m in LOSS_AGG_MODES if not m.endswith("-norm")])
    one_of("actor_rollout_ref.actor.kl_loss_type", actor.kl_loss_type, KL_KINDS)
    one_of("algorithm.kl_penalty", algorithm.kl_penalty, KL_KINDS)
    estimator = _by_name("algorithm.adv_estimator", algorithm.adv_estimator, get_adv_estimator)
    required = required_inputs(estimator)
    if {"group", "index"} & set(required) and config.actor_rollout_ref.rollout.n == 1:
        raise ConfigError(
            f"algorithm.adv_estimator={algorithm.adv_estimator} compares samples of one prompt, but actor_rollout_ref.rollout.n=1; "
            "set actor_rollout_ref.rollout.n to 2 or more"
        )
    present = ESTIMATOR_INPUTS | ({"rollout_is_weights"} if algorithm.rollout_correction.rollout_is else set())
    unknown = [name for name in required if name not in present]
    if unknown:
        raise ConfigError(
            f"algorithm.adv_estimator={algorithm.adv_estimator} needs {', '.join(unknown)}, which this run does not have; an estimator "
            f"can read {', '.join(sorted(present))}"
        )
    if "reward_parts" in required:
        _check_reward_parts(algorithm, config.reward.overlong_buffer.enable)
    if "ref_log_prob" in required and not config.use_reference:
        raise ConfigError(
            f"algorithm.adv_estimator={algorithm.adv_estimator} needs ref_log_prob, but the run has no reference; set a KL term, for "
            "example actor_rollout_ref.actor.use_kl_loss=true with actor_rollout_ref.actor.kl_loss_coef=0"
        )
    if "values" in required and not config.use_critic:
        raise ConfigError(
            f"algorithm.adv_estimator={algorithm.adv_estimator} needs values, but the run has no critic; set critic.enable=true"
        )
    _try_estimator(algorithm)


def _try_estimator(algorithm: AlgorithmConfig) -> None:
    """Call the estimator on two prompts of two responses. Raise ConfigError if it fails or returns other shapes."""
    rows = Rows(torch.tensor([2, 3, 2, 3]))
    per_token = torch.linspace(0.1, 1.0, 10)
    columns: dict[str, Any] = dict.fromkeys(("token_level_rewards", "values", "sum_pi_squared", "rollout_is_weights"), per_token)
    columns |= {
        "response_mask": torch.ones(10),
        "old_log_probs": -per_token,
        "ref_log_prob": -per_token,
        "group": torch.tensor([0, 0, 1, 1]),
    }
    columns |= {"index": np.array(["a", "a", "b", "b"], dtype=object), "reward_baselines": torch.zeros(4)}
    columns["reward_parts"] = torch.rand(4, len(algorithm.gdpo_reward_keys or ["reward"]))
    try:
        result = Estimation.of(algorithm).estimator(columns, rows)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"algorithm.adv_estimator={algorithm.adv_estimator} failed on a batch of four rows: {error!r}") from error
    if not isinstance(result, tuple) or [getattr(x, "shape", None) for x in result] != [per_token.shape] * 2:
        raise ConfigError(
            f"algorithm.adv_estimator={algorithm.adv_estimator} must return (advantages, returns), a number for each token"
        )


def _by_name(key: str, name: str, get: Callable[[str], Callable[..., Any]]) -> Callable[..., Any]:
    """Return the function that `name`, the value of `key`, stands for: in a file of the user, or what `get` returns for it."""
    try:
        found: Callable[..., Any] = load_reference(name) or get(name)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    return found


def _check_policy_loss(actor: ActorConfig) -> None:
    """Raise ConfigError unless the loss exists, has every number it requires, and has an argument for every value of loss_kwargs."""
    policy_loss = actor.policy_loss
    loss = _by_name("actor_rollout_ref.actor.policy_loss.loss_mode", policy_loss.loss_mode, get_policy_loss)
    names = loss_inputs(loss)
    for key in policy_loss.loss_kwargs:
        if key not in names:
            raise ConfigError(
                f"actor_rollout_ref.actor.policy_loss.loss_kwargs.{key} is not an argument of the policy loss "
                f"{policy_loss.loss_mode}, which reads {', '.join(names)}"
            )
    missing = missing_numbers(loss, actor.loss_parameters)
    if missing:
        raise ConfigError(
            f"the policy loss {policy_loss.loss_mode} needs {', '.join(missing)}; set "
            f"actor_rollout_ref.actor.policy_loss.loss_kwargs.{missing[0]}"
        )
    check_numbers(loss, actor.loss_parameters)


def _check_reward_parts(algorithm: AlgorithmConfig, penalises_length: bool) -> None:
    if not algorithm.gdpo_reward_keys:
        raise ConfigError(
            f"algorithm.adv_estimator={algorithm.adv_estimator} balances the parts of a reward; name them in "
            "algorithm.gdpo_reward_keys, as the reward function returns them"
        )
    if algorithm.use_kl_in_reward:
        raise ConfigError(
            f"algorithm.adv_estimator={algorithm.adv_estimator} reads the parts of the reward, which a KL penalty in the reward is not "
            "one of: set algorithm.use_kl_in_reward=false and, for a KL term, actor_rollout_ref.actor.use_kl_loss=true"
        )
    if penalises_length and OVERLONG_PART not in algorithm.gdpo_reward_keys:
        raise ConfigError(
            f"algorithm.adv_estimator={algorithm.adv_estimator} reads the parts of the reward that algorithm.gdpo_reward_keys="
            f"{algorithm.gdpo_reward_keys} names, and the penalty of reward.overlong_buffer is not among them: add {OVERLONG_PART!r} (and "
            "its weight), or set reward.overlong_buffer.enable=false"
        )


def needed_roles(config: PPOConfig, workers: Mapping[Enum, type]) -> dict[Enum, type]:
    """Return the mapping without a critic or a reference that the config does not use: a program may map them for all its configs."""
    unused = {name for name, used in (("Critic", config.use_critic), ("RefPolicy", config.use_reference)) if not used}
    return {role: cls for role, cls in workers.items() if role.name not in unused}


def check_roles(config: PPOConfig, workers: Mapping[Enum, type], pools: Mapping[Enum, str]) -> None:
    """Raise ConfigError unless every role has a pool and the roles together can do what the config asks for."""
    for role in workers:
        if role not in pools:
            raise ConfigError(f"{role} is in role_worker_mapping but has no pool in the ResourcePoolManager's mapping")
    names = [role.name for role in workers]
    actors = [name for name in names if name in _POLICY]
    if len(actors) != 1:
        raise ConfigError(f"role_worker_mapping needs exactly one of {', '.join(_POLICY)}; it has {actors or 'none'}")
    if (actors == ["Actor"]) != ("Rollout" in names):
        raise ConfigError(
            "Role.Actor and Role.Rollout go together: an Actor alone cannot generate, and ActorRollout has its own rollout. "
            f"role_worker_mapping has {names}"
        )
    if config.use_critic and "Critic" not in names:
        raise ConfigError(
            "the config trains a critic, but role_worker_mapping has no Role.Critic; add it, or set critic.enable=false"
        )
    if config.use_reference and "RefPolicy" not in names and actors != ["ActorRolloutRef"]:
        raise ConfigError(
            "a reference is needed (algorithm.use_kl_in_reward, actor.use_kl_loss or algorithm.adv_estimator=distill), but "
            "role_worker_mapping has neither Role.RefPolicy nor Role.ActorRolloutRef; add one"
        )
    if config.reward_model.enable != ("RewardModel" in names):
        raise ConfigError(
            f"reward_model.enable={config.reward_model.enable}, but Role.RewardModel is "
            f"{'' if 'RewardModel' in names else 'not '}in role_worker_mapping; make them agree"
        )


def check_models(config: PPOConfig, tokenizer: Any) -> None:
    """Raise ConfigError or DataError unless the model folders are models, and policy and critic hold the longest sequence and know the
    tokenizer's tokens."""
    _check_model(config.actor_rollout_ref.model, config, tokenizer)
    reference = config.actor_rollout_ref.reference_model
    if config.actor_rollout_ref.ref.model.path is not None:
        _check_model(reference, config, tokenizer)
        check_same_tokenizer(tokenizer, str(reference.path), reference.trust_remote_code, "actor_rollout_ref.ref.model.path")
    if config.use_critic and config.critic.model.path:
        critic = config.critic.model
        _check_model(critic, config, tokenizer)
        if has_tokenizer(str(critic.path)):  # a critic's checkpoint has none: it reads the policy's ids
            check_same_tokenizer(tokenizer, str(critic.path), critic.trust_remote_code, "critic.model.path", shared_only=True)
    if config.reward_model.enable:
        judge = config.reward_model.model  # it has a tokenizer of its own
        read_model_config(str(judge.path), judge.trust_remote_code, **judge.override_config)
    if tokenizer.pad_token_id is None:
        raise DataError("the tokenizer has no pad token; load it with lockstep.utils.tokenizer.hf_tokenizer")


def check_context(model: ModelConfig, config: PPOConfig) -> Any:
    """Return the model's config. Raise ConfigError unless the model holds the longest sequence."""
    hf_config = read_model_config(str(model.path), model.trust_remote_code, **model.override_config)
    longest = config.data.max_prompt_length + config.data.max_response_length
    limit = context_limit(hf_config)
    if limit is not None and longest > limit.tokens:
        raise ConfigError(
            f"data.max_prompt_length + data.max_response_length = {longest} tokens, but {model.path} holds {limit}; lower one of them"
        )
    return hf_config


def _check_model(model: ModelConfig, config: PPOConfig, tokenizer: Any) -> None:
    hf_config = check_context(model, config)
    vocabulary = getattr(hf_config, "vocab_size", None)
    if vocabulary is not None and len(tokenizer) > vocabulary:
        raise DataError(
            f"the tokenizer has {len(tokenizer)} tokens, the model {model.path} only {vocabulary}: they do not belong together"
        )


def check_columns(config: DataConfig, *datasets: Any) -> None:
    """Raise DataError if a column of the data has the name of a column that a step writes (protocol.py)."""
    for dataset, key in zip(datasets, ("data.train_files", "data.val_files"), strict=True):
        taken = [name for name in getattr(dataset, "columns", ()) if name in _STEP_COLUMNS and name != config.prompt_key]
        if taken:
            raise DataError(f"{key}: the columns {', '.join(taken)} have names that a step gives to its own; rename or drop them")


def check_rewards(
    config: PPOConfig, reward_fn: RewardFunction | None, val_reward_fn: RewardFunction | None, train_dataset: Any, val_dataset: Any
) -> RewardFunction | None:
    """Raise ConfigError, DataError or MissingReward unless every row that will need a reward has a judge.

    Return what judges training rows: `reward_fn`, or None if nothing reads rewards and it cannot judge these rows.
    """
    if val_dataset is not None and val_reward_fn is None:
        raise ConfigError("there is validation data but no val_reward_fn: pass RewardManager(tokenizer=tokenizer, num_examine=1)")
    if val_dataset is not None:
        _check_tags(val_reward_fn, val_dataset, has_model=asks_model(config, val_reward_fn), validation=True)
    if not reads_rewards(config.algorithm):
        try:
            _check_tags(reward_fn, train_dataset, has_model=config.reward_model.enable)
        except (DataError, MissingReward):
            return None
        return reward_fn
    if reward_fn is None:
        raise ConfigError("reward_fn is missing: pass RewardManager(tokenizer=tokenizer, num_examine=0), or a function of your own")
    _check_tags(reward_fn, train_dataset, has_model=config.reward_model.enable)
    return reward_fn


def asks_model(config: PPOConfig, val_reward_fn: RewardFunction | None) -> bool:
    """Return whether the reward model judges rows of a validation: `val_reward_fn` says which."""
    return config.reward_model.enable and hasattr(val_reward_fn, "wants_model")


def _check_tags(reward_fn: Any, dataset: Any, **arguments: bool) -> None:
    check = getattr(reward_fn, "check", None)
    tags = getattr(dataset, "tags", None)
    if inspect.ismethod(check) and tags is not None:
        check(tags(), **arguments)
