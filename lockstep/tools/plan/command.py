"""The command line of `lockstep plan`."""

import argparse
import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lockstep.config.data import EMBEDDED
from lockstep.config.load import with_changes
from lockstep.config.ppo import PPOConfig
from lockstep.errors import ConfigError, ResourceError, as_command
from lockstep.tools.training_command import TrainingCommand, read_training_command

if TYPE_CHECKING:
    from lockstep.planner import Prediction

_GPU = "h200"
"""What is planned for where no GPU is named: the constants were measured on it."""


@as_command
def main(arguments: Sequence[str]) -> int:
    """Print the plan; returns the exit status: 1 where it does not fit or cannot be made."""
    options = _parser().parse_intermixed_args(list(arguments))
    if options.run is not None:
        others = (options.config, options.count, options.price, options.prompt_length, options.response_length)
        if options.words or options.json or any(value is not None for value in others):
            raise ConfigError("--run has keys, lengths and number of GPUs from the run's folder; beside it only --gpu is read")
        from lockstep.tools.plan.measured import compare_run

        print(compare_run(options.run, options.gpu or _GPU))
        return 0
    from lockstep.planner import reusing_models

    with reusing_models():
        return _plan(options)


def _plan(options: argparse.Namespace) -> int:
    words = [*options.words, *(["--from-verl"] if options.from_verl else [])]
    training = read_training_command(words, options.config, None if options.gpu else _device_of)
    if options.price is not None and not options.price >= 0:
        raise ConfigError(f"--price {options.price:g} is no price; give that of one GPU for an hour")
    if not isinstance(training.config, PPOConfig):
        return _plan_stage(training, options)
    from lockstep.planner import Lengths, find_device
    from lockstep.tools.plan.measured import predicted
    from lockstep.tools.plan.propose import proposals, what_fits
    from lockstep.tools.plan.refused import check_run
    from lockstep.tools.plan.table import outcome, stages_table

    if training.config.actor_rollout_ref.model.path == EMBEDDED:
        raise ConfigError(
            "the embedded task's model is not planned; name one: actor_rollout_ref.model.path=MODEL data.train_files=FILE"
        )
    config = _on(training.config, options.count)
    device = find_device(options.gpu or _GPU)
    data = config.data
    lengths = Lengths(
        _length("--prompt-length", options.prompt_length, data.max_prompt_length, "data.max_prompt_length"),
        _length("--response-length", options.response_length, data.max_response_length, "data.max_response_length"),
    )
    config = check_run(config, device)
    ask = functools.partial(predicted, device=device, lengths=lengths)
    rows = f"prompts of {lengths.prompt:g} and responses of {lengths.response:g} tokens in the mean"
    group = config.actor_rollout_ref.rollout.n
    step = f"a step of {data.train_batch_size} prompts x {group} = {data.train_batch_size * group} responses"
    head = f"{training.command}: {config.actor_rollout_ref.model.path}; {step}; {rows}"
    if training.is_first_run:
        head += "\n(the step of the run that would start here, on a CPU; --gpu NAME plans the larger one that would start on a GPU)"
    try:
        found = ask(config)
    except ResourceError as error:
        print(f"{head}\n\nit does not fit: {error}\n")

        def ask_for_run(changed: PPOConfig) -> "Prediction":
            check_run(changed, device)
            return ask(changed)

        _print_proposals(
            "what would fit, any of:",
            what_fits(config, ask_for_run),
            "no smaller micro-batch, fewer sequences at once, GPUs that divide rows, more GPUs or adapters make it fit",
        )
        return 1
    if options.json:
        print(_json(found))
        return 0
    print(f"{head}; on {found.num_gpus} x {device.name}\n\n{stages_table(found)}\n")
    print("\n".join(outcome(found, device, options.price, config.trainer.save_freq)))
    if config.algorithm.filter_groups.enable:
        print("  dynamic sampling: one batch of prompts a step is counted; groups without a signal are generated again")
    if not device.is_measured:
        print(f"  the constants were measured on an H200 and are scaled to {device.name} by its peak rates")
    if found.num_gpus > 1:
        print("  communication between GPUs is arithmetic, not measured")
    print("  a reward function takes what it takes: it is not counted\n")
    _print_proposals(
        "proposal (nothing of it changes what is computed):", proposals(config, found, ask), "proposal: leave it as it is"
    )
    return 0


def _plan_stage(training: TrainingCommand, options: argparse.Namespace) -> int:
    """The same for what learns from files: one stage, an update, beside which a reference may pass."""
    from lockstep.planner import Lengths, find_device, predict_stage
    from lockstep.tools.plan.refused import check_run
    from lockstep.tools.plan.table import outcome, stages_table

    if training.command == "distill":
        raise ConfigError("lockstep plan does not know distill: its teacher computes beside the student")
    config = training.config
    device = find_device(options.gpu or _GPU)
    longest = training.config.data.max_length
    if options.count is not None:
        each, machines = _machines(options.count)
        trainer = dataclasses.replace(config.trainer, n_gpus_per_node=each, nnodes=machines)
        config = dataclasses.replace(config, trainer=trainer)
    config = check_run(config, device)
    prompt = 0.0 if options.prompt_length is None else _length("--prompt-length", options.prompt_length, longest, "data.max_length")
    response = _length("--response-length", options.response_length, longest, "data.max_length")
    lengths = Lengths(prompt, min(response, longest - prompt))
    found = predict_stage(config, device, lengths)
    if options.json:
        print(_json(found))
        return 0
    rows = f"rows of {lengths.prompt + lengths.response:g} tokens in the mean"
    print(f"{training.command}: {config.model.path}; {rows}; on {found.num_gpus} x {device.name}\n\n{stages_table(found)}\n")
    print("\n".join(outcome(found, device, options.price, config.trainer.save_freq)))
    return 0


def _device_of(name: str) -> str:
    from lockstep.utils.device import resolve_device

    return resolve_device(name)


def _length(option: str, given: float | None, longest: int, key: str) -> float:
    """Mean tokens as they were given, or the longest."""
    if given is not None and not 0 < given <= longest:
        raise ConfigError(f"{option} {given:g} is no mean of lengths up to {key}={longest}")
    return longest if given is None else given


def _on(config: PPOConfig, count: int | None) -> PPOConfig:
    """The configuration on `count` GPUs, eight to a machine."""
    if count is None:
        return config
    each, machines = _machines(count)
    return with_changes(config, {"trainer.n_gpus_per_node": each, "trainer.nnodes": machines, "trainer.worker_group": "auto"})


def _machines(count: int) -> tuple[int, int]:
    """GPUs of a machine, and how many machines."""
    if count < 1 or (count > 8 and count % 8):
        raise ConfigError(f"--count {count}: up to 8 GPUs, or machines of 8")
    each = min(count, 8)
    return each, count // each


def _json(found: "Prediction") -> str:
    from lockstep.tools.plan.table import GIB, columns

    memory = {stage: {name: round(size / GIB, 3) for name, size in columns(parts).items()} for stage, parts in found.memory.items()}
    numbers = {
        "peak_gib": {stage: round(parts.total() / GIB, 3) for stage, parts in found.memory.items()},
        "memory_gib": memory,
        "seconds": found.seconds,
        "step_s": found.step_s,
        "chosen": found.chosen,
    }
    return json.dumps(numbers, indent=1)


def _print_proposals(title: str, found: Sequence[Any], without: str) -> None:
    if not found:
        print(without)
        return
    print(title)
    for proposal in found:
        print(f"  {' '.join(f'{key}={value}' for key, value in proposal.changes.items())}\n      {proposal.reason}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lockstep plan", description="Memory, time and cost of a run before it starts. No GPU is needed."
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="[COMMAND] key=value",
        help="as for lockstep ppo; a first word such as grpo names another command",
    )
    parser.add_argument("--config", help="a YAML file with keys")
    parser.add_argument("--gpu", help=f"h200, h100, a100-80gb, ...; without it, the run that would start here, as on an {_GPU}")
    parser.add_argument("--from-verl", action="store_true", help="file and keys are verl's")
    parser.add_argument("--count", type=int, help="GPUs, eight to a machine; without it those of the keys")
    parser.add_argument("--price", type=float, help="of one GPU for an hour, in any currency")
    parser.add_argument("--prompt-length", type=float, help="mean tokens of a prompt; without it the longest")
    parser.add_argument("--response-length", type=float, help="mean tokens of a response; without it the longest")
    parser.add_argument("--json", action="store_true", help="print numbers only, as JSON")
    parser.add_argument("--run", help="a run's folder: what was measured in it beside what is predicted for it")
    return parser
