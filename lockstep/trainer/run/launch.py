"""Workers: from roles and pools to groups of running workers, each with its model on its device."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any

from lockstep.config.trainer import RunConfig
from lockstep.observability.spans import progress
from lockstep.planner import Load, SavedChoice
from lockstep.single_controller.base import ClassWithInitArgs, RoleGroup, WorkerGroup
from lockstep.trainer.run.memory import place_models
from lockstep.trainer.run.resources import ResourcePoolManager

TRAINED, FROZEN = 16, 4
"""Bytes per parameter in float32: weight, gradient and two moments; or the weight alone."""


@dataclass(frozen=True)
class RoleSpec:
    """What a role's workers are."""

    worker: ClassWithInitArgs
    """The class, and what it is made with."""
    load: Callable[[int], Load]
    """The number of ranks -> what one of them computes at once."""
    host_bytes: int = 0
    """Host memory of its models on a machine without GPUs, over all ranks."""


@dataclass
class Workers:
    """The workers of a run. Roles may be members of any Enum: what a trainer does with one depends on its name alone."""

    section: RunConfig
    manager: ResourcePoolManager
    """The pool of each role."""
    group_cls: type[WorkerGroup]
    say: Callable[[str], None]
    """Tells the user something."""
    groups: list[WorkerGroup] = field(default_factory=list)
    """One per pool, once started."""
    by_role: dict[Enum, RoleGroup] = field(default_factory=dict)
    """The workers of each role, once started."""
    numbers: dict[str, Any] = field(default_factory=dict)
    """Pool -> what was chosen for its keys that are auto (planner/choices.py::SavedChoice), for the checkpoints."""

    def recall(self, found: tuple[Path, dict[str, Any]] | None) -> None:
        """Let `start` choose again what was chosen before the checkpoint that was found, which has `numbers` in its state. A version that
        chose other numbers has left nothing to choose again."""
        numbers = {} if found is None else found[1].get("numbers", {})
        names = {field.name for field in fields(SavedChoice)}
        self.numbers |= {pool: own for pool, own in numbers.items() if own.keys() == names}

    def start(self, specs: Mapping[Enum, RoleSpec]) -> None:
        """Check the resources, start a process for each slot of the pools, and load every role's model.

        No process is left when this fails.
        """
        try:
            self._start(specs)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the processes."""
        for group in self.groups:
            group.close()
        self.groups.clear()

    def find(self, *names: str) -> RoleGroup | None:
        """The workers of the first role, of any Enum, that has one of these names."""
        by_name = {role.name: group for role, group in self.by_role.items()}
        return next((by_name[name] for name in names if name in by_name), None)

    def _start(self, specs: Mapping[Enum, RoleSpec]) -> None:
        section, manager, uses_gpu = self.section, self.manager, self.section.device == "cuda"
        memory = dict.fromkeys(manager.resource_pool_spec, 0)
        by_pool: dict[str, dict[str, Enum]] = {}
        for role, spec in specs.items():
            pool = manager.mapping[role]
            by_pool.setdefault(pool, {})[str(role)] = role
            memory[pool] += 0 if uses_gpu else spec.host_bytes // sum(manager.resource_pool_spec[pool])
        manager.create_resource_pool(self.group_cls.nodes(), uses_gpu, memory, roles=specs)
        for pool, roles in by_pool.items():
            group = self.group_cls(
                manager.resource_pool_dict[pool],
                {name: specs[role].worker for name, role in roles.items()},
                placement=manager.placement[pool],
                device=section.device,
                timeout_s=section.worker_timeout_s,
                start_timeout_s=section.start_timeout_s,
            )
            self.groups.append(group)
            with progress(f"starting the workers of {pool}"):
                for name, view in group.spawn().items():
                    self.by_role[roles[name]] = view
        self._place_models(by_pool, specs)
        for number, view in enumerate(self.by_role.values(), start=1):
            if hasattr(view, "init_model"):
                with progress(f"loading the model of {view.name} ({number} of {len(self.by_role)})"):
                    view.init_model()
            if section.on_nonfinite == "skip" and hasattr(view, "skip_nonfinite"):
                view.skip_nonfinite()
        for view in self.by_role.values() if uses_gpu else ():
            if hasattr(view, "warm_up"):
                with progress(f"compiling kernels for {view.name}"):
                    view.warm_up()
        for view in self.by_role.values():
            if not self.group_cls.in_driver and hasattr(view, "freeze_objects"):  # in the driver `Run.fit` does it, and undoes it
                view.freeze_objects()

    def _place_models(self, by_pool: Mapping[str, Mapping[str, Enum]], specs: Mapping[Enum, RoleSpec]) -> None:
        """Decide, for each device, which models are offloaded while others work, and say so."""
        if self.group_cls.in_driver:  # one process, one device
            by_pool = {", ".join(by_pool): {name: role for roles in by_pool.values() for name, role in roles.items()}}
        for pool, roles in by_pool.items():
            groups = {role: self.by_role[role] for role in roles.values()}
            loads = {role: specs[role].load(group.world_size) for role, group in groups.items()}
            before = self.numbers.get(pool)
            placed = place_models(pool, groups, loads, SavedChoice(**before) if before else None)
            if placed.kept is not None:
                self.numbers[pool] = asdict(placed.kept)
            if placed.text is not None:
                self.say(placed.text)
