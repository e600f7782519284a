"""Which keys of a repro file are safe to use: the file may come from a stranger, and some keys name code that a run imports or starts.

Every key that can hold a text, a list, a mapping or a switch has a handling here. A key without one is refused, so a new key of the
configuration is not used from a file before its author has decided.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any

from lockstep.config.keys import check_key, type_of, valid_keys
from lockstep.errors import ConfigError


class Handling(Enum):
    """What replay does with a key of a capsule."""

    COMMAND_LINE = "only from the command line"
    """Never taken from a file, also with --trust."""
    TRUST = "with --trust, or from the command line"
    """It runs code, starts a server's client, or reads and writes files that the user did not name."""
    WORD = "one word"
    """It chooses among names that Lockstep knows; a path or a dotted name needs --trust."""
    TEXT = "any text"
    """It is data: no code is looked up by it."""


_HANDLINGS = {
    Handling.COMMAND_LINE: ("*trust_remote_code", "agent.mcp"),
    Handling.TRUST: (
        "reward.custom_reward_function.path", "reward.rules", "reward.functions", "reward.sandbox.url",
        "reward.sandbox.accept_weak_isolation", "data.custom_cls.path", "data.train_files", "data.val_files", "sampled.files",
        "agent.environment", "agent.search_folder", "agent.recorded", "actor_rollout_ref.rollout.weight_sync_dir", "reference.folder",
        "trainer.logger", "trainer.resume_from_path", "trainer.default_local_dir", "trainer.rollout_data_dir",
        "trainer.validation_data_dir", "trainer.record_batch_dir", "ray_kwargs.ray_init",
    ),
    Handling.WORD: (
        "agent.tools", "agent.parser", "agent.history", "algorithm.adv_estimator", "algorithm.discount_unit", "algorithm.kl_penalty",
        "algorithm.kl_ctrl.type", "*.loss_mode", "*.loss_kwargs", "*.loss_agg_mode", "*.kl_loss_type", "*.override_config",
        "*.recompute", "*.strategy", "*.dtype", "*.optim.betas", "optim.betas", "*lr_scheduler_type", "algorithm.gdpo_reward_weights",
        "actor_rollout_ref.rollout.name", "*.kv_cache_dtype", "*.weight_sync", "data.truncation", "data.train_on",
        "data.apply_chat_template_kwargs", "reward.custom_reward_function.reward_kwargs", "reference.mode", "trainer.device",
        "trainer.worker_group", "trainer.on_*", "trainer.resume_mode",
    ),
    Handling.TEXT: (
        "*model.path", "teacher.path", "reference.path", "*.lora_adapter_path", "*.target_modules", "data.prompt_key",
        "data.custom_cls.name", "reward.custom_reward_function.name", "reward.weights", "actor_rollout_ref.rollout.stop",
        "algorithm.gdpo_reward_keys", "algorithm.filter_groups.metric", "algorithm.rollout_correction.rollout_*s",
        "algorithm.rollout_correction.rollout_*s_threshold", "trainer.best_metric", "trainer.project_name",
        "trainer.experiment_name", "trainer.allow_changes",
    ),
}  # fmt: skip
_WORD = re.compile(r"[\w +-]*")
_ENVIRONMENT = re.compile(r"\$\{oc\.env:[^${}]*\}")
_UNSET: tuple[Any, ...] = (None, False, "", [], {})


def handling(key: str, kind: Any) -> Handling:
    """Return how replay handles `key`, whose type in the configuration is `kind`. Numbers and switches that are not listed are inert."""
    for found, patterns in _HANDLINGS.items():
        if any(fnmatchcase(key, pattern) for pattern in patterns):
            return found
    names = {getattr(part, "__name__", str(part)) for part in (getattr(kind, "__args__", None) or (kind,))}
    return Handling.WORD if names & {"int", "float", "bool"} else Handling.TRUST


def check_safe(config: Mapping[str, Any], root: type, given: Collection[str], trust: bool) -> None:
    """Raise ConfigError for keys of a capsule's `config` that run code, unless they are `given` on the command line or `trust` is set.

    Also refuses keys that the configuration `root` does not have, and interpolations other than of environment variables.
    """
    keys = set(valid_keys(root))
    refused: list[tuple[str, Any, Handling]] = []
    for key, value in _leaves(config):
        schema_key = next((prefix for prefix in _prefixes(key) if prefix in keys), None)
        if schema_key is None:
            check_key(key, root)
            raise ConfigError(
                f"the capsule's key {key} is not a value of the configuration; lockstep capsule RUN --step N writes one"
            )
        if value in _UNSET or {key, schema_key} & set(given):
            continue
        needed = handling(schema_key, type_of(schema_key, root))
        if needed is Handling.TEXT:
            is_safe = _is_text(value)
        else:
            is_safe = needed is Handling.WORD and _is_word(value)
        if not is_safe and (needed is Handling.COMMAND_LINE or not trust):
            refused.append((key, value, needed))
    if refused:
        raise ConfigError(_refusal(refused))


def _refusal(refused: list[tuple[str, Any, Handling]]) -> str:
    lines = "\n".join(f"  {key}={str(value)[:200]}" for key, value, _ in refused)
    never = [key for key, _, needed in refused if needed is Handling.COMMAND_LINE]
    remedy = (
        "Look at them, and add --trust if you trust who made the file, or give your own: key=value (key=null or key=[] for none)."
    )
    if never:
        remedy += f" {' and '.join(never)}: only on the command line, also with --trust."
    return f"the capsule names code, files or servers, which a replay would use as you:\n{lines}\n{remedy}"


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _prefixes(key: str) -> Iterator[str]:
    """Yield the key and the keys around it: the keys of a free-form mapping are not in the configuration's classes."""
    while key:
        yield key
        key = key.rpartition(".")[0]


def _is_word(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_word, value))
    if isinstance(value, Mapping):
        return all(_is_word(name) and _is_word(inner) for name, inner in value.items())
    return not isinstance(value, str) or _WORD.fullmatch(value) is not None


def _is_text(value: Any) -> bool:
    """Return whether no text in the value is an interpolation, except of an environment variable (as `redacted` writes secrets)."""
    if isinstance(value, list):
        return all(map(_is_text, value))
    return not isinstance(value, str) or "${" not in _ENVIRONMENT.sub("", value)
