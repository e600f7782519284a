"""What every program here makes of its configuration before it starts: the embedded task's files, the arguments of the rewards."""

from __future__ import annotations

import dataclasses
import functools
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from lockstep.config import PPOConfig
from lockstep.config.data import EMBEDDED
from lockstep.config.engine import EngineChoice, ModelConfig
from lockstep.config.follow import for_context
from lockstep.config.load import fitted
from lockstep.config.reward import JudgeConfig
from lockstep.errors import ConfigError, LockstepError
from lockstep.observability.spans import progress

if TYPE_CHECKING:
    from lockstep.config.sft import SFTConfig
    from lockstep.config.stage import StageConfig
    from lockstep.trainer.sft import SampledAnswers

Config = TypeVar("Config", bound="PPOConfig | StageConfig")


def with_embedded_task(config: PPOConfig) -> PPOConfig:
    """The same configuration with the embedded task's files made and named: without its model where there is one of the user's."""
    config = with_embedded_files(config)
    warm_up_embedded(config)
    return config


def with_embedded_files(config: PPOConfig) -> PPOConfig:
    """The same, but the model knows nothing until `warm_up_embedded`: enough for all checks that need no weights."""
    from lockstep.embedded import prepare_prompts, prepare_untrained, widen_context

    directory, model = _embedded_folder(config), config.actor_rollout_ref.model
    if model.path != EMBEDDED:
        print(f"the embedded task: write a word backwards. Making data in {directory} ...", flush=True)
        train_file, val_file = prepare_prompts(directory, config.trainer.seed)
    else:
        print(f"the embedded task: write a word backwards. Making data and a model in {directory} ...", flush=True)
        folder, train_file, val_file = prepare_untrained(directory, config.trainer.seed)
        widen_context(folder, config.data.max_prompt_length + config.data.max_response_length)
        model = dataclasses.replace(model, path=str(folder))
    data = dataclasses.replace(config.data, train_files=str(train_file), val_files=config.data.val_files or str(val_file))
    return dataclasses.replace(config, data=data, actor_rollout_ref=dataclasses.replace(config.actor_rollout_ref, model=model))


def warm_up_embedded(config: PPOConfig) -> None:
    """Warm up the embedded model on its task, if `config` uses the model of `with_embedded_files`."""
    from lockstep.embedded import prepare, widen_context

    directory = _embedded_folder(config)
    if str(config.actor_rollout_ref.model.path) != str(directory / "model"):
        return
    with progress("supervised warm-up"):
        task = prepare(directory, config.trainer.seed)
    widen_context(task.model, config.data.max_prompt_length + config.data.max_response_length)
    print(
        f"supervised warm-up: {task.warmup_steps} steps on careless examples; it writes a word backwards with probability "
        f"{task.warmup_accuracy:.2f}",
        flush=True,
    )


def _embedded_folder(config: PPOConfig) -> Path:
    return config.trainer.run_dir / "embedded_task"


@contextmanager
def removed_if_refused(folder: Path) -> Iterator[None]:
    """Remove `folder`, and those around it that are empty then, after a LockstepError inside; folders that were there before stay."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    except LockstepError:
        if folder in made:
            shutil.rmtree(folder, ignore_errors=True)
        for path in made[1:]:
            with suppress(OSError):  # it holds something
                path.rmdir()
        raise


def fitted_to_models(config: Config) -> Config:
    """The configuration with the lengths that the user did not set lowered to what the models hold; says so."""
    from lockstep.models.hf_config import read_model_config

    if isinstance(config, PPOConfig) and config.actor_rollout_ref.model.path == EMBEDDED:
        return config  # its context follows the lengths
    found = [read_model_config(str(model.path), model.trust_remote_code, **model.override_config) for model in config.models]
    contexts = [held for hf_config in found if (held := getattr(hf_config, "max_position_embeddings", None)) is not None]
    context = min(contexts, default=None)
    return fitted(config, for_context(config, context), f"the model holds {context} tokens")


def check_engines(config: PPOConfig, device: str | None = None, capability: tuple[int, int] | None = None) -> None:
    """Raise ConfigError, before any process is started, for a model that its training engine cannot hold on the ranks it gets.

    `device` (cpu or cuda) is the configuration's where it is None. `capability` is that of its GPUs, where the caller knows them.
    """
    import torch

    from lockstep.generation import check_small_cache_capability, check_small_cache_config
    from lockstep.models.fit import check_fit
    from lockstep.models.hf_config import read_model_config
    from lockstep.models.load import Head
    from lockstep.models.routers import check_replay
    from lockstep.utils.device import resolve_device
    from lockstep.workers.engine.registry import check_engine
    from lockstep.workers.engine.spec import compute_dtype

    policy, critic, judge = config.actor_rollout_ref, config.critic, config.reward_model
    ranks = config.trainer.n_gpus_per_node * config.trainer.nnodes
    language, actor = Head.LANGUAGE_MODEL, "actor_rollout_ref.actor"
    choices: list[tuple[EngineChoice, ModelConfig, Head, int, str, str]] = [
        (policy.actor, policy.model, language, ranks, actor, "actor_rollout_ref.model")
    ]
    if policy.ref.model.path is not None:
        choices.append((policy.reference_engine, policy.reference_model, language, ranks, actor, "actor_rollout_ref.ref.model"))
    if config.use_critic:
        own = critic.n_gpus_per_node * critic.nnodes if critic.enable_resource_pool else ranks
        model = dataclasses.replace(critic.model, path=critic.model.path or policy.model.path)
        choices.append((critic, model, Head.VALUE, own, "critic", "critic.model"))
    if judge.enable:
        own = judge.n_gpus_per_node * judge.nnodes if judge.enable_resource_pool else ranks
        choices.append((judge, judge.model, Head.SCORE, own, "reward_model", "reward_model.model"))
    where = device or resolve_device(config.trainer.device)
    for choice, model, head, world_size, key, model_key in choices:
        hf_config = read_model_config(str(model.path), model.trust_remote_code, **model.override_config)
        check_engine(choice, hf_config, world_size, where, key)
        check_fit(model, head, model_key, learns=head is not Head.SCORE)
        if choice is policy.actor and policy.rollout.router_replay:
            check_replay(hf_config, where)
        if choice is policy.actor and policy.rollout.has_small_cache:
            dtype = compute_dtype(choice.engine.dtype, torch.device(where))
            check_small_cache_config(hf_config, where, dtype, policy.rollout)
            if capability is not None and policy.rollout.name == "native":
                check_small_cache_capability(capability, policy.rollout)


def check_stage_engine(
    config: StageConfig, longest: int, key: str = "data.max_length", scores: bool = False, device: str | None = None
) -> None:
    """The same for the model of a recipe that learns from files, whose rows have up to `longest` tokens, the value of `key`; a model that
    `scores` gets one number a row."""
    from lockstep.models.fit import check_fit
    from lockstep.models.hf_config import context_limit, read_model_config
    from lockstep.models.load import Head
    from lockstep.utils.device import resolve_device
    from lockstep.workers.engine.registry import check_engine

    model, section = config.model, config.trainer
    hf_config = read_model_config(str(model.path), model.trust_remote_code, **model.override_config)
    limit = context_limit(hf_config)
    if limit is not None and longest > limit.tokens:
        raise ConfigError(f"{key}={longest} tokens, but {model.path} holds {limit}; lower data.max_length")
    ranks = section.n_gpus_per_node * section.nnodes
    check_engine(config.engine, hf_config, ranks, device or resolve_device(section.device), "engine")
    check_fit(model, Head.SCORE if scores else Head.LANGUAGE_MODEL, "model")


@contextmanager
def sampled_answers(config: SFTConfig, tokenizer: Any) -> Iterator[SampledAnswers | None]:
    """What is answered and judged at each validation; None where there is nothing. The rewards' processes end with it."""
    from lockstep.rewards.manager import RewardManager
    from lockstep.trainer.sft import SampledAnswers

    if not config.sampled.files:
        yield None
        return
    reward_fn = RewardManager(tokenizer=tokenizer, num_examine=1, **reward_arguments(config.reward))
    try:
        yield SampledAnswers.of(config, tokenizer, reward_fn)
    finally:
        reward_fn.close()


def reward_arguments(reward: JudgeConfig) -> dict[str, Any]:
    """The arguments of RewardManager that the config decides."""
    from lockstep.judging import make_sandbox
    from lockstep.rewards.graders import register_score
    from lockstep.utils.files import load_object

    custom = reward.custom_reward_function
    for data_source, reference in reward.rules.items():
        register_score(data_source)(_function(f"reward.rules.{data_source}", reference))
    own = load_object(custom.path, custom.name) if custom.path else None
    if own is not None and not callable(own):
        raise ConfigError(f"{custom.name} in reward.custom_reward_function.path={custom.path} is no function but {own!r}")
    return {
        "compute_score": functools.partial(own, **custom.reward_kwargs) if own is not None else None,
        "functions": {name: _function(f"reward.functions.{name}", reference) for name, reference in reward.functions.items()},
        "weights": reward.weights,
        "timeout_s": reward.timeout_s,
        "retries": reward.retries,
        "num_workers": reward.num_workers,
        "max_memory_mb": reward.max_memory_mb,
        "make_sandbox": functools.partial(
            make_sandbox,
            url=reward.sandbox.url,
            max_concurrent=reward.sandbox.max_concurrent,
            wall_s=reward.sandbox.wall_s,
            memory_mb=reward.sandbox.memory_limit_mb,
            accept_weak_isolation=reward.sandbox.accept_weak_isolation,
        ),
    }


def _function(key: str, reference: str) -> Callable[..., Any]:
    from lockstep.utils.files import load_reference

    function = load_reference(reference)
    if not callable(function):
        raise ConfigError(f"{key}={reference} must have the form file.py:function")
    return cast("Callable[..., Any]", function)
