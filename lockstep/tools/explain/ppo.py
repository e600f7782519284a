"""PPO and its relatives in words: which stages a step has and why, and which model lives where."""

from collections.abc import Iterator

from lockstep.agents import agent_of
from lockstep.config.critic import CriticConfig
from lockstep.config.ppo import PPOConfig
from lockstep.config.reward import RewardModelConfig
from lockstep.trainer.ppo.passes import Drift, Source

_WHY = {
    Source.SAMPLER: "no pass: the sampler's log-probs are taken as they are",
    Source.UPDATE: "no pass: the batch is one update, whose own forward pass computes them",
    Source.PASS: "a forward pass of the actor over the batch",
}


def stages(config: PPOConfig, device: str) -> Iterator[tuple[str, str]]:
    """(stage, what it does) of a step, in their order; what is left out says why."""
    policy = config.actor_rollout_ref
    algorithm = config.algorithm
    batch = config.data.train_batch_size
    again = "; again until the batch is full of groups with a signal" if algorithm.filter_groups.enable else ""
    how = f"with {policy.rollout.name}, temperature {policy.rollout.temperature:g}"
    what = "episodes" if config.agent.is_on else "responses"
    yield "gen", f"{batch} prompts x {policy.rollout.n} {what} {how}{again}"
    yield "reward", _judge(config)
    if algorithm.adv_estimator == "remax":
        yield "gen_max", f"a greedy response to each of the {batch} prompts, whose score is the baseline"
    drift = Drift(config, lambda text: None)
    actor = policy.actor
    exact = device == "cpu" or actor.engine.dtype == "float32"
    updates = batch // config.actor_mini_batch_prompts * actor.ppo_epochs
    drift.largest = 0.0 if exact and policy.rollout.has_log_probs else None
    first = " (from the second step on, while they are the trainer's)" if exact else ""
    source = drift.source(config.trainer.critic_warmup + 1, updates, is_recorded=False)
    yield "old_log_prob", _WHY[source] + (first if source is Source.SAMPLER else "")
    yield "ref", _reference(config)
    yield "values", _values(config)
    yield "adv", f"{algorithm.adv_estimator}, on the driver"
    if config.use_critic:
        count = batch // config.critic_mini_batch_prompts * config.critic_epochs
        yield "update_critic", f"{count} optimizer step{'s' if count > 1 else ''}"
    warm = f", after the {config.trainer.critic_warmup} steps of trainer.critic_warmup" if config.trainer.critic_warmup else ""
    loss = policy.actor.policy_loss.loss_mode
    routed = ", through the experts that the sampler chose" if policy.rollout.router_replay else ""
    coef = policy.model.router_aux_loss_coef
    balanced = f" and {coef:g} times the load-balance loss of the experts" if coef else ""
    yield "update_actor", f"{updates} optimizer step{'s' if updates > 1 else ''} with the loss {loss}{balanced}{routed}{warm}"
    ways = {"native": "the sampler reads the actor's own weights", "hf": "the sampler reads the actor's own weights"}
    yield "update_weights", ways.get(policy.rollout.name, "weights are sent to the engine's process")


def _values(config: PPOConfig) -> str:
    if not config.use_critic:
        return f"none: {config.algorithm.adv_estimator} needs no critic"
    if config.values_in_update:
        return "no pass: the batch is one update of the critic, made before adv, whose own forward pass gives them"
    return "a pass of the critic"


def episodes(config: PPOConfig) -> Iterator[tuple[str, str]]:
    """Return the lines about episodes, as (label, text)."""
    agent = config.agent
    kind = agent_of(config).environment_class()
    own = "the built-in one, which calls tools" if agent.environment is None else agent.environment
    judge = _function(config) if kind.is_judged else "the environment"
    yield "environment", f"{own}; the reward of an episode is given by {judge}"
    named = [*agent.tools, *(f"those of the MCP server '{command}'" for command in agent.mcp)]
    classes = getattr(kind, "tools", ())
    named += [getattr(tool, "__name__", str(tool)) for tool in classes] if isinstance(classes, (list, tuple)) else []
    yield "tools", ", ".join(named) or "none"
    tokens = "" if agent.max_turn_tokens is None else f", each of up to {agent.max_turn_tokens} tokens"
    yield (
        "turns",
        (
            f"at most {agent.max_turns} of the policy{tokens}; {config.data.max_response_length} tokens for all that is written in an "
            f"episode; {agent.max_environments} episodes at once in each worker"
        ),
    )


def validation(config: PPOConfig, num_rows: int | None, total: int | None) -> str:
    """When validations are made, of how many rows, and how answers are drawn."""
    if not config.data.val_files:
        return "none: data.val_files is not set"
    kwargs = config.actor_rollout_ref.rollout.val_kwargs
    trainer = config.trainer
    rows = "all rows" if num_rows is None else f"{num_rows} rows"
    each = f"{kwargs.n} answers each" if kwargs.n > 1 else "1 answer each"
    drawn = f"{each} at temperature {kwargs.temperature:g}" + (" (greedy)" if not kwargs.temperature else "")
    if kwargs.n > 1 and not kwargs.temperature:
        drawn += (
            f": the {kwargs.n} answers to a row are equal; set actor_rollout_ref.rollout.val_kwargs.temperature above 0, or "
            "actor_rollout_ref.rollout.val_kwargs.n=1"
        )
    when = due_steps(trainer.test_freq, total)
    if trainer.val_before_train:
        step = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
        first = rows if num_rows is None else f"{len(trainer.first_validation_rows(num_rows, kwargs.n, step))} rows"
        when = f"before the first step ({first}), {when}"
    return f"{when}: {rows}, {drawn}"


def due_steps(frequency: int, total: int | None) -> str:
    """The steps after which something is done that has this frequency."""
    last = "after the last step" if total is None else f"after step {total}, the last"
    if not frequency:
        return "never after a step"
    if frequency < 0:
        return last
    every = f"after every {frequency} steps" if frequency > 1 else "after every step"
    is_last = total is not None and total % frequency == 0
    return every if frequency == 1 or is_last else f"{every} and {last}"


def _judge(config: PPOConfig) -> str:
    if config.agent.is_on and not agent_of(config).environment_class().is_judged:
        return "the environment"
    return _function(config)


def _function(config: PPOConfig) -> str:
    reward = config.reward
    if config.reward_model.enable:
        return f"the reward model {config.reward_model.model.path}"
    if reward.custom_reward_function.path:
        return f"{reward.custom_reward_function.path}:{reward.custom_reward_function.name}"
    return "the rule that data_source names" + (f", weighed by reward.weights={reward.weights}" if reward.weights else "")


def _reference(config: PPOConfig) -> str:
    if not config.use_reference:
        return "none: no KL term is on (algorithm.use_kl_in_reward, actor_rollout_ref.actor.use_kl_loss)"
    if config.algorithm.use_kl_in_reward:
        why = f"its KL is taken off the reward, times {config.algorithm.kl_ctrl.kl_coef:g}"
    elif config.actor_rollout_ref.actor.use_kl_loss:
        why = f"its KL is a loss, times {config.actor_rollout_ref.actor.kl_loss_coef:g}"
    else:
        why = "advantages are the distance to it"
    return f"a pass of the reference; {why}"


def places(config: PPOConfig) -> Iterator[tuple[str, str]]:
    """(pool, which models its processes hold)."""
    policy = config.actor_rollout_ref
    trainer = config.trainer
    models = [f"actor {policy.model.path} ({policy.actor.strategy}; its weights are the sampler's too)"]
    if policy.rollout.name in ("vllm", "sglang"):
        models = [f"actor {policy.model.path} ({policy.actor.strategy})", f"a copy of it in {policy.rollout.name}"]
    if config.use_reference:
        own = policy.ref.model.path is not None or not policy.model.adapts
        models.append(
            f"reference {policy.reference_model.path}, frozen" if own else "the actor without its adapters as the reference"
        )
    others: list[tuple[CriticConfig | RewardModelConfig, str, str]] = []
    if config.use_critic:
        others.append(
            (config.critic, "critic_pool", f"critic {config.critic.model.path or policy.model.path} ({config.critic.strategy})")
        )
    if config.reward_model.enable:
        others.append((config.reward_model, "reward_pool", f"reward model {config.reward_model.model.path}, frozen"))
    models += [text for section, _, text in others if not section.enable_resource_pool]
    yield f"global_pool, {_processes(trainer.n_gpus_per_node, trainer.nnodes)}", "; ".join(models)
    for section, pool, text in others:
        if section.enable_resource_pool:
            yield f"{pool}, {_processes(section.n_gpus_per_node, section.nnodes)}", text


def _processes(each: int, nodes: int) -> str:
    count = each * nodes
    return f"{count} process{'es' if count > 1 else ''}" + (f" on {nodes} machines" if nodes > 1 else "")
