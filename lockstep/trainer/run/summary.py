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
    """A line for each result of the last validation, and one with what was measured on the same rows before training where that was."""
    last, before, after = result.last_validation, result.validation_before, result.validation_after
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


def _head(result: FitResult) -> list[str]:
    return [f"\ndone: {result.steps} steps in {result.metrics_file.parent}"]


def _alarms(result: FitResult) -> list[str]:
    """What did not go as it should, said again where it is read."""
    where = result.metrics_file.with_name(FILE)
    return [f"  {alarm}" for alarm in result.alarms] + ([f"  more about alarms: {where}"] if result.alarms else [])
