"""Models that take turns on one device: who rests in host memory while the others work. Arithmetic only.

An idle model holds its weights, and AdamW's moments if it learns, unless they rest. What a stage needs beside what idle models hold:

```text
a pass     weights, weights gathered in the type of the computation, activations of one layer; the model's own moments
an update  weights and gradients; then, at one moment, gathered weights, activations and the moments that do not rest, and at a later
           one the moments
gen        the rollout's copy of the weights, and the least memory for a key-value cache; before that the copy is made from the weights
```

A plan lets the fullest moment of every stage fit into SHARE of what is free. It prefers nothing at rest, then frozen models' weights, then
the moments of trained models, then their weights; among these, first those of the model that works in the fewest stages, and of two such
models the larger; weights that the rollout shares come last, since it then needs a copy. Each next choice keeps the ones before. With
what rests decided, a trained model recomputes as little as fits. Where not even the last choice fits into SHARE, it may fill LIMIT.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lockstep.errors import ResourceError

SHARE = 0.85
"""Of the memory that is free before models are loaded, what a plan fills. The rest is for kernels, graphs and fragments."""
LIMIT = 0.95
"""What it fills when all that may rest does and everything is recomputed."""
GENERATION = "gen"
"""The stage in which a rollout works."""
_GB = 2**30

Parts = list[tuple[str, int]]
"""What lies on the device at one moment: (what it is, bytes)."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Where the configuration says what a plan may not change."""

    tokens: str
    """The tokens of a micro-batch."""
    weights: str | None = None
    """Whether weights rest; None where the engine cannot."""
    moments: str | None = None
    """Whether moments rest; None where the engine cannot, or the model does not learn."""
    recompute: str | None = None
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
    update: str | None = None
    """The stage in which it learns; None for a frozen model, which has none of the following."""
    gradients: int = 0
    moments: int = 0
    activations: Mapping[str, int] = field(default_factory=dict)
    """Kind of recomputation -> what an update keeps for its backward pass; the kinds that may be chosen, the least recomputation first."""
    param_offload: bool | str = False
    """Whether the weights rest while it is idle; auto leaves it to the plan."""
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
    lender: str | None = None
    """The model on this device that its weights are made from."""
    shares: bool = False
    """Whether it needs no copy while the lender's weights are on the device."""
    keeps_weights: bool = False
    """Whether the copy stays between generations."""
    keeps_cache: bool = False
    """Whether the cache does."""


@dataclass(frozen=True, slots=True)
class Placement:
    """What is decided for one model."""

    rest_weights: bool
    """Weights are in host memory while the model is idle."""
    rest_moments: bool
    """Moments are in host memory between updates."""
    recompute: str | None
    """What its update computes again (models/recompute.py); None for a frozen model."""


def plan_memory(models: Sequence[Model], rollout: Rollout | None, free: int) -> list[Placement]:
    """What is decided for each of the models that share a device with `free` bytes.

    What the user has decided (`param_offload`, `optimizer_offload`, a single kind in `activations`) stays. Raises ResourceError, with
    the bytes of each part of the largest stage and the first key to turn, when no choice lets every stage fit.
    """
    room = int(SHARE * free)

    def most(placements: Sequence[Placement]) -> int:
        return max(stage_bytes(models, rollout, placements).values())

    choices = list(_choices(models, rollout))
    for placements in choices:
        if most(placements) <= room:
            return _recompute_less(models, rollout, placements, room)
    # The last move can add more, a copy of lent weights, than it saves.
    least = min(reversed(choices[-2:]), key=most)
    if most(least) <= LIMIT * free:
        return least
    raise ResourceError(_too_large(models, rollout, least, free))


def stage_bytes(models: Sequence[Model], rollout: Rollout | None, placements: Sequence[Placement]) -> dict[str, int]:
    """Stage -> bytes on the device at its fullest moment."""
    return {stage: _total(parts) for stage, parts in _stage_parts(models, rollout, placements).items()}


def host_bytes(models: Sequence[Model], placements: Sequence[Placement]) -> int:
    """What one rank's resting weights and moments take of the host's memory."""
    return sum(
        placement.rest_weights * model.weights + placement.rest_moments * model.moments
        for model, placement in zip(models, placements, strict=True)
    )


def describe_plan(models: Sequence[Model], rollout: Rollout | None, placements: Sequence[Placement], free: int) -> str | None:
    """One line that says what a plan has put to rest in host memory, and why; None when that is nothing."""
    resting, without = [], []
    for model, placement in zip(models, placements, strict=True):
        weights = placement.rest_weights and model.param_offload == "auto"
        moments = placement.rest_moments and model.optimizer_offload == "auto"
        sizes = [f"weights {_gb(model.weights)}"] * weights + [f"moments {_gb(model.moments)}"] * moments
        resting += [f"{model.name} ({', '.join(sizes)})"] if sizes else []
        kept = replace(placement, rest_weights=placement.rest_weights and not weights)
        without.append(replace(kept, rest_moments=placement.rest_moments and not moments))
    if not resting:
        return None
    stage, most = max(stage_bytes(models, rollout, without).items(), key=lambda item: item[1])
    recomputed = [
        f"{model.name} {placement.recompute}" for model, placement in zip(models, placements, strict=True) if model.update
    ]
    return (
        f"in host memory while others work: {', '.join(resting)} GB. With all of it on the device, stage {stage} would take "
        f"{_gb(most)} GB of the {_gb(SHARE * free)} that may be filled"
        + (f". Recomputed: {', '.join(recomputed)}" if recomputed else "")
    )


# -- what a stage needs ----------------------------------------------------------------------------------------------------


def _stage_parts(models: Sequence[Model], rollout: Rollout | None, placements: Sequence[Placement]) -> dict[str, Parts]:
    """Stage -> what lies on the device at its fullest moment."""
    fullest: dict[str, Parts] = {}
    for stage, parts in _moments(models, rollout, placements):
        if stage not in fullest or _total(parts) > _total(fullest[stage]):
            fullest[stage] = parts
    return fullest


def _moments(models: Sequence[Model], rollout: Rollout | None, placements: Sequence[Placement]) -> Iterator[tuple[str, Parts]]:
    """Every moment that may be the fullest of its stage."""
    idle = [_idle(model, placement) for model, placement in zip(models, placements, strict=True)]
    copy, cache = _rollout_parts(models, rollout, placements)
    kept = (copy if rollout and rollout.keeps_weights else []) + (cache if rollout and rollout.keeps_cache else [])
    for number, (model, placement) in enumerate(zip(models, placements, strict=True)):
        others = kept + [part for i, parts in enumerate(idle) if i != number for part in parts]
        weights, gradients = [(f"{model.name} weights", model.weights)], [(f"{model.name} gradients", model.gradients)]
        moments = [(f"{model.name} moments", model.moments)]
        waiting = [] if placement.rest_moments else moments
        gathered = [(f"{model.name} gathered weights", model.gathered)]
        for stage in model.passes:
            yield stage, others + weights + waiting + gathered + [(f"{model.name} activations", model.forward)]
        if model.update is not None:
            assert placement.recompute is not None
            activations = [(f"{model.name} activations", model.activations[placement.recompute])]
            yield model.update, others + weights + gradients + waiting + gathered + activations
            yield model.update, others + weights + gradients + moments
    if rollout is None:
        return
    resting = [part for parts in idle for part in parts]
    yield GENERATION, resting + copy + cache
    for model, placement in zip(models, placements, strict=True):
        if model.name == rollout.lender and placement.rest_weights:  # its weights are there while the copy is made
            early = cache if rollout.keeps_cache else []
            yield GENERATION, resting + [(f"{model.name} weights", model.weights)] + copy + early


def _idle(model: Model, placement: Placement) -> Parts:
    """What a model holds while another one works."""
    weights = [] if placement.rest_weights else [(f"{model.name} weights", model.weights)]
    return weights + ([] if placement.rest_moments else [(f"{model.name} moments", model.moments)])


def _rollout_parts(models: Sequence[Model], rollout: Rollout | None, placements: Sequence[Placement]) -> tuple[Parts, Parts]:
    """The rollout's copy of the weights, where it has one, and its cache."""
    if rollout is None:
        return [], []
    lends = any(m.name == rollout.lender and not p.rest_weights for m, p in zip(models, placements, strict=True))
    copy = [] if rollout.shares and lends else [("rollout weights", rollout.weights)]
    return copy, [("key-value cache", rollout.cache)]


def _total(parts: Parts) -> int:
    return sum(size for _, size in parts)


# -- choosing --------------------------------------------------------------------------------------------------------------


def _choices(models: Sequence[Model], rollout: Rollout | None) -> Iterator[list[Placement]]:
    """What may rest, from as little as possible to as much as possible, with as much recomputation as possible."""
    placements = [
        Placement(
            rest_weights=model.param_offload is True,
            rest_moments=model.optimizer_offload is True and model.update is not None,
            recompute=list(model.activations)[-1] if model.update is not None else None,
        )
        for model in models
    ]
    yield placements
    for number, part in _moves(models, rollout):
        placements = list(placements)
        moved = placements[number]
        placements[number] = replace(moved, rest_weights=True) if part == "weights" else replace(moved, rest_moments=True)
        yield placements


def _moves(models: Sequence[Model], rollout: Rollout | None) -> list[tuple[int, str]]:
    """(model, weights or moments) that a plan may put to rest, in the order in which it does."""

    def working(model: Model) -> int:
        return model.num_stages + (rollout is not None and rollout.lender == model.name)

    # Last of all: the rollout would need a copy of weights that it has for nothing while they are on the device.
    lent = rollout.lender if rollout is not None and rollout.shares else None
    weights = [i for i, model in enumerate(models) if model.param_offload == "auto"]
    weights.sort(key=lambda i: (working(models[i]), -models[i].weights))
    moments = [i for i, model in enumerate(models) if model.optimizer_offload == "auto" and model.update is not None]
    moments.sort(key=lambda i: (working(models[i]), -models[i].moments))
    last = [i for i in weights if models[i].name == lent]
    frozen = [i for i in weights if models[i].update is None and i not in last]
    trained = [i for i in weights if i not in (*frozen, *last)]
    return [(i, "weights") for i in frozen] + [(i, "moments") for i in moments] + [(i, "weights") for i in (*trained, *last)]


def _recompute_less(models: Sequence[Model], rollout: Rollout | None, placements: list[Placement], room: int) -> list[Placement]:
    """The same with the least recomputation that fits; a model's activations are on the device in its own update only."""
    for number, model in enumerate(models):
        for kind in model.activations:
            trial = [*placements[:number], replace(placements[number], recompute=kind), *placements[number + 1 :]]
            if max(stage_bytes(models, rollout, trial).values()) <= room:
                placements = trial
                break
    return placements


# -- when nothing fits -----------------------------------------------------------------------------------------------------


def _too_large(models: Sequence[Model], rollout: Rollout | None, placements: Sequence[Placement], free: int) -> str:
    stage, parts = max(_stage_parts(models, rollout, placements).items(), key=lambda item: _total(item[1]))
    sizes = ", ".join(f"{what} {_gb(size)}" for what, size in sorted(parts, key=lambda part: -part[1]) if size)
    return (
        f"the models do not fit on one device: stage {stage} takes {_gb(_total(parts))} GB ({sizes}), and only {_gb(LIMIT * free)} GB, "
        f"{LIMIT:g} of the {_gb(free)} that are free, may be filled; {_remedy(models, rollout, placements, stage, parts, free)}"
    )


def _remedy(
    models: Sequence[Model], rollout: Rollout | None, placements: Sequence[Placement], stage: str, parts: Parts, free: int
) -> str:
    """The first key to turn: what the user forbids, then what makes the stage smaller, then more devices."""
    now = _total(parts)
    for number, (model, placement) in enumerate(zip(models, placements, strict=True)):
        for key, other in (
            (model.keys.weights, replace(placement, rest_weights=True)),
            (model.keys.moments, replace(placement, rest_moments=True)),
        ):
            trial = [*placements[:number], other, *placements[number + 1 :]]
            if key and stage_bytes(models, rollout, trial)[stage] < now:
                return f"set {key}=auto"
        if stage == model.update and model.keys.recompute and "full" not in model.activations:
            return f"set {model.keys.recompute}"
    lighter = [replace(model, forward=0, activations=dict.fromkeys(model.activations, 0)) for model in models]
    without_cache = replace(rollout, cache=0) if rollout is not None else None
    if stage_bytes(lighter, without_cache, placements)[stage] <= LIMIT * free:
        if stage == GENERATION and rollout is not None:
            return rollout.remedy
        for model in models:
            if stage in (*model.passes, model.update):
                return f"lower {model.keys.tokens}"
    return "raise trainer.n_gpus_per_node, so that more devices share the models, or set model.lora_rank to train adapters"


def _gb(size: float) -> str:
    return f"{size / _GB:.3g}"
