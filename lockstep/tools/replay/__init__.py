"""`lockstep replay FILE [key=value ...]`: do the steps of a capsule again, here, and compare their metrics.

The rows come from the capsule, the weights from the checkpoint that it names. Everything random depends on the run's keys alone, so on the
same kind of device the numbers come out the same to rounding. What environments said is in the capsule too: none of them is asked.
"""

import argparse
import importlib
import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lockstep.checkpoint import folders
from lockstep.errors import ConfigError, DataError, as_command, is_nonfinite
from lockstep.trainer.capsule import read_capsule, weights_differ
from lockstep.trainer.run import Run

PROGRAMS = {
    "PPOConfig": "lockstep.trainer.main_ppo",
    "SFTConfig": "lockstep.trainer.main_sft",
    "RewardTrainConfig": "lockstep.trainer.main_reward_model",
    "DPOConfig": "lockstep.trainer.main_dpo",
    "DistillConfig": "lockstep.trainer.main_distill",
}
"""Class of a configuration -> its program."""
_OWN = (
    "time",
    "timing",
    "perf/",
    "val/",
    "val-",
    "training/num_restarts",
    "training/left_out_batches",
    "agent/environment_s",
    "agent/wait",
)
"""How metrics begin that are of a machine or a moment, or of a validation, which is not done again."""

_FOLDERS = ("rollout_data_dir", "validation_data_dir", "record_batch_dir")
"""Keys of `trainer` that say where a run writes beside its own folder."""


@as_command
def main(arguments: Sequence[str]) -> int:
    """Replay; 0 where every metric is as it was, or the step fails as it did; 1 where something differs or it cannot be done."""
    parser = argparse.ArgumentParser("lockstep replay", description="Do the steps of a capsule again and compare their metrics.")
    parser.add_argument("file", type=Path, help="what lockstep capsule wrote, or a run whose step was not finite")
    parser.add_argument("--weights", type=Path, help="the checkpoint (global_step_N), where it lies elsewhere than in the run")
    parser.add_argument("--rel", type=float, default=1e-4, help="how much a metric may differ, relative to it (default 1e-4)")
    parser.add_argument("keys", nargs="*", metavar="key=value", help="for another machine, such as trainer.device=cpu")
    given = parser.parse_intermixed_args(arguments)
    capsule = read_capsule(given.file)
    failure = capsule["failure"]
    with tempfile.TemporaryDirectory() as folder:
        for step, metrics, error in replayed(capsule, Path(folder), given.weights, given.keys):
            if error is not None:
                if failure is not None and step == capsule["step"]:
                    print(f"step {step} fails here too: {error}")
                    return 0
                raise error
            expected = next((row for row in capsule["metrics"] if row["step"] == step), None)
            if expected is not None and (found := first_difference(expected, metrics, given.rel)) is not None:
                print(f"step {step} differs: {found}")
                return 1
            print(f"step {step}: {'as it was' if expected is not None else 'done'}", flush=True)
    if failure is not None:
        print(f"step {capsule['step']} does not fail here; there it was: {failure}")
    return int(failure is not None)


def replayed(
    capsule: Mapping[str, Any], folder: Path, weights: Path | None = None, keys: Sequence[str] = ()
) -> Iterator[tuple[int, dict[str, float], Exception | None]]:
    """The capsule's steps, one after the other: number, metrics, and what made it fail where its numbers are not finite. `folder` is
    for the files of the run."""
    program = importlib.import_module(PROGRAMS[capsule["recipe"]])
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in _in_place(capsule)))
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(capsule["config"])))
    config = program.load([*_here(capsule, folder, weights, keys), *keys], folder / "config.yaml")
    with program.opened(config) as run:
        _check_rows(capsule, run)
        run.init_workers()
        run.left_out[:] = capsule["keys"]["left_out"]
        if capsule["weights"] is not None:  # the rows that these steps do not read are fillers: other data, and no news
            state = folders.read_state(Path(run.section.resume_from_path))
            run.seen_data |= {name: state[name] for name in run.seen_data if name in state}
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


def first_difference(expected: Mapping[str, Any], found: Mapping[str, float], rel: float) -> str | None:
    """The first metric that is missing or differs by more than `rel` (or 1e-7), in words; None where none does."""
    for name, was in expected.items():
        if name == "step" or name.startswith(_OWN) or not isinstance(was, int | float):
            continue
        if name not in found:
            return f"{name} is missing; it was {was!r}"
        now = found[name]
        if not (math.isclose(was, now, rel_tol=rel, abs_tol=1e-7) or (math.isnan(was) and math.isnan(now))):
            return f"{name} is {now!r}, and was {was!r}"
    return None


def _here(capsule: Mapping[str, Any], folder: Path, weights: Path | None, given: Sequence[str]) -> list[str]:
    """The keys that make the run one of this machine: one process, these rows, nothing saved. What was `given` may differ from the
    checkpoint's: where the model lies, for one."""
    keys = [
        f"data.train_files={folder / 'rows.jsonl'}", "data.val_files=null", f"trainer.default_local_dir={folder / 'run'}",
        "trainer.logger=[console]", "trainer.n_gpus_per_node=1", "trainer.nnodes=1", "trainer.worker_group=local",
        "trainer.device=auto", "trainer.save_freq=0", "trainer.test_freq=0", "trainer.val_before_train=false", "trainer.max_restarts=0",
        "trainer.on_nonfinite=stop", "trainer.best_metric=null",
    ]  # fmt: skip
    if (episodes := capsule.get("episodes")) is not None:
        lines = [episodes["kinds"], *episodes["played"]]
        (folder / "episodes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        keys += [f"agent.recorded={folder / 'episodes.jsonl'}", "agent.record=false"]
    # What the run has written stays as it is.
    keys += [f"trainer.{name}=null" for name in _FOLDERS if name in capsule["config"]["trainer"]]
    if "sampled" in capsule["config"]:
        keys.append("sampled.files=null")
    if capsule["config"].get("reference", {}).get("mode") == "file":
        keys.append("reference.mode=model")  # a file of all rows' log-probs is not made for a few
    if capsule["weights"] is not None:
        start = weights or Path(capsule["weights"]["name"])
        if not start.is_dir():
            raise DataError(f"{start} is not here; name the checkpoint of step {capsule['from_step']} with --weights")
        if weights_differ(capsule, start):
            raise DataError(f"{start} is another checkpoint than that of the capsule: its manifest differs")
        changed = ["data.train_files", "reference.mode", *(key.lstrip("+").partition("=")[0] for key in given)]
        keys += [
            "trainer.resume_mode=resume_path",
            f"trainer.resume_from_path={start}",
            f"trainer.allow_changes=[{','.join(changed)}]",
        ]
    else:
        keys += ["trainer.resume_mode=disable", "trainer.resume_from_path=null"]
    return keys


def _in_place(capsule: Mapping[str, Any]) -> Iterator[Any]:
    """As many rows as the files had, each of the capsule's at its own number: random numbers and the order of rows depend on it."""
    rows = capsule["rows"]
    filler = next(iter(rows.values()))
    return (rows.get(str(number), filler) for number in range(capsule["keys"]["num_rows"]))


def _check_rows(capsule: Mapping[str, Any], run: Run) -> None:
    dataset, _ = run.training_data()
    if len(dataset) != capsule["keys"]["num_used"]:
        raise ConfigError(
            f"the run used {capsule['keys']['num_used']} of its rows, and here it would be {len(dataset)}: rows were left out by their "
            "length. It can be replayed with the run's own files: data.train_files=..."
        )
