"""The checkpoints of a run that goes on: newer weights for an engine that serves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lockstep.config.engine import ModelConfig
from lockstep.tools.load_model import LoadedModel, ModelSource, find_model, load_module
from lockstep.workers.rollout.base import ModuleRollout

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class NewerWeights:
    """Weights that were read, and not yet used."""

    source: ModelSource
    module: PreTrainedModel
    engine: ModuleRollout

    @torch.no_grad()
    def put(self) -> None:
        """Give them to the engine, in place. Nothing may be in flight."""
        own = dict(self.engine.module.named_parameters())
        for name, parameter in self.module.named_parameters():
            own[name].copy_(parameter)
        self.engine.version += 1


def newer_weights(run: str, loaded: LoadedModel) -> NewerWeights | None:
    """The weights of the newest checkpoint in a run's folder, if it is a later step than the one that is served.

    Raises DataError or OSError when it cannot be read, also because the run has deleted it meanwhile.
    """
    source = find_model(run)
    if source.step is None or source.step <= (loaded.source.step or 0):
        return None
    engine = loaded.engine
    assert isinstance(engine, ModuleRollout), "the command refuses the others"
    return NewerWeights(source, load_module(ModelConfig(path=source.path), engine.attention), engine)
