"""verl's helper functions over Lockstep's, with verl's arguments. Batches may be DataProto or anything with padded `batch` tensors."""

from __future__ import annotations

import functools
import importlib
import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from torch import Tensor

from lockstep.algorithms import kl
from lockstep.checkpoint import folders
from lockstep.compat.verl.core_algos import get_adv_estimator_fn
from lockstep.compat.verl.numbers import Metric
from lockstep.compat.verl.runner import our_config
from lockstep.config import actor_rollout_ref as config
from lockstep.config.algorithm import AlgorithmConfig
from lockstep.config.reward import OverlongConfig
from lockstep.data.rl_dataset import RLHFDataset
from lockstep.errors import ConfigError, RewardError
from lockstep.observability.trackers import Tracking as OurTracking
from lockstep.protocol import DataProto
from lockstep.rewards.graders.math import last_boxed
from lockstep.rewards.manager import RewardManager
from lockstep.single_controller.base import Dispatch, ResourcePool
from lockstep.single_controller.base.dispatch import balanced_partition
from lockstep.trainer.ppo.reward_columns import penalise_overlong
from lockstep.trainer.ppo.scored import Scored
from lockstep.trainer.setup import reward_arguments

is_cuda_available, is_npu_available = torch.cuda.is_available(), False
PPO_RAY_RUNTIME_ENV: dict[str, Any] = {}
"""Workers start with the environment that they need."""
_MANAGERS: dict[str, type] = {}

EXPRESSIONS: dict[str, Callable[..., Any]] = {
    # -- devices
    "get_device_name": lambda: "cuda" if is_cuda_available else "cpu",
    "get_torch_device": lambda: torch.cuda if is_cuda_available else torch.cpu,
    "get_device_id": lambda: torch.cuda.current_device() if is_cuda_available else 0,
    "get_nccl_backend": lambda: "nccl" if is_cuda_available else "gloo",
    # -- padded blocks: positions that count from 0 at the first token; 1 up to the first end token, that included; filled up on a side
    "compute_position_id_with_mask": lambda mask: (mask.cumsum(-1) - 1).clamp(min=0),
    "get_response_mask": lambda response_id, eos_token=2, dtype=torch.int64: (
        (ends := torch.isin(response_id, torch.as_tensor(eos_token, device=response_id.device)).long()).cumsum(-1) - ends == 0
    ).to(dtype),
    "pad_sequence_to_length": lambda tensors, max_seq_len, pad_token_id, left_pad=False: torch.nn.functional.pad(
        tensors, [max(0, max_seq_len - tensors.shape[-1]) * side for side in (left_pad, not left_pad)], value=pad_token_id
    ),
    "pad_2d_list_to_length": lambda response, pad_token_id, max_length=None: torch.tensor(
        [[*row, *[pad_token_id] * (max([max_length or 0, *map(len, response)]) - len(row))] for row in response]
    ),
    "logprobs_from_logits": lambda logits, labels, inplace_backward=True: (
        torch.log_softmax(logits, dim=-1).gather(-1, labels[..., None]).squeeze(-1)
    ),
    "compute_response_mask": lambda data: data.batch["attention_mask"][:, -data.batch["responses"].shape[-1] :],
    # -- what a configuration asks for
    "need_critic": lambda config: our_config(config).use_critic,
    "need_reference_policy": lambda config: bool(config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss),
    "need_reward_model": lambda config: bool(config.reward_model.enable),
    "get_custom_reward_fn": lambda config: reward_arguments(our_config(config).reward)["compute_score"],
    "migrate_legacy_reward_impl": lambda config: config,  # the reward's keys are read wherever verl has had them
    "ActorConfig": lambda **given: config.ActorConfig(
        **{key: value for key, value in given.items() if key in config.ActorConfig.__dataclass_fields__}
    ),
    # -- data
    "create_rl_dataset": lambda data_paths, data_config, tokenizer, processor=None, is_train=True, max_samples=-1: RLHFDataset(
        data_paths, tokenizer, data_config, max_samples=max_samples
    ),
    "create_rl_sampler": lambda data_config, dataset: (
        torch.utils.data.RandomSampler(dataset, generator=torch.Generator().manual_seed(data_config.seed or 0))
        if data_config.shuffle else torch.utils.data.SequentialSampler(dataset)
    ),
    "get_seqlen_balanced_partitions": lambda seqlen_list, k_partitions, equal_size=False: balanced_partition(seqlen_list, k_partitions),
    "make_nd_compute_dataproto_dispatch_fn": lambda mesh_name: Dispatch.DP_COMPUTE_PROTO,  # whichever mesh of devices a worker has
    # -- rewards
    "register": lambda name: lambda manager: _MANAGERS.setdefault(name, manager),
    "get_reward_manager_cls": lambda name: _MANAGERS.get(name, VerlRewardManager),
    "extract_reward": lambda batch: (
        batch.batch["rm_scores"], {name: batch.non_tensor_batch[name] for name in batch.meta_info.get("reward_extra_keys", ())}
    ),
    "last_boxed_only_string": lambda string: None if (content := last_boxed(string)) is None else f"\\boxed{{{content}}}",
    "remove_boxed": lambda s: s.removeprefix("\\boxed{").removesuffix("}"),
}  # fmt: skip
"""verl's name -> what it is, in one expression."""
globals().update(EXPRESSIONS)


def nothing(*args: Any, **kwargs: Any) -> None:
    """None: a processor of images, a choice of devices, which is made at the start, a profiler; each step logs timing_s/* and perf/*."""


class NoProfiler:
    """verl's profilers and memory loggers as decorators and bases that do nothing."""

    __init__ = log = start = stop = nothing

    def __call__(self, decorated: Any) -> Any:
        return decorated

    @classmethod
    def annotate(cls, *args: Any, **kwargs: Any) -> NoProfiler:
        """A decorator that does nothing."""
        return cls()


class RayResourcePool(ResourcePool):
    """`ResourcePool` with verl's arguments. What shares a pool is placed by the trainer: the last three say nothing here."""

    def __init__(
        self, process_on_nodes: list[int], use_gpu: bool = True, name_prefix: str | None = None, max_colocate_count: int = 10,
        detached: bool = False, accelerator_type: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(process_on_nodes, name_prefix or "pool", use_gpu)


class DataProtoConfig:
    """verl's switch for padding batches to the number of workers, which nothing here needs."""

    auto_padding = False


def RolloutSkip(config: Any, worker_group: Any) -> None:
    """Raises ConfigError: what was generated once is not replayed in training."""
    raise ConfigError("actor_rollout_ref.rollout.skip_rollout: generations cannot be replayed in training; leave it out")


def copy_to_local(src: str, cache_dir: str | None = None, **ignored: Any) -> str:
    """The path itself: files are read where they are. Raises ValueError for HDFS."""
    if str(src).startswith("hdfs://"):
        raise ValueError(f"{src} is on HDFS, which is not read here: copy it to a folder first")
    return str(src)


def import_external_libs(external_libs: str | Sequence[str] | None = None) -> None:
    """Import these modules."""
    for name in [external_libs] if isinstance(external_libs, str) else external_libs or []:
        importlib.import_module(name)


def convert_to_regular_types(obj: Any) -> Any:
    """OmegaConf's containers, at any depth, as dicts and lists."""
    if isinstance(obj, dict):
        return {key: convert_to_regular_types(value) for key, value in obj.items()}
    if isinstance(obj, list | tuple):
        return [convert_to_regular_types(value) for value in obj]
    return OmegaConf.to_container(obj, resolve=True) if OmegaConf.is_config(obj) else obj


def union_two_dict(dict1: dict[Any, Any], dict2: dict[Any, Any]) -> dict[Any, Any]:
    """`dict1` with the entries of `dict2` added, in place. Raises ValueError where they differ."""
    differ = [key for key in dict2 if key in dict1 and dict1[key] != dict2[key]]
    if differ:
        raise ValueError(f"both have {differ}, with different values")
    dict1 |= dict2
    return dict1


def append_to_dict(data: dict[str, Any], new_data: Mapping[str, Any]) -> None:
    """Add each value, or each of a list, to the list (or `Metric`) of its name, in place."""
    for name, value in new_data.items():
        found = data.setdefault(name, value.init_list() if isinstance(value, Metric) else [])
        (found.extend if isinstance(value, list) else found.append)(value)


def collate_fn(data_list: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Tensors stacked, everything else as an object array."""
    columns: dict[str, list[Any]] = {name: [row[name] for row in data_list] for name in data_list[0]}
    objects = {name: np.fromiter(values, dtype=object, count=len(values)) for name, values in columns.items()}
    return {name: torch.stack(list(values)) if isinstance(values[0], Tensor) else values for name, values in objects.items()}


@contextmanager
def marked_timer(name: str, timing_raw: dict[str, float], *ignored: Any, **also_ignored: Any) -> Iterator[None]:
    """Adds the seconds inside to `timing_raw[name]`."""
    started = time.perf_counter()
    yield
    timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - started


def log_seqlen_unbalance(seqlen_list: Sequence[int], partitions: Sequence[Sequence[int]], prefix: str) -> dict[str, float]:
    """The smallest and largest sum of a partition, of neighbouring rows and of `partitions`."""
    size = len(seqlen_list) // len(partitions)
    before = [sum(seqlen_list[i * size : (i + 1) * size]) for i in range(len(partitions))]
    after = [sum(seqlen_list[row] for row in part) for part in partitions]
    found = {"min": min(before), "max": max(before), "minmax_diff": max(before) - min(before), "balanced_min": min(after),
             "balanced_max": max(after), "mean": sum(seqlen_list) / len(partitions)}  # fmt: skip
    return {f"{prefix}/{name}": value for name, value in found.items()}


def apply_kl_penalty(data: Any, kl_ctrl: kl.KLController, kl_penalty: str = "kl") -> tuple[Any, dict[str, float]]:
    """Writes token_level_rewards, the scores less the KL penalty; updates `kl_ctrl`."""
    mask = data.batch["response_mask"]
    penalty = kl.kl_penalty(data.batch["old_log_probs"], data.batch["ref_log_prob"], kl_penalty) * mask
    data.batch["token_level_rewards"] = data.batch["token_level_scores"] - kl_ctrl.value * penalty
    found = (penalty.sum(-1) / mask.sum(-1).clamp(min=1)).mean().item()
    told = {"actor/reward_kl_penalty": found, "actor/reward_kl_penalty_coeff": kl_ctrl.value}
    kl_ctrl.update(found, n_steps=len(mask))
    return data, told


def compute_advantage(
    data: Any, adv_estimator: Any, gamma: float = 1.0, lam: float = 1.0, num_repeat: int = 1, norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> Any:  # fmt: skip
    """Writes advantages and returns, by the estimator of `core_algos` of that name."""
    config = AlgorithmConfig(gamma=gamma, lam=lam, norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo) if config is None else config
    known = {"gamma": gamma, "lam": lam, "norm_adv_by_std_in_grpo": norm_adv_by_std_in_grpo, "config": config, **data.batch}
    known |= {"index": data.non_tensor_batch.get("uid"), "non_tensor_batch": data.non_tensor_batch}
    function = get_adv_estimator_fn(getattr(adv_estimator, "value", adv_estimator))
    names = inspect.signature(function).parameters
    data.batch["advantages"], data.batch["returns"] = function(
        **{name: known[name] for name in names if known.get(name) is not None}
    )
    return data


class Tracking(OurTracking):
    """`observability.trackers.Tracking` with verl's arguments; files go to trainer.default_local_dir of `config`, or where a run without
    that key has its folder."""

    def __init__(self, project_name: str, experiment_name: str, default_backend: Any = "console", config: Any = None) -> None:
        names = [default_backend] if isinstance(default_backend, str) else list(default_backend)
        folder = dict((config or {}).get("trainer", {})).get("default_local_dir")
        run_dir = Path(folder or Path("checkpoints", project_name, experiment_name))
        newest = folders.newest(run_dir)  # what was logged before it stays
        step = int(newest.name.rpartition("_")[2]) if newest else None
        named: dict[str, Any] = {"project_name": project_name, "experiment_name": experiment_name}
        super().__init__(names, **named, run_dir=run_dir, config=dict(config or {}), resume_step=step)

    def log(self, data: Mapping[str, float], step: int, backend: Any = None) -> None:
        """Record the metrics of one step."""
        super().log(data, step)


class VerlRewardManager(RewardManager):
    """`rewards.manager.RewardManager` with the arguments of verl's managers: DAPO's limit of length, and more for `compute_score`."""

    def __init__(
        self, tokenizer: Any, num_examine: int, compute_score: Any = None, reward_fn_key: str = "data_source",
        max_resp_len: int | None = None, overlong_buffer_cfg: Any = None, **reward_kwargs: Any,
    ) -> None:  # fmt: skip
        ours = {name: reward_kwargs.pop(name) for name in inspect.signature(RewardManager).parameters if name in reward_kwargs}
        function = functools.partial(compute_score, **reward_kwargs) if compute_score and reward_kwargs else compute_score
        super().__init__(tokenizer, num_examine, function, reward_fn_key, **ours)
        self._limit, self._overlong = max_resp_len, overlong_buffer_cfg

    def __call__(self, data: DataProto, return_dict: bool = False, scoring: Any = None, ragged: bool = False) -> Any:
        """As the manager's; with `overlong_buffer_cfg.enable` less the penalty for length, which is among the parts. Raises RewardError
        for a reward that is missing, but when `ragged` is asked for."""
        answer: Any = super().__call__(data, return_dict, scoring, ragged=True)
        whole: dict[str, Any] = answer if return_dict else {"reward_tensor": answer, "reward_parts": {}, "failures": []}
        if not ragged and any(whole["failures"]):  # a loop of verl's knows no missing reward, and would take the zero
            raise RewardError(f"a reward is missing: {next(filter(None, whole['failures'])).text}")
        if self._overlong is not None and self._overlong.enable:
            rows = DataProto({"responses": data.ragged("responses"), "token_level_scores": whole["reward_tensor"]})
            buffer = OverlongConfig(True, self._overlong.len, self._overlong.penalty_factor)
            penalise_overlong(rows, Scored([], [], parts=whole["reward_parts"]), buffer, int(self._limit or 0))
            whole["reward_tensor"] = rows.ragged("token_level_scores")
        whole["reward_tensor"] = whole["reward_tensor"] if ragged else whole["reward_tensor"].pad()
        return whole if return_dict else whole["reward_tensor"]


def load_reward_manager(config: Any, tokenizer: Any, num_examine: int = 0, **reward_kwargs: Any) -> RewardManager:
    """The manager that the configuration describes."""
    arguments = reward_arguments(our_config(config).reward) | reward_kwargs
    return VerlRewardManager(tokenizer=tokenizer, num_examine=num_examine, **arguments)


def compute_reward(data: DataProto, reward_fn: Callable[..., Any]) -> tuple[Tensor, dict[str, Any]]:
    """The reward tensor and the extra columns of a manager."""
    result = reward_fn(data, return_dict=True)
    return result["reward_tensor"], result.get("reward_extra_info", {})
