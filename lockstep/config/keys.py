"""Which keys a configuration has, of which types, and what an unknown key was meant to be."""

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

from lockstep.config.engine import SECTIONS, section_of
from lockstep.config.ppo import PPOConfig
from lockstep.errors import ConfigError

REMOVED_KEYS = {
    "use_dynamic_bsz": "rows are always cut by tokens, unless a micro_batch_size_per_gpu is set",
    "use_remove_padding": "rows are always packed without padding",
    "max_actor_ckpt_to_keep": "use trainer.max_ckpt_to_keep",
    "max_critic_ckpt_to_keep": "use trainer.max_ckpt_to_keep",
    "hybrid_engine": "the roles in role_worker_mapping say what shares a process",
    "rollout_correction.loss_type": "use actor.policy_loss.loss_mode: vanilla is ppo_clip, cispo with clip_ratio_low=1 is reinforce",
    "load_format": "the native engine uses the trainer's own weights",
}
"""Keys of other systems, or how they end, that need no counterpart here, and why."""

TRL_NAMES = {
    "train_dataset": "data.train_files",
    "eval_dataset": "data.val_files",
    "model_name_or_path": "model.path",
    "reward_funcs": "reward.custom_reward_function.path",
    "reward_weights": "reward.weights",
    "num_generations": "rollout.n",
    "per_device_train_batch_size": "data.train_batch_size",
    "gradient_accumulation_steps": "data.train_batch_size",
    "steps_per_generation": "actor.ppo_mini_batch_size",
    "num_iterations": "actor.ppo_epochs",
    "max_completion_length": "data.max_response_length",
    "beta": "actor.kl_loss_coef",
    "epsilon": "actor.clip_ratio_low",
    "epsilon_high": "actor.clip_ratio_high",
    "delta": "actor.clip_ratio_c",
    "loss_type": "actor.loss_agg_mode loss.loss_mode",
    "scale_rewards": "algorithm.norm_adv_by_std_in_grpo",
    "importance_sampling_level": "actor.policy_loss.loss_mode",
    "mask_truncated_completions": "reward.overlong_buffer.enable",
    "vllm_importance_sampling_correction": "algorithm.rollout_correction.rollout_is",
    "vllm_importance_sampling_cap": "algorithm.rollout_correction.rollout_is_threshold",
    "use_vllm": "rollout.name",
    "vllm_gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "learning_rate": "optim.lr",
    "max_grad_norm": "optim.clip_grad",
    "warmup_ratio": "optim.lr_warmup_steps_ratio",
    "num_train_epochs": "trainer.total_epochs",
    "max_steps": "trainer.total_training_steps",
    "save_steps": "trainer.save_freq",
    "eval_steps": "trainer.test_freq",
    "output_dir": "trainer.default_local_dir",
    "report_to": "trainer.logger",
    "gradient_checkpointing": "model.enable_gradient_checkpointing",
    "bf16": "fsdp_config.dtype",
    "assistant_only_loss": "data.train_on",
    "completion_only_loss": "data.train_on",
}
"""Field of TRL's configurations -> the end of the key that does the same here (docs/from_trl.md), which recipes have under sections of
their own; two if it is another key in another recipe. By spelling alone `max_completion_length` would be nearest to the longest prompt."""

NOTHING_LIKE = {
    "packing": "rows are always packed, and never see each other",
    "padding_free": "rows are always packed without padding",
    "logging_steps": "every step is logged",
    "logging_strategy": "every step is logged",
    "dataset_text_field": "sft reads the column `text`, or conversations and completions: rename your column",
    "precompute_ref_log_probs": "the reference's log-probs are computed in each step",
    "remove_unused_columns": "columns that nothing reads are left alone",
    "dataloader_num_workers": "rows are read while the device computes, without processes of their own",
}
"""Field of TRL's configurations -> why it has no key here."""

ENGINE_KEY = re.compile(rf"(.+)\.({'|'.join(SECTIONS)})\.\w+")
"""A key of an engine's section: what has a strategy, and the section's name."""
_ALIKE = 0.6
"""Similarity, 0 to 1, from which on another key may have been meant."""
_NAME_ALIKE = 0.75
"""The same for the last part of a key alone: short words are often alike by chance."""


def check_key(key: str, root: type = PPOConfig) -> None:
    """Raise ConfigError unless `key` is a value in the schema `root`; the message names the nearest valid key."""
    section: Any = root
    for part in key.split("."):
        if typing.get_origin(section) is dict:
            return  # free-form: the schema cannot know its keys
        hints = typing.get_type_hints(section) if dataclasses.is_dataclass(section) else {}
        if part not in hints:
            raise ConfigError(_unknown_key(key, root), key=key)
        section = _section_type(hints[part])
    if dataclasses.is_dataclass(section):
        first = next(valid_keys(section, f"{key}."))
        raise ConfigError(f"'{key}' is a section, not a value; set the keys in it, such as '{first}'", key=key)


@cache
def has_key(key: str) -> bool:
    """Whether PPO's configuration has the key."""
    try:
        check_key(key)
    except ConfigError:
        return False
    return True


def valid_keys(section: Any = PPOConfig, prefix: str = "") -> Iterator[str]:
    """Every leaf key, in the order of the dataclasses."""
    hints = typing.get_type_hints(section)
    for item in dataclasses.fields(section):
        kind = _section_type(hints[item.name])
        if dataclasses.is_dataclass(kind):
            yield from valid_keys(kind, f"{prefix}{item.name}.")
        else:
            yield f"{prefix}{item.name}"


def section_type(section: Any, name: str) -> Any:
    """The type of the field `name` of a section's dataclass, without None where it may be that."""
    return _section_type(typing.get_type_hints(section)[name])


def _section_type(hint: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return next(arg for arg in typing.get_args(hint) if arg is not type(None))
    return hint


def type_of(key: str, root: type) -> Any:
    """The type of a valid key; None inside a free-form dict."""
    section: Any = root
    for part in key.split("."):
        if not dataclasses.is_dataclass(section):
            return None
        section = typing.get_type_hints(section)[part]
    return section


def is_of_another_engine(key: str, strategy_of: Callable[[str], str]) -> bool:
    """Return whether the key is read by an engine that the strategy beside it does not choose; `strategy_of` gives the value of its key."""
    found = ENGINE_KEY.fullmatch(key)
    return found is not None and found[2] != section_of(strategy_of(f"{found[1]}.strategy"))


def _unknown_key(key: str, root: Any) -> str:
    keys = list(valid_keys(root))
    for name, removed in REMOVED_KEYS.items():
        if f".{key}".endswith(f".{name}"):
            return f"unknown key '{key}': {removed}"
    more = "; verl's: lockstep verl-keys" if root is PPOConfig else ""
    where = f"(all keys: {root.command} --help{more})"
    if key in NOTHING_LIKE:
        return f"unknown key '{key}': there is nothing like it here, since {NOTHING_LIKE[key]} {where}"
    nearest = _nearest_key(key, keys)
    if nearest is None:
        return f"unknown key '{key}': there is nothing like it here {where}"
    return f"unknown key '{key}'; the nearest valid key is '{nearest}' {where}"


def _nearest_key(key: str, keys: Sequence[str]) -> str | None:
    """The valid key that was probably meant, or None if no key is like it."""
    ends = (key, *TRL_NAMES.get(key, "").split())
    for end in ends:
        same_end = [k for k in keys if f".{k}".endswith(f".{end}")]
        if same_end:
            return same_end[0]  # the policy's before the critic's
    name = key.rpartition(".")[2]
    same_name = [k for k in keys if k.rpartition(".")[2] == name]
    whole = difflib.get_close_matches(key, keys, n=1, cutoff=_ALIKE) or difflib.get_close_matches(key, same_name, n=1, cutoff=0.0)
    if whole:
        return whole[0]
    inside = [k for k in keys if key.startswith(f"{k}.")]
    if inside:
        return inside[0]
    # A word without its sections, or below another section: names are compared alone.
    near = difflib.get_close_matches(name, [k.rpartition(".")[2] for k in keys], n=1, cutoff=_NAME_ALIKE)
    found = [k for k in keys if near and k.rpartition(".")[2] == near[0]]
    return max(found, key=lambda k: difflib.SequenceMatcher(None, key, k).ratio()) if found else None
