"""Distillation: a teacher that the student's engine is compared with, and the worker that has both."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lockstep.algorithms.aggregation import Denominators
from lockstep.config.distill import DistillationConfig
from lockstep.errors import ConfigError
from lockstep.models.chunked_head import VocabularyPart
from lockstep.models.chunked_kl import DIVERGENCE_COLUMNS, Divergence, Layer, chunked_divergence
from lockstep.models.packing import PackedRows
from lockstep.observability.metrics import Metric
from lockstep.planner import Load, Model, Rollout
from lockstep.protocol import DataProto
from lockstep.single_controller.base import Dispatch, register
from lockstep.workers.engine.base import TrainEngine
from lockstep.workers.engine_workers import ActorRolloutRefWorker


@dataclass(frozen=True)
class Teacher:
    """A frozen engine in the same process that a student's engine is compared with.

    The student's forward pass runs inside the teacher's. Only there are both output layers gathered, whatever shards them, so neither
    weights nor logits are copied.
    """

    engine: TrainEngine
    kind: Divergence

    def columns(self, student: TrainEngine, packed: PackedRows) -> dict[str, Tensor]:
        """Return the columns of TokenOutputs that compare the two on a micro-batch. Reads the column response_mask."""
        learns = torch.is_grad_enabled()
        found = []
        mask = packed.tokens.columns.get("response_mask")
        if mask is None:  # a placeholder has no columns
            mask = torch.ones_like(packed.targets)

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
    """Compare `student` with `teacher` from now on. Raise ConfigError if one of the models cannot hand out its hidden states."""
    for engine, key in ((student, "model.path"), (teacher, "teacher.path")):
        if not engine.hands_out_hidden:
            raise ConfigError(
                f"the logits of {key} are not its output layer's (it scales or caps them), so they cannot be compared a chunk at a time; "
                "use lockstep ppo algorithm.adv_estimator=distill"
            )
    teacher.module.eval()
    student.teacher = Teacher(teacher, kind)


class DistillWorker(ActorRolloutRefWorker):
    """A student with its rollout, and its teacher as the reference.

    Updates and evaluations compare the two token by token, over the whole vocabulary.
    """

    def __init__(self, *args: Any, distill: DistillationConfig, **options: Any) -> None:
        super().__init__(*args, **options)
        self._kind = Divergence(distill.beta, distill.temperature, distill.top_k)

    def count(self, load: Load) -> tuple[list[Model], Rollout | None]:
        """See `ModelWorker.count`. The teacher computes within the student's update."""
        (student, teacher), rollout = super().count(load)
        return [student, dataclasses.replace(teacher, passes=(), beside=student.update)], rollout

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load student and teacher."""
        super().init_model()
        set_teacher(self.actor.engine, self.ref.engine, self._kind)

    @register(Dispatch.DP_COMPUTE_METRIC)
    def update_actor(self, mini_batch: DataProto, denominators: Denominators) -> dict[str, Metric]:
        """See ActorRolloutRefWorker."""
        with self._teacher_on_device():
            return super().update_actor(mini_batch, denominators)

    @register(Dispatch.DP_COMPUTE_METRIC)
    def evaluate(self, rows: DataProto, denominators: Denominators) -> dict[str, Metric]:
        """See ActorRolloutRefWorker."""
        with self._teacher_on_device():
            return super().evaluate(rows, denominators)

    @contextmanager
    def _teacher_on_device(self) -> Iterator[None]:
        with self.ref.engine.on_device():
            yield
            self.ref.engine.release()
