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
other row. To add one:

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

import torch
from torch import Tensor

from lockstep.algorithms.masked import masked_sum, masked_whiten, zero_outside
from lockstep.algorithms.registry import registering, unknown_name
from lockstep.errors import ConfigError

AdvantageEstimator = Callable[..., tuple[Tensor, Tensor]]

ADV_ESTIMATORS: dict[str, AdvantageEstimator] = {}
"""Name -> estimator: the values of `algorithm.adv_estimator`."""

_STD_FLOOR = 1e-6


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


@register_adv_est("gae")
def gae(*, token_level_rewards: Tensor, response_mask: Tensor, values: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al., arXiv 1506.02438), whitened over the mask of the batch.

    ```text
    delta_t  = r_t + gamma V_next - V_t
    A_t      = delta_t + gamma lam A_next        advantages = whiten(A)
    returns  = A + V                             from A before whitening
    ```

    "Next" is the row's next token *of the policy*: tool output in between costs no discount. After the last one V and A
    are 0, so a response cut at the length limit is treated as if it had ended there.
    """
    rewards, values = zero_outside(token_level_rewards, response_mask), zero_outside(values, response_mask)
    mask = response_mask.bool()
    advantages = torch.zeros_like(values)
    next_value = next_advantage = values.new_zeros(values.shape[0])
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(mask[:, t], delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = next_advantage
    returns = zero_outside(advantages + values, response_mask)
    return masked_whiten(advantages, response_mask), returns


@register_adv_est("grpo")
def grpo(
    *, token_level_rewards: Tensor, response_mask: Tensor, group: Tensor, norm_adv_by_std_in_grpo: bool
) -> tuple[Tensor, Tensor]:
    """Group-relative advantages (Shao et al., arXiv 2402.03300): a response against the other responses to its prompt.

    ```text
    s_i         = sum_t(r_it)                      the score of row i
    advantages  = (s_i - mean_g) / (std_g + 1e-6)  std unbiased
    returns     = s_i
    ```

    Without `norm_adv_by_std_in_grpo` nothing is divided (Dr. GRPO, Liu et al., arXiv 2503.20783).

    Each is the same for all tokens of a row. A group of one row has nothing to compare with: its advantage is the score
    itself. Rows without a selected token do not count in their group.

    Raises ValueError when `group` is not one number a row.
    """
    rows, dtype = response_mask.shape[0], token_level_rewards.dtype
    if group.shape != (rows,):
        raise ValueError(f"group must have one number for each of {rows} rows, but its shape is {tuple(group.shape)}")
    # In float64, because equal scores must give zero: the rounding error of a float32 mean is not small against 1e-6.
    scores = masked_sum(token_level_rewards, response_mask, dim=-1).double()
    counted = response_mask.bool().any(dim=-1).double()
    _, group_index = group.unique(return_inverse=True)

    def group_sum(x: Tensor) -> Tensor:
        """Sum of x [B] over the counted rows of each row's group, [B]."""
        return x.new_zeros(rows).index_add(0, group_index, x * counted)[group_index]

    size = group_sum(torch.ones_like(scores))
    alone = size < 2
    mean = group_sum(scores) / size.clamp(min=1)
    advantage = torch.where(alone, scores, scores - mean)
    if norm_adv_by_std_in_grpo:
        std = (group_sum((scores - mean).square()) / (size - 1).clamp(min=1)).sqrt()
        advantage = torch.where(alone, advantage, advantage / (std + _STD_FLOOR))

    def over_tokens(x: Tensor) -> Tensor:
        return zero_outside(x.to(dtype)[:, None].expand(response_mask.shape), response_mask)

    return over_tokens(advantage), over_tokens(scores)
