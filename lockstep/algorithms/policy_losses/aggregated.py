"""Policy losses that return one number, as verl's do: their losses per token, taken from what they give to `agg_loss`.

An aggregated loss depends on the micro-batch. While such a function is asked, `agg_loss` notes the losses per token and returns a
stand-in; what the function then does with the stand-ins (sums, weights) is linear, and its derivative weighs the losses per token.
"""

import inspect
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import ConfigError

BLOCKS = ("old_log_prob", "log_prob", "advantages", "response_mask")
_noted: ContextVar[list[tuple[Tensor, Tensor]] | None] = ContextVar("lockstep_noted_losses", default=None)


class _Numbers(SimpleNamespace):
    def get(self, name: str, default: Any = None) -> Any:
        """As a mapping gives it."""
        return getattr(self, name, default)


def stand_in(losses: Tensor) -> Tensor | None:
    """What `agg_loss` returns while a loss is asked for its losses per token; None at other times."""
    noted = _noted.get()
    if noted is None:
        return None
    noted.append((losses, torch.zeros((), dtype=losses.dtype, device=losses.device, requires_grad=True)))
    return noted[-1][1]


def per_token(name: str, function: Callable[..., Any], numbers: Sequence[str]) -> Callable[..., tuple[Tensor, dict[str, Tensor]]]:
    """A loss (old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights) -> (aggregated, metrics) as
    one that gives a loss for each token of padded blocks. Its `config` has the `numbers`, also in `policy_loss`.

    Calling it raises ConfigError when the function returns something else than `agg_loss` gave, or sums of it.
    """

    def call(**inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
        blocks = [inputs.pop(block) for block in BLOCKS]
        config = _Numbers(clip_ratio=inputs["clip_ratio_high"], **inputs, policy_loss=_Numbers(**inputs), global_batch_info={})
        noted: list[tuple[Tensor, Tensor]] = []
        token = _noted.set(noted)
        try:
            with torch.enable_grad():
                total, metrics = function(*blocks, loss_agg_mode="token-mean", config=config, rollout_is_weights=None)
        finally:
            _noted.reset(token)
        if not noted or not isinstance(total, Tensor) or not total.requires_grad:
            raise ConfigError(f"policy loss {name!r} must return what agg_loss gives for its losses per token, and metrics")
        shares = torch.autograd.grad(total, [stood_in for _, stood_in in noted], allow_unused=True)
        loss = torch.stack([share * losses for share, (losses, _) in zip(shares, noted, strict=True) if share is not None]).sum(0)
        outside = ~blocks[-1].bool()
        told = {key.removeprefix("actor/"): torch.full_like(loss, float(x)).masked_fill(outside, 0) for key, x in metrics.items()}
        return loss.masked_fill(outside, 0), {key: x.detach() for key, x in told.items()}

    parameters = [inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY) for key in (*BLOCKS, *numbers)]
    call.__name__, call.__signature__ = name, inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call
