"""The memory behind pages whose keys and values are kept in eight bits; gpu/float8.py says what the numbers are."""

import torch

from lockstep.generation.pages import CacheShape, KVCache


class Float8Cache(KVCache):
    """See KVCache. In memory the KV heads of a page follow each other, so that a head's tokens, which are read together, fill lines.

    `scales` [layers, num_pages, kv_heads, page_size, 2] bfloat16 are those of keys and values.
    """

    scales: torch.Tensor

    def __init__(self, shape: CacheShape, num_pages: int, device: torch.device) -> None:
        self.shape = shape
        self.num_pages = num_pages
        size = shape.num_layers, 2, num_pages, shape.num_kv_heads, shape.page_size, shape.head_dim
        # Zeros: what was never written may be multiplied by 0, and must be finite.
        self.pool = torch.zeros(size, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).transpose(3, 4)
        self.scales = torch.zeros(size[0], *size[2:5], 2, dtype=torch.bfloat16, device=device)
