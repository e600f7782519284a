"""Advantage estimators: how much better a token was than expected.

An estimator is a function whose keyword-only arguments say what it reads, from this vocabulary:

```text
rows                     Rows          how the tokens divide into rows
token_level_rewards      [M] float     reward of each token; read under the mask only
response_mask            [M]           1 where the policy wrote the token
values                   [M] float     the critic's estimate before each token
group                    [B] int64     rows of one prompt share a number
reward_baselines         [B] float     score of the greedy answer to the row's prompt; the trainer generates it when asked
reward_parts             [B, K] float  the parts that algorithm.gdpo_reward_keys names, of each row's reward
reward_part_weights      [K] float     their weights
old_log_probs            [M] float     log-prob of each token under the policy before the update
ref_log_prob             [M] float     the same under the reference, where the run has one
sum_pi_squared           [M] float     sum over the vocabulary of squared probabilities; no worker writes it yet
rollout_is_weights       [M] float     importance weights, where algorithm.rollout_correction makes them
gamma, lam               float         discount, and decay of GAE; [M] where algorithm.discount_unit=turn
norm_adv_by_std_in_grpo  bool          divide by the group's standard deviation
index                    [B] object    the prompt ids of the rows as a numpy array: `group` as estimators written for verl take it
config                   object        the section `algorithm` of the configuration, for the same estimators
```

It returns `(advantages, returns)`, both [M] and 0 outside the mask. A row without a selected token influences no other
row.

B rows have M tokens in all, which lie end to end (`lockstep.algorithms.rows`). An estimator that does not name `rows`, as
those written for verl, gets every [M] as a block [B, T] instead, with zeros behind the shorter rows, and returns blocks.

```text
gae             from a critic's values: gae
group           a response against the other responses to its prompt: grpo, grpo_passk, rloo, opo, gpg
returns         rewards to come, or whitened over the batch: reinforce_plus_plus, reinforce_plus_plus_baseline, gdpo, remax
token_baseline  a baseline for each token: optimal_token_baseline
distill         how much more likely a token is to a teacher: distill
recursion       sums along a row, which these share
```

To add one:

```python
@register_adv_est("reinforce")
def reinforce(*, token_level_rewards, response_mask, rows):
    scores = rows.sum(zero_outside(token_level_rewards, response_mask))
    advantages = zero_outside(rows.spread(scores), response_mask)
    return advantages, advantages
```
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lockstep.algorithms.advantages.distill import distill
from lockstep.algorithms.advantages.gae import gae
from lockstep.algorithms.advantages.group import gpg, grpo, grpo_passk, opo, rloo
from lockstep.algorithms.advantages.returns import gdpo, reinforce_plus_plus, reinforce_plus_plus_baseline, remax
from lockstep.algorithms.advantages.token_baseline import optimal_token_baseline
from lockstep.algorithms.binding import Bound, PaddedCall
from lockstep.algorithms.registry import input_names, registering, unknown_name

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
    "gdpo": gdpo,
    "remax": remax,
    "optimal_token_baseline": optimal_token_baseline,
    "tir_optimal_token_baseline": optimal_token_baseline,
    "distill": distill,
}
"""Name -> estimator: the values of `algorithm.adv_estimator`."""


def register_adv_est(name: str) -> Callable[[AdvantageEstimator], AdvantageEstimator]:
    """Make the decorated function the estimator `name`.

    Raises ConfigError when the name is taken, or when an argument is not keyword-only (arguments are matched by name).
    """

    def decorate(estimator: AdvantageEstimator) -> AdvantageEstimator:
        input_names(f"advantage estimator {name!r}", estimator)
        return registering("advantage estimator", ADV_ESTIMATORS, name)(estimator)

    return decorate


def get_adv_estimator(name: str) -> AdvantageEstimator:
    """The estimator registered as `name`; ConfigError when there is none."""
    if name not in ADV_ESTIMATORS:
        raise unknown_name("advantage estimator", name, ADV_ESTIMATORS)
    return ADV_ESTIMATORS[name]


def required_inputs(estimator: str | AdvantageEstimator) -> tuple[str, ...]:
    """The arguments the estimator (or the one of that name) cannot do without: what a trainer must produce before using it."""
    return tuple(name for name, is_required in input_names(*_resolve(estimator)).items() if is_required)


def bind_estimator(estimator: str | AdvantageEstimator, parameters: Mapping[str, Any]) -> Bound:
    """The estimator, or the one of that name, with those of the `parameters` that it names: `bound(columns, rows)` gives (advantages,
    returns), flat, also where the estimator takes and returns blocks.

    Raises ConfigError when the name is unknown or an argument is not keyword-only. Calling it raises ConfigError when a required column
    is missing, or when the blocks that it returns have another shape than those it was given.
    """
    what, function = _resolve(estimator)
    remedy = "choose another algorithm.adv_estimator, or switch on what produces it"
    bind = Bound if "rows" in input_names(what, function) else PaddedCall
    return bind(what, function, parameters, remedy)


def _resolve(estimator: str | AdvantageEstimator) -> tuple[str, AdvantageEstimator]:
    """What messages call it, and the function."""
    if isinstance(estimator, str):
        return f"advantage estimator {estimator!r}", get_adv_estimator(estimator)
    return f"advantage estimator {getattr(estimator, '__name__', estimator)!r}", estimator
