"""Attention functions that plug into transformers' attention interface: one for packed rows, one for decoding with a cache.

**Packed** (training and scoring): the rows of a micro-batch lie end to end in one sequence, and no row sees another. Rows of the same
prompt may share it: the prompt is one segment, and each response a segment that continues it.

**Cached** (decoding): new tokens read and extend a key-value cache that the native rollout engine owns.

Both get query, key, value as [batch, heads, tokens, head_dim] (rotary embedding already applied) and return
([batch, tokens, heads, head_dim], None). transformers builds no mask for a name it does not know, so the layout or the cache travels as a
keyword argument of the model's forward. Legend: R rows, S segments, L longest of them, N tokens, M queries, H query heads, K key-value
heads, D head size.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from lockstep.errors import ConfigError
from lockstep.kernels import flash, long_rows
from lockstep.kernels.flash import SegmentBounds
from lockstep.models import ulysses

if TYPE_CHECKING:
    from lockstep.kernels.segment_attention import Segments

PACKED = "lockstep_packed"
CACHED = "lockstep_cached"
SEGMENT_SIZES = (64, 128)
"""Head sizes of kernels/segment_attention.py."""


@dataclass(frozen=True)
class Variant:
    """How one layer attends, apart from its queries, keys and values."""

    scaling: float | None = None
    """Multiplies the scores; None means 1 / sqrt(D)."""
    sliding_window: int | None = None
    """A token sees itself and the `sliding_window` - 1 tokens before it; None sees all."""
    softcap: float | None = None
    """Scores become softcap * tanh(score / softcap)."""
    sinks: Tensor | None = None
    """[H]: a score of each head that takes part in the softmax and has no value."""

    @property
    def is_plain(self) -> bool:
        """Whether the softmax is over the scores as they are."""
        return self.softcap is None and self.sinks is None


def check_call(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, others: Mapping[str, Any]
) -> None:
    """Raise ConfigError unless each new token has one key and one value, and causality and a window are all that hides keys.

    Models that add compressed keys, or choose which keys a token sees, would be computed wrongly, or write outside the cache.
    """
    name = type(module).__name__
    if not query.shape[2] == key.shape[2] == value.shape[2]:
        raise ConfigError(
            f"{name} attends with {query.shape[2]} queries to {key.shape[2]} keys and {value.shape[2]} values; one key and one value per "
            "token are needed"
        )
    if attention_mask is not None:
        shape = list(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise ConfigError(f"{name} hides keys by a mask of its own ({shape}); only causal masks with a window are computed")
    chosen = [key for key in others if key.endswith("indices") and others[key] is not None]
    if chosen:
        raise ConfigError(f"{name} chooses the keys that a token sees ({chosen[0]}); only causal masks with a window are computed")


# -- packed rows -------------------------------------------------------------------------------------------------------------


@dataclass
class FlashLayout:
    """A packed layout as the flash attentions take it."""

    segments: Segments
    runs: dict[int, list[flash.SegmentRun]] = field(default_factory=dict)
    """By the longest segment that is packed with others; longer ones go alone."""


class PackedLayout:
    """Where the segments of a packed sequence lie, and what each sees: itself up to the token, and all of the segment it continues.

    `lengths` [S] are those of the segments in order. The first len(`followers`) of them are shared: `followers[i]` of the later ones,
    in order, each continue segment i. Without followers every segment stands alone.
    """

    group: dist.ProcessGroup | None = None
    """The ranks that have an equal part of the tokens each, in order, filled up at the end; None where this rank has them all."""

    def __init__(self, lengths: Tensor, device: torch.device | str = "cpu", followers: Sequence[int] = ()) -> None:
        self.lengths = lengths.to("cpu", torch.int64)
        self.num_shared = len(followers)
        self.device = device
        counts = torch.tensor(list(followers), dtype=torch.int64)
        assert not followers or int(counts.sum()) == len(lengths) - len(followers), "every later segment continues a shared one"
        self.continued = torch.repeat_interleave(torch.arange(self.num_shared), counts).tolist()
        """For each segment after the shared ones the number of the segment that it continues."""
        own = self.lengths.tolist()
        before = [0] * len(own)
        if followers:
            before[self.num_shared :] = [own[segment] for segment in self.continued]
        self.longest = max(a + b for a, b in zip(before, own, strict=True))
        """Tokens of the longest sequence."""
        self.num_tokens = sum(own)
        self.num_shared_tokens = sum(own[: self.num_shared])
        bounds = _bounds(self.lengths).to(device, non_blocking=True)
        self.own = SegmentBounds(bounds, bounds, max(own), max(own))
        self.shared: SegmentBounds | None = None
        if followers:
            shared = self.lengths[: self.num_shared]
            readers = torch.stack([part.sum() for part in self.lengths[self.num_shared :].split(counts.tolist())])
            queries = _bounds(readers).to(device, non_blocking=True)
            keys = _bounds(shared).to(device, non_blocking=True)
            self.shared = SegmentBounds(queries, keys, int(readers.max()), int(shared.max()))

    def divided(self, group: dist.ProcessGroup) -> PackedLayout:
        """The same layout for ranks that have a part of the tokens each."""
        layout = copy.copy(self)
        layout.group = group
        return layout

    @cached_property
    def flash(self) -> FlashLayout:
        """What the flash attentions need of the layout; made once for all layers of a model."""
        from lockstep.kernels.segment_attention import Segments

        followers = [self.continued.count(segment) for segment in range(self.num_shared)]
        return FlashLayout(Segments(self.lengths.tolist(), followers, self.device))

    @property
    def wastes_little(self) -> bool:
        """Whether the segments padded to the longest are at most twice the tokens."""
        return len(self.lengths) * self.own.longest_query <= 2 * self.num_tokens

    @cached_property
    def to_padded(self) -> Tensor:
        """[S, L]: for each padded place the token that fills it (padding repeats the segment's first token; nothing reads it)."""
        starts, valid = self._places()
        return (starts + torch.arange(valid.shape[1])).where(valid, starts).to(self.device)

    @cached_property
    def to_packed(self) -> Tensor:
        """[N]: for each token its place in the flattened padded block."""
        return self._places()[1].flatten().nonzero().flatten().to(self.device)

    def _places(self) -> tuple[Tensor, Tensor]:
        starts = (torch.cumsum(self.lengths, 0) - self.lengths)[:, None]
        return starts, torch.arange(self.own.longest_query) < self.lengths[:, None]


def _bounds(lengths: Tensor) -> Tensor:
    return F.pad(torch.cumsum(lengths, 0), (1, 0)).to(torch.int32)


@torch.compiler.disable  # layouts differ from one micro-batch to the next
def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: PackedLayout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each segment of a packed sequence (batch 1), and over the segment that it continues.

    On a GPU in half precision this is flash attention without padding. Elsewhere segments of about the same length that stand alone are
    padded on the right for this call only (under a causal mask a token never looks right), and others are computed one at a time.
    If the layout divides the tokens among ranks, each rank attends with a part of the heads (models/ulysses.py).
    """
    check_call(module, query, key, value, attention_mask, kwargs)
    group = layout.group
    if group is not None:
        query, key, value = ulysses.heads_for_tokens(query, key, value, layout.num_tokens, group)
        s_aux = None if s_aux is None else s_aux.chunk(group.size())[group.rank()]  # of its own heads
    window = sliding_window if sliding_window is not None and layout.longest > sliding_window else None
    out = _attend(query, key, value, layout, Variant(scaling, window, softcap, s_aux))
    if group is not None:
        out = ulysses.tokens_for_heads(out, group)
    return out.contiguous(), None  # some families call view on it


def _attend(query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, variant: Variant) -> Tensor:
    """[1, N, H, D] from [1, H, N, D] of all tokens."""
    window = variant.sliding_window
    if query.is_cuda and variant.is_plain and (window is None or layout.shared is None) and flash.applies(query, value):
        # (The gradient of x[0] would be a copy.)
        q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
        return _flash_attention(q, k, v, layout, variant.scaling, window)[None]
    if layout.shared is None and layout.wastes_little:
        q, k, v = (x[0][:, layout.to_padded].transpose(0, 1) for x in (query, key, value))  # [H, N, D] -> [S, H, L, D]
        out = causal_attention(q, k, v, variant)
        return out.transpose(1, 2).flatten(0, 1)[layout.to_packed][None]
    return _one_segment_at_a_time(query, key, value, layout, variant).transpose(1, 2)


def _flash_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scale: float | None, window: int | None
) -> Tensor:
    """[N, H, D] from query [N, H, D], key and value [N, K, D], by the flash attention that is fastest at these lengths.

    A `window` is for segments that stand alone only.
    """
    from lockstep.kernels import segment_attention

    size = query.shape[-1]
    longest_packed = layout.num_tokens
    if window is None and long_rows.applies(query):
        longest_packed = long_rows.LEAST[size] - 1
    prepared = layout.flash
    if window is None and size in SEGMENT_SIZES and layout.own.longest_query <= longest_packed:
        return segment_attention.attend(query, key, value, prepared.segments, scale)
    if longest_packed not in prepared.runs:
        prepared.runs[longest_packed] = flash.cut_runs(layout.lengths.tolist(), layout.device, longest_packed)
    runs = prepared.runs[longest_packed]
    return flash.attend(query, key, value, runs, layout.shared, layout.num_shared_tokens, scale, window)


def _one_segment_at_a_time(query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, variant: Variant) -> Tensor:
    sizes = layout.lengths.tolist()
    queries, keys, values = (x.split(sizes, dim=2) for x in (query, key, value))
    outputs = []
    for segment in range(len(sizes)):
        visible = [segment]
        if layout.shared is not None and segment >= layout.num_shared:
            visible = [layout.continued[segment - layout.num_shared], segment]
        k = torch.cat([keys[i] for i in visible], dim=2)
        v = torch.cat([values[i] for i in visible], dim=2)
        outputs.append(causal_attention(queries[segment], k, v, variant))
    return torch.cat(outputs, dim=2)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, variant: Variant) -> Tensor:
    """Attention of q [R, H, M, D] over k, v [R, H or fewer, L, D] whose last M tokens are the queries' own: [R, H, M, D]."""
    queries = q.shape[2]
    keys = k.shape[2]
    window = variant.sliding_window
    if queries == keys and (window is None or keys <= window) and variant.is_plain:
        is_grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=variant.scaling, enable_gqa=is_grouped)
    distance = torch.arange(keys - queries, keys, device=q.device)[:, None] - torch.arange(keys, device=q.device)
    mask = distance >= 0
    if window is not None:
        mask &= distance < window
    return masked_attention(q, k, v, mask, variant)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, variant: Variant) -> Tensor:
    """Attention of q [R, H, M, D] over k, v [R, H or fewer, L, D] under `mask` (boolean, broadcast to [R, H, M, L]): [R, H, M, D].

    The mask decides alone; the window of `variant` is ignored.
    """
    if variant.is_plain:
        is_grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=variant.scaling, enable_gqa=is_grouped)
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k = k.repeat_interleave(groups, 1)
        v = v.repeat_interleave(groups, 1)
    scaling = q.shape[-1] ** -0.5 if variant.scaling is None else variant.scaling
    scores = torch.matmul(q, k.transpose(2, 3)).float() * scaling
    if variant.softcap is not None:
        scores = variant.softcap * torch.tanh(scores / variant.softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if variant.sinks is not None:
        scores = torch.cat([scores, variant.sinks.float().view(-1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    return torch.matmul(weights.to(v.dtype), v)


# -- decoding with a cache ---------------------------------------------------------------------------------------------------


class KeyValueCache(Protocol):
    """A cache for `cached_attention`."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, variant: Variant) -> Tensor:
        """Return the attention output [batch, tokens, H, D]; store key and value of the new tokens. All have one head size D."""
        ...


def cached_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    kv_cache: KeyValueCache,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of new tokens over the keys and values of their sequences in `kv_cache`."""
    check_call(module, query, key, value, attention_mask, kwargs)
    layer: int = module.layer_idx  # type: ignore[assignment]
    # A cache has one head size. Zeros at the end of a key change no score; at the end of a value they are cut off again.
    value_dim = value.shape[-1]
    size = max(key.shape[-1], value_dim)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (_pad_heads(x, size) for x in (query, key, value))
    out = kv_cache.attend(layer, query, key, value, Variant(scaling, sliding_window, softcap, s_aux))
    return out[..., :value_dim], None


def _pad_heads(x: Tensor, size: int) -> Tensor:
    missing = size - x.shape[-1]
    return F.pad(x, (0, missing)) if missing else x


def sliding_window(module: PreTrainedModel, attention: nn.Module) -> int | None:
    """Return how far an attention layer looks back; None without a window.

    Qwen's layers have it as an attribute, Mistral's and Mixtral's read the config, Llama's have none.
    """
    whole = module.config.sliding_window if module.config.model_type in ("mistral", "mixtral") else None
    return getattr(attention, "sliding_window", whole)


AttentionInterface.register(PACKED, packed_attention)
AttentionInterface.register(CACHED, cached_attention)
