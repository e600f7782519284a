"""verl's helper functions over Lockstep's, with verl's arguments. Batches may be DataProto or anything with padded `batch` tensors."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from lockstep.algorithms import kl
from lockstep.checkpoint import folders
from lockstep.compat.verl.command import our_config
from lockstep.compat.verl.core_algos import get_adv_estimator_fn
from lockstep.config import actor_rollout_ref as config
from lockstep.config.algorithm import AlgorithmConfig
from lockstep.config.reward import OverlongConfig
from lockstep.data.rl_dataset import RLHFDataset
from lockstep.errors import ConfigError, RewardError
from lockstep.judging import last_boxed
from lockstep.observability.spans import StageTimer
from lockstep.observability.trackers import Tracking as OurTracking
from lockstep.protocol import DataProto
from lockstep.rewards.manager import RewardManager
from lockstep.single_controller.base import Dispatch, ResourcePool
from lockstep.single_controller.base.dispatch import balanced_partition
from lockstep.single_controller.base.equal_partition import equal_partition
from lockstep.trainer.ppo.metrics import balance_metrics
from lockstep.trainer.ppo.reward_columns import penalise_overlong
from lockstep.trainer.ppo.scored import Scored
from lockstep.trainer.run.setup import reward_arguments
from lockstep.utils.device import resolve_device

is_cuda_available, is_npu_available = torch.cuda.is_available(), False
PPO_RAY_RUNTIME_ENV: dict[str, Any] = {}  # workers start with the environment that they need
DataProtoConfig = SimpleNamespace(auto_padding=False)  # batches need no padding to the number of workers
_MANAGERS: dict[str, type] = {}

EXPRESSIONS: dict[str, Callable[..., Any]] = {
    "marked_timer": lambda name, timing_raw, *ignored, **also_ignored: StageTimer(timing_raw).stage(name),
    "compute_response_mask": lambda data: data.batch["attention_mask"][:, -data.batch["responses"].shape[-1] :],
    # -- padded tensors
    "compute_position_id_with_mask": lambda mask: (mask.cumsum(-1) - 1).clamp(min=0),
    "get_response_mask": lambda response_id, eos_token=2, dtype=torch.int64: (
        (ends := torch.isin(response_id, torch.as_tensor(eos_token, device=response_id.device)).long()).cumsum(-1) - ends == 0
    ).to(dtype),
    "pad_sequence_to_length": lambda tensors, max_seq_len, pad_token_id, left_pad=False: torch.nn.functional.pad(
        tensors, (0, max(0, max_seq_len - tensors.shape[-1]))[:: -1 if left_pad else 1], value=pad_token_id
    ),
    "logprobs_from_logits": lambda logits, labels, inplace_backward=True: (
        torch.log_softmax(logits, dim=-1).gather(-1, labels[..., None]).squeeze(-1)
    ),
    # -- devices
    "get_device_name": lambda: resolve_device("auto"),
    "get_torch_device": lambda: getattr(torch, resolve_device("auto")),
    "get_device_id": lambda: torch.cuda.current_device() if torch.cuda.is_available() else 0,
    "get_nccl_backend": lambda: "nccl" if torch.cuda.is_available() else "gloo",
    # -- what a configuration asks for
    "need_critic": lambda config: our_config(config).use_critic,
    "need_reference_policy": lambda config: our_config(config).use_reference,
    "need_reward_model": lambda config: bool(config.reward_model.enable),
    "get_custom_reward_fn": lambda config: reward_arguments(our_config(config).reward)["compute_score"],
    "migrate_legacy_reward_impl": lambda config: config,  # the reward's keys are read wherever verl has had them
    "ActorConfig": lambda **given: config.ActorConfig(
        **{key: value for key, value in given.items() if key in config.ActorConfig.__dataclass_fields__}
    ),
    "import_external_libs": lambda external_libs=None: [
        importlib.import_module(name) for name in ([external_libs] if isinstance(external_libs, str) else external_libs or [])
    ],
    # -- data
    "create_rl_dataset": lambda data_paths, data_config, tokenizer, processor=None, is_train=True, max_samples=-1: RLHFDataset(
        data_paths, tokenizer, data_config, max_samples=max_samples
    ),
    "create_rl_sampler": lambda data_config, dataset: (
        torch.utils.data.RandomSampler(dataset, generator=torch.Generator().manual_seed(data_config.seed or 0))
        if data_config.shuffle else torch.utils.data.SequentialSampler(dataset)
    ),
    "get_seqlen_balanced_partitions": lambda seqlen_list, k_partitions, equal_size=False: (
        equal_partition if equal_size else balanced_partition
    )(seqlen_list, k_partitions),
    "log_seqlen_unbalance": lambda seqlen_list, partitions, prefix: balance_metrics(torch.tensor(seqlen_list), partitions, prefix),
    # What shares a pool is placed by the trainer: verl's other arguments say nothing here.
    "RayResourcePool": lambda process_on_nodes, use_gpu=True, name_prefix=None, *ignored, **also_ignored: ResourcePool(
        process_on_nodes, name_prefix or "pool", use_gpu
    ),
    "make_nd_compute_dataproto_dispatch_fn": lambda mesh_name: Dispatch.DP_COMPUTE_PROTO,  # whichever mesh of devices a worker has
    # -- rewards
    "compute_reward": lambda data, reward_fn: (
        (result := reward_fn(data, return_dict=True))["reward_tensor"], result.get("reward_extra_info", {})
    ),
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


def pad_2d_list_to_length(response: list[list[int]], pad_token_id: int, max_length: int | None = None) -> torch.Tensor:
    """Lists as one block, as wide as the longest of them, or `max_length` where that is more."""
    width = max([max_length or 0, *map(len, response)])
    return torch.tensor([[*row, *[pad_token_id] * (width - len(row))] for row in response])


def union_two_dict(dict1: dict[Any, Any], dict2: dict[Any, Any]) -> dict[Any, Any]:
    """`dict1` with the entries of `dict2` added, in place. Raises ValueError where they differ."""
    if differ := [key for key in dict2 if key in dict1 and dict1[key] != dict2[key]]:
        raise ValueError(f"both have {differ}, with different values")
    dict1 |= dict2
    return dict1


def copy_to_local(src: str, cache_dir: str | None = None, **ignored: Any) -> str:
    """The path itself: files are read where they are. Raises ValueError for HDFS."""
    if str(src).startswith("hdfs://"):
        raise ValueError(f"{src} is on HDFS, which is not read here: copy it to a folder first")
    return str(src)


def nothing(*args: Any, **kwargs: Any) -> None:
    """None: a processor of images, a choice of devices, which is made at the start, a profiler; each step logs timing_s/* and perf/*."""


class NoProfiler:
    """verl's profilers and memory loggers as decorators and bases that do nothing."""

    __init__ = log = start = stop = nothing
    annotate = classmethod(lambda cls, *args, **kwargs: cls())

    def __call__(self, decorated: Any) -> Any:
        return decorated


def RolloutSkip(config: Any, worker_group: Any) -> None:
    """Raises ConfigError: what was generated once is not replayed in training."""
    raise ConfigError("actor_rollout_ref.rollout.skip_rollout: generations cannot be replayed in training; leave it out")


def append_to_dict(data: dict[str, Any], new_data: Mapping[str, Any]) -> None:
    """Add each value, or each of a list, to the list of its name, in place."""
    for name, value in new_data.items():
        data.setdefault(name, []).extend(value if isinstance(value, list) else [value])


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
    inputs = {name: known[name] for name in inspect.signature(function).parameters if known.get(name) is not None}
    data.batch["advantages"], data.batch["returns"] = function(**inputs)
    return data


class Tracking(OurTracking):
    """The trainer's trackers with verl's arguments; files go to trainer.default_local_dir, or where runs without it have them."""

    def __init__(self, project_name: str, experiment_name: str, default_backend: Any = "console", config: Any = None) -> None:
        names = [default_backend] if isinstance(default_backend, str) else list(default_backend)
        folder = dict((config or {}).get("trainer", {})).get("default_local_dir")
        run_dir = Path(folder or Path("checkpoints", project_name, experiment_name))
        newest = folders.newest(run_dir)  # what was logged before it stays
        step = int(newest.name.rpartition("_")[2]) if newest else None
        own: Any = {"project_name": project_name, "experiment_name": experiment_name, "config": dict(config or {})}
        super().__init__(names, run_dir=run_dir, resume_step=step, **own)

    def log(self, data: Mapping[str, float], step: int, backend: Any = None) -> None:
        """Record the metrics of one step."""
        super().log(data, step)


class VerlRewardManager(RewardManager):
    """The reward manager with the arguments of verl's: DAPO's limit of length, and more for `compute_score`."""

    def __init__(
        self, tokenizer: Any, num_examine: int, compute_score: Any = None, reward_fn_key: str = "data_source",
        max_resp_len: int | None = None, overlong_buffer_cfg: Any = None, **reward_kwargs: Any,
    ) -> None:  # fmt: skip
        ours = {name: reward_kwargs.pop(name) for name in inspect.signature(RewardManager).parameters if name in reward_kwargs}
        function = functools.partial(compute_score, **reward_kwargs) if compute_score and reward_kwargs else compute_score
        super().__init__(tokenizer, num_examine, function, reward_fn_key, **ours)
        self._limit, self._overlong = max_resp_len, overlong_buffer_cfg

    def __call__(self, data: DataProto, return_dict: bool = False, scoring: Any = None, ragged: bool = False) -> Any:
        """The rewards, less the penalty for length that `overlong_buffer_cfg` asks for. RewardError for a missing one, unless `ragged`."""
        whole: Any = super().__call__(data, True, scoring, ragged=True)
        missing = next(filter(None, whole["failures"]), None)
        if missing is not None and not (ragged and return_dict):  # a loop of verl's would take the zero
            raise RewardError(f"a reward is missing: {missing.text}")
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
