"""The kernels of packed attention in Triton's interpreter: TRITON_INTERPRET=1 pytest tests/kernels/test_segment_attention.py.

tests/gpu/test_packed.py has the compiled ones.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 from the start: triton reads it when it is imported", allow_module_level=True)

from lockstep.kernels import segment_attention
from lockstep.kernels.segment_attention import Blocks, Segments


def written_out(query: Tensor, key: Tensor, value: Tensor, lengths: list[int], followers: list[int]) -> Tensor:
    """Each segment with what it continues, one at a time."""
    ends = torch.tensor(lengths).cumsum(0).tolist()
    places = [torch.arange(end - n, end) for end, n in zip(ends, lengths, strict=True)]
    continued = [shared for shared, count in enumerate(followers) for _ in range(count)]
    outputs = []
    for number, own in enumerate(places):
        seen = own
        if followers and number >= len(followers):
            seen = torch.cat([places[continued[number - len(followers)]], own])
        group = query.shape[1] // key.shape[1]
        k, v = (x[seen].repeat_interleave(group, 1) for x in (key, value))
        s = torch.einsum("qhd,khd->hqk", query[seen], k) * query.shape[-1] ** -0.5
        s = s.masked_fill(torch.ones(len(seen), len(seen), dtype=torch.bool).triu(1), -torch.inf)
        outputs.append(torch.einsum("hqk,khd->qhd", s.softmax(-1), v)[-len(own) :])
    return torch.cat(outputs)


@pytest.mark.parametrize(
    ("lengths", "followers"), [([5, 33, 16, 70], []), ([20, 1, 40, 17, 35], [3, 0]), ([33, 20, 16, 64, 7], [1, 2])]
)
@pytest.mark.parametrize("heads", [(4, 2), (3, 1)])
def test_output_and_gradients_are_those_of_attention_written_out(lengths, followers, heads, monkeypatch):
    """float32, so 1e-5 of the largest; twice the same bits."""
    for table in ("FORWARD", "QUERIES", "KEYS"):
        monkeypatch.setattr(segment_attention, table, {16: Blocks(32, 16, 4, 1)})
    torch.manual_seed(0)
    leaves = [torch.randn(sum(lengths), h, 16, requires_grad=True) for h in (heads[0], heads[1], heads[1])]
    weights = torch.randn(sum(lengths), heads[0], 16)

    def run(attend) -> list[Tensor]:
        out = attend()
        return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)]

    segments = Segments(lengths, followers, "cpu")
    mine = run(lambda: segment_attention.attend(*leaves, segments, None))
    again = run(lambda: segment_attention.attend(*leaves, segments, None))
    want = run(lambda: written_out(*leaves, lengths, followers))
    for name, a, b, c in zip(("out", "dq", "dk", "dv"), mine, again, want, strict=True):
        assert torch.equal(a, b), name
        assert (a - c).abs().max() < 1e-5 * c.abs().max(), name
