"""The command line of `lockstep explain`."""

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from lockstep.config.arithmetic import describe
from lockstep.config.auto import tokens_in_words
from lockstep.config.data import EMBEDDED
from lockstep.config.ppo import PPOConfig
from lockstep.errors import ConfigError, LockstepError, as_command
from lockstep.tools.asked import Asked, read_asked

_EMBEDDED_ROWS = 2048


@as_command
def main(arguments: Sequence[str]) -> int:
    """Print the configuration in words; returns the exit status: 1 for one that cannot work."""
    options = _parser().parse_intermixed_args(list(arguments))
    asked = read_asked(options.words, options.config, None if options.gpu else _device_of)
    _check(asked, options.gpu)
    for part in list(_parts(asked, options.gpu)):  # all of it, or an error alone
        print(f"{part}\n")
    return 0


def _check(asked: Asked, gpu: str | None) -> None:
    from lockstep.planner import find_device
    from lockstep.tools.plan.refused import check_run

    check_run(asked.config, None if gpu is None else find_device(gpu))


def _parts(asked: Asked, gpu: str | None) -> Iterator[str]:
    from lockstep.tools.explain.values import values_text

    section = asked.config.trainer
    yield f"lockstep {asked.command}: run {section.experiment_name} in {section.run_dir}"
    yield values_text(asked)
    if not isinstance(asked.config, PPOConfig):
        yield _stage_words(asked.config)
        return
    from lockstep.data.schedule import PromptSchedule
    from lockstep.tools.explain.ppo import places, stages

    config = asked.config
    device = _device_of(section.device)
    rows = _rows(config)
    if isinstance(rows, int):
        PromptSchedule(
            rows, config.data.train_batch_size, config.data.shuffle, config.data_seed
        )  # raises where a batch has too few
        total = section.total_training_steps or rows // config.data.train_batch_size * section.total_epochs
        yield "what a step is:\n" + _indented(describe(config, rows, total, device))
    else:
        yield "what a step is:\n" + _indented(f"{rows}\n" + describe(config, 0, 0, device).partition("\n")[2])
    yield "where the models are:\n" + "\n".join(f"  {pool}: {models}" for pool, models in places(config))
    yield "stages of a step:\n" + "\n".join(f"  {stage:15} {what}" for stage, what in stages(config, device))
    yield "what a step will cost:\n" + _indented(_cost(config, gpu))


def _rows(config: PPOConfig) -> int | str:
    """Training prompts, or why their number is not known."""
    from lockstep.data.row_files import RowFiles

    files, limit = config.data.train_files, config.data.train_max_samples
    if files == EMBEDDED:
        return _EMBEDDED_ROWS
    if config.data.custom_cls.path is not None:
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
    try:
        device = find_device(gpu or here or "h200")
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


def _stage_words(config: Any) -> str:
    batch, engine, section = config.data.train_batch_size, config.engine, config.trainer
    cut = (
        f"{engine.micro_batch_size_per_gpu} rows"
        if engine.micro_batch_size_per_gpu
        else tokens_in_words(engine.max_token_len_per_gpu)
    )
    count = section.n_gpus_per_node * section.nnodes
    return "what a step is:\n" + _indented(
        f"{batch} rows of up to {config.data.max_length} tokens, one update of {config.model.path} ({engine.strategy})\n"
        f"on {count} process{'es' if count > 1 else ''}, at most {cut} at once on each (this bounds memory, not the result)"
    )


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def _parser() -> argparse.ArgumentParser:
    about = "A configuration in words. Nothing is trained, no weights are read."
    parser = argparse.ArgumentParser(prog="lockstep explain", description=about)
    words = "as lockstep ppo takes them; a first word such as grpo names another"
    parser.add_argument("words", nargs="*", metavar="[COMMAND] key=value", help=words)
    parser.add_argument("--config", help="a YAML file with keys")
    parser.add_argument("--gpu", help="for what a step costs; without it the GPU that is here, or an h200")
    return parser
