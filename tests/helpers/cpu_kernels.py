"""C functions of the native CPU engine that only `decoder_layers` calls: called one by one, they are its reference."""

from torch import Tensor

from lockstep.workers.rollout.native.cpu.kernels import Library


def rotate(
    library: Library,
    qk: Tensor,
    num_queries: int,
    angles: tuple[Tensor, Tensor],
    positions: Tensor,
    norms: tuple[Tensor | None, Tensor | None],
    eps: float,
) -> None:
    """Turn the heads qk [N, heads, D] by their positions [N] int64, in place; `angles` are cos and sin [positions, D / 2].

    `norms` are the weights of the norms that come before it, of the first `num_queries` heads and of the others.
    """
    tokens, heads, dim = qk.shape
    assert qk[0].is_contiguous()
    library.call("rotate", qk, *angles, positions, *norms, qk.stride(0), tokens, heads, num_queries, dim, eps)
