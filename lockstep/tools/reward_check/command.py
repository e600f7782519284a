"""`lockstep rewards check key=value ...`: try the configured reward before training on it. See docs/rewards_check.md."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import Progress

from lockstep.config import PPOConfig
from lockstep.config.data import EMBEDDED
from lockstep.errors import ConfigError, as_command
from lockstep.observability.safe_console import SafeConsole
from lockstep.tools.training_command import read_training_command
from lockstep.trainer.run.setup import reward_arguments, with_embedded_task

if TYPE_CHECKING:
    from lockstep.rewards.manager import RewardManager
    from lockstep.tools.reward_check.report import Report
    from lockstep.tools.reward_check.trials import JudgedRow, Trial

_WIDTH = 160
"""Columns of the tables where there is no terminal."""


@as_command
def main(arguments: Sequence[str]) -> int:
    """Check the rewards as the command line says; return 0 if nothing is wrong, 1 if something is, 2 if the command is not `check`."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in main_ppo
    first = arguments[0] if arguments else "nothing"
    if first in ("-h", "--help"):
        print(_parser().format_help())
        return 0
    if first != "check":
        usage = "lockstep rewards check [options] [key=value ...]"
        print(f"error: usage: {usage}; expected 'check' after 'rewards', not {first!r}", file=sys.stderr)
        return 2
    from lockstep.tools.reward_check.report import print_report

    options = _parser().parse_intermixed_args(arguments[1:])
    training = read_training_command(options.overrides, options.config)
    config = training.config
    if not isinstance(config, PPOConfig):
        raise ConfigError(f"lockstep {training.command} has no rewards to check; name ppo or a relative of it")
    for name, number in (("rows", options.rows), ("model-samples", options.model_samples)):
        if number is not None and number < 1:
            raise ConfigError(f"--{name} must be at least 1, not {number}")
    console = SafeConsole(width=None if sys.stdout.isatty() else _WIDTH, markup=False, highlight=False, emoji=False)
    report = check(config, options.rows, options.model_samples, options.gold_score, console)
    print_report(report, console)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report.as_dict(), indent=1) + "\n")
    return 0 if report.is_clean else 1


def check(
    config: PPOConfig,
    num_rows: int,
    model_samples: int | None = None,
    gold_score: float | None = None,
    console: SafeConsole | None = None,
) -> Report:
    """Score right answers, nonsense, attacks and, on request, the model's own samples with the configured reward; return the report.

    Args:
        num_rows: Rows of data.train_files and data.val_files to try, spread over the data_sources.
        model_samples: Prompts that the model answers actor_rollout_ref.rollout.n times each; None: no model is loaded.
        gold_score: The score that a right answer must get; None: the best that any right answer of its data_source gets.
        console: Where progress is shown; None: nowhere.

    Raises what training would raise for data without a reward, files that cannot be read and programs that cannot be run.
    """
    from lockstep.rewards.manager import RewardManager
    from lockstep.tools.reward_check.report import make_report
    from lockstep.tools.reward_check.responses import Traps
    from lockstep.tools.reward_check.trials import choose_rows, make_judged_rows, make_trials, score_twice
    from lockstep.trainer.ppo.checks import check_rewards
    from lockstep.trainer.ppo.prompts import open_dataset
    from lockstep.utils.tokenizer import hf_tokenizer

    if EMBEDDED in (config.data.train_files, config.actor_rollout_ref.model.path):
        config = with_embedded_task(config)
    model = config.actor_rollout_ref.model
    tokenizer = hf_tokenizer(str(model.path), trust_remote_code=model.trust_remote_code)
    datasets = {"train": open_dataset(config, tokenizer, config.data.train_files, config.data.train_max_samples)}
    if config.data.val_files:
        datasets["val"] = open_dataset(config, tokenizer, config.data.val_files, config.data.val_max_samples)
    manager = RewardManager(tokenizer=tokenizer, num_examine=0, **reward_arguments(config.reward))
    try:
        check_rewards(config, manager, manager, datasets["train"], datasets.get("val"))
        sources = {tag.data_source for dataset in datasets.values() if hasattr(dataset, "tags") for tag in dataset.tags()}
        rows = choose_rows(datasets, num_rows, len(sources), config.trainer.seed)
        judged = make_judged_rows(manager, rows, config.reward_model.enable, config.reward.timeout_s)
        missed = sources - {row.data_source for row in rows}
        notes = _notes(config, len(rows) - len(judged), missed, model_samples)
        with Traps() as traps:
            trials = make_trials(judged, traps)
            if model_samples is not None:
                sampled = choose_rows(datasets, model_samples, len(sources), config.trainer.seed)
                answered = make_judged_rows(manager, sampled, config.reward_model.enable, config.reward.timeout_s)
                trials += _model_samples(config, tokenizer, manager, datasets, answered)
            is_shown = console is not None and console.is_terminal
            with Progress(console=console, transient=True, disable=not is_shown) as progress:
                task = progress.add_task("scoring", total=2 * len(trials))
                num_at_once = config.reward.num_workers or min(os.cpu_count() or 1, 8)
                results = score_twice(manager, trials, num_at_once, lambda: progress.advance(task))
            escapes = traps.sprung()
    finally:
        manager.close()
    return make_report(results, escapes, config.reward.timeout_s, gold_score, notes)


def _model_samples(
    config: PPOConfig, tokenizer: Any, manager: RewardManager, datasets: dict[str, Any], rows: Sequence[JudgedRow]
) -> list[Trial]:
    """Return trials of the model's own responses to these rows, drawn as in training."""
    import torch

    from lockstep.models.hf_config import stop_token_ids
    from lockstep.single_controller.base.worker import WorkerEnvironment, worker_environment
    from lockstep.tools.reward_check.responses import AllowedScore, Response
    from lockstep.tools.reward_check.trials import SAMPLE, Trial
    from lockstep.trainer.ppo.checks import check_models
    from lockstep.trainer.ppo.prompts import make_prompts
    from lockstep.utils.device import resolve_device
    from lockstep.workers.engine_workers import ActorRolloutRefWorker

    check_models(config, tokenizer)
    rollout = config.actor_rollout_ref.rollout
    with worker_environment(WorkerEnvironment(device=torch.device(resolve_device(config.trainer.device)))):
        worker = ActorRolloutRefWorker(
            config.actor_rollout_ref,
            "rollout",
            seed=config.trainer.seed,
            pad_token_id=tokenizer.pad_token_id,
            total_updates=0,
            max_response_length=config.data.max_response_length,
        )
    worker.init_model()
    sampling = config.sampling(stop_token_ids(str(config.actor_rollout_ref.model.path), tokenizer))
    trials = []
    for split, dataset in datasets.items():
        of_split = [judged for judged in rows if judged.row.split == split]
        if not of_split:
            continue
        batch = make_prompts(dataset, [judged.row.position for judged in of_split], rollout.n, tokenizer.pad_token_id)
        batch.union(worker.generate_sequences(batch.select(["prompts"], ["index", "sample"]), sampling=sampling, step=0))
        for i, ids in enumerate(batch.ragged("responses").rows()):
            response = Response(SAMPLE, manager.decode(ids), AllowedScore.ANYTHING)
            trials.append(Trial(of_split[i // rollout.n], response))
    return trials


def _notes(config: PPOConfig, num_model_only: int, missed: set[str | None], model_samples: int | None) -> list[str]:
    """Return what the check leaves open."""
    notes = []
    if num_model_only:
        notes.append(f"{num_model_only} rows that only the reward model judges")
    if missed:
        notes.append(f"data_source {', '.join(sorted(map(str, missed)))}: none of the rows that were read has it; raise --rows")
    if model_samples is None:
        notes.append("how many groups carry a signal: add --model-samples N to let the model answer N prompts")
    elif config.actor_rollout_ref.rollout.n < 2:
        notes.append("how many groups carry a signal: actor_rollout_ref.rollout.n=1 makes groups of one")
    return notes


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lockstep rewards check",
        description="Try the configured reward on right answers, on nonsense, on attacks and on the model's own samples.",
        epilog="The keys are those of lockstep ppo (lockstep ppo --help lists them). Exit status: 0 clean, 1 something is wrong.",
        allow_abbrev=False,
    )
    words = "as lockstep ppo takes them; a first word such as grpo names another"
    parser.add_argument("overrides", nargs="*", metavar="[COMMAND] key=value", help=words)
    parser.add_argument("--config", type=Path, metavar="FILE", help="read the configuration from a YAML file first")
    parser.add_argument(
        "--rows", type=int, default=200, metavar="N", help="rows to try, spread over the data_sources (default 200)"
    )
    parser.add_argument("--model-samples", type=int, metavar="N", help="also let the model answer N prompts, rollout.n times each")
    parser.add_argument(
        "--gold-score",
        type=float,
        metavar="X",
        help="what a right answer must get (default: the best that one of its data_source gets)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there as well")
    return parser
