"""What a run's folder holds of its configuration: nothing secret, the values that a resumed run must keep, and a name made of them."""

import dataclasses
import functools
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import PurePath
from typing import Any

from lockstep.errors import ConfigError

HIDDEN = "***"
_SECRET = re.compile(r"(?i)(?:^|[_.-])(?:api_?key|access_?key|private_?key|token|secret|passw(?:or)?d|credentials?|authorization)$")
"""Names of keys, of environment variables and of a URL's arguments."""
_IN_URL = re.compile(r"(?<=://)([^/\s@:]*):[^/\s@]+@")
_IN_QUERY = re.compile(r"([?&]([^=&\s]+)=)[^&\s]+")
_SHORTEST = 8
"""A shorter value of the environment is found in harmless text too."""
_interpolated: dict[str, str] = {}

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
_LONGEST = 48


def remember(raw: Any, resolved: Any) -> None:
    """Store which values of a configuration came from environment variables: `raw` has `${oc.env:NAME}` where `resolved` has the value."""
    if isinstance(raw, Mapping):
        for name, value in raw.items():
            remember(value, resolved[name])
    elif isinstance(raw, list):
        for value, found in zip(raw, resolved, strict=True):
            remember(value, found)
    elif isinstance(raw, str) and "${oc.env:" in raw and isinstance(resolved, str):
        _interpolated[resolved] = raw


def redacted(values: Any) -> Any:
    """The values (dicts and lists of plain values, as `dataclasses.asdict` gives them) without what is secret.

    A value that came from the environment is again `${oc.env:NAME}`, which reads back. Hidden are the other values of environment variables
    and keys whose names say that they are secret, what stands below `env_vars`, and passwords and keys in URLs.
    """
    return _redacted(values, "", [value for name, value in os.environ.items() if len(value) >= _SHORTEST and _SECRET.search(name)])


def _redacted(values: Any, key: str, secrets: Sequence[str]) -> Any:
    if isinstance(values, Mapping):
        return {name: _redacted(value, "secret" if key == "env_vars" else str(name), secrets) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return [_redacted(value, key, secrets) for value in values]
    if not isinstance(values, str) or not values:
        return values
    if values in _interpolated:
        return _interpolated[values]
    if _SECRET.search(key):
        return HIDDEN
    text = _IN_URL.sub(rf"\1:{HIDDEN}@", values)
    text = _IN_QUERY.sub(lambda found: found[1] + HIDDEN if _SECRET.search(found[2]) else found[0], text)
    for value in secrets:
        text = text.replace(value, HIDDEN)
    return text


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


def default_name(config: Any, algorithm: str, model: str) -> str:
    """Such as grpo-smollm2-135m-1c0ffee0. The same command has the same name, and commands with other results have others.

    The fingerprint is of the values that a resumed run must keep (config/identity.py) and that are not the defaults: a key that a later
    version adds does not change it.
    """
    defaults = _defaults(type(config))  # type: ignore[arg-type]  # a class is hashable
    changed = {key: value for key, value in kept_values(config).items() if key not in defaults or defaults[key] != value}
    digest = hashlib.blake2b(json.dumps(changed, sort_keys=True).encode(), digest_size=4).hexdigest()
    return f"{_plain(algorithm)}-{_model_name(model)}-{digest}"


def _model_name(path: str) -> str:
    """The last part of a path or a hub id; of a checkpoint, the run that it is of."""
    parts = PurePath(path).parts
    if len(parts) > 2 and parts[-2].startswith("global_step_"):
        return _plain(parts[-3])
    return _plain(parts[-1].removesuffix(".gguf"))


def _plain(text: str) -> str:
    """What may be part of the name of a folder."""
    return re.sub(r"[^\w.+-]+", "_", text)[:_LONGEST].strip("._") or "model"


@functools.cache
def _defaults(root: type) -> dict[str, Any]:
    """The values of a configuration in which nothing is set. It need not be a valid one: a recipe without a model and data is not."""
    return kept_of({item.name: dataclasses.asdict(item.default_factory()) for item in dataclasses.fields(root)})  # type: ignore[operator]
