"""What of a configuration a run must keep when it goes on from a checkpoint: all that decides what is computed."""

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from lockstep.config.secrets import redacted
from lockstep.errors import ConfigError

_KEPT = ("trainer.seed", "trainer.critic_warmup", "*.dtype")
_FREE = (
    "trainer.*", "ray_kwargs.*", "*.strategy", "*.fsdp_config.*", "*.megatron.*", "*.torchtitan.*", "*.veomni.*",
    "*micro_batch_size_per_gpu", "*max_token_len_per_gpu", "*.enable_gradient_checkpointing", "*.recompute", "*.trust_remote_code",
    "*.param_offload", "*.n_gpus_per_node", "*.nnodes", "*.enable_resource_pool", "*_timeout_s", "*.timeout_s", "*.num_workers",
    "*.max_memory_mb",
    "sampled.*", "data.val_*", "*.val_kwargs.*", "*.max_num_seqs", "*.max_num_batched_tokens", "*.gpu_memory_utilization",
    "*.free_cache_engine", "*.enforce_eager", "*.weight_sync*", "*.fallback_to_hf", "reward.max_failure_rate", "reward.sandbox.*",
    "reward.retries",
    "agent.record", "agent.recorded", "agent.max_environments",
)  # fmt: skip
"""How long, where and how fast: these may change. What is in _KEPT may not, although a pattern here fits it."""


def kept_values(config: Any) -> dict[str, Any]:
    """Key -> value, as JSON has it, of all that a resumed run must have in common with the one that saved."""
    return kept_of(dataclasses.asdict(config))


def kept_of(sections: Mapping[str, Any]) -> dict[str, Any]:
    """The same of a configuration's sections as nested dicts."""
    values = json.loads(json.dumps(redacted(sections), default=str))
    return {key: value for key, value in _leaves(values, "") if _is_kept(key)}


def check_resumable(saved: Mapping[str, Any], present: Mapping[str, Any], allowed: Sequence[str], source: str) -> None:
    """Raise ConfigError, with every key and both values, where they differ in a key that is not `allowed` (trainer.allow_changes)."""
    keys = [key for key in (*saved, *(key for key in present if key not in saved)) if saved.get(key) != present.get(key)]
    different = [key for key in keys if key not in allowed]
    if different:
        lines = "\n".join(f"  {key}: {saved.get(key)!r} then, {present.get(key)!r} now" for key in different)
        raise ConfigError(
            f"{source} was trained with other settings:\n{lines}\n"
            f"To go on with those of now, set trainer.allow_changes=[{','.join(keys)}]; to begin a new run, choose another folder with "
            "trainer.experiment_name or trainer.default_local_dir"
        )


@functools.cache
def _is_kept(key: str) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in _KEPT) or not any(fnmatchcase(key, pattern) for pattern in _FREE)


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else name)
    else:
        yield key, value
