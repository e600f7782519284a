"""The loss of a reward model on pairs (Bradley and Terry, 1952; the centring term is Eisenstein et al., 2023)."""

import torch.nn.functional as F
from torch import Tensor


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor, center_rewards_coefficient: float) -> Tensor:
    """The loss [P] of P pairs with the scores `chosen` r+ and `rejected` r- [P], and a `margin` m [P] by which chosen should be ahead:

    ```text
    -log sigmoid(r+ - r- - m) + c (r+ + r-)^2        c = center_rewards_coefficient
    ```

    The first term leaves a constant free that is added to all scores; the second makes their mean 0.
    """
    return -F.logsigmoid(chosen - rejected - margin) + center_rewards_coefficient * (chosen + rejected).square()
