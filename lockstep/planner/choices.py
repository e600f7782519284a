"""Choose the numbers of keys that are `auto`, from the models' sizes, the free memory and the load, and write plans into the configuration.

None of them changes what is computed: they say how much is computed at once. Sums over other parts round otherwise, though, so a run that
resumes keeps the numbers it had (`SavedChoice`), whatever memory is free then.
"""

import dataclasses
import itertools
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from lockstep.config.actor_rollout_ref import ActorRolloutRefConfig, Parts, PolicyKeys
from lockstep.config.check import AUTO, CACHE_SHARE, PASS_TOKENS, SEATS
from lockstep.config.critic import CriticConfig
from lockstep.config.engine import EngineChoice, ModelConfig
from lockstep.config.reward import RewardModelConfig
from lockstep.errors import ResourceError
from lockstep.planner.memory import GENERATION, SHARE, MemoryPlan, Model, Plans, Rollout, held_bytes, plan_memory, stage_bytes
from lockstep.planner.needs import LEAST_SEQUENCES, Footprint, Load, actor_tokens, scored_tokens

C = TypeVar("C", bound=EngineChoice)
T = TypeVar("T", bound=CriticConfig | RewardModelConfig)
Numbers = dict[str, float]
"""Key -> what was chosen for it."""

PAGE = 64
"""Tokens of a page of the cache."""
CANDIDATES = (8192, 16384, 32768, 65536)
"""Tokens of a micro-batch. Small models gain up to the last: the host launches fewer kernels."""
MOST_SEATS = 2048
MOST_SENT_SEATS = 1024
"""Sequences at once: of the native engine, and of one in a process of its own, which starts longer the more it captures."""
MOST_PASS_TOKENS = 32768
PROMPTS_SHARE = 1 / 32
"""Of the free memory, what prompts may take that are computed at once."""
SMALL_PROMPTS = 40_000
"""Bytes of a prompt's token below which a pass has PASS_TOKENS at most: 135M (28,000) generates 6 % faster so, 0.5B (58,000) does not."""
GRAPHS = 2**30
"""Bytes for captured graphs and kernels' workspaces."""
LEAST_SHARE, MOST_SHARE = 0.05, 0.9
"""Of the free memory, the cache gets no less and no more."""


@dataclass(frozen=True)
class RolloutNumbers:
    """What a rollout computes at once; the values of its keys of these names."""

    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float


PLAIN = RolloutNumbers(SEATS, PASS_TOKENS, CACHE_SHARE)
"""On a CPU, where more at once brings nothing, and where one shape must serve every batch."""


@dataclass(frozen=True)
class SavedChoice:
    """The chosen numbers of a pool as a checkpoint keeps them, and the load that they were chosen for."""

    tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    longest: int
    step_rows: int


@dataclass(frozen=True)
class Choice:
    """What was chosen for the models of a device, and what follows for them."""

    tokens: int
    """Of a micro-batch."""
    models: Sequence[Model]
    rollout: Rollout | None
    """As they are counted with these tokens."""
    plans: list[MemoryPlan]
    numbers: RolloutNumbers
    is_new: bool = False
    """Whether there were earlier numbers that the run could not keep."""

    def saved(self, load: Load) -> SavedChoice:
        """Return what a resumed run needs to choose the same."""
        numbers = self.numbers
        return SavedChoice(self.tokens, numbers.max_num_seqs, numbers.max_num_batched_tokens, load.longest, load.step_rows)


def choose(options: Mapping[int, Footprint], load: Load, free: int, before: SavedChoice | None = None) -> Choice:
    """Return the numbers for models that share a device with `free` bytes.

    `options` has the footprint for each size of micro-batches that may be chosen, the smallest first. The choice is the largest for which
    nothing more is offloaded or recomputed than for the smallest. Numbers of `before` win if they are for the same load and fit, even if
    more has to be offloaded and recomputed for them. They do not fit if the cache would hold fewer of the longest rows than it should and
    half as many sequences at once would be chosen: sequences would then take turns.

    Raise ResourceError if the smallest size does not fit.
    """
    is_same = before is not None and (before.longest, before.step_rows) == (load.longest, load.step_rows)
    if before is None or not is_same or before.tokens not in options:
        return _choose(options, load, free)
    try:
        chosen = _choose({before.tokens: options[before.tokens]}, load, free)
    except ResourceError:
        return replace(_choose(options, load, free), is_new=True)
    _, wanted = options[before.tokens]
    rollout = chosen.rollout
    has_fewer = wanted is not None and rollout is not None and rollout.seats < wanted.seats
    if has_fewer and 2 * chosen.numbers.max_num_seqs <= before.max_num_seqs:
        return replace(_choose(options, load, free), is_new=True)
    seats = {"max_num_seqs": before.max_num_seqs, "max_num_batched_tokens": before.max_num_batched_tokens}
    return replace(chosen, numbers=replace(chosen.numbers, **seats))


def _choose(options: Mapping[int, Footprint], load: Load, free: int) -> Choice:
    tokens = next(iter(options))
    rollout, plans = _fitting(*options[tokens], free)
    for larger, (models, _) in options.items():
        if max(stage_bytes(models, rollout, plans).values()) <= SHARE * free:
            tokens = larger
    models = options[tokens][0]
    return Choice(tokens, models, rollout, plans, _rollout_numbers(models, rollout, plans, load, free))


def _fitting(models: Sequence[Model], rollout: Rollout | None, free: int) -> tuple[Rollout | None, list[MemoryPlan]]:
    """Return the rollout with as many sequences as it should hold, or as fit if it takes fewer, and the plans for it."""
    try:
        return rollout, plan_memory(models, rollout, free)
    except ResourceError:
        if rollout is None or not rollout.takes_fewer:
            raise
    choices = [rollout.holding(seats) for seats in range(1, rollout.seats)] or [rollout]

    def is_too_large(fewer: Rollout) -> bool:
        try:
            return stage_bytes(models, fewer, plan_memory(models, fewer, free))[GENERATION] > SHARE * free
        except ResourceError:
            return True

    num_fitting = bisect_left(choices, True, key=is_too_large)
    fewer = choices[max(1, num_fitting) - 1]  # one sequence may fill more than SHARE
    return fewer, plan_memory(models, fewer, free)


def candidates(load: Load) -> tuple[int, ...]:
    """Return the sizes of micro-batches that may be chosen for this load; none larger than the first that holds a whole update."""
    whole = load.update_rows * load.longest
    least = max(CANDIDATES[0], load.longest * load.unit)
    larger = [size for before, size in itertools.pairwise(CANDIDATES) if size > least and whole > before]
    return (least, *larger)


def choose_rollout(rollout: Rollout, load: Load, free: int, most_share: float = MOST_SHARE) -> RolloutNumbers:
    """Return what `rollout` computes at once if `free` bytes are left when it starts and its cache may take `most_share` of them."""
    if rollout.engine in ("vllm", "sglang"):
        return replace(PLAIN, max_num_seqs=max(1, min(load.step_rows, MOST_SENT_SEATS)))
    if rollout.engine != "native":
        has_fewer = rollout.seats < min(LEAST_SEQUENCES, load.step_rows)  # it cannot let any wait that it has begun
        return replace(PLAIN, max_num_seqs=rollout.seats) if has_fewer else PLAIN
    most_tokens = MOST_PASS_TOKENS if rollout.prompt_bytes >= SMALL_PROMPTS else PASS_TOKENS
    tokens = PASS_TOKENS
    while tokens < most_tokens and 2 * tokens * rollout.prompt_bytes <= PROMPTS_SHARE * free:
        tokens *= 2
    if rollout.in_one_shape:
        share = _share(rollout, PLAIN.max_num_seqs, tokens, load, free, most_share)
        return replace(PLAIN, gpu_memory_utilization=share)
    # Responses are about half as long as they may be. A response that finds no page waits, and its prompt is computed again.
    most_seats = int(most_share * free) * 2 // max(1, rollout.token_bytes * load.longest)
    seats = min(load.step_rows, MOST_SEATS, max(rollout.seats, most_seats))
    share = _share(rollout, seats, tokens, load, free, most_share)
    return RolloutNumbers(seats, tokens, share)


def _share(rollout: Rollout, seats: int, tokens: int, load: Load, free: int, most: float) -> float:
    """Return the share of `free` that is left for the cache.

    It is no less than one of the longest rows needs, with the page that it ends in, one to copy and the scratch page: the plan has found
    room for it.
    """
    beside = seats * rollout.row_bytes + tokens * rollout.prompt_bytes + GRAPHS
    share = int(100 * min(most, 1 - beside / max(1, free))) / 100
    row = math.ceil(100 * rollout.token_bytes * (load.longest + 3 * PAGE) / max(1, free)) / 100
    return max(LEAST_SHARE, share, min(MOST_SHARE, row))


def _rollout_numbers(models: Sequence[Model], rollout: Rollout | None, plans: Plans, load: Load, free: int) -> RolloutNumbers:
    if rollout is None:
        return PLAIN
    left = max(1, free - held_bytes(models, rollout, plans))
    most = MOST_SHARE
    if rollout.keeps_cache:  # it is there in all other stages too
        spare = SHARE * free - max(stage_bytes(models, replace(rollout, cache=0), plans).values())
        most = min(most, max(0, spare) / left)
    return choose_rollout(rollout, load, left, most)


def describe_chosen(values: Mapping[str, float | str]) -> str | None:
    """Return a line with what was chosen (key -> value); None if nothing was."""
    if not values:
        return None
    words = [f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in values.items()]
    return f"chosen for {AUTO}: {', '.join(words)}"


# -- into the configuration --------------------------------------------------------------------------------------------------


def settle_policy(
    config: ActorRolloutRefConfig, parts: Parts, names: PolicyKeys, load: Load, numbers: RolloutNumbers
) -> tuple[ActorRolloutRefConfig, Numbers]:
    """Return `config` with numbers for the keys that are auto, and the numbers of keys that a user can set.

    They are the tokens of `load` and what was chosen for the rollout.
    """
    chosen: Numbers = {}
    if config.actor.ppo_max_token_len_per_gpu == AUTO:
        tokens = actor_tokens(config.actor, load)
        config = dataclasses.replace(config, actor=dataclasses.replace(config.actor, ppo_max_token_len_per_gpu=tokens))
        if config.actor.ppo_micro_batch_size_per_gpu is None:
            chosen[names.tokens] = tokens
    open_keys = []
    if parts.rollout:
        open_keys = [key for key in dataclasses.asdict(numbers) if getattr(config.rollout, key) == AUTO]
    for key in open_keys:
        value = getattr(numbers, key)
        config = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, **{key: value}))
        if names.rollout is not None:
            chosen[f"{names.rollout}.{key}"] = value
    return config, chosen


def settle_training(config: T, load: Load) -> tuple[T, Numbers]:
    """Return the same for the critic or the reward model."""
    section, name = "reward_model", "max_token_len_per_gpu"
    if isinstance(config, CriticConfig):
        section, name = "critic", "ppo_max_token_len_per_gpu"
    if getattr(config, name) != AUTO:
        return config, {}
    tokens = scored_tokens(config, load)
    return dataclasses.replace(config, **{name: tokens}), {f"{section}.{name}": tokens}  # type: ignore[arg-type]


def place_policy(config: ActorRolloutRefConfig, plans: Mapping[str, MemoryPlan]) -> ActorRolloutRefConfig:
    """Return `config` with what was decided for the models that `policy_needs` named."""
    if "actor" in plans:
        actor, model = _placed(config.actor, config.model, plans["actor"])
        config = dataclasses.replace(config, actor=actor, model=model)
    if "ref" in plans:
        config = dataclasses.replace(config, ref=dataclasses.replace(config.ref, param_offload=plans["ref"].offload_weights))
    return config


def place_training(config: T, plan: MemoryPlan) -> T:
    """Return `config` with what was decided for the critic or the reward model."""
    config, model = _placed(config, config.model, plan)
    return dataclasses.replace(config, model=model)


def _placed(choice: C, model: ModelConfig, plan: MemoryPlan) -> tuple[C, ModelConfig]:
    fsdp = dataclasses.replace(choice.fsdp_config, param_offload=plan.offload_weights, optimizer_offload=plan.offload_moments)
    if plan.recompute == "none":
        model = dataclasses.replace(model, enable_gradient_checkpointing=False)
    elif plan.recompute is not None:
        model = dataclasses.replace(model, recompute=plan.recompute)
    return dataclasses.replace(choice, fsdp_config=fsdp), model
