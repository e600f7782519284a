from pathlib import Path

import pytest
import torch

from benchmarks.one_by_one import rms_norm, rotate
from lockstep.generation.cpu import kernels
from lockstep.generation.cpu.kernels import Library, Pages, attention_blocks, draw, uniforms
from lockstep.generation.cpu.paged_attention import attend, store
from lockstep.models.attention import Variant, masked_attention
from lockstep.workers.rollout import sampling
from lockstep.workers.rollout.sampling import sample

KV_HEADS = 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [8, 64, 80])
@pytest.mark.parametrize("groups", [1, 3])
def test_attention_is_what_pytorch_computes_in_float64_and_the_same_bits_in_any_block(
    compiled: Library, dtype: torch.dtype, dim: int, groups: int
) -> None:
    """Within 1e-5 of attention over the stored keys, for rows that decode and rows in prompts, with a window, soft-capped scores, sinks."""
    generator = torch.Generator().manual_seed(dim + groups)
    query_lens = [1, 5, 1, 9, 1, 70]
    contexts = [0, 0, 16, 60, 129, 3]
    tokens = sum(query_lens)
    width = 10
    table = (torch.randperm(len(query_lens) * width, generator=generator) + 1).int().view(-1, width)
    pages = Pages(*(torch.full((len(query_lens) * width + 1, 16, KV_HEADS, dim), torch.nan, dtype=dtype) for _ in range(2)))
    every = [context + count for context, count in zip(contexts, query_lens, strict=True)]
    keys, values = ([torch.randn(n, KV_HEADS, dim, generator=generator).to(dtype).float() for n in every] for _ in range(2))
    for row, length in enumerate(every):
        places = torch.arange(length)
        store(compiled, keys[row], values[row], table[row, places // 16].long() * 16 + places % 16, pages)
    q = torch.randn(tokens, KV_HEADS * groups, dim, generator=generator)
    sinks = torch.randn(KV_HEADS * groups, generator=generator)
    for variant in (Variant(), Variant(0.7, 5), Variant(softcap=1.5), Variant(sinks=sinks), Variant(0.2, 66, 2.0, sinks)):
        blocks = attention_blocks(query_lens, contexts, groups)
        out = attend(compiled, q, pages, table, blocks, variant)
        start = 0
        for row, (count, context) in enumerate(zip(query_lens, contexts, strict=True)):
            own = torch.arange(context, context + count)[:, None]
            seen = torch.arange(every[row]) <= own
            if variant.sliding_window is not None:
                seen &= torch.arange(every[row]) > own - variant.sliding_window
            expected = masked_attention(
                *(x.transpose(0, 1)[None].double() for x in (q[start : start + count], keys[row], values[row])),
                seen,
                variant,
            )
            torch.testing.assert_close(out[start : start + count].double(), expected[0].transpose(0, 1), atol=1e-5, rtol=0)
            start += count
        alone = torch.cat([blocks.new_tensor([[b[0] + i, 1, b[2] + i, b[3]] for i in range(b[1])]) for b in blocks.tolist()])
        assert torch.equal(attend(compiled, q, pages, table, alone, variant), out)


def test_a_number_that_is_not_finite_stays_visible_and_in_its_row(compiled: Library) -> None:
    pages = Pages(torch.randn(3, 16, 1, 8), torch.randn(3, 16, 1, 8))
    table = torch.tensor([[1], [2]], dtype=torch.int32)
    blocks = attention_blocks([1, 1], [2, 3], 1)
    for bad in (torch.nan, torch.inf):
        q = torch.randn(2, 1, 8)
        q[0, 0, 3] = bad
        out = attend(compiled, q, pages, table, blocks, Variant())
        assert not torch.isfinite(out[0]).all()
        assert torch.isfinite(out[1]).all()


def test_norm_and_rotation_are_those_of_the_formulas_in_float64(compiled: Library) -> None:
    """Within 2e-6."""
    x = torch.randn(5, 72)
    weight = torch.rand(72)
    expected = weight * x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(rms_norm(compiled, x, weight, 1e-5).double(), expected, atol=2e-6, rtol=2e-6)

    qkv = torch.randn(4, 9, 12)
    q_norm = torch.rand(12)
    k_norm = torch.rand(12)
    angle = torch.rand(7, 6)
    positions = torch.tensor([6, 0, 3, 3])
    for norms in ((None, None), (q_norm, k_norm)):
        expected = qkv.double()
        if norms[0] is not None:
            weights = torch.cat([q_norm.expand(5, 12), k_norm.expand(2, 12), torch.ones(2, 12)])
            scale = (expected.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
            scale[:, 7:] = 1.0
            expected = expected * scale * weights
        cos, sin = (torch.cat([f(angle[positions].double())] * 2, -1)[:, None] for f in (torch.cos, torch.sin))
        turned = expected * cos + torch.cat([-expected[..., 6:], expected[..., :6]], -1) * sin
        expected = torch.cat([turned[:, :7], expected[:, 7:]], 1)
        out = qkv.clone()
        rotate(compiled, out[:, :7], 5, (angle.cos(), angle.sin()), positions, norms, 1e-5)
        torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=2e-6)


def test_the_random_numbers_are_those_of_the_sampler(compiled: Library) -> None:
    keys = sampling.request_keys(3, [(step, 7, sample) for step in range(20) for sample in range(50)])
    positions = torch.arange(1000) * 37
    assert (keys < 0).any()
    assert torch.equal(uniforms(compiled, keys, positions), sampling.uniforms(keys, positions))


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_the_draw_is_that_of_sample(compiled: Library, temperature: float) -> None:
    """The same tokens; log-probs within 1e-5. A vocabulary that is not a whole number of chunks, and the ends of the unit interval."""
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(200, 1000, generator=generator)
    logits[:, -30:] = -torch.inf
    uniform = torch.rand(200, generator=generator)
    uniform[0], uniform[1] = 0.0, 1.0 - 2.0**-24
    tokens, log_probs = draw(compiled, logits, uniform, temperature)
    expected, expected_log_probs = sample(logits, uniform, temperature, -1, 1.0, 0.0, 1.0)
    assert torch.equal(tokens, expected)
    torch.testing.assert_close(log_probs, expected_log_probs, atol=1e-5, rtol=0)
    for bad in (torch.nan, torch.inf):
        logits[3, 500] = bad
        finite = torch.isfinite(draw(compiled, logits, uniform, temperature)[1])
        assert not finite[3]
        assert finite.sum() == 199


def test_without_a_working_compiler_there_is_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    make = kernels.library.__wrapped__
    monkeypatch.setattr(kernels.shutil, "which", lambda name: None)
    assert make() is None
    monkeypatch.setattr(kernels.shutil, "which", lambda name: "/bin/false")
    assert make() is None
    assert not list((tmp_path / "lockstep" / "kernels").iterdir())
