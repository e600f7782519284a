"""`trainer.*`: how long, where, how often to save and validate; `ray_kwargs.*`: how to reach Ray."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.config.check import at_home, at_least, in_range, one_of
from lockstep.errors import ConfigError


@dataclass
class RunConfig:
    """The run: how long, where, how often to save and validate."""

    total_epochs: int = 1
    """Passes over the training data."""
    total_training_steps: int | None = None
    """Steps in all; null means total_epochs passes."""
    seed: int = 0
    """Seed of everything random in the run."""
    device: str = "auto"
    """cuda, cpu, or auto (cuda where there is one)."""
    n_gpus_per_node: int = 1
    """Devices a node; on a CPU machine: processes a node."""
    nnodes: int = 1
    """Nodes."""
    worker_group: str = "auto"
    """local (everything in this process), ray (one process a device), or auto (local where one device is enough)."""
    val_before_train: bool = True
    """Validate before the first step."""
    val_before_train_samples: int | None = None
    """Samples of that validation, spread over the data; null: as many as a step has, so that it takes no longer. -1 takes all."""
    val_only: bool = False
    """Validate and stop."""
    test_freq: int = -1
    """Validate every so many steps, and after the last; -1 after the last only, 0 never."""
    save_freq: int = -1
    """Save a checkpoint every so many steps, and after the last; -1 after the last only, 0 never."""
    max_ckpt_to_keep: int | None = None
    """Delete the oldest checkpoints beyond this many; null keeps all. The best one (best_metric) stays."""
    best_metric: str | None = None
    """Keep the checkpoint that is best by this metric, such as val-core/TAG/reward/mean, beside the newest max_ckpt_to_keep."""
    best_is_lowest: bool = False
    """The best is the lowest value of best_metric instead of the highest."""
    save_in_background: bool = True
    """Copy what is saved to host memory and write it while the run goes on; false writes it before the run goes on."""
    on_save_failure: str = "stop"
    """What a save that fails (a full disk) does to the run: stop, or continue without that checkpoint."""
    stop_deadline_s: float = 300.0
    """Longest time from SIGTERM or SIGINT to the checkpoint of the step that is being done; then the run ends without it."""
    resume_mode: str = "auto"
    """auto (continue from the newest whole checkpoint in the run's folder), disable (begin in a folder without any), or resume_path."""
    resume_from_path: str | None = None
    """The global_step_N folder to continue from, with resume_mode=resume_path."""
    allow_changes: list[str] = field(default_factory=list)
    """Keys in which a resumed run may differ from its checkpoint, such as [actor_rollout_ref.actor.optim.lr]."""
    project_name: str = "lockstep"
    """Groups runs in the trackers, and names a folder."""
    experiment_name: str | None = None
    """Names the run, and its folder; null makes a name of algorithm, model and a fingerprint of the settings that decide the result."""
    default_local_dir: str | None = None
    """The run's folder; null means checkpoints/{project_name}/{experiment_name}."""
    logger: list[str] = field(default_factory=lambda: ["console"])
    """Where metrics and samples go besides the files in the run's folder: console, tensorboard, wandb, mlflow, swanlab, trackio, or
    file.py:name of your own; one, or a list such as [console,wandb]."""
    worker_timeout_s: float = 3600.0
    """Longest time one call to the workers may take before the run stops."""
    start_timeout_s: float = 600.0
    """Longest time the workers may take to start."""
    max_restarts: int = 0
    """How often workers are started again, from the newest checkpoint, when one of them dies, hangs or runs out of memory."""
    on_nonfinite: str = "stop"
    """When a loss, gradient or log-prob is not finite: stop, skip (leave the update out; three steps in a row without one stop the run), or
    rollback (go on from the newest checkpoint without that batch; it is one of the max_restarts)."""

    on_alarm: str = "warn"
    """When a run does not learn as it should (docs/observability.md): warn, or stop with a checkpoint and exit status 3."""

    def __post_init__(self) -> None:
        at_home(self, "resume_from_path", "default_local_dir")
        one_of("trainer.on_alarm", self.on_alarm, ("warn", "stop"))
        one_of("trainer.device", self.device, ("auto", "cpu", "cuda"))
        one_of("trainer.worker_group", self.worker_group, ("auto", "local", "ray"))
        one_of("trainer.resume_mode", self.resume_mode, ("auto", "disable", "resume_path"))
        one_of("trainer.on_save_failure", self.on_save_failure, ("stop", "continue"))
        if self.resume_mode == "resume_path" and not self.resume_from_path:
            raise ConfigError(
                "trainer.resume_mode=resume_path needs trainer.resume_from_path: the global_step_N folder",
                key="trainer.resume_mode",
            )
        if self.resume_mode != "resume_path" and self.resume_from_path:
            raise ConfigError(
                f"trainer.resume_from_path is set, but trainer.resume_mode={self.resume_mode} does not read it; "
                "set trainer.resume_mode=resume_path",
                key="trainer.resume_from_path",
            )
        at_least(self, "trainer", 1, "total_epochs", "total_training_steps", "n_gpus_per_node", "nnodes", "max_ckpt_to_keep")
        in_range(self, "trainer", -(2**63), 2**63 - 1, "seed")
        at_least(self, "trainer", 0.1, "stop_deadline_s")
        at_least(self, "trainer", 0, "max_restarts")
        one_of("trainer.on_nonfinite", self.on_nonfinite, ("stop", "skip", "rollback"))
        if self.on_nonfinite == "rollback" and not self.max_restarts:
            raise ConfigError(
                "trainer.on_nonfinite=rollback needs trainer.max_restarts: how often it may be done", key="trainer.on_nonfinite"
            )
        at_least(self, "trainer", -1, "test_freq", "save_freq", "val_before_train_samples")
        if self.val_before_train_samples == 0:
            raise ConfigError(
                "trainer.val_before_train_samples=0 validates nothing; set trainer.val_before_train=false",
                key="trainer.val_before_train_samples",
            )

    @property
    def run_dir(self) -> Path:
        """The run's folder."""
        return Path(self.default_local_dir or f"checkpoints/{self.project_name}/{self.experiment_name}")

    def check_validated(self, has_rows: bool) -> None:
        """Raise ConfigError for a setting that needs validations, where there are none: without rows, or never after a step."""
        asked = {
            "val_only=true": self.val_only,
            f"test_freq={self.test_freq}": self.test_freq > 0,
            f"val_before_train_samples={self.val_before_train_samples}": self.val_before_train_samples is not None,
        }
        for setting, is_set in asked.items():
            if is_set and not has_rows:
                raise ConfigError(
                    f"trainer.{setting}, but there is nothing to validate on; set data.val_files, or leave it out",
                    key=f"trainer.{setting.partition('=')[0]}",
                )
        needs = str(self.best_metric).startswith(("val/", "val-"))
        if needs and not (has_rows and self.test_freq):
            lacks = "trainer.test_freq other than 0" if has_rows else "data.val_files"
            raise ConfigError(
                f"trainer.best_metric={self.best_metric} is of a validation, and this run has none; set {lacks}",
                key="trainer.best_metric",
            )

    def first_validation_rows(self, num_rows: int, samples_per_row: int, samples_per_step: int) -> list[int]:
        """The rows of `num_rows` that are validated before the first step: all, or some that are spread evenly."""
        limit = samples_per_step if self.val_before_train_samples is None else self.val_before_train_samples
        count = num_rows if limit < 0 else min(num_rows, max(1, limit // samples_per_row))
        return spread_rows(count, num_rows)


def spread_rows(count: int, num_rows: int) -> list[int]:
    """`count` of `num_rows` rows, spread evenly."""
    return [i * num_rows // count for i in range(count)]


@dataclass
class TrainerConfig(RunConfig):
    """The run: how long, where, how often to save and validate, what is logged."""

    critic_warmup: int = 0
    """Steps in which only the critic learns."""
    rollout_data_dir: str | None = None
    """Write every training sample there, a JSONL file a step."""
    validation_data_dir: str | None = None
    """Write every validation sample there, a JSONL file a validation."""
    record_batch_dir: str | None = None
    """Save whole batches there for `lockstep compare`: every column, the configuration, the policy that wrote them."""
    record_batch_freq: int = -1
    """Save the batch of every so many steps, and of the last; -1 of the last only, 0 never."""
    report_rows: int = 64
    """Samples of each step and validation that are kept, with their numbers by token, for `lockstep report`; -1 all, 0 none."""
    report_ratio: bool = False
    """Keep also how much the update changed each kept token's probability: one more forward pass over the kept samples."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_home(self, "rollout_data_dir", "validation_data_dir", "record_batch_dir")
        at_least(self, "trainer", -1, "record_batch_freq", "report_rows")

    def check_validated(self, has_rows: bool) -> None:
        """As every run, and for the folder of validation samples."""
        super().check_validated(has_rows)
        if self.validation_data_dir is not None and not has_rows:
            raise ConfigError(
                "trainer.validation_data_dir is set, but there is nothing to validate on; set data.val_files, or leave it out",
                key="trainer.validation_data_dir",
            )


@dataclass
class RayConfig:
    """How Ray is reached."""

    ray_init: dict[str, Any] = field(default_factory=dict)
    """Arguments of ray.init, for example address of a running cluster, or num_cpus."""
