"""Scores of whole rows, read off a forward pass of a model with a score head, in float32."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from lockstep.errors import ConfigError
from lockstep.models.mixin import extend_class, replace_class


class ReadsScores:
    """Comes before the class of a model with a score head; see `read_scores`."""

    def forward(self, *args: Any, read_at: Tensor | None = None, **inputs: Any) -> Any:
        """Return the scores [M] at the places `read_at` [M] of a pack; without `read_at` the model's own output."""
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
    """Let the forward of a model with a score head take `read_at`, in place. Raise ConfigError if its head is not a linear layer."""
    head: Any = getattr(model, "score", None)
    if type(head) is not nn.Linear:
        raise ConfigError(
            f"{type(model).__name__} has no linear layer named score, which gives a score at the last token of a row; "
            "use a decoder with transformers' usual head for sequence classification"
        )
    extend_class(model, ReadsScores)
    replace_class(head, ScoreLayer)
