"""Predict the memory and the time of each stage, for `lockstep ppo` and for recipes that learn from files. No GPU is needed."""

import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from lockstep.config.actor_rollout_ref import PPO_KEYS, Parts
from lockstep.config.critic import CriticConfig
from lockstep.config.dpo import DPOConfig
from lockstep.config.engine import EngineChoice
from lockstep.config.ppo import PPOConfig
from lockstep.config.reward import RewardModelConfig
from lockstep.config.reward_train import RewardTrainConfig
from lockstep.config.sft import SFTConfig
from lockstep.config.stage import STAGE_KEYS
from lockstep.errors import ResourceError
from lockstep.models.load import Head
from lockstep.planner import decode
from lockstep.planner.choices import PAGE, PLAIN, Numbers, candidates, choose, settle_policy, settle_training
from lockstep.planner.hardware import Device
from lockstep.planner.memory import GENERATION, Contents, MemoryPlan, Model, Rollout, held_bytes, host_bytes, stage_parts
from lockstep.planner.needs import Load, policy_needs, reusing_models, training_needs
from lockstep.planner.time import Ranks, RowGroups, Shape, pass_s, read_shape, update_s

SAVE = "save_checkpoint"
SYNC = "update_weights"
UPDATE = "update_actor"
_COPIED, _WRITTEN = 3.4e9, 0.64e9
"""Bytes per second of a save: to host memory, while the run waits, and then to disk (measured with one 0.5B model)."""
_SENT = 20e9
"""Bytes per second to an engine in a process of its own."""
FLOAT32_SLOWER = 15
"""How many times fewer float32 operations than bfloat16 ones a GPU does per second (H100, H200: 67 of 989 TFLOP/s)."""
_ALL = Parts(actor=True, rollout=True, reference=True)
_SAVED = 12
"""Bytes of a checkpoint per parameter that learns: the weight and two moments."""


@dataclass(frozen=True)
class Lengths:
    """Mean tokens of prompts and responses."""

    prompt: float
    response: float


@dataclass(frozen=True)
class Pool:
    """GPUs that hold the same models."""

    name: str
    ranks: Ranks
    models: Sequence[Model]
    rollout: Rollout | None = None
    plans: Sequence[MemoryPlan] = ()
    """What is decided for each of the models; empty before that."""


@dataclass(slots=True)
class Prediction:
    """The predicted memory and time. Bytes are per GPU, seconds per step."""

    memory: dict[str, Contents] = field(default_factory=dict)
    """Stage -> what lies on the GPU at its fullest moment."""
    host: int = 0
    """What is offloaded to the host's memory, per GPU."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Stage -> seconds. Saving is there too, though it is not part of a step."""
    plans: dict[str, MemoryPlan] = field(default_factory=dict)
    """Model -> what is offloaded and recomputed."""
    seats: int = 0
    """Sequences that are generated at once on a GPU."""
    tokens: float = 0.0
    """Tokens of a step, prompts of every row counted."""
    num_gpus: int = 1
    chosen: Numbers = field(default_factory=dict)
    """Key that is auto -> its number."""

    @property
    def step_s(self) -> float:
        """Seconds of a step without validation and saving."""
        return sum(seconds for stage, seconds in self.seconds.items() if stage != SAVE)

    @property
    def peak(self) -> int:
        """Bytes of the fullest moment."""
        return max(parts.total() for parts in self.memory.values())


def predict(config: PPOConfig, device: Device, lengths: Lengths | None = None, *, passes: Collection[str] = ()) -> Prediction:
    """Return memory and time of a step on GPUs of this kind; `passes` (old_log_prob, values) count even if an update can do without.

    Without `lengths` every prompt and response is as long as it may be. Raise ResourceError, with the first key to change, if the models
    do not fit, and DataError if a model's config cannot be read.
    """
    lengths = lengths or Lengths(config.data.max_prompt_length, config.data.max_response_length)
    found = Prediction(
        tokens=config.data.train_batch_size * config.actor_rollout_ref.rollout.n * (lengths.prompt + lengths.response)
    )
    with reusing_models():
        config, found.chosen, pools = _settle(config, device)
        found.num_gpus = sum(pool.ranks.count for pool in pools)
        for pool in pools:
            found.plans |= {model.name: plan for model, plan in zip(pool.models, pool.plans, strict=True)}
            found.host = max(found.host, host_bytes(pool.models, pool.plans))
            _add_memory(found, config, pool, device)
        _add_seconds(found, config, pools, device, lengths, passes)
    return found


def _settle(config: PPOConfig, device: Device) -> tuple[PPOConfig, Numbers, list[Pool]]:
    """Return the configuration with numbers for the keys that are auto, these numbers, and the pools with their plans.

    Raise ResourceError as `predict`.
    """
    prompts = config.actor_mini_batch_prompts
    largest = max(prompts, config.critic_mini_batch_prompts) if config.use_critic else prompts
    load = _load(config, 1, prompts)
    counted = {size: _pools(config, size) for size in candidates(_load(config, 1, largest))}
    tokens: dict[str, int] = {}
    numbers = PLAIN
    pools = []
    for place, pool in enumerate(next(iter(counted.values()))):
        own_load = _load(config, pool.ranks.count, largest)
        options = {size: (counted[size][place].models, counted[size][place].rollout) for size in candidates(own_load)}
        try:
            chosen = choose(options, own_load, device.memory)
        except ResourceError as error:
            raise ResourceError(f"on {pool.ranks.count} x {device.name}, pool {pool.name}: {error}") from None
        tokens |= {model.name: chosen.tokens for model in pool.models}
        pools.append(dataclasses.replace(pool, models=chosen.models, rollout=chosen.rollout, plans=chosen.plans))
        if pool.rollout is not None:
            numbers = chosen.numbers
    actor_load = dataclasses.replace(load, auto_tokens=tokens["actor"])
    policy, found = settle_policy(config.actor_rollout_ref, _ALL, PPO_KEYS, actor_load, numbers)
    config = dataclasses.replace(config, actor_rollout_ref=policy)
    if config.use_critic:
        critic, own = settle_training(config.critic, dataclasses.replace(load, auto_tokens=tokens["critic"]))
        config = dataclasses.replace(config, critic=critic)
        found |= own
    if config.reward_model.enable:
        judge, own = settle_training(config.reward_model, load)
        config = dataclasses.replace(config, reward_model=judge)
        found |= own
    return config, found, pools


# -- who is where ----------------------------------------------------------------------------------------------------------


def _pools(config: PPOConfig, auto_tokens: int) -> list[Pool]:
    """Return the pools of main_ppo with the models on one rank of each; `auto_tokens` are those of micro-batches whose size is auto."""
    policy, trainer = config.actor_rollout_ref, config.trainer
    ranks = ranks_of(policy.actor, trainer.n_gpus_per_node, trainer.nnodes)
    load, element = _load(config, ranks.count, config.actor_mini_batch_prompts, auto_tokens), element_of(policy.actor)
    with_reference = config.use_reference and policy.model.adapts
    parts = Parts(actor=True, rollout=True, reference=with_reference)
    models, rollout = policy_needs(policy, parts, load=load, world_size=ranks.count, element=element)
    if config.use_reference and not with_reference:
        models += policy_needs(policy, Parts(reference=True), load=load, world_size=ranks.count, element=element)[0]
    pools = [Pool("global_pool", ranks, models, rollout)]
    others: list[tuple[str, CriticConfig | RewardModelConfig]] = (
        [("critic_pool", critic_section(config))] if config.use_critic else []
    )
    others += [("reward_pool", config.reward_model)] if config.reward_model.enable else []
    for name, section in others:
        place = section if section.enable_resource_pool else trainer
        own = ranks_of(section, place.n_gpus_per_node, place.nnodes)
        load = _load(config, own.count, config.critic_mini_batch_prompts, auto_tokens)
        model = training_needs(section, load=load, world_size=own.count, element=element_of(section))
        if section.enable_resource_pool:
            pools.append(Pool(name, own, [model]))
        else:
            models.append(model)
    return pools


def ranks_of(choice: EngineChoice, per_node: int, nodes: int) -> Ranks:
    """Return the ranks that compute a model of this engine on so many GPUs."""
    count, size = per_node * nodes, choice.fsdp_config.fsdp_size
    return Ranks(count, per_node, count if size == -1 or choice.strategy not in ("fsdp", "fsdp2") else min(size, count))


def critic_section(config: PPOConfig) -> CriticConfig:
    """Return the section `critic` with the model that it starts from."""
    model = dataclasses.replace(config.critic.model, path=config.critic.model.path or config.actor_rollout_ref.model.path)
    return dataclasses.replace(config.critic, model=model)


def device_of(choice: EngineChoice, device: Device) -> Device:
    """Return the GPU as a computation in the engine's type sees it: float32 uses no tensor cores and takes twice the bytes."""
    if element_of(choice) == 2:
        return device
    return dataclasses.replace(device, flops=device.flops / FLOAT32_SLOWER, bandwidth=device.bandwidth / 2)


def element_of(choice: EngineChoice) -> int:
    """Return the bytes of a number in the computation on a GPU."""
    return 4 if choice.engine.dtype == "float32" else 2


def _load(config: PPOConfig, ranks: int, mini_batch: int, auto_tokens: int | None = None) -> Load:
    data, n = config.data, config.actor_rollout_ref.rollout.n
    longest = data.max_prompt_length + data.max_response_length
    return Load(longest, -(-data.train_batch_size * n // ranks), -(-mini_batch * n // ranks), auto_tokens=auto_tokens)


# -- memory ----------------------------------------------------------------------------------------------------------------


def _add_memory(found: Prediction, config: PPOConfig, pool: Pool, device: Device) -> None:
    rollout, plans, policy = pool.rollout, pool.plans, config.actor_rollout_ref
    if rollout is not None:
        shape = read_shape(policy.model, Head.LANGUAGE_MODEL)
        found.seats, cache = _cache(config, pool, shape, device.memory - held_bytes(pool.models, rollout, plans))
        rollout = dataclasses.replace(rollout, cache=cache)
    memory = stage_parts(pool.models, rollout, plans)
    if rollout is not None:
        memory[GENERATION]["rollout logits"] = found.seats * shape.vocabulary * 4
        waiting = {name: size for name, size in memory[GENERATION].items() if not name.endswith(("cache", "logits"))}
        memory[SYNC] = Counter(waiting)
        memory[SAVE] = Counter(waiting) + Counter({"saving": 4 * shape.hidden * shape.vocabulary * (pool.ranks.count > 1)})
    found.memory |= memory


def _cache(config: PPOConfig, pool: Pool, shape: Shape, free: int) -> tuple[int, int]:
    """Sequences at once, and the bytes of the key-value cache of the native engine: what they can need, or the share of what is free."""
    policy, data = config.actor_rollout_ref, config.data
    rows = -(-data.train_batch_size * policy.rollout.n // pool.ranks.count)
    longest = data.max_prompt_length + data.max_response_length
    token = shape.token_bytes(element_of(policy.actor), policy.rollout.kv_cache_dtype)
    each = (-(-longest // PAGE) + 1) * PAGE * token
    wanted = min(policy.rollout.seats, rows)
    room = max(each, int(free * policy.rollout.cache_share))
    if policy.rollout.name != "native":
        return wanted, room
    return max(1, min(wanted, room // each)), min(wanted * each, room)


# -- time ------------------------------------------------------------------------------------------------------------------


def _add_seconds(
    found: Prediction, config: PPOConfig, pools: Sequence[Pool], device: Device, lengths: Lengths, passes: Collection[str]
) -> None:
    policy, ranks, batch = config.actor_rollout_ref, pools[0].ranks, config.data.train_batch_size
    n, shape, actor = policy.rollout.n, read_shape(policy.model, Head.LANGUAGE_MODEL), policy.actor
    of = {model.name: (model, pool.ranks) for pool in pools for model in pool.models}

    def rows(max_tokens: int, max_rows: int | None, count: int) -> RowGroups:
        budget = max_tokens if max_rows is None else int(max_rows * (lengths.prompt + lengths.response))
        return RowGroups(batch / count, n, lengths.prompt, lengths.response, budget)

    seconds, whole = found.seconds, device
    device = device_of(actor, whole)
    sampling = dataclasses.replace(whole, flops=device.flops)  # it counts its bytes itself
    seconds[GENERATION] = _generate_s(found, config, shape, sampling, ranks, lengths)
    if config.algorithm.adv_estimator == "remax":
        seconds["gen_max"] = _generate_s(found, config, shape, sampling, ranks, lengths, samples=1)
    own = rows(actor.max_tokens, actor.ppo_micro_batch_size_per_gpu, ranks.count)
    if "old_log_prob" in passes:
        seconds["old_log_prob"] = pass_s(shape, own, device, ranks)
    if config.use_reference:
        teacher = read_shape(policy.reference_model, Head.LANGUAGE_MODEL)
        budget = policy.ref.log_prob_max_token_len_per_gpu or actor.max_tokens
        passed = rows(budget, policy.ref.log_prob_micro_batch_size_per_gpu, ranks.count)
        seconds["ref"] = pass_s(teacher, passed, device, ranks)
    if config.reward_model.enable:
        judge, judges, own_keys = read_shape(config.reward_model.model, Head.SCORE), of["reward_model"][1], config.reward_model
        passed = rows(own_keys.max_tokens, own_keys.micro_batch_size_per_gpu, judges.count)
        seconds["reward_model"] = pass_s(judge, passed, device_of(own_keys, whole), judges)
    if config.use_critic:
        section, (model, those) = critic_section(config), of["critic"]
        value = read_shape(section.model, Head.VALUE)
        passed = rows(section.max_tokens, section.ppo_micro_batch_size_per_gpu, those.count)
        if "values" in passes or not config.values_in_update:
            seconds["values"] = pass_s(value, passed, device_of(section, whole), those)
        updates = batch // config.critic_mini_batch_prompts * config.critic_epochs
        seconds["update_critic"] = _update_s(
            value, passed, device_of(section, whole), those, found, model, updates, config.critic_epochs
        )
    updates = batch // config.actor_mini_batch_prompts * actor.ppo_epochs
    seconds[UPDATE] = _update_s(shape, own, device, ranks, found, of["actor"][0], updates, actor.ppo_epochs)
    own_process = policy.rollout.name in ("vllm", "sglang")
    seconds[SYNC] = 2 * shape.parameters / _SENT if own_process else ranks.gather_s(2 * shape.parameters, device)
    seconds[SAVE] = save_s([model for model, _ in of.values()])
    _add_offloading(found, of)


def _generate_s(
    found: Prediction, config: PPOConfig, shape: Shape, device: Device, ranks: Ranks, lengths: Lengths, samples: int | None = None
) -> float:
    rollout, data = config.actor_rollout_ref.rollout, config.data
    n = samples or rollout.n
    count = math.ceil(data.train_batch_size / ranks.count) * n
    responses = decode.spread_lengths(lengths.response, data.max_response_length, count)
    work = decode.Generation([lengths.prompt] * count, responses, n, found.seats)
    element = element_of(config.actor_rollout_ref.actor)
    return decode.ENGINES[rollout.name] * decode.generate_s(shape, work, device, element, rollout.kv_cache_dtype)


def _update_s(
    shape: Shape, rows: RowGroups, device: Device, ranks: Ranks, found: Prediction, model: Model, updates: int, epochs: int
) -> float:
    recompute = found.plans[model.name].recompute or "none"
    rows = dataclasses.replace(rows, groups=rows.groups * epochs)
    return update_s(shape, rows, device, ranks, recompute, updates, trained_share(model) * _shards(model, ranks))


def trained_share(model: Model) -> int:
    """Return the parameters that learn, as far as one rank has their moments."""
    return model.moments // 8


def save_s(models: Sequence[Model]) -> float:
    """Return how long a run waits for a save in the background: until weights and moments are in host memory."""
    return sum(_SAVED * trained_share(model) / _COPIED for model in models)


def _shards(model: Model, ranks: Ranks) -> int:
    """Ranks that share the moments of a model that a rank has a part of."""
    return ranks.count if model.moments else 1


def _add_offloading(found: Prediction, of: dict[str, tuple[Model, Ranks]]) -> None:
    """What moves between host and GPU: weights to each stage of the model and back after an update, moments to and from it."""
    host_link = 25e9  # bytes per second over PCIe from pinned memory
    for name, (model, _) in of.items():
        plan = found.plans[name]
        for stage in (*model.passes, *([model.update] if model.update else [])):
            if stage in found.seconds:
                moved = plan.offload_weights * model.weights * (2 if stage == model.update else 1)
                moved += plan.offload_moments * model.moments * 2 * (stage == model.update)
                found.seconds[stage] += moved / host_link


# -- recipes that learn from files -------------------------------------------------------------------------------------------


def predict_stage(config: SFTConfig | RewardTrainConfig | DPOConfig, device: Device, lengths: Lengths) -> Prediction:
    """Return memory and time of a step. Raise ResourceError if the models do not fit, DataError if a config cannot be read."""
    per_example = 1 if isinstance(config, SFTConfig) else 2
    head = Head.SCORE if isinstance(config, RewardTrainConfig) else Head.LANGUAGE_MODEL
    with_reference = isinstance(config, DPOConfig) and config.reference_mode == "model"
    engine = config.engine
    batch = config.data.train_batch_size
    ranks = ranks_of(engine, config.trainer.n_gpus_per_node, config.trainer.nnodes)
    rows = -(-batch * per_example // ranks.count)
    with reusing_models():
        policy = config.policy()
        load = Load(config.data.max_length, rows, rows, unit=per_example)
        parts = Parts(actor=True, reference=with_reference)
        options = {}
        for size in candidates(load):
            own_load = dataclasses.replace(load, auto_tokens=size)
            options[size] = policy_needs(
                policy, parts, STAGE_KEYS, load=own_load, world_size=ranks.count, element=element_of(engine), head=head
            )
        try:
            chosen = choose(options, load, device.memory)
        except ResourceError as error:
            raise ResourceError(f"on {ranks.count} x {device.name}: {error}") from None
        shape = read_shape(config.model, head)
    models = chosen.models
    plans = chosen.plans
    own_load = dataclasses.replace(load, auto_tokens=chosen.tokens)
    policy, numbers = settle_policy(policy, parts, STAGE_KEYS, own_load, chosen.numbers)
    found = Prediction(num_gpus=ranks.count, tokens=batch * per_example * (lengths.prompt + lengths.response), chosen=numbers)
    found.plans = {model.name: plan for model, plan in zip(models, plans, strict=True)}
    found.host = host_bytes(models, plans)
    used = {UPDATE, "ref"} if with_reference else {UPDATE}
    found.memory = {stage: parts for stage, parts in stage_parts(models, None, plans).items() if stage in used}
    width = lengths.prompt + lengths.response
    budget = policy.actor.max_tokens
    if engine.micro_batch_size_per_gpu:
        budget = int(engine.micro_batch_size_per_gpu * width)
    work = RowGroups(batch / ranks.count, per_example, lengths.prompt, lengths.response, budget)
    own = device_of(engine, device)
    if with_reference:
        found.seconds["ref"] = pass_s(shape, work, own, ranks)
    trained = trained_share(models[0]) * ranks.count
    found.seconds[UPDATE] = update_s(shape, work, own, ranks, found.plans["actor"].recompute or "none", 1, trained)
    found.seconds[SAVE] = save_s(models)
    return found
