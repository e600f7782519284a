import shutil
from pathlib import Path

import pytest
import torch

from lockstep.models.attention import Variant, masked_attention
from lockstep.workers.rollout.native.cpu import kernel

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@needs_compiler
@pytest.mark.parametrize("dim", [8, 64, 80, 128])
@pytest.mark.parametrize("groups", [1, 3])
def test_the_kernel_computes_what_pytorch_computes_in_float64(dim: int, groups: int) -> None:
    """Within 2e-6 for random page tables and lengths, with a window, soft-capped scores and sinks; at 1 and 2 threads the same bits."""
    attention = kernel.paged_attention_kernel()
    assert attention is not None
    generator = torch.Generator().manual_seed(dim + groups)
    rows, kv_heads, page_size, width = 7, 2, 4, 6
    k, v = (torch.randn(rows * width + 1, page_size, kv_heads, dim, generator=generator) for _ in range(2))
    q = torch.randn(rows, kv_heads * groups, dim, generator=generator)
    table = (torch.randperm(rows * width, generator=generator) + 1).int().view(rows, width)
    lengths = torch.tensor([1, 2, 4, 5, 17, 23, 24], dtype=torch.int32)
    sinks = torch.randn(kv_heads * groups, generator=generator)
    for variant in (Variant(), Variant(0.7, 5), Variant(softcap=1.5), Variant(sinks=sinks), Variant(0.2, 3, 2.0, sinks)):
        seen = torch.arange(width * page_size) < lengths[:, None]
        if variant.sliding_window is not None:
            seen &= torch.arange(width * page_size) >= lengths[:, None] - variant.sliding_window
        keys, values = (x[table.long()].flatten(1, 2).transpose(1, 2).double() for x in (k, v))
        expected = masked_attention(
            q[:, :, None].double(),
            keys,
            values,
            seen[:, None, None],
            variant.scaling,
            variant.softcap,
            None if variant.sinks is None else variant.sinks.double().view(1, -1, 1, 1),
        )[:, :, 0]
        out = attention(q, k, v, table, lengths, variant)
        torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=0)
        torch.set_num_threads(2)
        try:
            assert torch.equal(attention(q, k, v, table, lengths, variant), out)
        finally:
            torch.set_num_threads(1)


@needs_compiler
def test_a_number_that_is_not_finite_stays_visible() -> None:
    attention = kernel.paged_attention_kernel()
    assert attention is not None
    k = torch.randn(3, 4, 1, 8)
    table, lengths = torch.tensor([[1], [2]], dtype=torch.int32), torch.tensor([3, 4], dtype=torch.int32)
    for bad in (torch.nan, torch.inf):
        q = torch.randn(2, 1, 8)
        q[0, 0, 3] = bad
        out = attention(q, k, k, table, lengths, Variant())
        assert not torch.isfinite(out[0]).all()
        assert torch.isfinite(out[1]).all()


def test_without_a_working_compiler_there_is_no_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    make = kernel.paged_attention_kernel.__wrapped__
    monkeypatch.setattr(kernel.shutil, "which", lambda name: None)
    assert make() is None
    monkeypatch.setattr(kernel.shutil, "which", lambda name: "/bin/false")
    assert make() is None
    assert not list((tmp_path / "lockstep" / "kernels").iterdir())
