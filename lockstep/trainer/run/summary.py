"""The last lines of a run: what it came to, where things are, what to try next."""

import shlex

from lockstep.observability.alarms import FILE
from lockstep.observability.display import shown_numbers, with_interval
from lockstep.trainer.run.loop import FitResult


def summarise(result: FitResult, embedded: bool) -> str:
    """Before and after, the checkpoint, the metrics; for the embedded task also the next commands to try."""
    lines = [*_head(result), *_before_and_after(result, ("val-core/",), ".3f")]
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
    """The same for a recipe that learns from files; `shown` says how the names of its validation results begin."""
    lines = [*_head(result), *_before_and_after(result, shown, ".4f")]
    lines.append(f"  checkpoint (a Hugging Face folder): {result.checkpoint / 'actor' if result.checkpoint else 'none was saved'}")
    lines.append(f"  metrics of every step: {result.metrics_file}")
    lines.append(f"  a report to open in a browser: lockstep report {shlex.quote(str(result.metrics_file.parent))}")
    return "\n".join(lines + _alarms(result))


def _before_and_after(result: FitResult, shown: tuple[str, ...], spec: str) -> list[str]:
    """A line for each result of the last validation, with what was measured before training where that was."""
    after, before = result.last_validation, result.validation_before
    names = shown_numbers(after, shown)
    if not result.steps:
        return [f"  {name}: {with_interval(after, name, spec)}" for name in names]
    return [
        f"  {name}: {f'{with_interval(before, name, spec)} before, ' if name in before else ''}{with_interval(after, name, spec)} after"
        for name in names
    ]


def _head(result: FitResult) -> list[str]:
    lines = [f"\ndone: {result.steps} steps in {result.metrics_file.parent}"]
    share = result.validation_before.get("val-aux/share_of_rows")
    return lines if share is None else [*lines, f"  (before: on {share:.0%} of the rows, trainer.val_before_train_samples)"]


def _alarms(result: FitResult) -> list[str]:
    """What did not go as it should, said again where it is read."""
    where = result.metrics_file.with_name(FILE)
    return [f"  {alarm}" for alarm in result.alarms] + ([f"  more about alarms: {where}"] if result.alarms else [])
