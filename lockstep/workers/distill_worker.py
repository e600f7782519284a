"""DistillWorker: a student with its rollout, and its teacher as the reference."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lockstep.algorithms.aggregation import Denominators
from lockstep.config.distill import DistillationConfig
from lockstep.models.chunked_kl import Divergence
from lockstep.observability.metrics import Metric
from lockstep.planner import Load, Model, Rollout
from lockstep.protocol import DataProto
from lockstep.single_controller.base import Dispatch, register
from lockstep.workers.engine.teacher import set_teacher
from lockstep.workers.engine_workers import ActorRolloutRefWorker


class DistillWorker(ActorRolloutRefWorker):
    """An update and an evaluation compare the actor with the reference, token by token over the whole vocabulary."""

    def __init__(self, *args: Any, distill: DistillationConfig, **options: Any) -> None:
        super().__init__(*args, **options)
        self._kind = Divergence(distill.beta, distill.temperature, distill.top_k)

    def count(self, load: Load) -> tuple[list[Model], Rollout | None]:
        """See `ModelWorker.count`. The teacher computes in the student's update."""
        (student, teacher), rollout = super().count(load)
        return [student, dataclasses.replace(teacher, passes=(), beside=student.update)], rollout

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load both."""
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
