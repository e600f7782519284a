# mypy: disable-error-code="no-untyped-def"
# (Triton kernels take no Python types.)
"""Kernels that begin while the one before them still runs, where the GPU can (Hopper and later: programmatic dependent launch).

With few rows a step is some 200 kernels of a few microseconds, each of which waits for the one before. A kernel that is launched with
`early` begins as soon as the one before has called `begin` or `let_next` in all of its programs, or has ended. Until its own `begin` it may
read only what no other kernel of the step writes: weights, older keys and values, where they lie. `begin` waits until the kernel before has
ended and everything that it wrote can be read; so when a kernel passes it, all kernels before are over. Where one calls `let_next` before
it waits itself, three may run at once.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def early(like: Tensor) -> dict[str, bool]:
    """Options for the launch of a kernel with EARLY that calls `begin`, on the device of `like`."""
    return {"EARLY": True, "launch_pdl": True} if like.is_cuda and _can(like.device) else {"EARLY": False}


@functools.cache
def _can(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def begin(EARLY: tl.constexpr, LETS_NEXT: tl.constexpr):
    """Wait for the kernel before; with LETS_NEXT the next one may begin, which takes room from this one's programs."""
    if EARLY:
        gdc_wait()
        if LETS_NEXT:
            gdc_launch_dependents()


@triton.jit
def let_next(EARLY: tl.constexpr):
    """The next kernel may begin, whether this one has waited or not."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def fetch(pointers):
    """Ask for the 128 bytes that each pointer is in, into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64, bitcast=True)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
