"""The common part of all programs: the command line, errors as one line, Ray for runs of several processes, the last lines of a run."""

from __future__ import annotations

import errno
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lockstep.checkpoint.lock import check_folder
from lockstep.config import PPOConfig, follow
from lockstep.config.load import of_layers, read_layers
from lockstep.config.presets import FIRST_RUN, first_run_in_words, first_stage_in_words
from lockstep.config.trainer import RayConfig, RunConfig
from lockstep.errors import ConfigError, LockstepError, MissingExtra, Stopped
from lockstep.observability.alarms import FILE
from lockstep.observability.display import is_live_terminal, shown_numbers, with_interval
from lockstep.observability.spans import progress
from lockstep.observability.trackers import check_trackers
from lockstep.observability.waiting import leave_terminal, shown_waits
from lockstep.utils.terminal import say

if TYPE_CHECKING:
    from lockstep.config.engine import ModelConfig
    from lockstep.config.stage import StageConfig
    from lockstep.trainer.run.loop import FitResult
    from lockstep.trainer.stage_run import StageRun

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
Config = TypeVar("Config")
T = TypeVar("T", bound="StageRun")


def run_program(
    arguments: Sequence[str] | None,
    root: type,
    load: Callable[[list[str], Path | None], Any],
    run: Callable[[Any], None],
    algorithm: str = "ppo",
) -> int:
    """`run` what the command line describes. Return the exit status.

    `--config FILE` reads a YAML file. `--help` lists the keys in groups, `--help WORD` explains a group or searches (config/reference.py).
    """
    # Read when torch loads its OpenMP library. Threads that spin while they wait make a small model many times slower on busy cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        asked = next((at for at, word in enumerate(arguments) if word in ("-h", "--help")), None)
        if asked is not None:
            from lockstep.config.reference import command_help

            print(command_help(root, [word for word in arguments[asked + 1 :] if "=" not in word], algorithm))
            return 0
        config_file, overrides = _split_arguments(arguments)
        is_live = is_live_terminal(sys.stdout)
        with shown_waits(sys.stdout, is_live):  # it may have to import PyTorch to know the device
            config = load(overrides, config_file)
        check_trackers(config.trainer.logger)
        check_folder(config.trainer.run_dir)
        with shown_waits(sys.stdout, is_live):
            with progress("importing PyTorch and transformers"):
                import_module("lockstep.workers.engine_workers")
            run(config)
    except Stopped as stopped:
        say(stopped, is_error=True)
        return stopped.exit_status
    except LockstepError as error:
        say(f"error: {error}", is_error=True)  # it may quote what a model wrote
        return error.exit_status
    except OSError as error:
        if error.filename is None and error.errno not in _NO_SPACE:
            raise
        advice = "free some space" if error.errno in _NO_SPACE else "make it one that can be read and written, or name another"
        say(f"error: {error.filename or 'a file'}: {error.strerror}; {advice}", is_error=True)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def read_run(
    root: type[Config],
    overrides: Sequence[str],
    config_file: Path | None = None,
    algorithm: str = "ppo",
    check: Callable[[Config], None] = lambda config: None,
) -> Config:
    """Return the configuration that the command line describes. Print which values differ from the defaults although the user did not set
    them, unless `check` or the configuration raises."""
    layers = read_layers(root, overrides, config_file, algorithm, _device_of)
    config = of_layers(root, layers)
    check(config)
    for layer in layers:
        if layer.origin == FIRST_RUN:
            leave_terminal()  # keys that are to be copied are not wrapped
            is_stage = root is not PPOConfig
            say(first_stage_in_words(dict(layer.values)) if is_stage else first_run_in_words(algorithm), flush=True)
        elif layer.origin == follow.ORIGIN:
            say(follow.in_words(dict(layer.values)), flush=True)
    return config


def _device_of(name: str) -> str:
    with progress("importing PyTorch"):
        from lockstep.utils.device import resolve_device
    return resolve_device(name)


@contextmanager
def opened_stage(config: StageConfig, make_trainer: Callable[[Any], T]) -> Iterator[T]:
    """Yield the trainer that `make_trainer` makes for a class of worker groups. Its workers end with the context."""
    with (
        worker_group(config.trainer, config.ray_kwargs, config.needs_ray) as group_cls,
        closing(make_trainer(group_cls)) as trainer,
    ):
        yield trainer


def read_tokenizer(model: ModelConfig) -> Any:
    """Return the tokenizer of a model that is trained."""
    from lockstep.utils.tokenizer import hf_tokenizer

    with progress("reading the tokenizer"):
        return hf_tokenizer(str(model.path), trust_remote_code=model.trust_remote_code)


@contextmanager
def worker_group(section: RunConfig, ray: RayConfig, needs_ray: bool) -> Iterator[Any]:
    """Yield the class of the run's worker groups: in this process, or on Ray, which is started and stopped here if necessary."""
    from lockstep.single_controller.local import LocalWorkerGroup
    from lockstep.single_controller.ray import RayWorkerGroup
    from lockstep.single_controller.ray.cluster import connect, disconnect
    from lockstep.trainer.run.stop import end_on_sigterm

    if section.worker_group != "ray" and not (section.worker_group == "auto" and needs_ray):
        end_on_sigterm()
        yield LocalWorkerGroup
        return
    try:
        with progress("starting Ray, or reaching it"):
            started = connect(**ray.ray_init)
    except MissingExtra as error:
        raise ConfigError(_without_ray(section)) from error
    end_on_sigterm()  # Ray has a handler of its own
    try:
        yield RayWorkerGroup
    finally:
        if started:
            disconnect()


def _without_ray(section: RunConfig) -> str:
    """Return which key asks for Ray, and what to do without it."""
    asked = []
    if section.n_gpus_per_node > 1:
        asked.append(f"trainer.n_gpus_per_node={section.n_gpus_per_node}")
    if section.nnodes > 1:
        asked.append(f"trainer.nnodes={section.nnodes}")
    if asked:
        key = ", ".join(asked)
        instead = "set it to 1"
    elif section.worker_group == "ray":
        key = "trainer.worker_group=ray"
        instead = "leave it out"
    else:
        key = "enable_resource_pool=true (critic or reward_model)"
        instead = "set it to false"
    return f"{MissingExtra(key, 'ray', 'ray')}; or {instead}, for a run in one process"


def _split_arguments(arguments: list[str]) -> tuple[Path | None, list[str]]:
    if "--config" not in arguments:
        return None, arguments
    at = arguments.index("--config")
    if at + 1 == len(arguments):
        raise ConfigError("--config needs a file name after it")
    return Path(arguments[at + 1]), arguments[:at] + arguments[at + 2 :]


# -- the last lines of a run -----------------------------------------------------------------------------------------------


def summarise(result: FitResult, embedded: bool) -> str:
    """Return the last lines of a run: before and after, the checkpoint, the metrics; after the embedded task also commands to try next."""
    lines = [_head(result), *_before_and_after(result, ("val-core/",), ".3f")]
    lines.append(f"  checkpoint (a Hugging Face folder): {result.checkpoint / 'actor' if result.checkpoint else 'none was saved'}")
    if result.best_checkpoint is not None:
        lines.append(f"  the best one: {result.best_checkpoint}")
    lines.append(f"  metrics of every step: {result.metrics_file}")
    lines.append(f"  a report to open in a browser: lockstep report {shlex.quote(str(result.metrics_file.parent))}")
    lines += _alarms(result)
    if embedded:
        lines += [
            "what to try next:",
            "  lockstep grpo                                              the same task without a critic",
            "  lockstep ppo trainer.n_gpus_per_node=2                     two processes on Ray",
            "  lockstep ppo data.train_files=train.parquet data.val_files=val.parquet actor_rollout_ref.model.path=MODEL",
            "                                                             your own data and model",
        ]
    return "\n".join(lines)


def summarise_stage(result: FitResult, shown: tuple[str, ...]) -> str:
    """Return the last lines of a recipe that learns from files; `shown` are the prefixes of its validation results."""
    lines = [_head(result), *_before_and_after(result, shown, ".4f")]
    lines.append(f"  checkpoint (a Hugging Face folder): {result.checkpoint / 'actor' if result.checkpoint else 'none was saved'}")
    lines.append(f"  metrics of every step: {result.metrics_file}")
    lines.append(f"  a report to open in a browser: lockstep report {shlex.quote(str(result.metrics_file.parent))}")
    return "\n".join(lines + _alarms(result))


def _before_and_after(result: FitResult, shown: tuple[str, ...], spec: str) -> list[str]:
    """Return a line for each result of the last validation, and one for the rows of the validation before training, if they were fewer."""
    last = result.last_validation
    before = result.validation_before
    after = result.validation_after
    names = shown_numbers(last, shown)
    if not result.steps:
        return [f"  {name}: {with_interval(last, name, spec)}" for name in names]
    share = before.get("val-aux/share_of_rows", 1.0)
    lines = []
    for name in names:
        is_comparable = name in before and name in after
        at_first = f"{with_interval(before, name, spec)} before, " if is_comparable else ""
        if not is_comparable or share == 1.0:
            lines.append(f"  {name}: {at_first}{with_interval(last, name, spec)} after")
            continue
        lines.append(f"  {name}: {with_interval(last, name, spec)} after")
        lines.append(f"    on the rows that were validated before training: {at_first}{with_interval(after, name, spec)} after")
    return lines


def _alarms(result: FitResult) -> list[str]:
    if not result.alarms:
        return []
    return [*(f"  {alarm}" for alarm in result.alarms), f"  more about alarms: {result.metrics_file.with_name(FILE)}"]


def _head(result: FitResult) -> str:
    return f"\ndone: {result.steps} steps in {result.metrics_file.parent}"
