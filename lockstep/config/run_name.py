"""The name of a run that was given none: algorithm, model, and a fingerprint of the settings that decide its result."""

import dataclasses
import functools
import hashlib
import json
import re
from pathlib import PurePath
from typing import Any

from lockstep.config.resume import kept_of, kept_values

_LONGEST = 48


def default_name(config: Any, algorithm: str, model: str) -> str:
    """Such as grpo-smollm2-135m-1c0ffee0. The same command has the same name, and commands with other results have others.

    The fingerprint is of the values that a resumed run must keep (config/resume.py) and that are not the defaults: a key that a later
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
