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
from typing import Any, NamedTuple

from lockstep.checkpoint import folders
from lockstep.checkpoint.manifest import MANIFEST, check_manifest
from lockstep.config.presets import ALGORITHMS
from lockstep.errors import ConfigError, DataError, LockstepError, ResourceError
from lockstep.observability.metrics import MACHINE_METRICS
from lockstep.utils.terminal import say

PROGRAM = "lockstep.cli"
"""The module that is run; its first argument is the training command."""
_WITHOUT_SAMPLES = ("sft", "distill", "dpo", "reward-model")
"""Training commands that do not have the keys in _FOLDERS."""
_COMMANDS = ("ppo", *_WITHOUT_SAMPLES, *ALGORITHMS)
_FOLDERS = ("rollout_data_dir", "validation_data_dir", "record_batch_dir")
"""Keys of `trainer` that say where a run writes beside its own folder."""
_KEYS = (
    "trainer.save_freq=1",
    "trainer.test_freq=0",
    "trainer.val_before_train=false",
    "trainer.max_ckpt_to_keep=2",
    "trainer.resume_mode=auto",
    "trainer.resume_from_path=null",
    "trainer.logger=[console]",
    "trainer.best_metric=null",
)
"""Keys of a run that saves every step and validates nothing."""


class Moment(NamedTuple):
    """When to kill a run."""

    after_steps: int
    """Steps that must be done first; 0: counted from the start of the process."""
    seconds: float
    """How long after that."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Verify as the command line says; return 0 if nothing differs."""
    with tempfile.TemporaryDirectory() as temporary:
        try:
            options, command, keys = _read(sys.argv[1:] if arguments is None else arguments)
            folder = options.folder or Path(temporary)
            return verify(command, keys, folder, options.steps, options.kills, random.Random(options.seed))
        except LockstepError as error:
            say(f"error: {error}", is_error=True)
            return 1


def verify(command: str, keys: list[str], folder: Path, steps: int, num_kills: int, rng: random.Random) -> int:
    """Run, kill, compare, and print the result; return the exit status. Raises ResourceError if the run itself fails."""
    run_dir = folder / "run"
    whole = folder / "whole"
    again = folder / "again"
    words = [sys.executable, "-m", PROGRAM, command, *keys, *_short(run_dir, steps, command)]
    print(f"a run of {steps} steps to its end ...", flush=True)
    start_s, step_s = _run(words, run_dir)
    run_dir.rename(whole)  # paths in the configuration stay the same for both
    kills = 0
    late_kills = 0
    while kills < num_kills:
        shutil.rmtree(run_dir, ignore_errors=True)
        moments = _moments(steps, num_kills - kills, start_s, step_s, rng)
        while _killed(words, run_dir, next(moments, None)):
            kills += 1
            if _num_steps(run_dir) >= steps:
                late_kills += 1
            print(f"killed: {_progress(run_dir)}; the same command again ...", flush=True)
        found = list(differences(whole, run_dir))
        if found:
            break
    if not found:
        late = f" ({late_kills} of them after the last step)" if late_kills else ""
        print(f"the run that was killed {kills} times{late} ended as the one that was not: every file and every metric, to the bit")
        if kills > late_kills:
            return 0
        print("no kill fell before the last step was done, so no step was resumed: try more steps (--steps) or another --seed")
        return 1
    say("\n".join([f"{len(found)} differences after {kills} kills; first:", *(f"  {line}" for line in found[:5])]))
    print("is it the resume, or the machine? A second run to its end, without a kill ...", flush=True)
    run_dir.rename(again)
    _run(words, run_dir)
    plain = list(differences(whole, run_dir))
    if plain:
        say(f"two runs that were not killed differ as well: the computation is not repeatable here. First: {plain[0]}")
    else:
        print("two runs that were not killed do not differ: it is the resume. Please report it with the lines above")
    return 1


def _read(arguments: Sequence[str]) -> tuple[argparse.Namespace, str, list[str]]:
    """Return the options, the training command and its arguments."""
    usage = "lockstep verify-resume [options] [ppo | grpo | ... | sft | dpo | ...] [--config FILE] [key=value ...]"
    parser = argparse.ArgumentParser(
        usage=usage, description=__doc__, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--steps", type=int, default=5, help="steps of the run (default 5)")
    parser.add_argument("--kills", type=int, default=3, help="kills (default 3)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    parser.add_argument("--folder", type=Path, help="where both runs are kept; without it they are deleted")
    options, words = parser.parse_known_args(arguments)
    for name in ("steps", "kills"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name} must be at least 1, not {getattr(options, name)}")
    if not words or "=" in words[0] or words[0].startswith("-"):
        return options, "ppo", words
    spellings = {name.replace("_", "-"): name for name in _COMMANDS}
    command = spellings.get(words[0].replace("_", "-"))
    if command is None:
        raise ConfigError(f"'{words[0]}' is neither key=value nor a training command: {', '.join(_COMMANDS)}")
    return options, command, words[1:]


# -- running and killing ---------------------------------------------------------------------------------------------------------------


def _short(run_dir: Path, steps: int, command: str) -> list[str]:
    """Return the keys of a short run that writes into `run_dir` and nowhere else."""
    keys = [f"trainer.default_local_dir={run_dir}", f"trainer.total_training_steps={steps}", *_KEYS]
    if command not in _WITHOUT_SAMPLES:
        keys += [f"trainer.{name}=null" for name in _FOLDERS]
    return keys


def _run(words: list[str], run_dir: Path) -> tuple[float, float]:
    """Run to the end; return the seconds until the first step was done, and the seconds of a step."""
    began_at = time.time()
    _killed(words, run_dir, None)
    seconds = time.time() - began_at
    times = [line["time"] for line in _metrics(run_dir)]
    start_s = times[0] - began_at
    step_s = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else seconds - start_s
    return start_s, step_s


def _moments(steps: int, num_kills: int, start_s: float, step_s: float, rng: random.Random) -> Iterator[Moment]:
    """Yield one moment for each kill, spread over the run's steps; those before the first step are within the start."""
    for number in range(num_kills):
        after = min(steps - 1, int(rng.uniform(number, number + 1) * steps / num_kills))
        yield Moment(after, rng.uniform(0, step_s if after else start_s))


def _killed(words: list[str], run_dir: Path, moment: Moment | None) -> bool:
    """Run the program and kill it at the moment; return False if it reached its end before. Raises ResourceError if it failed."""
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    log_file = run_dir.parent / "log"
    began_at = time.time()
    with log_file.open("w") as log:
        process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            if moment is not None:
                while process.poll() is None and not _has_reached(run_dir, moment.after_steps, began_at):
                    time.sleep(0.02)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=moment.seconds)
                if process.poll() is None:
                    process.kill()
            status = process.wait()
        finally:
            process.kill()
    if status not in (0, -signal.SIGKILL):
        lines = log_file.read_text().strip().splitlines()
        raise ResourceError(f"the run failed with exit code {status}:\n" + "\n".join(lines[-10:]))
    return status != 0


def _has_reached(run_dir: Path, steps: int, since: float) -> bool:
    """Return whether metrics.jsonl was written after `since` and has so many steps; True for 0 steps."""
    if not steps:
        return True
    file = run_dir / "metrics.jsonl"
    return file.is_file() and file.stat().st_mtime > since and _num_steps(run_dir) >= steps


def _num_steps(run_dir: Path) -> int:
    file = run_dir / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.is_file() else 0


def _progress(run_dir: Path) -> str:
    is_saving = any(run_dir.glob("global_step_*.incomplete"))
    return f"{_num_steps(run_dir)} steps done{', a checkpoint half written' if is_saving else ''}"


# -- comparing -------------------------------------------------------------------------------------------------------------------------


def end_of(run_dir: Path) -> dict[str, Any]:
    """Return the end of a run by name: the lines of its metrics, its checkpoints, and the checksum of every file of the last one.

    Raises DataError if it has no checkpoint, or a damaged one.
    """
    newest = folders.newest(run_dir)
    if newest is None:
        raise DataError(f"{run_dir} has no checkpoint")
    check_manifest(newest)
    lines = _metrics(run_dir)
    end: dict[str, Any] = {"steps of metrics.jsonl": [line["step"] for line in lines]}
    for number, line in enumerate(lines, start=1):
        end[f"metrics of line {number}"] = {name: value for name, value in line.items() if not name.startswith(MACHINE_METRICS)}
    end["checkpoints"] = [path.name for path in folders.found(run_dir)]
    for name, entry in json.loads((newest / MANIFEST).read_text())["files"].items():
        end[f"{newest.name}/{name}"] = entry
    return end


def differences(expected: Path, found: Path) -> Iterator[str]:
    """Yield what differs between two runs, in the order of `end_of`, each with the first place where it does."""
    one = end_of(expected)
    other = end_of(found)
    for name in dict.fromkeys((*one, *other)):
        if one.get(name) == other.get(name):
            continue
        if name not in one or name not in other:
            yield name
        elif name.endswith(".safetensors"):
            yield f"{name}: {_first_tensor(expected / name, found / name)}"
        elif name.startswith("metrics of"):
            yield f"{name} (step {one[name].get('step')}): {_metric_differences(one[name], other[name])}"
        elif "sha256" not in one[name]:
            yield f"{name}: {one[name]} and {other[name]}"
        else:
            yield name


def _metric_differences(one: dict[str, Any], other: dict[str, Any]) -> str:
    names = sorted(name for name in {*one, *other} if one.get(name) != other.get(name))
    values = ", ".join(f"{name} {one.get(name)} and {other.get(name)}" for name in names[:3])
    return f"{len(names)} differ, first {values}"


def _first_tensor(one: Path, other: Path) -> str:
    import torch
    from safetensors import safe_open

    with safe_open(one, framework="pt") as left, safe_open(other, framework="pt") as right:
        for name in left.keys():  # noqa: SIM118  (it is no dict)
            a = left.get_tensor(name)
            b = right.get_tensor(name)
            if not torch.equal(a, b):
                return f"{name} differs in {int((a != b).sum())} of {a.numel()} numbers, by at most {(a - b).abs().max():.3g}"
    return "the same tensors in other bytes"


def _metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of the run's metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
