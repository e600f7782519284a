"""Where weights come from: anything that gives rows of a parameter by its Hugging Face name."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor
from transformers import PreTrainedModel


class Source(Protocol):
    """See lockstep.models.meta.WeightSource."""

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` of a parameter, in float32 on the CPU."""
        ...


class LoadedWeights:
    """The weights of a model that is in memory as a whole, where its files could not be read part by part."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._weights = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def read(self, name: str, start: int, stop: int) -> Tensor:
        return self._weights[name][start:stop]
