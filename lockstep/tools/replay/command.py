"""`lockstep replay FILE [key=value ...]`: repeat the steps of a capsule (a repro file) here, and compare their metrics.

The rows come from the capsule, the weights from the checkpoint that it names. Everything random depends on the run's keys alone, so on the
same kind of device the numbers agree to rounding. The capsule also holds what environments said: none of them is called.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lockstep.config.load import read_layers
from lockstep.config.reference import ROOTS
from lockstep.errors import ConfigError, DataError, as_command, is_nonfinite
from lockstep.observability.metrics import MACHINE_METRICS, RANK_METRICS
from lockstep.tools.replay.trust import check_safe
from lockstep.utils.terminal import say

if TYPE_CHECKING:
    from lockstep.trainer.run.loop import Run

PROGRAMS = {
    "PPOConfig": "lockstep.trainer.main_ppo",
    "SFTConfig": "lockstep.trainer.recipes:SFT",
    "RewardTrainConfig": "lockstep.trainer.recipes:REWARD_MODEL",
    "DPOConfig": "lockstep.trainer.recipes:DPO",
    "DistillConfig": "lockstep.trainer.recipes:DISTILL",
}
"""Class of a configuration -> its program: a module, or an object in a module."""
_NOT_REPLAYED = ("val/", "val-", "training/num_restarts", "training/left_out_batches")
"""Beginnings of the names of metrics of validations and restarts, which a replay does not do."""
_MIN_DIFFERENCE = 1e-7

_ONE_PROCESS = (
    "data.val_files=null",
    "trainer.logger=[console]",
    "trainer.n_gpus_per_node=1",
    "trainer.nnodes=1",
    "trainer.worker_group=local",
    "trainer.device=auto",
    "trainer.save_freq=0",
    "trainer.test_freq=0",
    "trainer.val_before_train=false",
    "trainer.max_restarts=0",
    "trainer.on_nonfinite=stop",
    "trainer.best_metric=null",
    "trainer.val_before_train_samples=null",
)
"""Keys of a run in one process of this machine that saves and validates nothing."""
_FOLDERS = ("rollout_data_dir", "validation_data_dir", "record_batch_dir")
"""Keys of `trainer` that say where a run writes beside its own folder."""
_EPISODE_KEYS = ("agent.environment", "agent.tools", "agent.mcp", "agent.search_folder")
"""Keys of environments, which a replay does not use if the file has the episodes."""


@as_command
def main(arguments: Sequence[str]) -> int:
    """Replay. Return 0 if every metric is the same or the step fails again, 1 if something differs or it cannot be done."""
    parser = argparse.ArgumentParser("lockstep replay", description="Do the steps of a capsule again and compare their metrics.")
    parser.add_argument("file", type=Path, help="what lockstep capsule wrote, or a run whose step was not finite")
    parser.add_argument("--weights", type=Path, help="the checkpoint (global_step_N), where it lies elsewhere than in the run")
    parser.add_argument("--rel", type=float, default=1e-4, help="how much a metric may differ, relative to it (default 1e-4)")
    parser.add_argument(
        "--trust", action="store_true", help="use keys of the file that name code, servers or other files; they run as you"
    )
    parser.add_argument("keys", nargs="*", metavar="key=value", help="for another machine, such as trainer.device=cpu")
    given = parser.parse_intermixed_args(arguments)
    from lockstep.trainer.run.capsule import read_capsule  # brings torch

    capsule = read_capsule(given.file)
    failure = capsule["failure"]
    rows = {row["step"]: row for row in reversed(capsule["metrics"])}
    not_compared: set[str] = set()
    with tempfile.TemporaryDirectory() as folder:
        for step, metrics, error in replayed(capsule, Path(folder), given.weights, given.keys, given.trust):
            if error is not None:
                if failure is None or step != capsule["step"]:
                    raise error
                say(f"step {step} fails here too: {error}")
                return 0
            if step not in rows:
                print(f"step {step}: done", flush=True)
                continue
            not_compared |= _different_rank_metrics(rows[step], metrics)
            difference = first_difference(rows[step], metrics, given.rel)
            if difference is not None:
                say(f"step {step} differs: {difference}")
                return 1
            print(f"step {step}: as it was", flush=True)
    if not_compared:
        say(f"not compared, since they depend on the number of processes, and different: {', '.join(sorted(not_compared))}")
    if failure is not None:
        say(f"step {capsule['step']} does not fail here; there it was: {failure}")
        return 1
    return 0


def replayed(
    capsule: Mapping[str, Any], folder: Path, weights: Path | None = None, keys: Sequence[str] = (), trust: bool = False
) -> Iterator[tuple[int, dict[str, float], Exception | None]]:
    """Yield each step of the capsule: its number, its metrics, and the error if its numbers are not finite.

    Writes the run's files into `folder`. Raises ConfigError if the capsule names code, and neither `keys` nor `trust` allows it.
    """
    root = _root(capsule["recipe"])
    overrides = [*_overrides(capsule, folder, weights, keys), *keys]
    config_of_run = _config(capsule)
    command_line = read_layers(root, overrides)[-1:]
    given = {key for layer in command_line for key in layer.keys}
    check_safe(config_of_run, root, given, trust)
    if not trust and capsule["episodes"] is None and any(row.get("environment") for row in capsule["rows"].values()):
        raise ConfigError("the capsule's rows name environments, whose code a replay would run; add --trust if you trust the file")
    _write_rows(capsule, folder / "rows.jsonl")
    try:
        (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(config_of_run)))
    except OmegaConfBaseException as error:
        raise ConfigError(f"the capsule's configuration cannot be read: {' '.join(str(error).split())}") from error
    from lockstep.checkpoint import folders

    program = program_of(capsule["recipe"])
    config = program.load(overrides, folder / "config.yaml")
    with program.opened(config) as run:
        _check_rows(capsule, run)
        run.init_workers()
        run.left_out[:] = capsule["keys"]["left_out"]
        if capsule["weights"] is not None:
            # Rows that these steps do not read are fillers. The checkpoint's fingerprints of the data keep the run from noticing.
            state = folders.read_state(Path(run.section.resume_from_path))
            run.data_description |= {name: state[name] for name in run.data_description if name in state}
        run._resume()
        while run.global_steps < capsule["step"]:
            run.timer.reset()
            try:
                metrics = run._step()
            except Exception as error:
                if not is_nonfinite(error):
                    raise
                yield run.global_steps + 1, {}, error
                return
            run.global_steps += 1
            run._examine(metrics)
            yield run.global_steps, metrics, None


def program_of(recipe: str) -> Any:
    """Return the object with `load` and `opened` of a recipe, named by the class of its configuration."""
    module, _, name = PROGRAMS[recipe].partition(":")
    owner = importlib.import_module(module)
    return getattr(owner, name) if name else owner


def first_difference(expected: Mapping[str, Any], found: Mapping[str, float], rel: float) -> str | None:
    """Return, in words, the first metric that is missing or differs by more than `rel` (or 1e-7); None if all agree.

    Metrics of a machine, of the number of ranks, of validations and of restarts are not compared.
    """
    ignored = (*MACHINE_METRICS, *RANK_METRICS, *_NOT_REPLAYED)
    for name, before in expected.items():
        if name == "step" or name.startswith(ignored) or not isinstance(before, int | float):
            continue
        if name not in found:
            return f"{name} is missing; it was {before!r}"
        now = found[name]
        are_close = math.isclose(before, now, rel_tol=rel, abs_tol=_MIN_DIFFERENCE)
        are_nan = math.isnan(before) and math.isnan(now)
        if not are_close and not are_nan:
            return f"{name} is {now!r}, and was {before!r}"
    return None


def _different_rank_metrics(expected: Mapping[str, Any], found: Mapping[str, float]) -> set[str]:
    return {name for name, before in expected.items() if name.startswith(RANK_METRICS) and before != found.get(name)}


def _overrides(capsule: Mapping[str, Any], folder: Path, weights: Path | None, given: Sequence[str]) -> list[str]:
    """Return the keys with which the run is repeated here: in one process, on the capsule's rows, from the capsule's checkpoint.

    The keys that were `given` on the command line may differ from the checkpoint's. Writes the capsule's episodes into `folder`.
    """
    keys = [f"data.train_files={folder / 'rows.jsonl'}", f"trainer.default_local_dir={folder / 'run'}", *_ONE_PROCESS]
    episodes = capsule["episodes"]
    if episodes is not None:
        lines = [episodes["kinds"], *episodes["played"]]
        (folder / "episodes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        keys += [f"agent.recorded={folder / 'episodes.jsonl'}", "agent.record=false"]
    # What the run has written stays as it is.
    keys += [f"trainer.{name}=null" for name in _FOLDERS if name in capsule["config"]["trainer"]]
    if "sampled" in capsule["config"]:
        keys.append("sampled.files=null")
    if capsule["config"].get("reference", {}).get("mode") == "file":
        # The file has log-probs of all rows; for a few rows the model computes them.
        keys += ["reference.mode=model", "reference.folder=null"]
    if capsule["weights"] is None:
        return [*keys, "trainer.resume_mode=disable", "trainer.resume_from_path=null"]
    start = _checkpoint(capsule, weights)
    changed = ["data.train_files", "reference.mode", "reference.folder", *_EPISODE_KEYS]
    changed += [key.lstrip("+").partition("=")[0] for key in given]
    return [
        *keys,
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={start}",
        f"trainer.allow_changes=[{','.join(changed)}]",
    ]


def _checkpoint(capsule: Mapping[str, Any], weights: Path | None) -> Path:
    """Return the folder of the capsule's checkpoint. Raises DataError if it is missing or another checkpoint."""
    from lockstep.trainer.run.capsule import weights_differ

    start = weights or Path(capsule["weights"]["name"])
    if not start.is_dir():
        raise DataError(f"{start} is not here; name the checkpoint of step {capsule['from_step']} with --weights")
    if weights_differ(capsule, start):
        raise DataError(f"{start} is another checkpoint than that of the capsule: its manifest differs")
    return start


def _root(recipe: str) -> type:
    """Return the class of the configuration of this name. Raises DataError if there is none."""
    found = next((root for root in ROOTS.values() if root.__name__ == recipe), None)
    if found is None:
        raise DataError(f"the capsule's recipe {recipe!r} is not known; it must be one of: {', '.join(PROGRAMS)}")
    return found


def _config(capsule: Mapping[str, Any]) -> dict[str, Any]:
    """Return the capsule's configuration without what a replay does not use: Ray, a folder for weights and, with episodes, environments."""
    unused = ["ray_kwargs", "actor_rollout_ref.rollout.weight_sync_dir"]
    if capsule["episodes"] is not None:
        unused += _EPISODE_KEYS
    return dict(_without(capsule["config"], unused))


def _without(values: Mapping[str, Any], unused: Sequence[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        key = f"{prefix}{name}"
        if key in unused:
            continue
        if isinstance(value, Mapping):
            yield name, dict(_without(value, unused, f"{key}."))
        else:
            yield name, value


def _write_rows(capsule: Mapping[str, Any], file: Path) -> None:
    """Write as many rows as the run's files had, the capsule's at their own numbers: random numbers and the order depend on these.

    Raises DataError if they do not fit on the disk.
    """
    rows = {int(number): json.dumps(row) + "\n" for number, row in capsule["rows"].items()}
    filler = next(iter(rows.values()))
    num_rows = capsule["keys"]["num_rows"]
    size = num_rows * len(filler.encode())
    free = shutil.disk_usage(file.parent).free
    if size > free:
        raise DataError(
            f"the capsule's {num_rows} rows need {size / 1e9:.0f} GB in {file.parent}, which has {free / 1e9:.0f} GB left"
        )
    with file.open("w") as lines:
        lines.writelines(rows.get(number, filler) for number in range(num_rows))


def _check_rows(capsule: Mapping[str, Any], run: Run) -> None:
    dataset, _ = run.training_data()
    if len(dataset) != capsule["keys"]["num_used"]:
        raise ConfigError(
            f"the run used {capsule['keys']['num_used']} of its rows, and here it would be {len(dataset)}: rows were left out by their "
            "length. It can be replayed with the run's own files: data.train_files=..."
        )
