"""Advantage estimators: how much better a token was than expected.

An estimator is a function whose keyword-only arguments say what it reads, from this vocabulary:

```text
token_level_rewards      [B, T] float  reward of each token; read under the mask only
response_mask            [B, T]        1 where the policy wrote the token
values                   [B, T] float  the critic's estimate before each token
group                    [B] int64     rows of one prompt share a number
gamma, lam               float         discount, and decay of GAE
norm_adv_by_std_in_grpo  bool          divide by the group's standard deviation
```

It returns `(advantages, returns)`, both [B, T] and 0 outside the mask. A row without a selected token influences no
other row.

```text
gae      from a critic's values: gae
group    a response against the other responses to its prompt: grpo, grpo_passk, rloo, opo, gpg
returns  against the whole batch, by whitening: reinforce_plus_plus, reinforce_plus_plus_baseline
scores   the scores of the rows and the statistics of their groups, which the last two share
```

To add one:

```python
@register_adv_est("reward_to_go")
def reward_to_go(*, token_level_rewards, response_mask):
    rewards = zero_outside(token_level_rewards, response_mask)
    togo = zero_outside(rewards.flip(1).cumsum(1).flip(1), response_mask)
    return togo, togo
```
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lockstep.algorithms.advantages.gae import gae
from lockstep.algorithms.advantages.group import gpg, grpo, grpo_passk, opo, rloo
from lockstep.algorithms.advantages.returns import reinforce_plus_plus, reinforce_plus_plus_baseline
from lockstep.algorithms.registry import registering, unknown_name
from lockstep.errors import ConfigError

AdvantageEstimator = Callable[..., tuple[Tensor, Tensor]]

ADV_ESTIMATORS: dict[str, AdvantageEstimator] = {
    "gae": gae,
    "grpo": grpo,
    "grpo_passk": grpo_passk,
    "rloo": rloo,
    "opo": opo,
    "gpg": gpg,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
}
"""Name -> estimator: the values of `algorithm.adv_estimator`."""


def register_adv_est(name: str) -> Callable[[AdvantageEstimator], AdvantageEstimator]:
    """Make the decorated function the estimator `name`.

    Raises ConfigError when the name is taken, or when an argument is not keyword-only (arguments are matched by name).
    """

    def decorate(estimator: AdvantageEstimator) -> AdvantageEstimator:
        for parameter in inspect.signature(estimator).parameters.values():
            if parameter.kind is not parameter.KEYWORD_ONLY:
                raise ConfigError(
                    f"advantage estimator {name!r} takes {str(parameter)!r}, but its arguments must be keyword-only: "
                    "put '*' before the first one"
                )
        return registering("advantage estimator", ADV_ESTIMATORS, name)(estimator)

    return decorate


def get_adv_estimator(name: str) -> AdvantageEstimator:
    """The estimator registered as `name`; ConfigError when there is none."""
    if name not in ADV_ESTIMATORS:
        raise unknown_name("advantage estimator", name, ADV_ESTIMATORS)
    return ADV_ESTIMATORS[name]


def required_inputs(name: str) -> tuple[str, ...]:
    """The arguments the estimator cannot do without: what a trainer must produce before it can use this estimator."""
    parameters = inspect.signature(get_adv_estimator(name)).parameters.values()
    return tuple(p.name for p in parameters if p.default is p.empty)


def compute_advantage(name: str, available: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Call the estimator `name` with those of the `available` inputs that it names. None counts as not available.

    Raises ConfigError when the estimator is unknown or an input it requires is not available.
    """
    estimator = get_adv_estimator(name)
    inputs = {p: available[p] for p in inspect.signature(estimator).parameters if available.get(p) is not None}
    missing = [p for p in required_inputs(name) if p not in inputs]
    if missing:
        present = sorted(key for key, value in available.items() if value is not None)
        raise ConfigError(
            f"advantage estimator {name!r} needs {', '.join(missing)}, which this run does not have "
            f"(it has {', '.join(present)}): choose another algorithm.adv_estimator, or switch on what produces it"
        )
    return estimator(**inputs)
