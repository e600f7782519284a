import torch
from torch import Tensor, nn

from lockstep.models.attention import PackedLayout
from lockstep.models.outputs import token_log_probs


class Logits(nn.Module):
    """A model whose logits are given."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, logits_to_keep: Tensor, **kwargs: object) -> object:
        return type("Output", (), {"logits": self.logits[None, logits_to_keep]})


def outputs(model: nn.Module, targets: Tensor, entropy_grad: bool) -> tuple[Tensor, Tensor]:
    n = len(targets)
    empty = torch.zeros(1, n, dtype=torch.long)
    return token_log_probs(model, empty, empty, PackedLayout(torch.tensor([n])), torch.arange(n), targets, 2.0, entropy_grad)


def test_a_forbidden_token_makes_neither_entropy_nor_gradient_nan() -> None:
    model = Logits(torch.tensor([[1.0, -torch.inf, 0.5], [0.2, 0.1, -torch.inf]]))
    log_probs, entropy = outputs(model, torch.tensor([0, 1]), entropy_grad=True)
    (log_probs.sum() + entropy.sum()).backward()
    assert torch.isfinite(entropy).all()
    assert torch.isfinite(model.logits.grad).all()
    first = torch.tensor([1.0, 0.5]) / 2.0
    torch.testing.assert_close(entropy[0], torch.distributions.Categorical(logits=first).entropy())


def test_the_entropy_has_a_gradient_only_when_asked_for() -> None:
    model = Logits(torch.randn(2, 3))
    targets = torch.tensor([0, 1])
    assert outputs(model, targets, entropy_grad=True)[1].requires_grad
    assert not outputs(model, targets, entropy_grad=False)[1].requires_grad
