"""One new token for each of some sequences in pages, and what attention makes of it, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from helpers.small_pages import plain_pages, small_pages, stored

PAGE = 16


@dataclass
class NewTokens:
    """Inputs of `NewToken`."""

    heads: int
    kv_heads: int
    qkv: Tensor
    bias: Tensor | None
    norms: tuple[Tensor, Tensor] | None
    pages: tuple[Tensor, Tensor]
    cos: Tensor
    sin: Tensor
    positions: Tensor
    slots: Tensor
    table: Tensor
    context: Tensor
    scales: Tensor | None = None
    kept: str = "auto"
    eps: float = 1e-6

    def expected(self, scale: float, window: int | None) -> tuple[Tensor, Tensor, Tensor]:
        """[rows, heads D]; the new keys and values [rows, kv_heads, D]; rounded where the kernel rounds, and to what the pages have."""
        kind = self.cos.dtype
        whole = self.qkv.double() if self.qkv.dim() == 2 else self.qkv.double().sum(0)
        whole = whole if self.bias is None else whole + self.bias.double()
        dim = self.pages[0].shape[3]
        query, key, value = whole.to(kind).double().view(len(whole), -1, dim).split([self.heads, self.kv_heads, self.kv_heads], 1)
        if self.norms is not None:
            query, key = (self._normed(x, w).to(kind).double() for x, w in zip((query, key), self.norms, strict=True))
        query, key = (self._rotated(x).to(kind).double() for x in (query, key))
        if self.scales is not None:
            key, value = stored(key, value, self.kept)
        rows = [self._attend(row, query[row], key[row], value[row], scale, window) for row in range(len(whole))]
        return torch.stack(rows).flatten(1), key, value

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * weight.double()

    def _rotated(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        cos, sin = (table[self.positions].double()[:, None] for table in (self.cos, self.sin))
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def _attend(self, row: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        length = int(self.context[row])
        held = self.pages if self.scales is None else plain_pages(self.pages, self.scales, self.kept)
        keys, values = (
            torch.cat([pages[self.table[row].long()].flatten(0, 1)[:length].double(), new[None]])
            for pages, new in zip(held, (key, value), strict=True)
        )
        group = self.heads // self.kv_heads
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        score = torch.einsum("hd,nhd->hn", query, keys) * scale
        if window is not None:
            score[:, : max(length + 1 - window, 0)] = -torch.inf
        return torch.einsum("hn,nhd->hd", score.softmax(-1), values)


def spoil(pages: tuple[Tensor, Tensor], table: Tensor, lengths: Sequence[int]) -> None:
    """What the rows of `table` do not see of their pages after so many tokens becomes NaN: a page is not cleared when it is used again,
    and 0 x NaN is no zero."""
    for each in pages:
        for row, length in zip(table.long(), lengths, strict=True):
            kept = each[row].flatten(0, 1)
            kept[length:] = torch.nan
            each[row] = kept.view(len(row), *each.shape[1:])


def make_new_tokens(
    device: torch.device,
    kind: torch.dtype,
    *,
    parts: int,
    norm: bool,
    dim: int,
    heads: int = 6,
    kv_heads: int = 2,
    page: int = PAGE,
    contexts: tuple[int, ...] = (35, 16, 0, 47),
    kept: str = "auto",
) -> NewTokens:
    """Random ones. `parts` 0: a product that is complete; otherwise parts in float32 and a bias. `kept`: how pages are."""
    made = torch.Generator().manual_seed(parts + dim)

    def random(*shape: int, dtype: torch.dtype = kind) -> Tensor:
        return torch.randn(*shape, generator=made).to(device, dtype)

    rows, width = len(contexts), max(contexts) // page + 1
    table = (1 + torch.randperm(rows * width, generator=made).view(rows, width)).int().to(device)
    context = torch.tensor(contexts, dtype=torch.int32, device=device)
    positions = context.long()
    slots = table.gather(1, (positions // page)[:, None])[:, 0].long() * page + positions % page
    pages = random(rows * width + 1, page, kv_heads, dim), random(rows * width + 1, page, kv_heads, dim)
    spoil(pages, table, contexts)
    scales = None
    if kept != "auto":
        # Tokens whose numbers are large and small.
        sizes = [torch.exp2(torch.randint(-12, 7, x.shape[:3], generator=made))[..., None].to(x) for x in pages]
        pages, scales = small_pages((pages[0] * sizes[0] / 16, pages[1] * sizes[1]), kept)
    angle = torch.rand(max(contexts) + 1, dim // 2, generator=made).to(device)
    columns = (heads + 2 * kv_heads) * dim
    return NewTokens(
        heads,
        kv_heads,
        random(rows, columns) if not parts else random(parts, rows, columns, dtype=torch.float32),
        random(columns) if parts else None,
        (random(dim), random(dim)) if norm else None,
        pages,
        angle.cos().to(kind),
        angle.sin().to(kind),
        positions,
        slots,
        table,
        context,
        scales,
        kept,
    )
