"""Pages whose keys and values are kept in fewer bits (`rollout.kv_cache_dtype`), made and read in the plainest way."""

from __future__ import annotations

import torch
from torch import Tensor

SMALL = ("fp8",)


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Float8 codes of heads [..., D], which are finite, and their scales [..., 1]: powers of two that take the largest number into
    [128, 256)."""
    scale = torch.exp2(x.abs().amax(-1, keepdim=True).double().clamp_min(2.0**-33).log2().floor() - 7)
    return (x.double() / scale).float().to(torch.float8_e4m3fn), scale


def stored(key: Tensor, value: Tensor, kept: str) -> tuple[Tensor, Tensor]:
    """What is left of keys and values [..., D] of one token each, in float64."""
    assert kept == "fp8"
    keys, values = (codes.double() * scale for codes, scale in map(rounded, (key, value)))
    return keys, values


def small_pages(pages: tuple[Tensor, Tensor], kept: str) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Pages [pages, page_size, kv_heads, D] and their scales, as the caches have them. What is NaN has a scale that is."""
    assert kept == "fp8"
    return _float8(pages)


def plain_pages(pages: tuple[Tensor, Tensor], scales: Tensor, kept: str) -> tuple[Tensor, Tensor]:
    """What they stand for, in float64."""
    scales = scales.transpose(1, 2)  # tokens before heads
    assert kept == "fp8"
    keys, values = (codes.float().double() * scales[..., i][..., None].double() for i, codes in enumerate(pages))
    return keys, values


def _float8(pages: tuple[Tensor, Tensor]) -> tuple[tuple[Tensor, Tensor], Tensor]:
    made, scales = [], []
    for each in pages:
        codes, scale = rounded(each.nan_to_num())
        scale[each.isnan().any(-1)] = torch.nan
        made.append(codes.transpose(1, 2).contiguous().transpose(1, 2))
        scales.append(scale.transpose(1, 2))
    return (made[0], made[1]), torch.cat(scales, -1).bfloat16().contiguous()
