"""What is read off a forward pass: log-probs and entropy of response tokens, values, sequence scores. All in float32."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.models.attention import PackedLayout
from lockstep.models.token_head import LossParts, TokenHead


def token_log_probs(
    model: nn.Module,
    input_ids: Tensor,
    position_ids: Tensor,
    layout: PackedLayout,
    predict_at: Tensor,
    targets: Tensor,
    temperature: float,
    entropy_grad: bool,
    head: TokenHead | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob [M] of `targets` [M] and entropy [M], predicted from the packed positions `predict_at` [M].

    The head is applied at those positions only. The logits are divided by `temperature`, as in sampling. The entropy carries a gradient
    only when `entropy_grad` asks for it. `head` is the model's own, where it can answer without logits; else M logits over the
    vocabulary are kept for the backward pass.
    """
    with head.asked(targets, temperature, entropy_grad) if head is not None else nullcontext():
        out = model(
            input_ids=input_ids,
            position_ids=position_ids,
            use_cache=False,
            logits_to_keep=predict_at,
            layout=layout,
        )
    if head is not None:
        log_probs, entropy = out.logits[0].unbind(-1)
        return log_probs, entropy if entropy_grad else entropy.detach()
    logits = out.logits[0].float() / temperature
    log_normaliser = torch.logsumexp(logits, dim=-1)
    log_probs = logits.gather(-1, targets[:, None]).squeeze(-1) - log_normaliser
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        probs = torch.exp(logits - log_normaliser[:, None])
        # 0 * -inf at a forbidden token would be NaN, in the value and in the gradient; such a token adds nothing to the entropy.
        finite = logits.masked_fill(logits == -torch.inf, 0.0)
        entropy = log_normaliser - (probs * finite).sum(-1)
    return log_probs, entropy


def token_loss(
    model: nn.Module,
    input_ids: Tensor,
    position_ids: Tensor,
    layout: PackedLayout,
    predict_at: Tensor,
    targets: Tensor,
    temperature: float,
    entropy_grad: bool,
    head: TokenHead,
    parts: LossParts,
) -> Tensor:
    """The losses of `parts`, summed: what they give for the log-probs and entropies of `token_log_probs`, with less work."""
    with head.asked(targets, temperature, entropy_grad, parts):
        out = model(input_ids=input_ids, position_ids=position_ids, use_cache=False, logits_to_keep=predict_at, layout=layout)
    return out.logits.squeeze()


def token_values(model: nn.Module, input_ids: Tensor, position_ids: Tensor, layout: PackedLayout, predict_at: Tensor) -> Tensor:
    """The value [M] before each response token, read at the packed positions `predict_at` [M]."""
    out = model(input_ids=input_ids, position_ids=position_ids, use_cache=False, layout=layout)
    return out.logits[0, predict_at, 0].float()


def sequence_scores(model: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """One score a row [R] of a right-padded block [R, L]."""
    return model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits[:, 0].float()


def packed_scores(
    model: nn.Module, score: nn.Module, input_ids: Tensor, position_ids: Tensor, layout: PackedLayout, read_at: Tensor
) -> Tensor:
    """One score a row [R] of packed rows, read at the places `read_at` [R]. `score` is the model's last layer."""
    inputs = {"input_ids": input_ids, "position_ids": position_ids, "use_cache": False, "layout": layout}
    return layer_output(model, score, inputs)[0, read_at, 0].float()


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
