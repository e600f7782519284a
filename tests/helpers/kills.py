"""Kill a run again and again, and see whether it ends as the run that was never hit: `python -m helpers.kills --kills 1000` (from tests/).

The run is a fork of this process, which has everything imported, so a kill costs a second. Half of the kills come at an instant that is
chosen among all touches of a file in the run's folder (drafts, manifests, renames, metrics, pruning), half after a random time.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from helpers.warm import warm_workers
from lockstep.tools.verify_resume import differences

Start = Callable[[Path], None]
"""Train in a folder to the end, resuming what is there."""


@dataclass
class Kills:
    """What came of killing."""

    kills: int = 0
    runs: int = 0
    """Runs that reached the end, each after several kills."""
    different: list[str] = field(default_factory=list)
    """What was not as in the run that was never hit."""
    seconds: float = 0.0


def kill_runs(start: Start, folder: Path, num_kills: int, seed: int, tell: Callable[[Kills], None] = lambda kills: None) -> Kills:
    """Start runs and kill them until `num_kills` have hit, and let the last one end. `tell` hears what came of it after each run."""
    rng, kills, started = random.Random(seed), Kills(), time.monotonic()
    whole = folder / "whole"
    num_instants, seconds = _uninterrupted(start, whole)
    while kills.kills < num_kills:
        run_dir = folder / "run"
        shutil.rmtree(run_dir, ignore_errors=True)
        while True:
            spare = kills.kills < num_kills
            instant = rng.randrange(num_instants) if spare and rng.random() < 0.5 else None
            after_s = rng.uniform(0, 1.2 * seconds) if spare and instant is None else None
            is_fresh, began = not run_dir.exists(), time.monotonic()
            if _attempt(start, run_dir, instant, after_s):
                if is_fresh:  # the first run of all may have had something to compile
                    seconds = min(seconds, time.monotonic() - began)
                break
            kills.kills += 1
        kills.runs += 1
        kills.different += [f"run {kills.runs}: {difference}" for difference in differences(whole, run_dir)]
        kills.seconds = time.monotonic() - started
        tell(kills)
    return kills


def _uninterrupted(start: Start, run_dir: Path) -> tuple[int, float]:
    """Touches of files and seconds of a run to the end."""
    before = time.monotonic()
    count = run_dir.with_name("instants")

    def counted(run_dir: Path) -> None:
        touches = [0]
        _on_touch(run_dir, lambda: touches.__setitem__(0, touches[0] + 1))
        start(run_dir)
        count.write_text(str(touches[0]))

    assert _attempt(counted, run_dir, None, None)
    return int(count.read_text()), time.monotonic() - before


def _attempt(start: Start, run_dir: Path, instant: int | None, after_s: float | None) -> bool:
    """Start it, and maybe kill it; whether it reached the end."""
    child = os.fork()
    if child == 0:
        _child(start, run_dir, instant)
    if after_s is not None:
        until = time.monotonic() + after_s
        while time.monotonic() < until:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return _ended(status)
            time.sleep(0.005)
        os.kill(child, signal.SIGKILL)
    return _ended(os.waitpid(child, 0)[1])


def _ended(status: int) -> bool:
    assert status in (0, signal.SIGKILL), f"the run failed with status {status}; see above"
    return status == 0


def _child(start: Start, run_dir: Path, instant: int | None) -> None:
    """Never returns."""
    gc.freeze()
    status = 1
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what went wrong is on standard error
    try:
        if instant is not None:
            left = [instant]

            def touched() -> None:
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1

            _on_touch(run_dir, touched)
        start(run_dir)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _on_touch(run_dir: Path, call: Callable[[], None]) -> None:
    """Call it whenever a file or folder in the run's folder is about to be opened, made, renamed or removed."""
    prefix = str(run_dir)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate") and str(arguments[0]).startswith(
            prefix
        ):
            call()

    sys.addaudithook(hook)


def program_runs(main: Callable[[list[str]], int], keys: dict[str, Any]) -> Start:
    """What a command (the `main` of its program) does with these keys, in one process."""

    def start(run_dir: Path) -> None:
        keys_here = keys | {"trainer.default_local_dir": run_dir}
        assert main([f"{key}={value}" for key, value in keys_here.items()]) == 0

    return start


# -- the long command --------------------------------------------------------------------------------------------------------


def small_runs(task: Any, *more: str, ray_init: dict[str, Any] | None = None) -> Start:
    """Seven PPO steps of the embedded task, saved every other step and validated now and then; `more` are further keys.

    With arguments of `ray.init`, the address of a cluster among them, it has two processes there, and its driver is killed.
    """
    from helpers.run import make_trainer, roles
    from lockstep.config import load_config

    def start(run_dir: Path) -> None:
        config = load_config(
            [
                f"data.train_files={task.train_file}", f"data.val_files={task.val_file}", "data.val_max_samples=8",
                "data.train_batch_size=4", "data.max_prompt_length=16", "data.max_response_length=8",
                f"actor_rollout_ref.model.path={task.model}", "actor_rollout_ref.rollout.n=2", "trainer.device=cpu",
                "trainer.total_training_steps=7", "trainer.save_freq=2", "trainer.test_freq=3", "trainer.max_ckpt_to_keep=2",
                f"trainer.default_local_dir={run_dir}", *more,
            ]
        )  # fmt: skip
        names = roles("ActorRollout", "Critic") if config.use_critic else roles("ActorRollout")
        if ray_init is None:
            trainer = make_trainer(config, {"global_pool": [1]}, names)
        else:
            import ray

            from lockstep.single_controller.ray import RayWorkerGroup

            ray.init(log_to_driver=False, **ray_init)
            trainer = make_trainer(config, {"global_pool": [2]}, names, RayWorkerGroup)
        try:
            trainer.init_workers()
            trainer.fit()
        finally:
            trainer.close()

    return start


CASES = {
    "PPO, fsdp2": ("algorithm.use_kl_in_reward=false", "trainer.critic_warmup=2"),
    "GRPO, fsdp2": ("algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=false"),
    "PPO, fsdp2, with a journal": ("algorithm.use_kl_in_reward=false", "trainer.max_restarts=1"),
    "GRPO, torchtitan": (
        "algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=false", "actor_rollout_ref.actor.strategy=torchtitan",
    ),
}  # fmt: skip


@contextmanager
def ray_cluster() -> Iterator[dict[str, Any]]:
    """What `ray.init` takes to join a cluster of its own process (one that runs Ray cannot be forked), whose workers have their modules
    imported. It asks nobody for a token, which Ray makes for the process that starts it."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    code = "import ray; c = ray.init(address='local', num_cpus=8, include_dashboard=False); "
    code += "print(c.address_info['gcs_address'], flush=True); input()"
    with TemporaryDirectory() as folder, warm_workers(Path(folder)) as executable:
        process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            yield {"address": process.stdout.readline().strip(), "runtime_env": {"py_executable": executable}}
        finally:
            process.communicate("\n", timeout=60)


def main() -> int:
    """Kill runs of every case, or with --ray those of fsdp2 in two Ray processes; print, and write with --out, what came of it.

    The file has what is known after every run; with --go-on the kills in it count, and only the rest is done.
    """
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ray", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--go-on", action="store_true")
    arguments = parser.parse_args()
    import torch

    from lockstep.embedded import prepare

    torch.set_num_threads(1)
    with suppress(ImportError):  # what a fork has, it need not import
        from lockstep.backends.torchtitan.compat import prepare_import

        prepare_import(torch.device("cpu"))
        import lockstep.backends.torchtitan.engine  # noqa: F401
    results: dict[str, dict[str, Any]] = {}
    if arguments.go_on and arguments.out.exists():
        results = json.loads(arguments.out.read_text())["cases"]
    about = {"torch": torch.__version__, "processes": 2 if arguments.ray else 1}
    cases = {name: more for name, more in CASES.items() if "fsdp2" in name or not arguments.ray}
    with TemporaryDirectory() as folder, ray_cluster() if arguments.ray else nullcontext() as ray_init:
        task = prepare(Path(folder) / "task", seed=0)
        for number, (name, more) in enumerate(cases.items()):
            share = arguments.kills * (number + 1) // len(cases) - arguments.kills * number // len(cases)
            before = results.get(name) or {"kills": 0, "runs": 0, "different": [], "seconds": 0}

            def tell(found: Kills, name: str = name, before: dict[str, Any] = before) -> None:
                results[name] = {
                    "kills": before["kills"] + found.kills,
                    "runs": before["runs"] + found.runs,
                    "different": before["different"] + found.different,
                    "seconds": before["seconds"] + round(found.seconds),
                }
                if arguments.out is not None:
                    arguments.out.write_text(json.dumps(about | {"cases": results}, indent=1) + "\n")

            start = small_runs(task, *more, ray_init=ray_init)
            kill_runs(start, Path(folder) / str(number), share - before["kills"], arguments.seed + number + before["kills"], tell)
            told = results[name]
            print(
                f"{name}: {told['kills']} kills, {told['runs']} runs, {len(told['different'])} differences",
                *told["different"],
                sep="\n  ",
            )
    return int(any(result["different"] for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
