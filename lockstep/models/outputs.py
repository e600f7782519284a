"""What is read off a forward pass that makes logits: log-probs and entropy of given tokens, sequence scores. All in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def logits_log_probs(logits: Tensor, targets: Tensor, temperature: float, entropy_grad: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob [M] of `targets` [M], entropy [M] and log-prob of the most likely token [M] under softmax(logits [M, V] / temperature).

    For models whose logits are not the plain product of their output layer (`hidden.py`). The entropy carries a gradient only when
    `entropy_grad` asks for it.
    """
    logits = logits.float() / temperature
    log_normaliser = torch.logsumexp(logits, dim=-1)
    log_probs = logits.gather(-1, targets[:, None]).squeeze(-1) - log_normaliser
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        probs = torch.exp(logits - log_normaliser[:, None])
        # 0 * -inf at a forbidden token would be NaN, in the value and in the gradient; such a token adds nothing to the entropy.
        finite = logits.masked_fill(logits == -torch.inf, 0.0)
        entropy = log_normaliser - (probs * finite).sum(-1)
    return log_probs, entropy, logits.detach().amax(-1) - log_normaliser.detach()


def sequence_scores(model: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """One score per row [R] of a right-padded block [R, L]."""
    return model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits[:, 0].float()


def layer_output(model: nn.Module, layer: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """What a layer of the model gives when the model is called with `inputs`."""
    seen: list[Tensor] = []
    handle = layer.register_forward_hook(lambda module, args, output: seen.append(output))
    try:
        model(**inputs)
    finally:
        handle.remove()
    (output,) = seen
    return output
