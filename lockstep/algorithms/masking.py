"""Statistics over the entries a mask selects.

Entries outside the mask are replaced, not multiplied by zero: NaN and inf there reach neither the result nor its
gradient. Masks may be bool, integer or float; anything but zero selects. Results have the dtype of `x`: pass float32 or
better.
"""

import torch
from torch import Tensor

_VARIANCE_FLOOR = 1e-8


def zero_outside(x: Tensor, mask: Tensor) -> Tensor:
    """`x` where the mask selects, 0 elsewhere.

    Cleaning the *inputs* of a formula with this also keeps its gradient clean. Masking only its result does not: the
    backward pass multiplies the zero gradient of a masked entry by a derivative that may be NaN there.

    Raises ValueError when the shapes differ.
    """
    if x.shape != mask.shape:
        raise ValueError(f"the mask must have the shape of the tensor, {tuple(x.shape)}, not {tuple(mask.shape)}")
    return torch.where(mask.bool(), x, 0)


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of the selected entries along `dim` (all of them when None)."""
    return zero_outside(x, mask).sum(dim)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of the selected entries along `dim` (all of them when None). Where nothing is selected the mean is 0."""
    return masked_sum(x, mask, dim) / mask.bool().sum(dim).clamp(min=1)


def masked_var(x: Tensor, mask: Tensor) -> Tensor:
    """Variance of the n selected entries: sum((x - mean)^2) / (n - 1); 0 with fewer than two."""
    deviation = zero_outside(x - masked_mean(x, mask), mask)
    return deviation.square().sum() / (mask.bool().sum() - 1).clamp(min=1)


def masked_whiten(x: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over the selected entries, 0 elsewhere; the mean is kept when not `shift_mean`.

    With fewer than two selected entries there is no scale to divide by: `x` comes back as it is, 0 outside the mask.
    """
    x = zero_outside(x, mask)
    mean = masked_mean(x, mask)
    # Equal entries must give 0, and the rounding error of one mean is not small against the floor: centre a second time.
    centred = zero_outside(x - mean, mask)
    centred = centred - masked_mean(centred, mask)
    whitened = centred * torch.rsqrt(masked_var(centred, mask) + _VARIANCE_FLOOR)
    if not shift_mean:
        whitened = whitened + mean
    return zero_outside(torch.where(mask.bool().sum() >= 2, whitened, x), mask)
