"""The models of a worker as a plan counts them, and what a plan decided as the configuration that the worker loads them with."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lockstep.config.actor_rollout_ref import PPO_KEYS, ActorConfig, ActorRolloutRefConfig, Parts, PolicyKeys
from lockstep.config.auto import AUTO, SCORED_TOKENS, TOKENS
from lockstep.config.critic import CriticConfig
from lockstep.config.engine import EngineChoice, ModelConfig
from lockstep.config.reward import RewardModelConfig
from lockstep.models.load import Head
from lockstep.planner.choices import Counted, RolloutNumbers
from lockstep.planner.count import Load, count_model, count_rollout
from lockstep.planner.memory import Keys, MemoryPlan, Model, Rollout

C = TypeVar("C", bound=EngineChoice)
T = TypeVar("T", bound=CriticConfig | RewardModelConfig)
Numbers = dict[str, float]
"""Key -> what was chosen for it."""


@dataclass(frozen=True)
class Needs:
    """What the models of one worker need, and what its device and its machine have before anything is loaded."""

    free: int
    """Bytes that are free on the device."""
    host: int
    """Bytes of host memory that are free on the machine."""
    machine: str
    """Its name: workers of one machine share that."""
    models: list[Model]
    rollout: Rollout | None = None
    options: Mapping[int, Counted] = field(default_factory=dict)
    """Models and rollout for each size of micro-batches that may be chosen where that is auto; `models` has the smallest."""


def policy_needs(
    config: ActorRolloutRefConfig,
    parts: Parts,
    names: PolicyKeys = PPO_KEYS,
    *,
    load: Load,
    world_size: int,
    element: int,
    head: Head = Head.LANGUAGE_MODEL,
) -> tuple[list[Model], Rollout | None]:
    """The actor, the reference and the rollout, as far as they are among `parts`; `element` as in `count_model`, `names` for messages."""
    actor, ref, model = config.actor, config.ref, config.model
    options: Any = {"model": model, "head": head, "load": load, "world_size": world_size, "element": element}
    models = []
    if parts.actor:
        # With adapters the actor is the reference too, unless that is another model.
        passes = ("old_log_prob", "ref") if parts.reference and not config.loads_reference(parts) else ("old_log_prob",)
        budget = (_actor_tokens(actor, load), actor.ppo_micro_batch_size_per_gpu)
        keys = _trained_keys(names.engine, _less(names.tokens, names.length, budget, load, actor, names.engine), names.model)
        models.append(count_model("actor", keys, passes, "update_actor", choice=actor, budget=budget, **options))
    if config.loads_reference(parts):
        tokens = ref.log_prob_max_token_len_per_gpu or _actor_tokens(actor, load)
        budget = (tokens, ref.log_prob_micro_batch_size_per_gpu)
        less = _less(names.reference_tokens, names.length, budget, load, config.reference_engine, names.engine)
        keys = Keys(less, names.reference_offload, moments=None, recompute=None)
        options["model"] = config.reference_model
        models.append(count_model("ref", keys, ("ref",), None, choice=config.reference_engine, budget=budget, **options))
    rollout = None
    if parts.rollout:
        source = actor if parts.actor else None
        rollout = count_rollout(config.rollout, model, actor=source, world_size=world_size, element=element, load=load)
    return models, rollout


def training_needs(config: CriticConfig | RewardModelConfig, *, load: Load, world_size: int, element: int) -> Model:
    """The critic or the reward model."""
    options: Any = {"choice": config, "model": config.model, "load": load, "world_size": world_size, "element": element}
    if isinstance(config, CriticConfig):
        budget = (_scored_tokens(config, load), config.ppo_micro_batch_size_per_gpu)
        less = _less("critic.ppo_max_token_len_per_gpu", PPO_KEYS.length, budget, load, config, "critic")
        keys = _trained_keys("critic", less, "critic.model")
        return count_model("critic", keys, ("values",), "update_critic", head=Head.VALUE, budget=budget, **options)
    budget = (_scored_tokens(config, load), config.micro_batch_size_per_gpu)
    less = _less("reward_model.max_token_len_per_gpu", PPO_KEYS.length, budget, load, config, "reward_model")
    keys = Keys(less, "reward_model.fsdp_config.param_offload", moments=None, recompute=None)
    return count_model("reward_model", keys, ("reward_model",), None, head=Head.SCORE, budget=budget, **options)


def _actor_tokens(actor: ActorConfig, load: Load) -> int:
    return load.micro_batch(actor.ppo_max_token_len_per_gpu, TOKENS, actor.token_ranks)


def _scored_tokens(config: CriticConfig | RewardModelConfig, load: Load) -> int:
    if isinstance(config, CriticConfig):
        return load.micro_batch(config.ppo_max_token_len_per_gpu, TOKENS, config.token_ranks)
    # Nothing is kept of its passes, so its micro-batches are not the plan's to make smaller.
    alone = dataclasses.replace(load, auto_tokens=None)
    return alone.micro_batch(config.max_token_len_per_gpu, SCORED_TOKENS, config.token_ranks)


def _less(tokens: str, length: str, budget: tuple[int, int | None], load: Load, choice: EngineChoice, section: str) -> str:
    """What makes micro-batches of this budget smaller: the key of their tokens or rows, or where each is one row that of its length, or of
    the ranks that divide it. `section` has the engine's keys."""
    max_tokens, max_rows = budget
    if max_rows is not None and max_rows > load.unit:
        return tokens.replace("max_token_len", "micro_batch_size")
    if max_rows is None and max_tokens * choice.token_ranks > load.longest * load.unit:
        return tokens
    if choice.strategy not in ("fsdp", "fsdp2") or choice.fsdp_config.tensor_parallel_size > 1:
        return length
    return f"{length}, or raise {section}.fsdp_config.ulysses_sequence_parallel_size, so that more GPUs divide each row"


def _trained_keys(section: str, less: str, model: str) -> Keys:
    """The keys of a model that learns: its section, what makes its micro-batches smaller, and the section of its model."""
    return Keys(
        less=less,
        weights=f"{section}.fsdp_config.param_offload",
        moments=f"{section}.fsdp_config.optimizer_offload",
        recompute=f"{model}.recompute=auto and {model}.enable_gradient_checkpointing=true",
    )


def settle_policy(
    config: ActorRolloutRefConfig, parts: Parts, names: PolicyKeys, load: Load, numbers: RolloutNumbers
) -> tuple[ActorRolloutRefConfig, Numbers]:
    """The same with numbers for the keys that are auto, the tokens of `load` and what was chosen for the rollout; and the numbers of keys
    that a user can set."""
    chosen: Numbers = {}
    if config.actor.ppo_max_token_len_per_gpu == AUTO:
        tokens = _actor_tokens(config.actor, load)
        config = dataclasses.replace(config, actor=dataclasses.replace(config.actor, ppo_max_token_len_per_gpu=tokens))
        if config.actor.ppo_micro_batch_size_per_gpu is None:
            chosen[names.tokens] = tokens
    open_keys = [key for key in dataclasses.asdict(numbers) if getattr(config.rollout, key) == AUTO] if parts.rollout else []
    for key in open_keys:
        value = getattr(numbers, key)
        config = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, **{key: value}))
        if names.rollout is not None:
            chosen[f"{names.rollout}.{key}"] = value
    return config, chosen


def settle_training(config: T, load: Load) -> tuple[T, Numbers]:
    """The same for the critic or the reward model."""
    section, name = (
        ("critic", "ppo_max_token_len_per_gpu") if isinstance(config, CriticConfig) else ("reward_model", "max_token_len_per_gpu")
    )
    if getattr(config, name) != AUTO:
        return config, {}
    tokens = _scored_tokens(config, load)
    return dataclasses.replace(config, **{name: tokens}), {f"{section}.{name}": tokens}  # type: ignore[arg-type]


def place_policy(config: ActorRolloutRefConfig, plans: Mapping[str, MemoryPlan]) -> ActorRolloutRefConfig:
    """The same with what was decided for the models that `policy_needs` named."""
    if "actor" in plans:
        actor, model = _placed(config.actor, config.model, plans["actor"])
        config = dataclasses.replace(config, actor=actor, model=model)
    if "ref" in plans:
        config = dataclasses.replace(config, ref=dataclasses.replace(config.ref, param_offload=plans["ref"].offload_weights))
    return config


def place_training(config: T, plan: MemoryPlan) -> T:
    """The same with what was decided for the critic or the reward model."""
    config, model = _placed(config, config.model, plan)
    return dataclasses.replace(config, model=model)


def _placed(choice: C, model: ModelConfig, plan: MemoryPlan) -> tuple[C, ModelConfig]:
    fsdp = dataclasses.replace(choice.fsdp_config, param_offload=plan.offload_weights, optimizer_offload=plan.offload_moments)
    if plan.recompute == "none":
        model = dataclasses.replace(model, enable_gradient_checkpointing=False)
    elif plan.recompute is not None:
        model = dataclasses.replace(model, recompute=plan.recompute)
    return dataclasses.replace(choice, fsdp_config=fsdp), model
