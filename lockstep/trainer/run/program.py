"""What the programs of all recipes share: the command line, errors as one line, and Ray where a run has several processes."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lockstep.checkpoint.lock import check_folder
from lockstep.config import PPOConfig, follow
from lockstep.config.load import of_layers, read_layers
from lockstep.config.presets import FIRST_RUN, first_run_in_words, first_stage_in_words
from lockstep.config.trainer import RayConfig, RunConfig
from lockstep.errors import ConfigError, LockstepError, MissingExtra, Stopped
from lockstep.observability.display import is_live_terminal
from lockstep.observability.spans import progress
from lockstep.observability.trackers import check_trackers
from lockstep.observability.waiting import leave_terminal, shown_waits
from lockstep.utils.terminal import say

if TYPE_CHECKING:
    from lockstep.config.engine import ModelConfig
    from lockstep.config.stage import StageConfig
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
    """`run` what the command line describes; returns the exit status.

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
    """The configuration that the command line describes; prints which values are not the usual ones although the user did not set them.

    Nothing is printed where `check`, or the configuration itself, raises.
    """
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
    """The recipe that `make_trainer` makes for a class of worker groups; none of its workers is left at the end."""
    with (
        worker_group(config.trainer, config.ray_kwargs, config.needs_ray) as group_cls,
        closing(make_trainer(group_cls)) as trainer,
    ):
        yield trainer


def stage_program(
    root: type, opened: Callable[[Any], AbstractContextManager[StageRun]]
) -> tuple[Callable[..., Any], Callable[..., int]]:
    """`load` and `main` of a recipe that learns from files: `root` is the class of its configuration, `opened` gives its trainer."""
    load = partial(read_run, root)

    def run(config: Any) -> None:
        from lockstep.trainer.run.summary import summarise_stage

        with opened(config) as trainer:
            trainer.init_workers()
            result = trainer.fit()
        say(summarise_stage(result, trainer.view.validation))

    def main(arguments: Sequence[str] | None = None) -> int:
        """Train as the command line says; returns the exit status."""
        return run_program(arguments, root, load, run)

    return load, main


def read_tokenizer(model: ModelConfig) -> Any:
    """The tokenizer of a model that is trained."""
    from lockstep.utils.tokenizer import hf_tokenizer

    with progress("reading the tokenizer"):
        return hf_tokenizer(str(model.path), trust_remote_code=model.trust_remote_code)


@contextmanager
def worker_group(section: RunConfig, ray: RayConfig, needs_ray: bool) -> Iterator[Any]:
    """The class of the run's worker groups: in this process, or on Ray, which is started here if it has to be and stopped after."""
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
    """Which key asks for Ray, and what can be done where it is not installed."""
    counts = {
        f"trainer.{name}={count}": count
        for name, count in (("n_gpus_per_node", section.n_gpus_per_node), ("nnodes", section.nnodes))
    }
    asked = [key for key, count in counts.items() if count > 1]
    if asked:
        key, instead = ", ".join(asked), "set it to 1"
    elif section.worker_group == "ray":
        key, instead = "trainer.worker_group=ray", "leave it out"
    else:
        key, instead = "enable_resource_pool=true (critic or reward_model)", "set it to false"
    return f"{MissingExtra(key, 'ray', 'ray')}; or {instead}, for a run in one process"


def _split_arguments(arguments: list[str]) -> tuple[Path | None, list[str]]:
    if "--config" not in arguments:
        return None, arguments
    at = arguments.index("--config")
    if at + 1 == len(arguments):
        raise ConfigError("--config needs a file name after it")
    return Path(arguments[at + 1]), arguments[:at] + arguments[at + 2 :]
