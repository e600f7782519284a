"""Models that take turns on one device: who is offloaded to host memory while the others work. Arithmetic only.

An idle model holds its weights, and AdamW's moments if it learns, unless they are offloaded. What a stage needs beside that:

```text
a pass     weights, weights gathered in the type of the computation, activations of one layer; the model's own moments
an update  weights and gradients; then, at one moment, gathered weights, activations and the moments that are not offloaded, and at a
           later one the moments
gen        the rollout's copy of the weights, and the least memory for a key-value cache; before that the copy is made from the weights
```

The plans let the fullest moment of every stage fit into SHARE of what is free. They prefer to offload nothing, then frozen models' weights,
then the moments of trained models, then their weights; among these, first those of the model that works in the fewest stages, and of two
such models the larger; weights that the rollout borrows come last, since it then needs a copy. Each next choice keeps the ones before. With
that decided, a trained model recomputes as little as fits. Where not even the last choice fits into SHARE, they may fill LIMIT.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lockstep.errors import ResourceError

SHARE = 0.85
"""Of the memory that is free before models are loaded, what the plans fill. The remainder is for kernels, graphs and fragments."""
LIMIT = 0.95
"""What they fill when all that may be offloaded is, and everything is recomputed."""
GENERATION = "gen"
"""The stage in which a rollout works."""
_GB = 2**30

Contents = list[tuple[str, int]]
"""What lies on the device at one moment: (what it is, bytes)."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Where the configuration says what a plan may not change."""

    tokens: str
    """The tokens of a micro-batch."""
    weights: str | None
    """Whether weights are offloaded; None where the engine cannot."""
    moments: str | None
    """Whether moments are offloaded; None where the engine cannot, or the model does not learn."""
    recompute: str | None
    """What is recomputed, as key=value that leaves it to the plan; None where the model does not learn."""


@dataclass(frozen=True, slots=True)
class Model:
    """One model as one rank has it on its device. Sizes are bytes."""

    name: str
    keys: Keys
    passes: tuple[str, ...]
    """The stages in which it computes without a gradient."""
    weights: int
    """What its engine keeps of the weights."""
    gathered: int
    """Weights in the type of the computation, while it computes."""
    forward: int
    """Activations of a pass without a gradient."""
    param_offload: bool | str
    """Whether the weights are offloaded while it is idle; auto leaves it to the plan."""
    update: str | None = None
    """The stage in which it learns; None for a frozen model, which has none of the following."""
    gradients: int = 0
    moments: int = 0
    activations: Mapping[str, int] = field(default_factory=dict)
    """Kind of recomputation -> what an update keeps for its backward pass; the kinds that may be chosen, the least recomputation first."""
    optimizer_offload: bool | str = False
    """The same for the moments, between updates."""

    @property
    def num_stages(self) -> int:
        """Stages in which it works, generation aside."""
        return len(self.passes) + (self.update is not None)


@dataclass(frozen=True, slots=True)
class Rollout:
    """What generates, as one rank has it on its device. Sizes are bytes."""

    weights: int
    """Its copy of the weights."""
    cache: int
    """The free memory with which its key-value cache is large enough."""
    remedy: str
    """What the user can do about the cache, naming a key."""
    source: str | None = None
    """The model on this device that its weights are made from."""
    shares: bool = False
    """Whether it needs no copy while that model's weights are on the device."""
    keeps_weights: bool = False
    """Whether the copy stays between generations."""
    keeps_cache: bool = False
    """Whether the cache does."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What is decided for one model."""

    offload_weights: bool
    """Weights are in host memory while the model is idle."""
    offload_moments: bool
    """Moments are in host memory between updates."""
    recompute: str | None
    """What its update computes again (models/recompute.py); None for a frozen model."""


def plan_memory(models: Sequence[Model], rollout: Rollout | None, free: int) -> list[MemoryPlan]:
    """What is decided for each of the models that share a device with `free` bytes.

    What the user has decided (`param_offload`, `optimizer_offload`, a single kind in `activations`) stays. Raises ResourceError, with
    the bytes of each part of the largest stage and the first key to turn, when no choice lets every stage fit.
    """
    room = int(SHARE * free)

    def most(plans: Sequence[MemoryPlan]) -> int:
        return max(stage_bytes(models, rollout, plans).values())

    choices = list(_choices(models, rollout))
    for plans in choices:
        if most(plans) <= room:
            return _recompute_less(models, rollout, plans, room)
    # The last move can add more, a copy of borrowed weights, than it saves.
    least = min(reversed(choices[-2:]), key=most)
    if most(least) <= LIMIT * free:
        return least
    raise ResourceError(_too_large(models, rollout, least, free))


def stage_bytes(models: Sequence[Model], rollout: Rollout | None, plans: Sequence[MemoryPlan]) -> dict[str, int]:
    """Stage -> bytes on the device at its fullest moment."""
    return {stage: _total(parts) for stage, parts in _stage_parts(models, rollout, plans).items()}


def host_bytes(models: Sequence[Model], plans: Sequence[MemoryPlan]) -> int:
    """What one rank's offloaded weights and moments take of the host's memory."""
    return sum(
        plan.offload_weights * model.weights + plan.offload_moments * model.moments
        for model, plan in zip(models, plans, strict=True)
    )


def describe_plan(models: Sequence[Model], rollout: Rollout | None, plans: Sequence[MemoryPlan], free: int) -> str | None:
    """One line that says what is offloaded to host memory, and why; None when that is nothing."""
    offloaded, without = [], []
    for model, plan in zip(models, plans, strict=True):
        weights = plan.offload_weights and model.param_offload == "auto"
        moments = plan.offload_moments and model.optimizer_offload == "auto"
        sizes = [f"weights {_gb(model.weights)}"] * weights + [f"moments {_gb(model.moments)}"] * moments
        offloaded += [f"{model.name} ({', '.join(sizes)})"] if sizes else []
        kept = replace(plan, offload_weights=plan.offload_weights and not weights)
        without.append(replace(kept, offload_moments=plan.offload_moments and not moments))
    if not offloaded:
        return None
    stage, most = max(stage_bytes(models, rollout, without).items(), key=lambda item: item[1])
    recomputed = [f"{model.name} {plan.recompute}" for model, plan in zip(models, plans, strict=True) if model.update]
    return (
        f"in host memory while others work: {', '.join(offloaded)} GB. With all of it on the device, stage {stage} would take "
        f"{_gb(most)} GB of the {_gb(SHARE * free)} that may be filled"
        + (f". Recomputed: {', '.join(recomputed)}" if recomputed else "")
    )


# -- what a stage needs ----------------------------------------------------------------------------------------------------


def _stage_parts(models: Sequence[Model], rollout: Rollout | None, plans: Sequence[MemoryPlan]) -> dict[str, Contents]:
    """Stage -> what lies on the device at its fullest moment."""
    fullest: dict[str, Contents] = {}
    for stage, parts in _moments(models, rollout, plans):
        if stage not in fullest or _total(parts) > _total(fullest[stage]):
            fullest[stage] = parts
    return fullest


def _moments(models: Sequence[Model], rollout: Rollout | None, plans: Sequence[MemoryPlan]) -> Iterator[tuple[str, Contents]]:
    """Every moment that may be the fullest of its stage."""
    idle = [_idle(model, plan) for model, plan in zip(models, plans, strict=True)]
    copy, cache = _rollout_parts(models, rollout, plans)
    kept = (copy if rollout and rollout.keeps_weights else []) + (cache if rollout and rollout.keeps_cache else [])
    for number, (model, plan) in enumerate(zip(models, plans, strict=True)):
        others = kept + [part for i, parts in enumerate(idle) if i != number for part in parts]
        weights, gradients = [(f"{model.name} weights", model.weights)], [(f"{model.name} gradients", model.gradients)]
        moments = [(f"{model.name} moments", model.moments)]
        waiting = [] if plan.offload_moments else moments
        gathered = [(f"{model.name} gathered weights", model.gathered)]
        for stage in model.passes:
            yield stage, others + weights + waiting + gathered + [(f"{model.name} activations", model.forward)]
        if model.update is not None:
            assert plan.recompute is not None
            activations = [(f"{model.name} activations", model.activations[plan.recompute])]
            yield model.update, others + weights + gradients + waiting + gathered + activations
            yield model.update, others + weights + gradients + moments
    if rollout is None:
        return
    offloaded = [part for parts in idle for part in parts]
    yield GENERATION, offloaded + copy + cache
    for model, plan in zip(models, plans, strict=True):
        if model.name == rollout.source and plan.offload_weights:  # its weights are there while the copy is made
            early = cache if rollout.keeps_cache else []
            yield GENERATION, offloaded + [(f"{model.name} weights", model.weights)] + copy + early


def _idle(model: Model, plan: MemoryPlan) -> Contents:
    """What a model holds while another one works."""
    weights = [] if plan.offload_weights else [(f"{model.name} weights", model.weights)]
    return weights + ([] if plan.offload_moments else [(f"{model.name} moments", model.moments)])


def _rollout_parts(models: Sequence[Model], rollout: Rollout | None, plans: Sequence[MemoryPlan]) -> tuple[Contents, Contents]:
    """The rollout's copy of the weights, where it has one, and its cache."""
    if rollout is None:
        return [], []
    is_there = any(m.name == rollout.source and not p.offload_weights for m, p in zip(models, plans, strict=True))
    copy = [] if rollout.shares and is_there else [("rollout weights", rollout.weights)]
    return copy, [("key-value cache", rollout.cache)]


def _total(parts: Contents) -> int:
    return sum(size for _, size in parts)


# -- choosing --------------------------------------------------------------------------------------------------------------


def _choices(models: Sequence[Model], rollout: Rollout | None) -> Iterator[list[MemoryPlan]]:
    """What may be offloaded, from as little as possible to as much as possible, with as much recomputation as possible."""
    plans = [
        MemoryPlan(
            offload_weights=model.param_offload is True,
            offload_moments=model.optimizer_offload is True and model.update is not None,
            recompute=list(model.activations)[-1] if model.update is not None else None,
        )
        for model in models
    ]
    yield plans
    for number, part in _moves(models, rollout):
        plans = list(plans)
        moved = plans[number]
        plans[number] = replace(moved, offload_weights=True) if part == "weights" else replace(moved, offload_moments=True)
        yield plans


def _moves(models: Sequence[Model], rollout: Rollout | None) -> list[tuple[int, str]]:
    """(model, weights or moments) that may be offloaded, in the order in which they are."""

    def working(model: Model) -> int:
        return model.num_stages + (rollout is not None and rollout.source == model.name)

    # Last of all: the rollout would need a copy of weights that it has for nothing while they are on the device.
    borrowed = rollout.source if rollout is not None and rollout.shares else None
    weights = [i for i, model in enumerate(models) if model.param_offload == "auto"]
    weights.sort(key=lambda i: (working(models[i]), -models[i].weights))
    moments = [i for i, model in enumerate(models) if model.optimizer_offload == "auto" and model.update is not None]
    moments.sort(key=lambda i: (working(models[i]), -models[i].moments))
    last = [i for i in weights if models[i].name == borrowed]
    frozen = [i for i in weights if models[i].update is None and i not in last]
    trained = [i for i in weights if i not in (*frozen, *last)]
    return [(i, "weights") for i in frozen] + [(i, "moments") for i in moments] + [(i, "weights") for i in (*trained, *last)]


def _recompute_less(models: Sequence[Model], rollout: Rollout | None, plans: list[MemoryPlan], room: int) -> list[MemoryPlan]:
    """The same with the least recomputation that fits; a model's activations are on the device in its own update only."""
    for number, model in enumerate(models):
        for kind in model.activations:
            trial = [*plans[:number], replace(plans[number], recompute=kind), *plans[number + 1 :]]
            if max(stage_bytes(models, rollout, trial).values()) <= room:
                plans = trial
                break
    return plans


# -- when nothing fits -----------------------------------------------------------------------------------------------------


def _too_large(models: Sequence[Model], rollout: Rollout | None, plans: Sequence[MemoryPlan], free: int) -> str:
    stage, parts = max(_stage_parts(models, rollout, plans).items(), key=lambda item: _total(item[1]))
    sizes = ", ".join(f"{what} {_gb(size)}" for what, size in sorted(parts, key=lambda part: -part[1]) if size)
    return (
        f"the models do not fit on one device: stage {stage} takes {_gb(_total(parts))} GB ({sizes}), and only {_gb(LIMIT * free)} GB, "
        f"{LIMIT:g} of the {_gb(free)} that are free, may be filled; {_remedy(models, rollout, plans, stage, parts, free)}"
    )


def _remedy(
    models: Sequence[Model], rollout: Rollout | None, plans: Sequence[MemoryPlan], stage: str, parts: Contents, free: int
) -> str:
    """The first key to turn: what the user forbids, then what makes the stage smaller, then more devices."""
    now = _total(parts)
    for number, (model, plan) in enumerate(zip(models, plans, strict=True)):
        for key, other in (
            (model.keys.weights, replace(plan, offload_weights=True)),
            (model.keys.moments, replace(plan, offload_moments=True)),
        ):
            trial = [*plans[:number], other, *plans[number + 1 :]]
            if key and stage_bytes(models, rollout, trial)[stage] < now:
                return f"set {key}=auto"
        if stage == model.update and model.keys.recompute and "full" not in model.activations:
            return f"set {model.keys.recompute}"
    lighter = [replace(model, forward=0, activations=dict.fromkeys(model.activations, 0)) for model in models]
    without_cache = replace(rollout, cache=0) if rollout is not None else None
    if stage_bytes(lighter, without_cache, plans)[stage] <= LIMIT * free:
        if stage == GENERATION and rollout is not None:
            return rollout.remedy
        for model in models:
            if stage in (*model.passes, model.update):
                return f"lower {model.keys.tokens}"
    return "raise trainer.n_gpus_per_node, so that more devices share the models, or set model.lora_rank to train adapters"


def _gb(size: float) -> str:
    return f"{size / _GB:.3g}"
