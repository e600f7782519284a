"""`lockstep verify-resume [command] key=value ...`: does a killed run of THIS configuration end as one that was never hit?

A short run is done once to its end, and once with `kill -9` at random moments, each followed by the same command again. Then every file
of the last checkpoints and every metric are compared. Nothing of the user's own run is touched: both are in a folder of their own.
"""

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from lockstep.config.presets import ALGORITHMS
from lockstep.errors import ConfigError, LockstepError, ResourceError
from lockstep.utils.printable import say

RECIPES = {
    "ppo": "lockstep.trainer.main_ppo",
    "sft": "lockstep.trainer.main_sft",
    "distill": "lockstep.trainer.main_distill",
    "dpo": "lockstep.trainer.main_dpo",
    "reward-model": "lockstep.trainer.main_reward_model",
} | {name: f"lockstep.cli {name}" for name in ALGORITHMS}
"""Training command -> the module that is run, and what it is told first."""
_WITHOUT_SAMPLES = ("sft", "distill", "dpo", "reward-model")
_FOLDERS = ("rollout_data_dir", "validation_data_dir", "record_batch_dir")
"""Keys of `trainer` that say where a run writes beside its own folder; _WITHOUT_SAMPLES have none of them."""


class Moment(NamedTuple):
    """When to kill a run."""

    after_steps: int
    """Steps that must be done first; 0: counted from the start of the process."""
    seconds: float
    """How long after that."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Verify as the command line says; returns 0 where nothing differs."""
    with tempfile.TemporaryDirectory() as temporary:
        try:
            options, recipe, keys = _read(sys.argv[1:] if arguments is None else arguments)
            return verify(
                recipe, keys, options.folder or Path(temporary), options.steps, options.kills, random.Random(options.seed)
            )
        except LockstepError as error:
            say(f"error: {error}", is_error=True)
            return 1


def verify(recipe: str, keys: list[str], folder: Path, steps: int, num_kills: int, rng: random.Random) -> int:
    """Run, kill, compare, and say what came of it; returns the exit status. Raises ResourceError where the run itself fails."""
    from lockstep.tools.verify_resume.compare import differences  # brings torch

    run_dir = folder / "run"
    whole = folder / "whole"
    again = folder / "again"
    command = [sys.executable, "-m", *RECIPES[recipe].split(), *keys, *_short(run_dir, steps, recipe)]
    print(f"a run of {steps} steps to its end ...", flush=True)
    start_s, step_s = _run(command, run_dir)
    run_dir.rename(whole)  # paths in the configuration stay the same for both
    kills = late_kills = 0
    while kills < num_kills:
        shutil.rmtree(run_dir, ignore_errors=True)
        moments = _moments(steps, num_kills - kills, start_s, step_s, rng)
        while _killed(command, run_dir, next(moments, None)):
            kills += 1
            late_kills += _num_steps(run_dir) >= steps
            print(f"killed: {_progress(run_dir)}; the same command again ...", flush=True)
        found = list(differences(whole, run_dir))
        if found:
            break
    late = f" ({late_kills} of them after the last step)" if late_kills else ""
    if not found:
        print(f"the run that was killed {kills} times{late} ended as the one that was not: every file and every metric, to the bit")
        if kills > late_kills or not kills:
            return 0
        print("no kill fell before the last step was done, so no step was resumed: try more steps (--steps) or another --seed")
        return 1
    say("\n".join([f"{len(found)} differences after {kills} kills; first:", *(f"  {line}" for line in found[:5])]))
    print("is it the resume, or the machine? A second run to its end, without a kill ...", flush=True)
    run_dir.rename(again)
    _run(command, run_dir)
    plain = list(differences(whole, run_dir))
    if plain:
        say(f"two runs that were not killed differ as well: the computation is not repeatable here. First: {plain[0]}")
    else:
        print("two runs that were not killed do not differ: it is the resume. Please report it with the lines above")
    return 1


def _read(arguments: Sequence[str]) -> tuple[argparse.Namespace, str, list[str]]:
    usage = "lockstep verify-resume [options] [ppo | grpo | ... | sft | dpo | ...] [--config FILE] [key=value ...]"
    parser = argparse.ArgumentParser(
        usage=usage, description=__doc__, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--steps", type=int, default=5, help="steps of the run (default 5)")
    parser.add_argument("--kills", type=int, default=3, help="kills (default 3)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    parser.add_argument("--folder", type=Path, help="where both runs are kept; without it they are deleted")
    options, words = parser.parse_known_args(arguments)
    if not words or "=" in words[0] or words[0].startswith("-"):
        return options, "ppo", words
    spelled = {name.replace("_", "-"): name for name in RECIPES}
    recipe = spelled.get(words[0].replace("_", "-"))
    if recipe is None:
        raise ConfigError(f"'{words[0]}' is neither key=value nor a training command: {', '.join(RECIPES)}")
    return options, recipe, words[1:]


def _short(run_dir: Path, steps: int, recipe: str) -> list[str]:
    """The keys of a short run in a folder of its own that saves every step, and writes nowhere else."""
    keys = [
        f"trainer.default_local_dir={run_dir}", f"trainer.total_training_steps={steps}", "trainer.save_freq=1", "trainer.test_freq=0",
        "trainer.val_before_train=false", "trainer.max_ckpt_to_keep=2", "trainer.resume_mode=auto", "trainer.resume_from_path=null",
        "trainer.logger=[console]", "trainer.best_metric=null",
    ]  # fmt: skip
    return keys if recipe in _WITHOUT_SAMPLES else [*keys, *(f"trainer.{name}=null" for name in _FOLDERS)]


def _run(command: list[str], run_dir: Path) -> tuple[float, float]:
    """Run to the end; returns the seconds until the first step was done, and those of a step."""
    started = time.monotonic()
    at = time.time()
    _killed(command, run_dir, None)
    seconds = time.monotonic() - started
    times = [json.loads(line)["time"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    first = times[0] - at
    return first, (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else seconds - first


def _moments(steps: int, num_kills: int, start_s: float, step_s: float, rng: random.Random) -> Iterator[Moment]:
    """One moment for each kill, spread over the run's steps; those before the first step are within the start."""
    for number in range(num_kills):
        after = min(steps - 1, int(rng.uniform(number, number + 1) * steps / num_kills))
        yield Moment(after, rng.uniform(0, step_s if after else start_s))


def _killed(command: list[str], run_dir: Path, moment: Moment | None) -> bool:
    """Run it, and kill it at a moment; False where it reached the end before. Raises ResourceError where it failed."""
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    log_file = run_dir.parent / "log"
    metrics = run_dir / "metrics.jsonl"
    at = time.time()
    with log_file.open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            if moment is not None:
                while moment.after_steps and process.poll() is None and not _is_at(metrics, moment.after_steps, at):
                    time.sleep(0.02)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=moment.seconds)
            if moment is not None and process.poll() is None:
                process.kill()
            status = process.wait()
        finally:
            process.kill()
    if status not in (0, -signal.SIGKILL):
        lines = log_file.read_text().strip().splitlines()
        raise ResourceError(f"the run failed with exit code {status}:\n" + "\n".join(lines[-10:]))
    return status != 0


def _is_at(metrics: Path, steps: int, since: float) -> bool:
    """Whether the file was written after `since` and has so many steps."""
    return metrics.is_file() and metrics.stat().st_mtime > since and _num_steps(metrics.parent) >= steps


def _num_steps(run_dir: Path) -> int:
    metrics = run_dir / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.is_file() else 0


def _progress(run_dir: Path) -> str:
    steps = _num_steps(run_dir)
    saving = any(run_dir.glob("global_step_*.incomplete"))
    return f"{steps} steps done{', a checkpoint half written' if saving else ''}"
