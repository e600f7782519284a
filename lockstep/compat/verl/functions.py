"""verl's helper functions over Lockstep's, with verl's arguments. Batches may be DataProto or anything with padded `batch` tensors."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.algorithms import kl, mismatch
from lockstep.algorithms.rows import Rows
from lockstep.compat.verl.core_algos import get_adv_estimator_fn
from lockstep.config import actor_rollout_ref as config
from lockstep.config import as_config
from lockstep.config.algorithm import AlgorithmConfig
from lockstep.data.rl_dataset import RLHFDataset
from lockstep.observability.trackers import Tracking as OurTracking
from lockstep.protocol import DataProto, Ragged
from lockstep.rewards.graders.math import last_boxed
from lockstep.rewards.manager import RewardManager
from lockstep.single_controller.base.dispatch import balanced_partition
from lockstep.trainer.ppo import metrics, stages
from lockstep.trainer.ppo.validation import validation_metrics
from lockstep.trainer.setup import reward_arguments

SUPPORTED_ROLLOUT_RS_OPTIONS = {kind for kind in mismatch.RS_KINDS if not kind.startswith("group")}


def _compute_response_info(batch: Any) -> dict[str, Tensor]:
    """Tokens of each prompt and response, from `attention_mask`, and the mask of the latter."""
    attention, width = batch.batch["attention_mask"].float(), batch.batch["responses"].shape[-1]
    prompt, response = attention[:, :-width], attention[:, -width:]
    return {"response_mask": response, "prompt_length": prompt.sum(-1), "response_length": response.sum(-1)}


def _as_rows(batch: Any) -> DataProto:
    info, blocks = _compute_response_info(batch), batch.batch
    lengths, prompts = info["response_length"].long(), info["prompt_length"].long()
    names = ("token_level_scores", "token_level_rewards", "advantages", "returns", "values", "response_mask", "responses")
    columns: dict[str, Tensor | Ragged] = {name: Ragged.from_padded(blocks[name], lengths) for name in names if name in blocks}
    return DataProto(columns | {"prompts": Ragged(torch.zeros(int(prompts.sum())), prompts)})


def compute_data_metrics(batch: Any, use_critic: bool = True) -> dict[str, float]:
    """`trainer.ppo.metrics.data_metrics`; the limits are the widths of the padded blocks."""
    rows = _as_rows(batch)
    if not use_critic:
        rows.columns.pop("values", None)
    return metrics.data_metrics(rows, batch.batch["responses"].shape[-1], batch.batch["prompts"].shape[-1])


def compute_timing_metrics(batch: Any, timing_raw: Mapping[str, float]) -> dict[str, float]:
    """timing_s/* and timing_per_token_ms/* of `trainer.ppo.metrics.timing_metrics`."""
    found = metrics.timing_metrics(_as_rows(batch), {"step": 1.0} | dict(timing_raw), 1)
    return {name: value for name, value in found.items() if name.startswith("timing_") and name.partition("/")[2] in timing_raw}


def compute_throughout_metrics(batch: Any, timing_raw: Mapping[str, float], n_gpus: int) -> dict[str, float]:
    """perf/total_num_tokens, time_per_step and throughput of `batch.meta_info["global_token_num"]`."""
    tokens, seconds = sum(batch.meta_info["global_token_num"]), timing_raw["step"]
    return {"perf/total_num_tokens": tokens, "perf/time_per_step": seconds, "perf/throughput": tokens / (seconds * n_gpus)}


def reduce_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The largest of a list whose name has max, the smallest where it has min, else the mean."""
    return {name: (np.max if "max" in name else np.min if "min" in name else np.mean)(values) for name, values in metrics.items()}


def bootstrap_metric(
    data: Sequence[Any], subset_size: int, reduce_fns: Sequence[Callable[..., float]], n_bootstrap: int = 1000, seed: int = 42
) -> list[tuple[float, float]]:
    """Mean and standard deviation of each function over subsets drawn with replacement."""
    drawn = np.random.default_rng(seed).choice(len(data), size=(n_bootstrap, subset_size))
    found = np.array([[function([data[i] for i in subset]) for function in reduce_fns] for subset in drawn])
    return [(float(column.mean()), float(column.std())) for column in found.T]


def calc_maj_val(data: Sequence[Mapping[str, Any]], vote_key: str, val_key: str) -> float:
    """The value of the first entry with the most frequent vote."""
    votes = [entry[vote_key] for entry in data]
    return float(data[votes.index(max(votes, key=votes.count))][val_key])


def process_validation_metrics(
    data_sources: Sequence[str], sample_uids: Sequence[Any], infos_dict: dict[str, list[Any]], seed: int = 42
) -> dict[str, Any]:
    """`validation.validation_metrics` as source -> variable -> name -> value."""
    numbers = {uid: i for i, uid in enumerate(dict.fromkeys(sample_uids))}
    found: dict[str, Any] = defaultdict(lambda: defaultdict(dict))
    for name, value in validation_metrics(data_sources, [numbers[uid] for uid in sample_uids], infos_dict).items():
        source = next(source for source in data_sources if name.split("/", 1)[1].startswith(f"{source}/"))
        variable, _, rest = name.split("/", 1)[1].removeprefix(f"{source}/").partition("/")
        found[source][variable][rest] = value
    return found


def compute_response_mask(data: Any) -> Tensor:
    """The part of `attention_mask` over the responses."""
    mask: Tensor = data.batch["attention_mask"][:, -data.batch["responses"].shape[-1] :]
    return mask


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
    names = function.__signature__.parameters if hasattr(function, "__signature__") else known
    advantages, returns = function(**{name: known[name] for name in names if known.get(name) is not None})
    data.batch["advantages"], data.batch["returns"] = advantages, returns
    return data


def compute_offpolicy_metrics(old_log_prob: Tensor, rollout_log_prob: Tensor | None, response_mask: Tensor) -> dict[str, float]:
    """`mismatch.mismatch_metrics` of padded blocks; without `rollout_log_prob` those of the trainer's policy."""
    other = old_log_prob if rollout_log_prob is None else rollout_log_prob
    rows = Rows.of_padded(response_mask)
    found = mismatch.mismatch_metrics(old_log_prob.flatten(), other.flatten(), response_mask.flatten(), rows)
    return found if rollout_log_prob is not None else {name: value for name, value in found.items() if name.startswith("training")}


def compute_rollout_correction_and_rejection_mask(
    old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor, rollout_is: str | None = None,
    rollout_is_threshold: float | str | None = 2.0, rollout_is_batch_normalize: bool = False, rollout_rs: str | None = None,
    rollout_rs_threshold: float | str | None = None,
) -> tuple[DataProto | None, Tensor, dict[str, float]]:  # fmt: skip
    """`stages.correct` of padded blocks: the weights (None where there are none), the mask that is left, and the metrics."""
    if isinstance(rollout_is_threshold, bool):
        raise TypeError("rollout_is_threshold must be a float or a string threshold specification, not a boolean")
    lengths = torch.full((len(response_mask),), response_mask.shape[1])
    blocks = {"old_log_probs": old_log_prob, "rollout_log_probs": rollout_log_prob, "response_mask": response_mask.long()}
    data = DataProto({name: Ragged(block.flatten(), lengths) for name, block in blocks.items()}, {"uid": list(range(len(lengths)))})
    data.set("responses", data.ragged("response_mask"))
    options = (rollout_is, rollout_is_threshold or 2.0, rollout_is_batch_normalize, rollout_rs, rollout_rs_threshold)
    found = stages.correct(data, mismatch.make_correction(*options))
    weights = DataProto({"rollout_is_weights": data.batch["rollout_is_weights"]}) if rollout_is else None
    return weights, data.batch["response_mask"].to(response_mask.dtype), found


def compute_is_metrics(
    rollout_is_weights: Tensor, raw_rollout_is_weights: Tensor, log_ratio_for_metrics: Tensor, response_mask: Tensor, rollout_is: str,
    rollout_is_threshold: float, rollout_is_threshold_lower: float | None = None,
) -> dict[str, float]:  # fmt: skip
    """`mismatch.weight_metrics` of padded blocks; the cut weights follow from the raw ones."""
    band, rows = mismatch.Bounds(rollout_is_threshold_lower or 0.0, rollout_is_threshold), Rows.of_padded(response_mask)
    return mismatch.weight_metrics(raw_rollout_is_weights.flatten(), response_mask.flatten(), rows, rollout_is, band)


def compute_rollout_correction_and_add_to_batch(batch: Any, rollout_corr_config: Any) -> tuple[Any, dict[str, float]]:
    """The same over a batch: response_mask is replaced, rollout_is_weights added where there are weights."""
    names = ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize", "rollout_rs", "rollout_rs_threshold")
    read = rollout_corr_config.get if hasattr(rollout_corr_config, "get") else lambda name: getattr(rollout_corr_config, name, None)
    options: dict[str, Any] = {name: read(name) for name in names if read(name) is not None}
    blocks: Any = (batch.batch[name] for name in ("old_log_probs", "rollout_log_probs", "response_mask"))
    weights, batch.batch["response_mask"], found = compute_rollout_correction_and_rejection_mask(*blocks, **options)
    return (batch if weights is None else batch.union(weights)), found


def need_critic(config: Any) -> bool:
    """Whether the run trains a value model."""
    return as_config(config).use_critic


def need_reference_policy(config: Any) -> bool:
    """Whether a KL term is on."""
    return bool(config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss)


def need_reward_model(config: Any) -> bool:
    """Whether a reward model scores."""
    return bool(config.reward_model.enable)


def load_reward_manager(config: Any, tokenizer: Any, num_examine: int = 0, **reward_kwargs: Any) -> RewardManager:
    """The manager that the configuration describes."""
    return RewardManager(
        tokenizer=tokenizer, num_examine=num_examine, **(reward_arguments(as_config(config).reward) | reward_kwargs)
    )


def get_custom_reward_fn(config: Any) -> Callable[..., Any] | None:
    """The function of reward.custom_reward_function, None without one."""
    return reward_arguments(as_config(config).reward)["compute_score"]


def compute_reward(data: DataProto, reward_fn: Callable[..., Any]) -> tuple[Tensor, dict[str, Any]]:
    """The reward tensor and the extra columns of a manager."""
    result = reward_fn(data, return_dict=True)
    return result["reward_tensor"], result.get("reward_extra_info", {})


def create_rl_dataset(
    data_paths: Any, data_config: Any, tokenizer: Any, processor: Any = None, is_train: bool = True, max_samples: int = -1
) -> RLHFDataset:
    """The dataset of these files."""
    return RLHFDataset(data_paths, tokenizer, data_config, max_samples=max_samples)


def create_rl_sampler(data_config: Any, dataset: Any) -> torch.utils.data.Sampler[int]:
    """Random with `data.seed`, or in order."""
    if not data_config.shuffle:
        return torch.utils.data.SequentialSampler(dataset)
    return torch.utils.data.RandomSampler(dataset, generator=torch.Generator().manual_seed(data_config.seed or 0))


def collate_fn(data_list: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Tensors stacked, everything else as an object array."""
    columns: dict[str, list[Any]] = {name: [row[name] for row in data_list] for name in data_list[0]}
    objects = {name: np.fromiter(values, dtype=object, count=len(values)) for name, values in columns.items()}
    return {name: torch.stack(list(values)) if isinstance(values[0], Tensor) else values for name, values in objects.items()}


def copy_to_local(src: str, cache_dir: str | None = None, **ignored: Any) -> str:
    """The path itself: files are read where they are. Raises ValueError for HDFS."""
    if str(src).startswith("hdfs://"):
        raise ValueError(f"{src} is on HDFS, which is not read here: copy it to a folder first")
    return str(src)


@contextmanager
def marked_timer(name: str, timing_raw: dict[str, float], *ignored: Any, **also_ignored: Any) -> Iterator[None]:
    """Adds the seconds inside to `timing_raw[name]`."""
    started = time.perf_counter()
    yield
    timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - started


def get_seqlen_balanced_partitions(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool = False) -> list[list[int]]:
    """Indices of rows in `k_partitions` parts of nearly equal sums."""
    return [sorted(part) for part in balanced_partition(seqlen_list, k_partitions)]


class Tracking(OurTracking):
    """`observability.trackers.Tracking` with verl's arguments; files go to checkpoints/{project_name}/{experiment_name}."""

    def __init__(self, project_name: str, experiment_name: str, default_backend: Any = "console", config: Any = None) -> None:
        names = [default_backend] if isinstance(default_backend, str) else list(default_backend)
        named: dict[str, Any] = {"project_name": project_name, "experiment_name": experiment_name}
        super().__init__(names, **named, run_dir=Path("checkpoints", project_name, experiment_name), config=dict(config or {}))

    def log(self, data: Mapping[str, float], step: int, backend: Any = None) -> None:
        """Record the metrics of one step."""
        super().log(data, step)


def last_boxed_only_string(string: str) -> str | None:
    """The last \\boxed{...} of a text, None without one."""
    content = last_boxed(string)
    return None if content is None else f"\\boxed{{{content}}}"


def remove_boxed(s: str) -> str:
    """What stands in \\boxed{...}."""
    return s.removeprefix("\\boxed{").removesuffix("}")


def ActorConfig(**given: Any) -> config.ActorConfig:
    """The actor's section of these keys; those that Lockstep does not have are left out."""
    return config.ActorConfig(**{key: value for key, value in given.items() if key in config.ActorConfig.__dataclass_fields__})


def hf_processor(name_or_path: str, **ignored: Any) -> None:
    """None, as verl's gives for a model of text."""


def get_device_name() -> str:
    """The kind of device that a run uses here."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def compute_position_id_with_mask(mask: Tensor) -> Tensor:
    """Positions that count from 0 at the first token of each row."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


def append_to_dict(data: dict[str, list[Any]], new_data: Mapping[str, Any]) -> None:
    """Add each value to the list of its name, in place."""
    for name, value in new_data.items():
        data.setdefault(name, []).append(value)


def get_reward_manager_cls(name: str) -> type[RewardManager]:
    """The one manager there is."""
    return RewardManager
