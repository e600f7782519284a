"""A causal language model that hands its last hidden states to a function, in place of making logits.

The function runs inside the model's forward, where whatever shards the model (FSDP, FSDP2) has gathered the output layer's weights, and
gets both. So the engine says what is done with them, chunk by chunk, and the model need not know.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lockstep.models.attention import PackedLayout
from lockstep.models.vocabulary_part import VocabularyPart

Read = Callable[[Tensor, Tensor, Tensor | None, VocabularyPart | None], Any]
"""(hidden states [M, H], weight [V, H] and bias [V] of the output layer or this rank's part of them, which part) -> anything."""


class HandsOutHidden:
    """Comes before a model's own class; see `hand_out_hidden`."""

    def forward(self, *args: Any, read: Read | None = None, read_at: Tensor | None = None, **inputs: Any) -> Any:
        """The model's own forward; with `read`, what that returns for the last hidden states at the places `read_at` [M]."""
        if read is None:
            return super().forward(*args, **inputs)  # type: ignore[misc]
        hidden = self.base_model(**inputs).last_hidden_state[0, read_at]  # type: ignore[attr-defined]
        layer = self.get_output_embeddings()  # type: ignore[attr-defined]
        if not isinstance(layer.weight, DTensor):
            return read(hidden, layer.weight, layer.bias, None)
        bias = None if layer.bias is None else layer.bias.to_local()
        return read(hidden, layer.weight.to_local(), bias, VocabularyPart.of(layer.weight, sums_hidden_grad=True))


def hand_out_hidden(model: PreTrainedModel) -> bool:
    """Let the model's forward take `read` and `read_at`, in place; False where its output layer is not a plain linear layer."""
    if type(model.get_output_embeddings()) is not nn.Linear:
        return False
    own = type(model)
    model.__class__ = type(own.__name__, (HandsOutHidden, own), {"__module__": own.__module__})
    return True


@torch.no_grad()
def logits_are_the_layers(model: nn.Module, layer: nn.Module, device: torch.device) -> bool:
    """Whether the model's logits are what `layer`, its output layer, makes of the hidden states that it hands out: some families scale
    or cap one or the other.

    Two forward passes of two tokens; on a sharded model every rank has to call it.
    """
    seen: list[tuple[Tensor, Tensor]] = []
    handle = layer.register_forward_hook(lambda module, args, output: seen.append((args[0], output)))
    ids = torch.arange(2, device=device)[None]
    inputs = {"input_ids": ids, "position_ids": ids, "use_cache": False, "layout": PackedLayout(torch.tensor([2]), device)}
    was_training = model.training
    try:
        logits = model.eval()(**inputs, logits_to_keep=ids[0, 1:]).logits
        hidden = model(**inputs, read=lambda hidden, *weights: hidden, read_at=ids[0, 1:])
    finally:
        handle.remove()
        model.train(was_training)
    if len(seen) != 1 or logits.shape[1] != 1:
        return False
    ((given, made),) = seen
    return torch.equal(made.to(logits.dtype), logits) and torch.equal(given[0], hidden)
