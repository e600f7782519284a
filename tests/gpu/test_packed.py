"""Flash attention over packed and shared segments on the GPU, against the same rows one at a time in float32."""

import pytest
import torch

pytest.importorskip("triton")

from lockstep.kernels import flash, long_rows
from lockstep.models import attention
from lockstep.models.attention import PackedLayout, packed_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (12, 2)])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize(("followers", "window"), [((), None), ((), 50), ((3, 0, 2), None)])
@pytest.mark.parametrize("segments", [True, False], ids=["segments", "flash"])
def test_packed_attention_equals_float32_one_segment_at_a_time(segments, heads, size, followers, window, monkeypatch) -> None:
    """bfloat16 rounds to 8 bits: outputs within 2 %, gradients within 3 %, of the largest. Our own kernels give the same bits twice."""
    if not segments:
        monkeypatch.setattr(attention, "SEGMENT_SIZES", ())
    lengths = torch.tensor([70, 33, 129, 64, 1, 200, 90, 31])
    generator = torch.Generator("cuda").manual_seed(1)
    total = int(lengths.sum())
    tensors = [torch.randn(1, h, total, size, device="cuda", generator=generator) for h in (heads[0], heads[1], heads[1])]
    weights = torch.randn(1, total, heads[0], size, device="cuda", generator=generator)
    layout = PackedLayout(lengths, "cuda", followers)

    def run(dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(torch.bfloat16).to(dtype).requires_grad_() for x in tensors]
        assert flash.applies(leaves[0], leaves[2]) == (dtype == torch.bfloat16)
        out, _ = packed_attention(torch.nn.Module(), *leaves, None, layout=layout, sliding_window=window)
        return [out.float(), *(g.float() for g in torch.autograd.grad((out.float() * weights).sum(), leaves))]

    found, again = run(torch.bfloat16), run(torch.bfloat16)
    for name, mine, other, want in zip(("out", "dq", "dk", "dv"), found, again, run(torch.float32), strict=True):
        assert (mine - want).abs().max() < 0.03 * want.abs().max(), name
        assert torch.equal(mine, other) or not segments or window is not None, name


@pytest.mark.parametrize(("heads", "size"), [((12, 2), 128), ((14, 2), 64), ((9, 3), 64)])
@pytest.mark.parametrize(("lengths", "followers"), [((700, 5000, 4097, 300, 4096), ()), ((300, 130, 4500, 4500, 5003, 10), (2, 2))])
def test_long_rows_are_as_near_float32_as_packed_ones(heads, size, lengths, followers, monkeypatch) -> None:
    """Rows that go alone, some of them filled up, among packed ones and with shared prompts. Errors against float32, one segment at a
    time, relative and in the mean over all numbers: at most 1.1 times those of the packed kernel, and below 1 %."""
    generator = torch.Generator("cuda").manual_seed(1)
    tensors = [torch.randn(1, h, sum(lengths), size, device="cuda", generator=generator) for h in (heads[0], heads[1], heads[1])]
    weights = torch.randn(1, sum(lengths), heads[0], size, device="cuda", generator=generator)

    monkeypatch.setattr(attention, "SEGMENT_SIZES", ())

    def run(dtype: torch.dtype, least: int = 1 << 40) -> list[torch.Tensor]:
        monkeypatch.setitem(long_rows.LEAST, size, least)
        layout = PackedLayout(torch.tensor(lengths), "cuda", followers)
        leaves = [x.to(torch.bfloat16).to(dtype).requires_grad_() for x in tensors]
        out, _ = packed_attention(torch.nn.Module(), *leaves, None, layout=layout)
        if dtype == torch.bfloat16 and long_rows.applies(leaves[0]):
            assert any(part.bounds is None for part in layout.flash.runs[least - 1]) == (least < 5000)
        return [out.float(), *(g.float() for g in torch.autograd.grad((out.float() * weights).sum(), leaves))]

    exact, alone = run(torch.float32), run(torch.bfloat16, least=4096)
    for name, mine, packed, want in zip(("out", "dq", "dk", "dv"), alone, run(torch.bfloat16), exact, strict=True):
        errors = [((x - want).norm() / want.norm()).item() for x in (mine, packed)]
        assert errors[0] < 1.1 * errors[1], (name, errors)
        assert errors[0] < 0.01, (name, errors)
