"""verl's helper functions over Lockstep's, with verl's arguments. Batches are a DataProto, or have padded `batch` tensors."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from lockstep.algorithms import kl
from lockstep.checkpoint import folders
from lockstep.compat.core_algos import get_adv_estimator_fn
from lockstep.compat.verl_keys.command import our_config
from lockstep.config import actor_rollout_ref
from lockstep.config.algorithm import AlgorithmConfig
from lockstep.config.reward import OverlongConfig
from lockstep.errors import ConfigError, RewardError
from lockstep.judging import math
from lockstep.observability.spans import StageTimer
from lockstep.observability.trackers import Tracking as OurTracking
from lockstep.protocol import DataProto
from lockstep.rewards.manager import RewardManager
from lockstep.single_controller.base import Dispatch, ResourcePool
from lockstep.single_controller.base.dispatch import balanced_partition
from lockstep.single_controller.base.equal_partition import equal_partition
from lockstep.trainer.ppo.metrics import balance_metrics
from lockstep.trainer.ppo.rewards import Scored, penalise_overlong
from lockstep.trainer.run.setup import reward_arguments
from lockstep.utils.dataset.rl_dataset import RLHFDataset
from lockstep.utils.device import resolve_device

is_cuda_available = torch.cuda.is_available()
is_npu_available = False
PPO_RAY_RUNTIME_ENV: dict[str, Any] = {}
"""Workers start with the environment that they need."""
DataProtoConfig = SimpleNamespace(auto_padding=False)
"""Batches need no padding to the number of workers."""


def nothing(*args: Any, **kwargs: Any) -> None:
    """Return None: what verl does here is not needed."""


# -- a step


def marked_timer(name: str, timing_raw: dict[str, float], *ignored: Any, **also_ignored: Any) -> AbstractContextManager[Any]:
    return StageTimer(timing_raw).stage(name)


def compute_response_mask(data: Any) -> torch.Tensor:
    return data.batch["attention_mask"][:, -data.batch["responses"].shape[-1] :]


def compute_position_id_with_mask(mask: torch.Tensor) -> torch.Tensor:
    return (mask.cumsum(-1) - 1).clamp(min=0)


def apply_kl_penalty(data: Any, kl_ctrl: kl.KLController, kl_penalty: str = "kl") -> tuple[Any, dict[str, float]]:
    """Write token_level_rewards, the scores less the KL penalty, and update `kl_ctrl`. Return the data and metrics."""
    mask = data.batch["response_mask"]
    penalty = kl.kl_penalty(data.batch["old_log_probs"], data.batch["ref_log_prob"], kl_penalty) * mask
    data.batch["token_level_rewards"] = data.batch["token_level_scores"] - kl_ctrl.value * penalty
    mean_penalty = (penalty.sum(-1) / mask.sum(-1).clamp(min=1)).mean().item()
    metrics = {"actor/reward_kl_penalty": mean_penalty, "actor/reward_kl_penalty_coeff": kl_ctrl.value}
    kl_ctrl.update(mean_penalty, n_steps=len(mask))
    return data, metrics


def compute_advantage(
    data: Any,
    adv_estimator: Any,
    gamma: float = 1.0,
    lam: float = 1.0,
    num_repeat: int = 1,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> Any:
    """Write advantages and returns, by the estimator of `core_algos` of that name."""
    if config is None:
        config = AlgorithmConfig(gamma=gamma, lam=lam, norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo)
    available = {"gamma": gamma, "lam": lam, "norm_adv_by_std_in_grpo": norm_adv_by_std_in_grpo, "config": config, **data.batch}
    available |= {"index": data.non_tensor_batch.get("uid"), "non_tensor_batch": data.non_tensor_batch}
    function = get_adv_estimator_fn(adv_estimator)
    inputs = {name: available[name] for name in inspect.signature(function).parameters if available.get(name) is not None}
    data.batch["advantages"], data.batch["returns"] = function(**inputs)
    return data


def get_seqlen_balanced_partitions(seqlen_list: list[int], k_partitions: int, equal_size: bool = False) -> list[list[int]]:
    if equal_size:
        return equal_partition(seqlen_list, k_partitions)
    return balanced_partition(seqlen_list, k_partitions)


def log_seqlen_unbalance(seqlen_list: list[int], partitions: list[list[int]], prefix: str) -> dict[str, float]:
    return balance_metrics(torch.tensor(seqlen_list), partitions, prefix)


def append_to_dict(data: dict[str, Any], new_data: Mapping[str, Any]) -> None:
    """Add each value, or each value of a list, to the list of its name, in place."""
    for name, value in new_data.items():
        data.setdefault(name, []).extend(value if isinstance(value, list) else [value])


# -- the configuration and what it describes


def get_device_name() -> str:
    return resolve_device("auto")


def need_critic(config: Any) -> bool:
    return our_config(config).use_critic


def need_reference_policy(config: Any) -> bool:
    return our_config(config).use_reference


def migrate_legacy_reward_impl(config: Any) -> Any:
    """Return the configuration as it is: the reward's keys are read wherever verl has had them."""
    return config


def ActorConfig(**given: Any) -> actor_rollout_ref.ActorConfig:
    """Return the actor's section; keys that only verl has are left out."""
    known = actor_rollout_ref.ActorConfig.__dataclass_fields__
    return actor_rollout_ref.ActorConfig(**{key: value for key, value in given.items() if key in known})


def RolloutSkip(config: Any, worker_group: Any) -> None:
    """Raise ConfigError: generations cannot be replayed in training."""
    raise ConfigError("actor_rollout_ref.rollout.skip_rollout: generations cannot be replayed in training; leave it out")


def create_rl_dataset(
    data_paths: Any, data_config: Any, tokenizer: Any, processor: Any = None, is_train: bool = True, max_samples: int = -1
) -> RLHFDataset:
    return RLHFDataset(data_paths, tokenizer, data_config, processor, max_samples)


def create_rl_sampler(data_config: Any, dataset: Any) -> torch.utils.data.Sampler[int]:
    if not data_config.shuffle:
        return torch.utils.data.SequentialSampler(dataset)
    return torch.utils.data.RandomSampler(dataset, generator=torch.Generator().manual_seed(data_config.seed or 0))


def copy_to_local(src: str, cache_dir: str | None = None, **ignored: Any) -> str:
    """Return the path itself: files are read where they are. Raise ValueError for HDFS."""
    if str(src).startswith("hdfs://"):
        raise ValueError(f"{src} is on HDFS, which is not read here: copy it to a folder first")
    return str(src)


def RayResourcePool(
    process_on_nodes: list[int], use_gpu: bool = True, name_prefix: str | None = None, *ignored: Any, **also_ignored: Any
) -> ResourcePool:
    """Return a pool. The trainer chooses what shares it, so verl's other arguments are not needed."""
    return ResourcePool(process_on_nodes, name_prefix or "pool", use_gpu)


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> Dispatch:
    return Dispatch.DP_COMPUTE_PROTO


class Tracking(OurTracking):
    """The trainer's trackers with verl's arguments. Files go to trainer.default_local_dir, or where a run without it has them."""

    def __init__(self, project_name: str, experiment_name: str, default_backend: Any = "console", config: Any = None) -> None:
        names = [default_backend] if isinstance(default_backend, str) else list(default_backend)
        folder = dict((config or {}).get("trainer", {})).get("default_local_dir")
        run_dir = Path(folder or Path("checkpoints", project_name, experiment_name))
        newest = folders.newest(run_dir)
        resume_step = int(newest.name.rpartition("_")[2]) if newest else None  # what was logged before it stays
        run: Any = {"project_name": project_name, "experiment_name": experiment_name, "config": dict(config or {})}
        super().__init__(names, run_dir=run_dir, resume_step=resume_step, **run)

    def log(self, data: Mapping[str, float], step: int, backend: Any = None) -> None:
        """Record the metrics of one step."""
        super().log(data, step)


# -- rewards


class VerlRewardManager(RewardManager):
    """The reward manager with the arguments of verl's: DAPO's limit of length, and more for `compute_score`."""

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: Any = None,
        reward_fn_key: str = "data_source",
        max_resp_len: int | None = None,
        overlong_buffer_cfg: Any = None,
        **reward_kwargs: Any,
    ) -> None:
        ours = {name: reward_kwargs.pop(name) for name in inspect.signature(RewardManager).parameters if name in reward_kwargs}
        if compute_score and reward_kwargs:
            compute_score = functools.partial(compute_score, **reward_kwargs)
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key, **ours)
        self._limit = int(max_resp_len or 0)
        self._overlong = overlong_buffer_cfg

    def __call__(self, data: DataProto, return_dict: bool = False, scoring: Any = None, ragged: bool = False) -> Any:
        """Return the rewards, less the penalty for length that `overlong_buffer_cfg` asks for.

        Raise RewardError if one is missing, unless `ragged` and `return_dict`: a loop of verl's would take it for a zero.
        """
        result: Any = super().__call__(data, True, scoring, ragged=True)
        missing = next(filter(None, result["failures"]), None)
        if missing is not None and not (ragged and return_dict):
            raise RewardError(f"a reward is missing: {missing.text}")
        if self._overlong is not None and self._overlong.enable:
            rows = DataProto({"responses": data.ragged("responses"), "token_level_scores": result["reward_tensor"]})
            buffer = OverlongConfig(True, self._overlong.len, self._overlong.penalty_factor)
            penalise_overlong(rows, Scored([], [], parts=result["reward_parts"]), buffer, self._limit)
            result["reward_tensor"] = rows.ragged("token_level_scores")
        if not ragged:
            result["reward_tensor"] = result["reward_tensor"].pad()
        return result if return_dict else result["reward_tensor"]


_MANAGERS: dict[str, type] = {}


def register(name: str) -> Callable[[type], type]:
    """Return a decorator that makes a class the reward manager of that name."""
    return lambda manager: _MANAGERS.setdefault(name, manager)


def get_reward_manager_cls(name: str) -> type:
    return _MANAGERS.get(name, VerlRewardManager)


def load_reward_manager(config: Any, tokenizer: Any, num_examine: int = 0, **reward_kwargs: Any) -> RewardManager:
    """Return the manager that the configuration describes."""
    arguments = reward_arguments(our_config(config).reward) | reward_kwargs
    return VerlRewardManager(tokenizer=tokenizer, num_examine=num_examine, **arguments)


def get_custom_reward_fn(config: Any) -> Callable[..., Any] | None:
    return reward_arguments(our_config(config).reward)["compute_score"]


def compute_reward(data: DataProto, reward_fn: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    result = reward_fn(data, return_dict=True)
    return result["reward_tensor"], result.get("reward_extra_info", {})


def extract_reward(batch: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the rewards that generation brought, and what else the reward function said."""
    extra = {name: batch.non_tensor_batch[name] for name in batch.meta_info.get("reward_extra_keys", ())}
    return batch.batch["rm_scores"], extra


def is_equiv(str1: str, str2: str, verbose: bool = False) -> bool:
    return math.is_same(str1, str2, timeout_s=5.0)


def last_boxed_only_string(string: str) -> str | None:
    content = math.last_boxed(string)
    return None if content is None else f"\\boxed{{{content}}}"


def remove_boxed(s: str) -> str:
    return s.removeprefix("\\boxed{").removesuffix("}")
