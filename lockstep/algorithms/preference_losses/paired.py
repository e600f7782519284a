"""Losses of a pair against a reference. What they take and return: see the package.

Legend: h = log_prob - ref_log_prob of a response y, |y| its length, D = h(chosen) - h(rejected), D' the same of h / |y|, b = beta,
e = label_smoothing, s the sigmoid.
"""

from torch import Tensor
from torch.nn.functional import logsigmoid

from lockstep.errors import ConfigError


def sigmoid(*, log_prob: Tensor, ref_log_prob: Tensor, beta: float = 0.1) -> tuple[Tensor, Tensor]:
    """DPO (Rafailov et al., arXiv 2305.18290): -log s(b D). ln 2 where policy and reference agree."""
    rewards = beta * (log_prob - ref_log_prob)
    return -logsigmoid(_gap(rewards)), rewards


def smoothed(*, log_prob: Tensor, ref_log_prob: Tensor, beta: float = 0.1, label_smoothing: float = 0.1) -> tuple[Tensor, Tensor]:
    """Conservative DPO (Mitchell 2023), for labels of which a share e is wrong: -(1 - e) log s(b D) - e log s(-b D).

    Raises ConfigError when e is not at least 0 and below 0.5.
    """
    _check_share("smoothed", label_smoothing)
    rewards = beta * (log_prob - ref_log_prob)
    gap = _gap(rewards)
    return -(1 - label_smoothing) * logsigmoid(gap) - label_smoothing * logsigmoid(-gap), rewards


def robust(*, log_prob: Tensor, ref_log_prob: Tensor, beta: float = 0.1, label_smoothing: float = 0.1) -> tuple[Tensor, Tensor]:
    """Robust DPO (Chowdhury et al., arXiv 2403.00409), without bias where a share e of the labels is flipped:
    (-(1 - e) log s(b D) + e log s(-b D)) / (1 - 2 e). It has no lower bound: large margins go on paying.

    Raises ConfigError when e is not at least 0 and below 0.5.
    """
    _check_share("robust", label_smoothing)
    rewards = beta * (log_prob - ref_log_prob)
    gap = _gap(rewards)
    clean = -(1 - label_smoothing) * logsigmoid(gap)
    flipped = -label_smoothing * logsigmoid(-gap)
    return (clean - flipped) / (1 - 2 * label_smoothing), rewards


def hinge(*, log_prob: Tensor, ref_log_prob: Tensor, beta: float = 0.1) -> tuple[Tensor, Tensor]:
    """SLiC's loss on DPO's rewards (Zhao et al., arXiv 2305.10425; Liu et al., arXiv 2309.06657): max(0, 1 - b D).

    A pair with a margin of 1 or more teaches nothing.
    """
    rewards = beta * (log_prob - ref_log_prob)
    return (1 - _gap(rewards)).clamp(min=0), rewards


def ipo(*, log_prob: Tensor, ref_log_prob: Tensor, length: Tensor, beta: float = 0.1) -> tuple[Tensor, Tensor]:
    """IPO (Azar et al., arXiv 2310.12036): (D' - 1 / (2 b))^2, which stops at a margin instead of growing it without end.

    Log-probs are means over tokens, as the authors did and TRL does; the paper's formula has sums. 1 / (4 b^2) at the start.
    """
    ratios = (log_prob - ref_log_prob) / length
    return (_gap(ratios) - 1 / (2 * beta)).square(), beta * ratios


def sigmoid_norm(*, log_prob: Tensor, ref_log_prob: Tensor, length: Tensor, beta: float = 5.0) -> tuple[Tensor, Tensor]:
    """DPO on means over tokens: -log s(b D'), so that length alone earns nothing. A mean is far smaller than a sum, so beta is larger:
    5 in Tulu 3 (Lambert et al., arXiv 2411.15124).
    """
    rewards = beta * (log_prob - ref_log_prob) / length
    return -logsigmoid(_gap(rewards)), rewards


def _gap(x: Tensor) -> Tensor:
    """Chosen minus rejected [P] of x [P, 2]."""
    return x[:, 0] - x[:, 1]


def _check_share(name: str, share: float) -> None:
    if not 0 <= share < 0.5:
        raise ConfigError(f"the {name} preference loss needs a label_smoothing of at least 0 and below 0.5, not {share}")
