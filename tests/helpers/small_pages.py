"""Pages whose keys and values are kept in fewer bits (`rollout.kv_cache_dtype`), made and read in the plainest way."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.generation.k8v4_cache import K8V4Cache
from lockstep.generation.pages import CacheShape

SMALL = ("fp8", "k8v4")


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Float8 codes of heads [..., D], which are finite, and their scales [..., 1]: powers of two that take the largest number into
    [128, 256)."""
    scale = torch.exp2(x.abs().amax(-1, keepdim=True).double().clamp_min(2.0**-33).log2().floor() - 7)
    return (x.double() / scale).float().to(torch.float8_e4m3fn), scale


def rounded_up(x: Tensor, bits: int) -> Tensor:
    """The least float32 numbers with so many bits of mantissa that are no smaller than x > 0."""
    mantissa, exponent = torch.frexp(x.double())
    return torch.ldexp(torch.ceil(mantissa * 2 ** (bits + 1)) / 2 ** (bits + 1), exponent).float()


def rounded_key(x: Tensor) -> tuple[Tensor, Tensor]:
    """Integers from -127 to 127 of keys [..., D], which are finite, and their scales [..., 1]."""
    scale = rounded_up(x.abs().amax(-1, keepdim=True).float().clamp_min(2.0**-100) * (1 / 127), 7)
    return torch.floor(x.float() * (1 / scale) + 0.5), scale


def rounded_value(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Integers from 0 to 15 of values [..., D], which are finite, their scales and zeros [..., 1]."""
    low, high = x.float().amin(-1, keepdim=True).clamp_max(0), x.float().amax(-1, keepdim=True).clamp_min(0)
    scale = rounded_up((high - low).clamp_min(2.0**-100) * (1 / 15), 3)
    zero = torch.floor(-2 * low * (1 / scale) + 0.5) / 2
    return torch.floor((x.float() * (1 / scale) + zero).clamp(0, 15) + 0.5), scale, zero


def stored(key: Tensor, value: Tensor, kept: str) -> tuple[Tensor, Tensor]:
    """What is left of keys and values [..., D] of one token each, in float64."""
    if kept == "fp8":
        keys, values = (codes.double() * scale for codes, scale in map(rounded, (key, value)))
        return keys, values
    key_codes, key_scale = rounded_key(key)
    value_codes, value_scale, zero = rounded_value(value)
    return key_codes.double() * key_scale.double(), (value_codes - zero).double() * value_scale.double()


def small_pages(pages: tuple[Tensor, Tensor], kept: str) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Pages [pages, page_size, kv_heads, D] and their scales, as the caches have them. What is NaN has a scale that is."""
    return _float8(pages) if kept == "fp8" else _k8v4(pages)


def plain_pages(pages: tuple[Tensor, Tensor], scales: Tensor, kept: str) -> tuple[Tensor, Tensor]:
    """What they stand for, in float64."""
    scales = scales.transpose(1, 2)  # tokens before heads
    if kept == "fp8":
        keys, values = (codes.float().double() * scales[..., i][..., None].double() for i, codes in enumerate(pages))
        return keys, values
    lower, upper = (scales[..., i].to(torch.int32) & 0xFFFF for i in range(2))
    key_scale, value_scale = ((x[..., None]).view(torch.float32).double() for x in (lower << 16, (upper & 0xFFE0) << 15))
    numbers = torch.stack([pages[1] % 16, pages[1] // 16], -1).flatten(-2).double()
    return (pages[0].double() - 128) * key_scale, (numbers - (upper % 32)[..., None] / 2) * value_scale


def _float8(pages: tuple[Tensor, Tensor]) -> tuple[tuple[Tensor, Tensor], Tensor]:
    made, scales = [], []
    for each in pages:
        codes, scale = rounded(each.nan_to_num())
        scale[each.isnan().any(-1)] = torch.nan
        made.append(codes.transpose(1, 2).contiguous().transpose(1, 2))
        scales.append(scale.transpose(1, 2))
    return (made[0], made[1]), torch.cat(scales, -1).bfloat16().contiguous()


def _k8v4(pages: tuple[Tensor, Tensor]) -> tuple[tuple[Tensor, Tensor], Tensor]:
    count, tokens, heads, dim = pages[0].shape
    cache = K8V4Cache(CacheShape(1, heads, dim, tokens, torch.float32, "k8v4"), count, pages[0].device)
    keys, key_scale = rounded_key(pages[0].nan_to_num())
    values, value_scale, zero = rounded_value(pages[1].nan_to_num())
    key_scale[pages[0].isnan().any(-1)] = torch.nan
    value_scale[pages[1].isnan().any(-1)] = torch.nan
    k_pages, v_pages = cache.layer(0)
    k_pages.copy_((keys + 128).to(torch.uint8))
    even, odd = values.to(torch.uint8).unflatten(-1, (dim // 2, 2)).unbind(-1)
    v_pages.copy_(even + odd * 16)
    lower = key_scale.view(torch.int32) >> 16
    upper = ((value_scale.view(torch.int32) >> 15) & 0xFFE0) | (zero * 2).to(torch.int32)
    cache.scales[0] = torch.cat([lower, upper], -1).to(torch.int16).transpose(1, 2)
    return (k_pages, v_pages), cache.scales[0]
