"""Compile a model for training, one layer at a time."""

import torch
from transformers import PreTrainedModel


def compile_layers(model: PreTrainedModel, backend: str = "inductor") -> None:
    """Compile the forward pass of each layer in place. Micro-batches of any length run the same code, and so do layers of one kind.

    The layer's own `forward` is compiled, not the call around it: what sharding and recomputation hang on a layer stays outside.
    """
    names = set(model._no_split_modules or ())
    for layer in model.modules():
        if type(layer).__name__ in names:
            layer.forward = torch.compile(layer.forward, dynamic=True, backend=backend)
