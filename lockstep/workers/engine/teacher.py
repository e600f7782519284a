"""Teacher: a frozen engine in the same process that a student's engine compares its model with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.models.chunked_kl import DIVERGENCE_COLUMNS, Divergence, Layer, chunked_divergence
from lockstep.models.packing import PackedRows
from lockstep.models.vocabulary_part import VocabularyPart

if TYPE_CHECKING:
    from lockstep.workers.engine.base import TrainEngine


@dataclass(frozen=True)
class Teacher:
    """The student's forward pass runs inside the teacher's: there, and nowhere else, both have their output layers gathered, whatever
    shards them, so neither weights nor logits are copied."""

    engine: TrainEngine
    kind: Divergence

    def columns(self, student: TrainEngine, packed: PackedRows) -> dict[str, Tensor]:
        """The columns of TokenOutputs that compare the two on a micro-batch. Reads the column response_mask."""
        learns, found = torch.is_grad_enabled(), []
        mask = packed.tokens.columns.get("response_mask")
        mask = torch.ones_like(packed.targets) if mask is None else mask  # a placeholder has no columns

        def compare(hidden: Tensor, weight: Tensor, bias: Tensor | None, part: VocabularyPart | None) -> Tensor:
            layer: Layer = (hidden, weight, bias)
            read = partial(chunked_divergence, self.kind, packed.targets, mask, layer)
            with torch.set_grad_enabled(learns):
                found.append(student.read_hidden(packed, read))
            return hidden

        with torch.no_grad():
            self.engine.read_hidden(packed, compare)
        return dict(zip(DIVERGENCE_COLUMNS, found[0], strict=True))


def set_teacher(student: TrainEngine, teacher: TrainEngine, kind: Divergence) -> None:
    """Let the student's columns be those of `Teacher`. Raises ConfigError for a model that cannot hand out its hidden states."""
    for engine, key in ((student, "model.path"), (teacher, "teacher.path")):
        if not engine.hands_out_hidden:
            raise ConfigError(
                f"the logits of {key} are not its output layer's (it scales or caps them), so they cannot be compared a chunk at a time; "
                "use lockstep ppo algorithm.adv_estimator=distill"
            )
    teacher.module.eval()
    student.teacher = Teacher(teacher, kind)
