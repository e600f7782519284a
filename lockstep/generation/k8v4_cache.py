"""The memory behind pages whose keys are kept in eight bits and whose values in four; gpu/k8v4.py says what the numbers are."""

import torch
from torch import Tensor

from lockstep.generation.pages import CacheShape, KVCache


class K8V4Cache(KVCache):
    """See KVCache. `pool` [layers, 1, num_pages, kv_heads, bytes]: of a KV head of a page first the keys of its tokens, then their values.

    `scales` [layers, num_pages, kv_heads, page_size, 2] int16 are beside them.
    """

    scales: Tensor

    def __init__(self, shape: CacheShape, num_pages: int, device: torch.device) -> None:
        self.shape, self.num_pages = shape, num_pages
        heads, tokens = (num_pages, shape.num_kv_heads), shape.page_size
        # Zeros: what was never written may be multiplied by 0, and must be finite.
        self.pool = torch.zeros(shape.num_layers, 1, *heads, tokens * shape.head_dim * 3 // 2, dtype=torch.uint8, device=device)
        self.scales = torch.zeros(shape.num_layers, *heads, tokens, 2, dtype=torch.int16, device=device)

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """Keys [num_pages, page_size, kv_heads, head_dim] and values [..., head_dim / 2], two in a byte."""
        dim, tokens = self.shape.head_dim, self.shape.page_size
        keys, values = self.pool[number, 0].split([tokens * dim, tokens * dim // 2], -1)
        return keys.unflatten(-1, (tokens, dim)).transpose(1, 2), values.unflatten(-1, (tokens, dim // 2)).transpose(1, 2)
