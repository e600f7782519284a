import torch

from lockstep.models.outputs import logits_log_probs


def test_a_forbidden_token_makes_neither_entropy_nor_gradient_nan() -> None:
    logits = torch.tensor([[1.0, -torch.inf, 0.5], [0.2, 0.1, -torch.inf]], requires_grad=True)
    log_probs, entropy, _ = logits_log_probs(logits, torch.tensor([0, 1]), 2.0, entropy_grad=True)
    (log_probs.sum() + entropy.sum()).backward()
    assert torch.isfinite(entropy).all()
    assert torch.isfinite(logits.grad).all()
    first = torch.tensor([1.0, 0.5]) / 2.0
    torch.testing.assert_close(entropy[0], torch.distributions.Categorical(logits=first).entropy())


def test_the_entropy_has_a_gradient_only_when_asked_for() -> None:
    logits, targets = torch.randn(2, 3, requires_grad=True), torch.tensor([0, 1])
    assert logits_log_probs(logits, targets, 2.0, entropy_grad=True)[1].requires_grad
    assert not logits_log_probs(logits, targets, 2.0, entropy_grad=False)[1].requires_grad
