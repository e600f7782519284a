import torch
from helpers.blocks import estimate


def test_a_token_is_worth_how_much_more_likely_it_is_to_the_teacher():
    inputs = {
        "old_log_probs": torch.tensor([[-1.0, -2.0, -0.5], [-0.25, -9.0, -9.0]]),
        "ref_log_prob": torch.tensor([[-0.5, -5.0, -0.5], [-1.25, torch.nan, 0.0]]),
        "response_mask": torch.tensor([[1, 1, 1], [1, 0, 0]]),
    }
    advantages, returns = estimate("distill", **inputs)
    assert torch.equal(advantages, torch.tensor([[0.5, -3.0, 0.0], [-1.0, 0.0, 0.0]]))
    assert torch.equal(returns, advantages)


def test_its_policy_gradient_is_that_of_the_reverse_kl():
    """At one place, over all tokens that may be drawn there: E[advantage grad log p] = -grad KL(p || q); float64, to 1e-12."""
    logits = torch.randn(7, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    log_q = torch.log_softmax(torch.randn(7, generator=torch.Generator().manual_seed(1), dtype=torch.float64), -1)
    log_p = torch.log_softmax(logits, -1)
    (kl,) = torch.autograd.grad((log_p.exp() * (log_p - log_q)).sum(), logits, retain_graph=True)
    old = log_p.detach()
    mask = torch.ones(7, 1)
    advantages, _ = estimate("distill", old_log_probs=old[:, None], ref_log_prob=log_q[:, None], response_mask=mask)
    (expected,) = torch.autograd.grad((old.exp() * advantages[:, 0] * log_p).sum(), logits)
    torch.testing.assert_close(expected, -kl, atol=1e-12, rtol=0)
