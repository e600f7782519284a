"""How far the policy is from the reference: estimates per token, and the controllers of the weight they get.

The estimates need only the log-probs of tokens sampled from the policy. k1 and k3 (before its clamps) are unbiased
estimates of KL(policy || reference); k2 is biased, but its gradient is an unbiased estimate of the KL's gradient.
Source: http://joschu.net/blog/kl-approx.html
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from lockstep.algorithms.masking import zero_outside
from lockstep.algorithms.registry import unknown_name
from lockstep.errors import ConfigError, NumericalError

_BASE_KINDS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")

KL_KINDS = _BASE_KINDS + tuple(f"{kind}+" for kind in _BASE_KINDS)

KL_CONTROLLERS = ("fixed", "adaptive")

_MAX_LOG_RATIO = 20.0
_MAX_K3 = 10.0
_MAX_RELATIVE_ERROR = 0.2
_ROUNDING = 1e-4
"""A difference of log-probs that may be rounding: above it in float32, below what an update makes of it."""


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kind: str) -> Tensor:
    """The distance per token, in the shape of its inputs.

    ```text
    kl, k1          logprob - ref_logprob                                    any sign
    abs             |logprob - ref_logprob|                                  gradient: see `absolute`
    mse, k2         0.5 (logprob - ref_logprob)^2
    low_var_kl, k3  min(exp(x) - x - 1, 10), x = clamp(ref_logprob - logprob, -20, 20)
    <kind>+         the value of <kind> with the gradient of k2
    ```

    There is no mask here. Where masked entries may be NaN or inf and the gradient is wanted, clean both inputs with
    `masking.zero_outside` before.

    Raises ConfigError when the kind is unknown.
    """
    difference = logprob - ref_logprob
    match kind.removesuffix("+") if kind in KL_KINDS else None:
        case "kl" | "k1":
            value = difference
        case "abs":
            value = absolute(difference)
        case "mse" | "k2":
            value = 0.5 * difference.square()
        case "low_var_kl" | "k3":
            x = (-difference).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
            # expm1 keeps the digits that exp(x) - 1 loses near 0, where most tokens are.
            value = (torch.expm1(x) - x).clamp(max=_MAX_K3)
        case _:
            raise unknown_name("kind of KL penalty", kind, KL_KINDS)
    if kind.endswith("+"):
        k2 = 0.5 * difference.square()
        return value.detach() + (k2 - k2.detach())
    return value


def absolute(x: Tensor) -> Tensor:
    """|x|, with the gradient sign(x) where |x| is at least 2e-4, 0 where it is less than 1e-4, and a part of it between them.

    Policies that are the same differ by the rounding of their log-probs, up to 2e-5 in float32. The sign of that is no direction: with it
    as the gradient, the size of a micro-batch would decide where the weights go. The gradient grows from 0, because at a hard border
    rounding would decide again.
    """
    size = x.abs()
    value = size.detach()
    return value + (size - value) * (value / _ROUNDING - 1).clamp(0, 1)


def reward_penalty(logprob: Tensor, ref_logprob: Tensor, mask: Tensor, kind: str) -> Tensor:
    """What the reward loses for each token: `kl_penalty` where the mask selects, 0 elsewhere, in the shape of its inputs.

    It is 0 everywhere when no selected log-prob differs by 1e-4: the policy is still the reference, and estimators that divide by a spread
    would make advantages of the rounding. It is decided for the batch, not for a token: a penalty that counts is left as it is.

    Raises ConfigError when the kind is unknown, ValueError when the shapes differ.
    """
    logprob = zero_outside(logprob, mask)
    ref_logprob = zero_outside(ref_logprob, mask)
    penalty = kl_penalty(logprob, ref_logprob, kind)
    return torch.zeros_like(penalty) if ((logprob - ref_logprob).abs() < _ROUNDING).all() else penalty


class FixedKLController:
    """A KL weight that never changes."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Nothing to do."""

    def state_dict(self) -> dict[str, float]:
        """Empty: the weight comes from the configuration."""
        return {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Nothing to restore: the weight comes from the configuration."""


class AdaptiveKLController:
    """A KL weight that grows while the KL is above its target and shrinks while it is below.

    Each update multiplies `value` by 1 + clip(current_kl / target_kl - 1, -0.2, 0.2) * n_steps / horizon.
    Source: Ziegler et al., arXiv 1909.08593.

    Raises ConfigError when target_kl or horizon is not positive.
    """

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: int) -> None:
        if not (target_kl > 0 and horizon > 0):
            raise ConfigError(f"an adaptive KL weight needs target_kl and horizon above 0, not {target_kl} and {horizon}")
        self.value = init_kl_coef
        self.target_kl = target_kl
        self.horizon = horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """Adjust `value`, in place, to the KL measured over `n_steps` rows.

        Raises:
            NumericalError: current_kl is not finite.
            ConfigError: the horizon is so short that one update could take the weight to zero or below.
        """
        if not math.isfinite(current_kl):
            raise NumericalError(f"the adaptive KL weight was given a KL of {current_kl}")
        pace = n_steps / self.horizon
        if pace * _MAX_RELATIVE_ERROR >= 1:
            raise ConfigError(
                f"with horizon {self.horizon}, one update over {n_steps} rows can take the KL weight to zero or below: "
                f"set horizon above {_MAX_RELATIVE_ERROR * n_steps:g}"
            )
        error = min(max(current_kl / self.target_kl - 1, -_MAX_RELATIVE_ERROR), _MAX_RELATIVE_ERROR)
        self.value *= 1 + error * pace

    def state_dict(self) -> dict[str, float]:
        """The weight reached so far; target and horizon come from the configuration."""
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from the weight in `state`. Raises ConfigError when it has none, as a fixed controller's has not."""
        if "value" not in state:
            raise ConfigError("the saved state has no adaptive KL weight: it is from a fixed one, resume with kl_ctrl.type=fixed")
        self.value = state["value"]


KLController = FixedKLController | AdaptiveKLController


def make_kl_controller(kind: str, kl_coef: float, target_kl: float, horizon: int) -> KLController:
    """The controller named `kind`, "fixed" or "adaptive"; `target_kl` and `horizon` are read by the adaptive one only.

    Raises ConfigError when the kind is unknown, or as the controller's constructor does.
    """
    match kind:
        case "fixed":
            return FixedKLController(kl_coef)
        case "adaptive":
            return AdaptiveKLController(kl_coef, target_kl, horizon)
        case _:
            raise unknown_name("kind of KL controller", kind, KL_CONTROLLERS)
