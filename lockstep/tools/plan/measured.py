"""A run that was made beside the prediction for it: peaks of memory and seconds of each stage."""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from lockstep.config.load import load_config
from lockstep.config.ppo import PPOConfig
from lockstep.errors import DataError
from lockstep.planner import Device, Lengths, Prediction, find_device, predict
from lockstep.trainer.ppo.passes import Drift, Source

_PEAK = "perf/max_memory_allocated_gb/"
_TIME = "timing_s/"


def predicted(config: PPOConfig, device: Device, lengths: Lengths) -> Prediction:
    """The prediction for this configuration, with a pass for old log-probs where the trainer would make one."""
    drift = Drift(config, lambda text: None)
    if config.actor_rollout_ref.actor.engine.dtype == "float32":
        drift.largest = 0.0  # the sampler is exact
    updates = config.data.train_batch_size // config.actor_mini_batch_prompts * config.actor_rollout_ref.actor.ppo_epochs
    source = drift.source(config.trainer.critic_warmup + 1, updates, is_recorded=False)
    return predict(config, device, lengths, passes=("old_log_prob",) if source is Source.PASS else ())


def compare_run(folder: str | Path, gpu: str | None = None) -> str:
    """A table of stages with the predicted and the measured peak and time of the run in `folder`.

    Raises DataError where the folder has no run that trained on a GPU for two steps, ConfigError for a GPU that is not known.
    """
    metrics, config = _read(Path(folder))
    if not any(name.startswith(_PEAK) for name in metrics):
        raise DataError(f"{folder} is a run on a CPU: what lockstep plan predicts is for GPUs")
    found = predicted(config, find_device(gpu or "h200"), lengths_of(metrics))
    lines = [f"{'stage':16}{'GiB predicted':>15}{'measured':>10}{'error':>8}{'s predicted':>14}{'measured':>10}{'error':>8}"]
    for stage, (memory, seconds) in errors(found, metrics).items():
        lines.append(f"{stage:16}{_three(*memory, 15, 10)}{_three(*seconds, 14, 10)}")
    return "\n".join(lines)


def one_line(config: PPOConfig, metrics_file: Path, gpu: str) -> str | None:
    """The prediction beside what a run measured, in a line for its end; None where nothing was measured."""
    try:
        steps = _steps(metrics_file)
        if not steps:
            return None
        metrics = _typical(steps)
        found = predicted(config, find_device(gpu), lengths_of(metrics))
    except Exception as error:  # a prediction that fails must not take the run with it
        return f"  lockstep plan has no prediction for this run: {error}"
    both = errors(found, metrics)
    memory = max((pair for pair, _ in both.values() if None not in pair), key=lambda pair: pair[1] or 0.0, default=None)
    times = [pair for _, pair in both.values() if None not in pair]
    parts = [f"peak memory {memory[0]:.1f} GiB predicted, {memory[1]:.1f} measured ({_error(*memory)})"] if memory else []
    if times:
        total = sum(pair[0] or 0.0 for pair in times), sum(pair[1] or 0.0 for pair in times)
        parts.append(f"a step {total[0]:.1f} s predicted, {total[1]:.1f} measured ({_error(*total)})")
    return f"  lockstep plan: {'; '.join(parts)}" if parts else None


Pair = tuple[float | None, float | None]


def errors(found: Prediction, metrics: Mapping[str, float]) -> dict[str, tuple[Pair, Pair]]:
    """Stage -> (predicted, measured) GiB and seconds; None where one is not there."""
    measured = {name.removeprefix(_PEAK) for name in metrics if name.startswith(_PEAK)}
    stages = [stage for stage in dict.fromkeys([*found.seconds, *found.memory]) if stage in measured or _TIME + stage in metrics]
    return {
        stage: (
            (found.memory[stage].total() / 2**30 if stage in found.memory else None, metrics.get(_PEAK + stage)),
            (found.seconds.get(stage), metrics.get(_TIME + stage)),
        )
        for stage in stages
    }


def lengths_of(metrics: Mapping[str, float]) -> Lengths:
    """The mean lengths that were measured."""
    return Lengths(metrics["prompt_length/mean"], metrics["response_length/mean"])


def _read(folder: Path) -> tuple[dict[str, float], PPOConfig]:
    if not (folder / "metrics.jsonl").is_file():
        raise DataError(f"{folder} is not the folder of a run: it has no metrics.jsonl")
    steps = _steps(folder / "metrics.jsonl")
    if not steps:
        raise DataError(f"{folder} has no step after the first, which compiles and captures and is not compared")
    return _typical(steps), load_config(config_file=folder / "config.yaml")


def _steps(file: Path) -> list[dict[str, float]]:
    """The metrics of the steps after the first."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [row for row in rows if _TIME + "step" in row][1:]


def _typical(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each number over the steps; of peaks the largest."""
    numbers = {name for step in steps for name, value in step.items() if isinstance(value, int | float)}
    values = {name: [step[name] for step in steps if name in step] for name in numbers}
    return {name: max(found) if name.startswith("perf/max_") else statistics.median(found) for name, found in values.items()}


def _error(predicted: float | None, measured: float | None) -> str:
    return f"{predicted / measured - 1:+.0%}" if predicted and measured else "-"


def _three(predicted: float | None, measured: float | None, first: int, second: int) -> str:
    shown = [f"{value:.2f}" if value is not None else "-" for value in (predicted, measured)]
    return f"{shown[0]:>{first}}{shown[1]:>{second}}{_error(predicted, measured):>8}"
