"""What the command line calls an algorithm: some keys of the configuration, laid over those of the recorded run.

```text
grpo, dapo, gspo, ...     a name of `ALGORITHMS`: estimator, loss, clip range and aggregation of the paper
opo, grpo_passk, ...      any other advantage estimator, with the loss of the recorded run
gspo+rloo                 the loss (with clip range and aggregation where the name is in `ALGORITHMS`) + another estimator
mine.py:function          a loss of your own (it reads log_prob), or an estimator of your own; either side of a + too
mine.yaml                 any keys of the configuration
```

`loss_kwargs={sharpness: 3.0}` behind a name are the arguments of that algorithm's loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.algorithms.advantages import ADV_ESTIMATORS
from lockstep.algorithms.policy_losses import POLICY_LOSSES, loss_inputs
from lockstep.algorithms.registry import unknown_name
from lockstep.config.check import absolute_reference
from lockstep.config.load import read_keys, read_overrides
from lockstep.config.ppo import PPOConfig
from lockstep.errors import ConfigError
from lockstep.utils.files import load_reference

_ACTOR = "actor_rollout_ref.actor"
_ESTIMATOR = "algorithm.adv_estimator"
_LOSS = f"{_ACTOR}.policy_loss.loss_mode"
LOSS_KWARGS = f"{_ACTOR}.policy_loss.loss_kwargs"
_SHORT_KWARGS = "loss_kwargs="


@dataclass(frozen=True)
class Algorithm:
    """One column of a comparison."""

    name: str
    """As it is shown."""
    changes: dict[str, Any]
    """Key of the configuration -> value."""


def _make(
    estimator: str, loss: str, aggregation: str, low: float | None = None, high: float | None = None, norm: bool = True
) -> dict[str, Any]:
    """Return the keys of an algorithm; a clip range of None is the recorded run's actor.clip_ratio."""
    return {
        _ESTIMATOR: estimator,
        _LOSS: loss,
        f"{_ACTOR}.loss_agg_mode": aggregation,
        f"{_ACTOR}.clip_ratio_low": low,
        f"{_ACTOR}.clip_ratio_high": high,
        "algorithm.norm_adv_by_std_in_grpo": norm,
    }


ALGORITHMS: dict[str, dict[str, Any]] = {
    "ppo": _make("gae", "vanilla", "token-mean"),
    "grpo": _make("grpo", "vanilla", "seq-mean-token-mean"),
    "dr_grpo": _make("grpo", "vanilla", "seq-mean-token-sum-norm", norm=False),
    "dapo": _make("grpo", "vanilla", "token-mean", 0.2, 0.28),
    "rloo": _make("rloo", "vanilla", "seq-mean-token-sum"),
    "remax": _make("remax", "vanilla", "seq-mean-token-sum"),
    "reinforce_plus_plus": _make("reinforce_plus_plus", "vanilla", "token-mean"),
    "reinforce_plus_plus_baseline": _make("reinforce_plus_plus_baseline", "vanilla", "token-mean"),
    "gspo": _make("grpo", "gspo", "seq-mean-token-mean", 3e-4, 4e-4),
    "gmpo": _make("grpo", "geo_mean", "seq-mean-token-mean", 0.4, 0.4),
    "cispo": _make("grpo", "cispo", "token-mean", 1.0),
    "sapo": _make("grpo", "sapo", "seq-mean-token-mean"),
    "gpg": _make("gpg", "gpg", "token-mean"),
    "gdpo": _make("gdpo", "vanilla", "token-mean"),
}
"""Name -> the keys that make the algorithm; docs/algorithms.md says where each comes from."""


def read_algorithms(words: Sequence[str]) -> list[Algorithm]:
    """Return the algorithms that the words name; `loss_kwargs={...}` belongs to the name before it. Raises as `read_algorithm` does."""
    found: list[Algorithm] = []
    for word in words:
        if not word.startswith(_SHORT_KWARGS):
            found.append(read_algorithm(word))
        elif not found:
            raise ConfigError(f"{word} stands before the first algorithm; put it behind the name of the one whose loss takes it")
        else:
            changes = found[-1].changes | read_overrides([f"{LOSS_KWARGS}={word.removeprefix(_SHORT_KWARGS)}"])
            found[-1] = Algorithm(found[-1].name, changes)
    return found


def own_changes(algorithm: Algorithm, recorded: PPOConfig) -> dict[str, Any]:
    """Return the keys that make the algorithm on the recorded run: arguments of the recorded loss are not those of another loss."""
    loss = algorithm.changes.get(_LOSS, recorded.actor_rollout_ref.actor.policy_loss.loss_mode)
    is_recorded = loss == recorded.actor_rollout_ref.actor.policy_loss.loss_mode
    given = algorithm.changes.get(LOSS_KWARGS)
    if given is None and is_recorded:
        return algorithm.changes
    prefix = f"{LOSS_KWARGS}."
    arguments = {key: value for key, value in algorithm.changes.items() if key.startswith(prefix)}
    others = {key: value for key, value in algorithm.changes.items() if key != LOSS_KWARGS and key not in arguments}
    arguments |= {f"{prefix}{name}": value for name, value in (given or {}).items()}
    return {**others, LOSS_KWARGS: {}, **arguments}


def read_algorithm(text: str) -> Algorithm:
    """Return the algorithm that `text` names; see the module.

    Raises ConfigError, with the nearest name, if there is no such algorithm, and DataError if a file does not exist.
    """
    if text.endswith((".yaml", ".yml")):
        return Algorithm(Path(text).stem, read_keys(text))
    loss, plus, estimator = text.rpartition("+")
    if plus:
        return Algorithm(f"{_short(loss)}+{_short(estimator)}", _loss(loss) | {_ESTIMATOR: _estimator(estimator)})
    if text in ALGORITHMS:
        return Algorithm(text, ALGORITHMS[text])
    own = load_reference(text)
    if own is not None and "log_prob" in loss_inputs(own):
        return Algorithm(_short(text), _loss(text))
    if own is None and text not in ADV_ESTIMATORS:
        raise unknown_name("algorithm", text, {**ALGORITHMS, **ADV_ESTIMATORS})
    return Algorithm(_short(text), {_ESTIMATOR: absolute_reference(text)})


def _loss(text: str) -> dict[str, Any]:
    if text in ALGORITHMS:
        return ALGORITHMS[text]
    if load_reference(text) is None and text not in POLICY_LOSSES:
        raise unknown_name("policy loss", text, {**ALGORITHMS, **POLICY_LOSSES})
    return {_LOSS: absolute_reference(text)}


def _estimator(text: str) -> str:
    if load_reference(text) is None and text not in ADV_ESTIMATORS:
        raise unknown_name("advantage estimator", text, ADV_ESTIMATORS)
    return absolute_reference(text)


def _short(text: str) -> str:
    """Return `function` of mine.py:function."""
    return text.rpartition(":")[2]
