"""The last lines of a run: what it came to, where things are, what to try next."""

from __future__ import annotations

from lockstep.observability.alarms import FILE
from lockstep.trainer.run import FitResult


def summarise(result: FitResult, embedded: bool) -> str:
    """Before and after, the checkpoint, the metrics; for the embedded task also the next commands to try."""
    lines = [f"\ndone: {result.steps} steps"]
    for name, after in result.last_validation.items():
        if name.startswith("val-core/"):
            before = result.first_validation.get(name, float("nan"))
            lines.append(f"  {name}: {before:.3f} before, {after:.3f} after")
    lines.append(f"  checkpoint (a Hugging Face folder): {result.checkpoint / 'actor' if result.checkpoint else 'none was saved'}")
    if result.best_checkpoint is not None:
        lines.append(f"  the best one: {result.best_checkpoint}")
    lines.append(f"  metrics of every step: {result.metrics_file}")
    lines += _alarms(result)
    if embedded:
        lines += [
            "what to try next:",
            "  lockstep ppo algorithm.adv_estimator=grpo                  the same task without a critic",
            "  lockstep ppo trainer.n_gpus_per_node=2                     two processes on Ray",
            "  lockstep ppo data.train_files=train.parquet data.val_files=val.parquet actor_rollout_ref.model.path=MODEL",
            "                                                             your own data and model",
        ]
    return "\n".join(lines)


def summarise_stage(result: FitResult, shown: tuple[str, ...]) -> str:
    """The same for a recipe that learns from files; `shown` says how the names of its validation results begin."""
    lines = [f"\ndone: {result.steps} steps"]
    for name, after in result.last_validation.items():
        if name.startswith(shown):
            before = (
                f"{result.first_validation[name]:.4f} before, " if result.first_validation is not result.last_validation else ""
            )
            lines.append(f"  {name}: {before}{after:.4f} after")
    lines.append(f"  checkpoint (a Hugging Face folder): {result.checkpoint / 'actor' if result.checkpoint else 'none was saved'}")
    lines.append(f"  metrics of every step: {result.metrics_file}")
    return "\n".join(lines + _alarms(result))


def _alarms(result: FitResult) -> list[str]:
    """What did not go as it should, said again where it is read."""
    where = result.metrics_file.with_name(FILE)
    return [f"  {alarm}" for alarm in result.alarms] + ([f"  more about alarms: {where}"] if result.alarms else [])
