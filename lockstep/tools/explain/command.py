"""The command line of `lockstep explain`."""

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from lockstep.config.check import tokens_in_words
from lockstep.config.data import EMBEDDED
from lockstep.config.ppo import PPOConfig, describe
from lockstep.config.presets import ALGORITHMS
from lockstep.config.trainer import RunConfig
from lockstep.errors import ConfigError, LockstepError, as_command
from lockstep.tools.training_command import TrainingCommand, read_training_command

_EMBEDDED_ROWS = 2048
_SMALL = "(it is this small because there is no GPU here and no key says how large it is)"


@as_command
def main(arguments: Sequence[str]) -> int:
    """Print the configuration in words; returns the exit status: 1 for one that cannot work."""
    options = _parser().parse_intermixed_args(list(arguments))
    words = [*options.words, *(["--from-verl"] if options.from_verl else [])]
    training = read_training_command(words, options.config, None if options.gpu else _device_of)
    training = dataclasses.replace(training, config=_checked(training, options.gpu))
    for part in list(_parts(training, options.gpu, options.all)):  # all of it, or an error alone
        print(f"{part}\n")
    return 0


def _checked(training: TrainingCommand, gpu: str | None) -> Any:
    from lockstep.planner import find_device
    from lockstep.tools.plan.refused import check_run

    if training.command in ALGORITHMS:
        from lockstep.trainer.main_ppo import check_data_named

        check_data_named(training.config)
    return check_run(training.config, None if gpu is None else find_device(gpu))


def _parts(training: TrainingCommand, gpu: str | None, shows_all: bool) -> Iterator[str]:
    from lockstep.tools.explain.values import values_text

    section = training.config.trainer
    yield f"lockstep {training.command}: run {section.experiment_name} in {section.run_dir}"
    device = "cuda" if gpu else _device_of(section.device)
    if not isinstance(training.config, PPOConfig):
        yield _stage_words(training.config, device) + (f"\n  {_SMALL}" if training.is_first_run else "")
        yield values_text(training, shows_all)
        return
    from lockstep.data.schedule import PromptSchedule
    from lockstep.tools.explain.ppo import episodes, places, stages, validation

    config = training.config
    total = training.config.trainer.total_training_steps
    rows = _rows(config.data, config.data.train_files, config.data.train_max_samples)
    if isinstance(rows, int):
        PromptSchedule(
            rows, config.data.train_batch_size, config.data.shuffle, config.data_seed
        )  # raises where a batch has too few
        total = total or rows // config.data.train_batch_size * section.total_epochs
        words = describe(config, rows, total, device)
    else:
        words = f"{rows}\n" + describe(config, 0, 0, device).partition("\n")[2]
    if training.is_first_run:
        words += f"\n{_SMALL}"
    yield "what a step is:\n" + _indented(words)
    if config.agent.is_on:
        yield "what an episode is:\n" + "\n".join(f"  {name:15} {what}" for name, what in episodes(config))
    yield "stages of a step:\n" + "\n".join(f"  {stage:15} {what}" for stage, what in stages(config, device))
    val_rows = _rows(config.data, config.data.val_files, config.data.val_max_samples) if config.data.val_files else 0
    known = val_rows if isinstance(val_rows, int) else None
    yield "beside the steps:\n" + _indented(
        f"validation: {validation(config, known, total)}\ncheckpoints: {_saves(section, total)}"
    )
    yield "where the models are:\n" + "\n".join(f"  {pool}: {models}" for pool, models in places(config))
    yield "what a step will cost:\n" + _indented(_cost(config, gpu))
    yield values_text(training, shows_all)


def _saves(section: RunConfig, total: int | None) -> str:
    from lockstep.tools.explain.ppo import due_steps

    kept = "" if section.max_ckpt_to_keep is None else f"; the newest {section.max_ckpt_to_keep} are kept"
    return due_steps(section.save_freq, total) + kept


def _rows(data: Any, files: Any, limit: int) -> int | str:
    """Rows of these files, before any is left out; or why their number is not known."""
    from lockstep.data.row_files import RowFiles

    if files == EMBEDDED:
        return _EMBEDDED_ROWS
    if getattr(data, "custom_cls", None) is not None and data.custom_cls.path is not None:
        return "the number of training prompts is the dataset class's own"
    try:
        found = len(RowFiles([files] if isinstance(files, str) else list(files)))
    except LockstepError as error:
        return f"the number of training prompts is not known: {error}"
    return found if limit < 0 else min(found, limit)


def _cost(config: PPOConfig, gpu: str | None) -> str:
    from lockstep.planner import Lengths, describe_chosen, find_device
    from lockstep.tools.plan.measured import predicted

    if config.actor_rollout_ref.model.path == EMBEDDED:
        return "about a second on two CPU cores"
    here = None if gpu else _gpu_here()
    if gpu is None and here is None:
        return "not predicted for a CPU; --gpu NAME says it for a GPU, and lockstep plan says more"
    try:
        device = find_device(gpu or str(here))
    except ConfigError:
        if here is None:
            raise
        return f"not known: lockstep plan has no numbers of the GPU that is here, {here}; --gpu NAME says it of one that it knows"
    found = predicted(config, device, Lengths(config.data.max_prompt_length, config.data.max_response_length))
    times = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in found.seconds.items() if seconds >= 0.05)
    return (
        f"on {found.num_gpus} x {device.name}, with rows as long as they may be: {found.step_s:.1f} s ({times}), "
        f"{found.peak / 2**30:.0f} of {device.memory / 2**30:.0f} GiB at the fullest\n"
        + (f"{line}\n" if (line := describe_chosen(found.chosen)) else "")
        + "lockstep plan says more, for other GPUs too"
    )


def _device_of(name: str) -> str:
    from lockstep.utils.device import resolve_device

    return resolve_device(name)


def _gpu_here() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _stage_words(config: Any, device: str) -> str:
    from lockstep.tools.explain.ppo import due_steps

    batch = config.data.train_batch_size
    engine = config.engine
    section = config.trainer
    cut = (
        f"{engine.micro_batch_size_per_gpu} rows"
        if engine.micro_batch_size_per_gpu
        else tokens_in_words(engine.max_token_len_per_gpu)
    )
    count = section.n_gpus_per_node * section.nnodes
    one = {"cuda": "GPU", "cpu": "CPU process"}[device]
    several = f"{one}s" if one == "GPU" else f"{one}es"
    rows = _rows(config.data, config.data.train_files, getattr(config.data, "train_max_samples", -1))
    total = section.total_training_steps
    if isinstance(rows, int):
        per_epoch = rows // batch
        total = total or per_epoch * section.total_epochs
        steps = f"{rows} rows in the files, {batch} a step: at most {per_epoch} steps an epoch, {total} steps in all"
    else:
        steps = rows.replace("prompts", "rows") + ("" if total is None else f"; {total} steps in all")
    checks = due_steps(section.test_freq, total)
    checks = f"before the first step, {checks}" if section.val_before_train else checks
    return "what a step is:\n" + _indented(
        f"{steps}\n"
        f"{batch} rows of up to {config.data.max_length} tokens, one update of {config.model.path} ({engine.strategy})\n"
        f"on {count} {several if count > 1 else one}, at most {cut} at once on each (this bounds memory, not the result)\n"
        f"validation: {checks if config.data.val_files else 'none: data.val_files is not set'}\n"
        f"checkpoints: {_saves(section, total)}"
    )


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def _parser() -> argparse.ArgumentParser:
    about = "A configuration in words. Nothing is trained, no weights are read."
    parser = argparse.ArgumentParser(prog="lockstep explain", description=about)
    words = "as lockstep ppo takes them; a first word such as grpo names another"
    parser.add_argument("words", nargs="*", metavar="[COMMAND] key=value", help=words)
    parser.add_argument("--config", help="a YAML file with keys")
    parser.add_argument("--gpu", help="describe the run on this GPU, with what a step costs; without it, the run here")
    parser.add_argument("--all", action="store_true", help="list the defaults too")
    parser.add_argument("--from-verl", action="store_true", help="file and keys are verl's")
    return parser
