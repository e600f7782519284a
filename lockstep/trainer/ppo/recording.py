"""One batch of a run on disk, with all data for its advantages and losses. `lockstep compare` reads it.

```text
step_12/
  batch.pt      every column, before the correction, the advantages and the update
  config.yaml   the run's configuration; algorithm.kl_ctrl.kl_coef is the weight at that step
  model/        the policy that wrote the responses, and its tokenizer: a Hugging Face folder
```
"""

import dataclasses
import math
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from lockstep.config.load import load_config, to_yaml
from lockstep.config.ppo import PPOConfig
from lockstep.errors import DataError, RewardError
from lockstep.models.hf_config import read_model_config
from lockstep.protocol import DataProto
from lockstep.trainer.ppo.interfaces import Actor
from lockstep.trainer.ppo.rewards import Scored, set_parts
from lockstep.utils.json_values import is_number

PREFIX = "step_"
_BATCH, _CONFIG, _MODEL = "batch.pt", "config.yaml", "model"


@dataclass(frozen=True)
class Recording:
    """The contents of one folder."""

    folder: Path
    batch: DataProto
    config: PPOConfig
    model: Path
    """The policy that wrote the responses."""


def record(batch: DataProto, scored: Scored, config: PPOConfig, step: int, kl_coef: float, actor: Actor, tokenizer: Any) -> Path:
    """Write the batch of a step, with every number of the judges as reward_parts; return the folder. Changes `batch`.

    The folder gets its name when it is complete; an older one is replaced. `kl_coef` is the present weight of the KL in the reward.
    """
    batch.meta_info["global_step"] = step
    names = number_parts(scored)
    if names:
        set_parts(batch, scored, names)
    kl_ctrl = dataclasses.replace(config.algorithm.kl_ctrl, kl_coef=kl_coef)
    config = dataclasses.replace(config, algorithm=dataclasses.replace(config.algorithm, kl_ctrl=kl_ctrl))
    folder = Path(str(config.trainer.record_batch_dir)) / f"{PREFIX}{step}"
    draft = folder.with_name(f"{folder.name}.incomplete")
    shutil.rmtree(draft, ignore_errors=True)
    (draft / _MODEL).mkdir(parents=True)
    batch.save_to_disk(draft / _BATCH)
    (draft / _CONFIG).write_text(to_yaml(config))
    model = config.actor_rollout_ref.model
    read_model_config(str(model.path), model.trust_remote_code, **model.override_config).save_pretrained(draft / _MODEL)
    tokenizer.save_pretrained(draft / _MODEL)
    (weights,) = [exported for exported in actor.export_weights() if exported is not None]
    tensors = {name: tensor.contiguous() for name, tensor in weights}
    save_file(tensors, draft / _MODEL / "model.safetensors", metadata={"format": "pt"})
    shutil.rmtree(folder, ignore_errors=True)
    draft.rename(folder)
    return folder


def add_baselines(recorded: DataProto, step: int, greedy_baseline: Callable[[DataProto], Any], say: Callable[[str], None]) -> None:
    """Write reward_baselines, NaN where the greedy answer's reward is missing. The run did not ask for baselines, so its rows stay as they
    are, and it continues with a warning if too many are missing. `greedy_baseline` writes the column, and leaves out rows without one."""
    mask = recorded.ragged("response_mask")
    try:
        greedy_baseline(recorded)
    except RewardError as error:
        say(f"warning: the batch of step {step} is recorded without scores of greedy answers (remax): {error}")
        return
    left = recorded.ragged("response_mask")
    lost = torch.tensor([bool(before.any() and not after.any()) for before, after in zip(mask.rows(), left.rows(), strict=True)])
    recorded.set("reward_baselines", recorded.batch["reward_baselines"].masked_fill(lost, math.nan))
    recorded.set("response_mask", mask)


def load_recording(folder: Path) -> Recording:
    """Return the recording in the folder of one step, or in a folder with only one such folder. The batch is unpickled.

    Raise DataError if the folder is not a recording, or holds several.
    """
    steps = sorted(path.parent.name for path in folder.glob(f"{PREFIX}*/{_BATCH}"))
    if not (folder / _BATCH).is_file() and len(steps) == 1:
        folder = folder / steps[0]
    for name in (_BATCH, _CONFIG, _MODEL):
        if not (folder / name).exists():
            hint = f"name one of its steps: {', '.join(steps)}" if steps else "make one with lockstep compare --record DIR"
            raise DataError(f"{folder} is not a recorded batch: there is no {name} in it; {hint}")
    try:
        batch = DataProto.load_from_disk(folder / _BATCH)
    except (OSError, RuntimeError, ValueError, TypeError, EOFError, pickle.UnpicklingError) as error:
        raise DataError(f"{folder / _BATCH} cannot be read: {error}") from error
    return Recording(folder, batch, load_config(config_file=folder / _CONFIG), folder / _MODEL)


def number_parts(scored: Scored) -> list[str]:
    """Return the judges and the keys of a reward function that gave a finite number to every row with a reward."""
    known = [i for i, failure in enumerate(scored.failures) if failure is None]
    columns = {**scored.extra, **scored.parts}
    return [name for name, values in columns.items() if known and all(is_number(values[i]) for i in known)]
