"""Log-probs without logits on the GPU: bfloat16 inputs with float32 sums, against float32 all the way."""

import pytest
import torch

from lockstep.models.chunked_head import chunked_log_probs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_bfloat16_inputs_are_summed_in_float32() -> None:
    """Inputs are the same numbers, so log-probs differ by the order of additions only; gradients are rounded to bfloat16 (8 bits)."""
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(300, 256, device="cuda", generator=generator).bfloat16()
    weight = (0.1 * torch.randn(5000, 256, device="cuda", generator=generator)).bfloat16()
    targets = torch.randint(0, 5000, (300,), device="cuda", generator=generator)
    weights = torch.randn(2, 300, device="cuda", generator=generator)

    def run(dtype: torch.dtype, max_logits: int) -> list[torch.Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in (hidden, weight)]
        log_probs, entropy, _ = chunked_log_probs(targets, 0.8, True, *leaves, max_logits=max_logits)
        assert log_probs.dtype == torch.float32
        gradients = torch.autograd.grad((weights[0] * log_probs + weights[1] * entropy).sum(), leaves)
        return [log_probs, entropy, *(g.float() for g in gradients)]

    mine, want = run(torch.bfloat16, 64 * 5000), run(torch.float32, 1 << 30)
    for a, b, bound in zip(mine, want, (1e-3, 1e-3, 0.02, 0.02), strict=True):
        assert (a - b).abs().max() <= bound * b.abs().max()


def test_the_logits_are_never_whole() -> None:
    """16,384 tokens over 150,000 entries would be 9.8 GB in float32; chunk and weight gradient are 2 GiB and 0.3 GB."""
    hidden = torch.randn(16_384, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(150_000, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(16_384, device="cuda", dtype=torch.int64)
    torch.cuda.reset_peak_memory_stats()
    log_probs, *_ = chunked_log_probs(targets, 1.0, False, hidden, weight)
    log_probs.sum().backward()
    assert torch.cuda.max_memory_allocated() < 8e9


def test_the_kernels_give_what_plain_float64_gives_with_forbidden_tokens_among_them() -> None:
    """3e-6 of the largest number: float32 sums of 70,000 terms."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(40, 64, generator=generator, dtype=torch.float64)
    weight, bias = torch.randn(70_000, 64, generator=generator, dtype=torch.float64), torch.zeros(70_000, dtype=torch.float64)
    bias[torch.randperm(70_000, generator=generator)[:9000]] = -torch.inf
    bias[10_000:30_000] = -torch.inf  # a whole block of them
    targets = torch.randint(30_000, 70_000, (40,), generator=generator)
    bias[targets] = 0.0
    weights = torch.randn(2, 40, generator=generator, dtype=torch.float64)

    def run(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(device, dtype, copy=True).requires_grad_() for x in (hidden, weight)]
        columns = chunked_log_probs(targets.to(device), 0.8, True, *leaves, bias.to(device, dtype), max_logits=16 * 70_000)
        loss = sum((w.to(device, dtype) * column).sum() for w, column in zip(weights, columns, strict=False))
        return [x.double().cpu() for x in (*columns, *torch.autograd.grad(loss, leaves))]

    found, expected = run("cuda", torch.float32), run("cpu", torch.float64)
    sizes = [want.abs().max() for want in expected]
    sizes[2] = sizes[0]  # the largest log-prob is near 0: it is a difference of numbers as large as the others'
    for mine, want, size in zip(found, expected, sizes, strict=True):
        assert (mine - want).abs().max() <= 3e-6 * size
