"""Make a causal language model hand out its last hidden states (chunked_head.py), where that gives the same as its logits."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lockstep.models.attention import PackedLayout
from lockstep.models.chunked_head import HandsOutHidden


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
    try:
        logits = model(**inputs, logits_to_keep=ids[0, 1:]).logits
        hidden = model(**inputs, read=lambda hidden, *weights: hidden, read_at=ids[0, 1:])
    finally:
        handle.remove()
    if len(seen) != 1 or logits.shape[1] != 1:
        return False
    ((given, made),) = seen
    return torch.equal(made.to(logits.dtype), logits) and torch.equal(given[0], hidden)
