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

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lockstep.errors import ResourceError

SHARE = 0.85
"""Of the memory that is free before models are loaded, what the plans fill. The remainder is for kernels, graphs and fragments."""
LIMIT = 0.95
"""What they fill when all that may be offloaded is, and everything is recomputed."""
GENERATION = "gen"
"""The stage in which a rollout works."""
_CACHE = "key-value cache"
_GB = 2**30

Contents = Counter[str]
"""What lies on the device at one moment: what it is -> bytes."""


@dataclass(frozen=True)
class Keys:
    """Where the configuration says what a plan may not change."""

    less: str
    """What makes its micro-batches smaller."""
    weights: str | None
    """Whether weights are offloaded; None where the engine cannot."""
    moments: str | None
    """Whether moments are offloaded; None where the engine cannot, or the model does not learn."""
    recompute: str | None
    """What is recomputed, as key=value that leaves it to the plan; None where the model does not learn."""


@dataclass(frozen=True)
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
    beside: str | None = None
    """The update of another model in which it computes too: a teacher's, in its student's."""
    update: str | None = None
    """The stage in which it learns; None for a frozen model, which has no gradients, moments and activations."""
    pass_logits: int = 0
    """Logits of a chunk in a pass."""
    update_logits: int = 0
    """Logits of a chunk and their gradient in an update."""
    gradients: int = 0
    moments: int = 0
    activations: Mapping[str, int] = field(default_factory=dict)
    """Kind of recomputation -> what an update keeps for its backward pass; the kinds that may be chosen, the least recomputation first."""
    optimizer_offload: bool | str = False
    """The same for the moments, between updates."""

    def parts(self, *names: str) -> Contents:
        """Return some of its sizes, by name."""
        return Counter({f"{self.name} {name.rpartition('_')[2]}": getattr(self, name) for name in names})


@dataclass(frozen=True)
class Rollout:
    """What generates, as one rank has it on its device. Sizes are bytes."""

    weights: int
    """Its copy of the weights."""
    cache: int
    """The free memory with which its key-value cache is large enough."""
    remedy: str
    """What the user can do about the cache, naming a key."""
    seats: int = 1
    """Sequences of the longest kind that it holds then."""
    takes_fewer: bool = False
    """Whether it may hold fewer where so many do not fit: their number is auto."""
    source: str | None = None
    """The model on this device that its weights are made from."""
    shares: bool = False
    """Whether it needs no copy while that model's weights are on the device."""
    keeps_weights: bool = False
    """Whether the copy stays between generations."""
    keeps_cache: bool = False
    """Whether the cache does."""
    engine: str = "native"
    token_bytes: int = 0
    """Keys and values of a token."""
    row_bytes: int = 0
    """What a sequence takes beside them while it is decoded: its logits."""
    prompt_bytes: int = 0
    """What a token of a prompt takes while it is computed."""
    in_one_shape: bool = False
    """Whether every batch is computed in one shape, which must not depend on the load."""

    def holding(self, seats: int) -> "Rollout":
        """Return the rollout with a cache for so many sequences."""
        return replace(self, cache=self.cache * seats // self.seats, seats=seats)


@dataclass(frozen=True)
class MemoryPlan:
    """What is decided for one model."""

    offload_weights: bool
    """Weights are in host memory while the model is idle."""
    offload_moments: bool
    """Moments are in host memory between updates."""
    recompute: str | None
    """What its update computes again (models/recompute.py); None for a frozen model."""


Models = Sequence[Model]
Plans = Sequence[MemoryPlan]


def plan_memory(models: Models, rollout: Rollout | None, free: int) -> list[MemoryPlan]:
    """Return what is decided for each of the models that share a device with `free` bytes.

    What the user has decided (`param_offload`, `optimizer_offload`, a single kind in `activations`) stays. Raise ResourceError, with the
    bytes of each part of the largest stage and the first key to change, if no choice lets every stage fit.
    """
    room = int(SHARE * free)

    def most(plans: Plans) -> int:
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


def stage_bytes(models: Models, rollout: Rollout | None, plans: Plans) -> dict[str, int]:
    """Return stage -> bytes on the device at its fullest moment."""
    return {stage: parts.total() for stage, parts in stage_parts(models, rollout, plans).items()}


def held_bytes(models: Models, rollout: Rollout, plans: Plans) -> int:
    """Return the bytes on the device apart from the cache while the rollout generates."""
    return (_idle(list(zip(models, plans, strict=True))) + _rollout_parts(models, rollout, plans)[0]).total()


def host_bytes(models: Models, plans: Plans) -> int:
    """Return the bytes of host memory that one rank's offloaded weights and moments take."""
    return sum(
        plan.offload_weights * model.weights + plan.offload_moments * model.moments
        for model, plan in zip(models, plans, strict=True)
    )


def describe_plan(models: Models, rollout: Rollout | None, plans: Plans, free: int) -> str | None:
    """Return one line that says what is offloaded to host memory, and why; None if nothing is."""
    offloaded = []
    without = []
    for model, plan in zip(models, plans, strict=True):
        weights = plan.offload_weights and model.param_offload == "auto"
        moments = plan.offload_moments and model.optimizer_offload == "auto"
        sizes = []
        if weights:
            sizes.append(f"weights {_gb(model.weights)}")
        if moments:
            sizes.append(f"moments {_gb(model.moments)}")
        if sizes:
            offloaded.append(f"{model.name} ({', '.join(sizes)})")
        without.append(MemoryPlan(plan.offload_weights and not weights, plan.offload_moments and not moments, plan.recompute))
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


def stage_parts(models: Models, rollout: Rollout | None, plans: Plans) -> dict[str, Contents]:
    """Return stage -> what lies on the device at its fullest moment."""
    fullest: dict[str, Contents] = {}
    for stage, parts in _moments(models, rollout, plans):
        if parts.total() >= fullest.get(stage, Counter()).total():
            fullest[stage] = parts
    return fullest


def _moments(models: Models, rollout: Rollout | None, plans: Plans) -> Iterator[tuple[str, Contents]]:
    """Yield (stage, contents) for every moment that may be the fullest of its stage."""
    pairs = list(zip(models, plans, strict=True))
    copy, cache = _rollout_parts(models, rollout, plans)
    resident: Contents = Counter()
    if rollout is not None and rollout.keeps_weights:
        resident += copy
    if rollout is not None and rollout.keeps_cache:
        resident += cache
    for model, plan in pairs:
        others = resident + _idle([pair for pair in pairs if pair[0] is not model])
        waiting = () if plan.offload_moments else ("moments",)
        activations = f"{model.name} activations"
        for stage in model.passes:
            passing = model.parts("weights", *waiting, "gathered", "pass_logits")
            yield stage, others + passing + Counter({activations: model.forward})
        if model.update is not None:
            assert plan.recompute is not None
            computing = model.parts("weights", "gradients", *waiting, "gathered", "update_logits") + _beside(pairs, model.update)
            yield model.update, others + computing + Counter({activations: model.activations[plan.recompute]})
            yield model.update, others + model.parts("weights", "gradients", "moments")
    if rollout is None:
        return
    yield GENERATION, _idle(pairs) + copy + cache
    for model, plan in pairs:
        if model.name == rollout.source and plan.offload_weights:  # its weights are there while the copy is made
            making_copy = _idle(pairs) + model.parts("weights") + copy
            yield GENERATION, making_copy + cache if rollout.keeps_cache else making_copy


def _idle(pairs: Sequence[tuple[Model, MemoryPlan]]) -> Contents:
    """Return what models hold while another one works."""
    held: Contents = Counter()
    for model, plan in pairs:
        if not plan.offload_weights:
            held += model.parts("weights")
        if not plan.offload_moments:
            held += model.parts("moments")
    return held


def _beside(pairs: Sequence[tuple[Model, MemoryPlan]], update: str) -> Contents:
    """Return what models need that compute in this update of another model, beyond what they hold while idle."""
    needed: Contents = Counter()
    for model, plan in pairs:
        if model.beside != update:
            continue
        needed += model.parts("gathered", "pass_logits")
        if plan.offload_weights:
            needed += model.parts("weights")
        needed += Counter({f"{model.name} activations": model.forward})
    return needed


def _rollout_parts(models: Models, rollout: Rollout | None, plans: Plans) -> tuple[Contents, Contents]:
    """Return the rollout's copy of the weights, if it has one, and its cache."""
    if rollout is None:
        return Counter(), Counter()
    is_there = any(m.name == rollout.source and not p.offload_weights for m, p in zip(models, plans, strict=True))
    copy = 0 if rollout.shares and is_there else rollout.weights
    return Counter({"rollout weights": copy}), Counter({_CACHE: rollout.cache})


# -- choosing --------------------------------------------------------------------------------------------------------------


def _choices(models: Models, rollout: Rollout | None) -> Iterator[list[MemoryPlan]]:
    """Yield what may be offloaded, from as little to as much as possible, with as much recomputation as possible."""
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
        plans = _changed(plans, number, **{part: True})
        yield plans


def _changed(plans: Plans, number: int, **changes: Any) -> list[MemoryPlan]:
    return [*plans[:number], replace(plans[number], **changes), *plans[number + 1 :]]


def _moves(models: Models, rollout: Rollout | None) -> list[tuple[int, str]]:
    """Return (model, field of its plan) that may be offloaded, in the order of offloading."""
    source = rollout.source if rollout is not None else None

    def order(move: tuple[int, str]) -> tuple[int, int, int]:
        model = models[move[0]]
        num_stages = len(model.passes) + (model.update is not None) + (model.name == source)
        if move[1] == "offload_moments":
            return 1, num_stages, -model.moments
        # Last of all: the rollout would need a copy of weights that it has for nothing while they are on the device.
        is_borrowed = rollout is not None and rollout.shares and model.name == source
        if is_borrowed:
            return 3, num_stages, -model.weights
        return 2 if model.update is not None else 0, num_stages, -model.weights

    weights = [(i, "offload_weights") for i, model in enumerate(models) if model.param_offload == "auto"]
    moments = [(i, "offload_moments") for i, model in enumerate(models) if model.optimizer_offload == "auto" and model.update]
    return sorted(weights + moments, key=order)


def _recompute_less(models: Models, rollout: Rollout | None, plans: list[MemoryPlan], room: int) -> list[MemoryPlan]:
    """Return the plans with the least recomputation that fits; activations are on the device in the model's own update only."""
    for number, model in enumerate(models):
        for kind in model.activations:
            trial = _changed(plans, number, recompute=kind)
            if max(stage_bytes(models, rollout, trial).values()) <= room:
                plans = trial
                break
    return plans


# -- when nothing fits -----------------------------------------------------------------------------------------------------


def _too_large(models: Models, rollout: Rollout | None, plans: Plans, free: int) -> str:
    stage, parts = max(stage_parts(models, rollout, plans).items(), key=lambda item: item[1].total())
    sizes = ", ".join(f"{what} {_gb(size)}" for what, size in parts.most_common())
    return (
        f"the models do not fit on one device: stage {stage} takes {_gb(parts.total())} GB ({sizes}), and only {_gb(LIMIT * free)} GB, "
        f"{LIMIT:g} of the {_gb(free)} that are free, may be filled; {_remedy(models, rollout, plans, stage, parts, free)}"
    )


def _remedy(models: Models, rollout: Rollout | None, plans: Plans, stage: str, parts: Contents, free: int) -> str:
    """Return the first key to change: one that the user set, then one that makes the stage smaller, then more devices."""
    for number, model in enumerate(models):
        for key, choice in ((model.keys.weights, "offload_weights"), (model.keys.moments, "offload_moments")):
            trial = _changed(plans, number, **{choice: True})
            if key and stage_bytes(models, rollout, trial)[stage] < parts.total():
                return f"set {key}=auto"
        if stage == model.update and model.keys.recompute and "full" not in model.activations:
            return f"set {model.keys.recompute}"
    if rollout is not None and parts.total() - parts[_CACHE] <= LIMIT * free:
        return rollout.remedy
    none: dict[str, Any] = {"forward": 0, "pass_logits": 0, "update_logits": 0}
    lighter = [replace(model, activations=dict.fromkeys(model.activations, 0), **none) for model in models]
    without_cache = replace(rollout, cache=0) if rollout is not None else None
    if stage_bytes(lighter, without_cache, plans)[stage] <= LIMIT * free:
        for model in models:
            if stage in (*model.passes, model.update):
                return f"lower {model.keys.less}"
    more = "raise trainer.n_gpus_per_node, so that more devices share the models"
    learns_whole = any(model.moments > model.weights for model in models)
    return f"{more}, or set model.lora_rank to train adapters" if learns_whole else more


def _gb(size: float) -> str:
    return f"{size / _GB:.3g}"
