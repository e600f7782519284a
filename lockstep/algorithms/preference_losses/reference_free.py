"""Losses of a pair without a reference. What they take and return: see the package.

Legend: L the log-prob of a response y, l = L / |y| its mean over tokens, b = beta, s the sigmoid.
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

_LARGEST_MEAN = -1e-9
"""A response of probability 1 has no odds."""


def cpo(*, log_prob: Tensor, beta: float = 0.1) -> tuple[Tensor, Tensor]:
    """CPO (Xu et al., arXiv 2401.08417): -log s(b (L+ - L-)), to which its nll term belongs (`NLL_COEF`)."""
    rewards = beta * log_prob
    return -logsigmoid(rewards[:, 0] - rewards[:, 1]), rewards


def simpo(*, log_prob: Tensor, length: Tensor, beta: float = 2.0, gamma_beta_ratio: float = 0.5) -> tuple[Tensor, Tensor]:
    """SimPO (Meng et al., arXiv 2405.14734): -log s(b (l+ - l-) - g), with the margin g = b `gamma_beta_ratio`.

    The authors' betas are 2 to 10, a DPO's 0.1 hardly trains. Without reference and nll term a high learning rate breaks the model:
    the authors' are 3e-7 to 1e-6.
    """
    rewards = beta * log_prob / length
    return -logsigmoid(rewards[:, 0] - rewards[:, 1] - beta * gamma_beta_ratio), rewards


def orpo(*, log_prob: Tensor, length: Tensor, beta: float = 0.1) -> tuple[Tensor, Tensor]:
    """ORPO (Hong et al., arXiv 2403.07691): -b log s(o+ - o-), o = l - log(1 - e^l) the log-odds; b is the paper's lambda.

    Its nll term (`NLL_COEF`) is most of what it teaches: it is meant for a model that was not fine-tuned before.
    """
    means = (log_prob / length).clamp(max=_LARGEST_MEAN)
    odds = means - torch.log(-torch.expm1(means))
    return -beta * logsigmoid(odds[:, 0] - odds[:, 1]), beta * means
