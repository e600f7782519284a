"""What is read off a forward pass: log-probs and entropy of given tokens from logits, scores of whole rows. All in float32."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from lockstep.errors import ConfigError
from lockstep.models.chunked_head import chunked_log_probs


def stacked_log_probs(targets: Tensor, temperature: float, entropy_grad: bool, *layer: Any) -> Tensor:
    """The columns of `chunked_log_probs` side by side, [M, 3]."""
    return torch.stack(chunked_log_probs(targets, temperature, entropy_grad, *layer), dim=-1)


def logits_log_probs(logits: Tensor, targets: Tensor, temperature: float, entropy_grad: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob [M] of `targets` [M], entropy [M] and log-prob of the most likely token [M] under softmax(logits [M, V] / temperature).

    For models whose logits are not the plain product of their output layer (`hidden.py`). The entropy carries a gradient only when
    `entropy_grad` asks for it.
    """
    logits = logits.float() / temperature
    log_normaliser = torch.logsumexp(logits, dim=-1)
    log_probs = logits.gather(-1, targets[:, None]).squeeze(-1) - log_normaliser
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        probs = torch.exp(logits - log_normaliser[:, None])
        # 0 * -inf at a forbidden token would be NaN, in the value and in the gradient; such a token adds nothing to the entropy.
        finite = logits.masked_fill(logits == -torch.inf, 0.0)
        entropy = log_normaliser - (probs * finite).sum(-1)
    return log_probs, entropy, logits.detach().amax(-1) - log_normaliser.detach()


class ReadsScores:
    """Comes before the class of a model with a score head; see `read_scores`."""

    def forward(self, *args: Any, read_at: Tensor | None = None, **inputs: Any) -> Any:
        """The model's own forward; with `read_at` [M] the scores [M] at those places of a pack."""
        if read_at is None:
            return super().forward(*args, **inputs)  # type: ignore[misc]
        hidden = self.base_model(**inputs).last_hidden_state[0, read_at]  # type: ignore[attr-defined]
        return self.score(hidden).sum(-1)  # type: ignore[attr-defined]  # a sum over one number: FSDP2 warns about outputs that are views


class ScoreLayer(nn.Linear):
    """Computes in float32 whatever the model computes in: scores are compared by differences that half precision would round away."""

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        return F.linear(input.float(), self.weight.float(), bias)


def read_scores(model: PreTrainedModel) -> None:
    """Let the forward of a model with a score head take `read_at`, in place. Raises ConfigError where its head is not a linear layer."""
    if type(getattr(model, "score", None)) is not nn.Linear:
        raise ConfigError(
            f"{type(model).__name__} has no linear layer named score, which gives a score at the last token of a row; "
            "use a decoder with transformers' usual head for sequence classification"
        )
    own = type(model)
    model.__class__ = type(own.__name__, (ReadsScores, own), {"__module__": own.__module__})
    model.score.__class__ = ScoreLayer
