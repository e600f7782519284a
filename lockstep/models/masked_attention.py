"""Attention under any mask, in plain PyTorch: for windows, soft caps and sinks."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.models.cached_attention import Variant


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, variant: Variant) -> Tensor:
    """Attention of q [R, H, M, D] over k, v [R, H or fewer, L, D] where `mask` (to [R, H, M, L], boolean) allows, whatever the window is:
    [R, H, M, D]."""
    scaling, softcap, sinks = variant.scaling, variant.softcap, variant.sinks
    if variant.is_plain:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=q.shape[1] != k.shape[1])
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.matmul(q, k.transpose(2, 3)).float() * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(-1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    return torch.matmul(weights.to(v.dtype), v)
