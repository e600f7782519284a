"""A run's configuration beside the defaults."""

import json
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lockstep.config.reference import ROOTS, keys
from lockstep.config.yaml_file import read_yaml


def read_settings(file: Path) -> dict[str, Any]:
    """{"recipe": its algorithm, or its command where that has only one, "keys": [[key, value, default, differs, meaning], ...], "values":
    the values by key} of a run's config.yaml.

    Values are text, as JSON. A key that this version does not know has no default and no meaning. Raises ConfigError where the file is no
    YAML.
    """
    values = {key: _plain(value) for key, value in _leaves(OmegaConf.to_container(read_yaml(file), resolve=False))}
    known = {command: {key: (default, meaning) for key, default, meaning in keys(root)} for command, root in ROOTS.items()}
    recipe = max(known, key=lambda command: len(values.keys() & known[command].keys()))
    rows = []
    for key in dict.fromkeys((*known[recipe], *values)):
        if key in values or key in known[recipe]:
            default, meaning = known[recipe].get(key, (None, ""))
            value = values.get(key, default)
            rows.append([key, _text(value), _text(default), _text(value) != _text(default), meaning])
    return {"recipe": _algorithm(values) if recipe == "ppo" else recipe, "keys": rows, "values": values}


def _algorithm(values: dict[str, Any]) -> str:
    """PPO by its name, and its relatives by the estimator or, where that is grpo's, by a loss of their own."""
    estimator = str(values.get("algorithm.adv_estimator", "gae"))
    loss = str(values.get("actor_rollout_ref.actor.policy_loss.loss_mode", "vanilla"))
    name = loss if estimator == "grpo" and loss != "vanilla" else estimator
    return "ppo" if name == "gae" else name.rpartition(":")[2]


def _leaves(value: Any, key: str = "") -> Any:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def _plain(value: Any) -> Any:
    """The value as JSON holds it: a date, a number that is not finite and one beyond floats are texts."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return str(value)
    return str(value) if isinstance(value, int) and abs(value) > 1 << 53 else value


def _text(value: Any) -> str:
    return json.dumps(value, default=str)
