"""StageRun: what the recipes that learn from files have in common. A step is a batch of rows and one update.

```text
rows of the files -> prepare -> update (-> evaluate on the validation rows)
```

Rows are read and tokenised one step ahead, beside the update. A recipe is a subclass: it opens its data, and makes readable metrics of
what the workers measured.
"""

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from lockstep.algorithms.aggregation import Denominators
from lockstep.algorithms.rows import Rows
from lockstep.config.check import tokens_in_words
from lockstep.config.follow import for_rows
from lockstep.config.load import fitted
from lockstep.config.sampling import SamplingConfig
from lockstep.config.stage import STAGE_KEYS, StageConfig
from lockstep.data.row_files import describe_data, warn_of_other_data
from lockstep.data.schedule import PromptSchedule, batch_at
from lockstep.models.weight_files import count_parameters
from lockstep.observability.display import View, make_display
from lockstep.observability.metrics import Metric, merge_metrics, values
from lockstep.observability.spans import expect
from lockstep.observability.trackers import check_trackers
from lockstep.planner import Load
from lockstep.protocol import DataProto
from lockstep.single_controller.base import ClassWithInitArgs, WorkerGroup
from lockstep.trainer.role import Role
from lockstep.trainer.run.launch import TRAINED, ResourcePoolManager, RoleSpec, Workers
from lockstep.trainer.run.loop import FIRST, Run
from lockstep.utils.device import resolve_device

MODEL = "actor"
"""The model's folder in a checkpoint, as in PPO's."""


Measured = tuple[DataProto, list[dict[str, Metric]]]
"""A batch, and what each rank measured on its share of it."""


class Examples(Protocol):
    """Training rows in files."""

    def __len__(self) -> int: ...

    def batch(self, positions: Sequence[int]) -> DataProto:
        """The rows at these positions, as tokens."""
        ...


class StageRun(Run):
    """Trains one model on the rows of `train_data`, data.train_batch_size of them per step, and evaluates it on `val_data`.

    `make_loss` makes the loss (workers/losses.py) in a worker: it is pickled. The constructor checks what can be checked without a model,
    `init_workers` starts the processes and loads it, `fit` trains.
    """

    config: StageConfig
    view: View
    """What the display shows of a step."""
    role: Enum = Role.Actor
    """The role of the model that learns."""
    more_roles: tuple[Enum, ...] = ()
    """Other roles, in the same processes."""
    head = "language_model"
    """What the model has on top; see models/load.py."""
    rows_per_example = 1
    """Rows of a batch that one of the files becomes."""

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        worker_cls: type,
        group_cls: type[WorkerGroup],
        make_loss: Callable[[], Any],
        train_data: Examples,
        val_data: Examples | None,
    ) -> None:
        device = resolve_device(config.trainer.device)
        config = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, device=device))
        check_trackers(config.trainer.logger)
        config = fitted(config, for_rows(config, len(train_data)), f"the data has {len(train_data)} rows")
        section, data = config.trainer, config.data
        seed = section.seed if data.seed is None else data.seed
        self.schedule = PromptSchedule(len(train_data), data.train_batch_size, data.shuffle, seed)
        total_steps = section.total_training_steps or self.schedule.steps_per_epoch * section.total_epochs
        super().__init__(config, total_steps, make_display(view=self.view), has_validation=val_data is not None)
        self.tokenizer, self.train_data, self.val_data = tokenizer, train_data, val_data
        self.data_description = describe_data(data, len(train_data))
        self.rows_per_step, self.longest = data.train_batch_size, data.max_length
        self._worker_cls, self._make_loss = worker_cls, make_loss
        self._ahead: tuple[int, Future[DataProto]] | None = None
        """The number of a batch that was read ahead, and its rows."""
        counts = {"global_pool": [section.n_gpus_per_node] * section.nnodes}
        pools = dict.fromkeys((self.role, *self.more_roles), "global_pool")
        self.workers = Workers(section, ResourcePoolManager(counts, pools), group_cls, self.display.message)

    def init_workers(self) -> None:
        """Take the run's folder, check the resources, start a process per device, load the model. No process is left when this fails."""
        self.open_folder()
        self.workers.recall(self._from)
        self.workers.start(self._specs())
        self.model_wg: Any = self.workers.by_role[self.role]

    def close(self) -> None:
        """End the worker processes, and let other runs have the folder."""
        self.close_folder()
        self.workers.close()

    # -- what a recipe gives -----------------------------------------------------------------------------------------------

    def _sampling(self) -> SamplingConfig | None:
        """How responses are drawn, where the recipe has any."""
        return None

    def _prepare(self, batch: DataProto) -> DataProto:
        """What an update needs of a batch beside its rows."""
        return batch

    def _train_batch(self) -> DataProto:
        """The rows of this step's update."""
        number, ahead = batch_at(self.global_steps, self.left_out), self._ahead
        self._ahead = None
        return self._prepare(ahead[1].result() if ahead is not None and ahead[0] == number else self._read(number))

    @abstractmethod
    def _metrics(self, batch: DataProto, measured: dict[str, float]) -> dict[str, float]:
        """Metrics of a batch, from what the workers measured on it, named as they are in `measured`."""

    # -- what is the same for all ------------------------------------------------------------------------------------------

    def _read(self, number: int) -> DataProto:
        """The rows of the files that are batch `number`, which is all that decides them."""
        return self.train_data.batch(self.schedule.batch(number))

    @contextmanager
    def _reading_ahead(self) -> Iterator[None]:
        """Inside, a thread reads the next step's rows; it is done when this ends, so that nothing else uses the tokenizer meanwhile. What
        it raises is raised when the rows are asked for."""
        if self.global_steps + 1 >= self.total_steps:
            yield
            return
        number = batch_at(self.global_steps + 1, self.left_out)
        with ThreadPoolExecutor(1, "rows") as thread:
            self._ahead = number, thread.submit(self._read, number)
            yield

    def _step(self) -> dict[str, float]:
        """One batch, one update."""
        timer = self.timer
        with timer.stage("step"):
            with timer.stage("data"):
                batch = self._train_batch()
            with timer.stage("update"), self._reading_ahead():
                measured = merge_metrics(self.model_wg.update_actor(batch, denominators=denominators_of(batch)))
        tokens, seconds = int(batch.token_counts().sum()), timer.seconds["step"]
        found = values(measured)
        skipped = found.pop("train/skipped_updates", None)
        return {
            **(self._metrics(batch, found) if not skipped else {}),
            **({} if skipped is None else {"train/skipped_updates": skipped}),
            **{f"timing_s/{name}": value for name, value in timer.seconds.items()},
            "perf/total_num_tokens": tokens,
            "perf/throughput": tokens / (seconds * self.workers.manager.get_n_gpus()),
            "training/global_step": self.global_steps + 1,
            "training/epoch": self.schedule.epoch(batch_at(self.global_steps, self.left_out)),
        }

    def _validate(self) -> dict[str, float]:
        """The same metrics of all validation rows, under val/."""
        assert self.val_data is not None
        count = len(self.val_data)
        metrics = self._validate_on(self._validated_rows("val_files", count, 1, self.rows_per_step))
        first = self._first_rows("val_files", count)
        if first is not None:
            metrics |= {f"{FIRST}{name}": value for name, value in self._validate_on(first).items()}
        return metrics

    def _validate_on(self, positions: Sequence[int]) -> dict[str, float]:
        """The metrics of these validation rows, under val/."""
        return self._val_metrics(self._measure(positions))

    def _measure(self, positions: Sequence[int]) -> list[Measured]:
        """What the workers measure on these validation rows, a batch at a time."""
        assert self.val_data is not None
        found, seen = [], expect(len(positions), "rows")
        for start, end in whole_batches(len(positions), self.rows_per_step):
            batch = self._prepare(self.val_data.batch(positions[start:end]))
            found.append((batch, self._evaluate(batch)))
            seen.done = end
            seen.tokens += int(batch.token_counts().sum())
        return found

    def _val_metrics(self, measured: Sequence[Measured]) -> dict[str, float]:
        found = values(merge_metrics([metrics for _, ranks in measured for metrics in ranks]))
        found = self._metrics(DataProto.concat([batch for batch, _ in measured]), found)
        return {f"val/{name.removeprefix('train/')}": value for name, value in found.items() if name.startswith("train/")}

    def _evaluate(self, batch: DataProto) -> list[dict[str, Metric]]:
        found: list[dict[str, Metric]] = self.model_wg.evaluate(batch, denominators=denominators_of(batch))
        return found

    def training_data(self) -> tuple[Any, PromptSchedule]:
        """See Run."""
        return getattr(self.train_data, "rows", self.train_data), self.schedule

    def _state(self) -> dict[str, Any]:
        return {"numbers": self.workers.numbers, **self.data_description}

    def _save(self, folder: Path) -> list[Path]:
        reports = self.model_wg.begin_checkpoint(str(folder / MODEL), self.section.save_in_background)
        self.tokenizer.save_pretrained(folder / MODEL)
        return [Path(report) for report in reports]

    def _finish_save(self) -> list[str]:
        return [error for error in self.model_wg.finish_checkpoint() if error is not None]

    def _restart(self) -> None:
        self.workers.close()
        self.init_workers()

    def _load(self, folder: Path, state: dict[str, Any]) -> None:
        warn_of_other_data(state, self.data_description, self.display.message)
        self.model_wg.load_checkpoint(str(folder / MODEL))

    def _describe(self) -> str:
        section, engine, batch = self.section, self.config.engine, self.rows_per_step
        one, several = {"cuda": ("GPU", "GPUs"), "cpu": ("CPU process", "CPU processes")}[section.device]
        processes, rows = section.n_gpus_per_node * section.nnodes, engine.micro_batch_size_per_gpu
        cut = f"{rows} rows" if rows else tokens_in_words(engine.max_token_len_per_gpu)
        return "\n".join(
            (
                f"{len(self.train_data)} training rows, {batch} a step: {self.schedule.steps_per_epoch} steps an epoch, "
                f"{self.total_steps} steps in all, each one update",
                f"on {processes} {several if processes > 1 else one}, at most {cut} at once on each (this bounds memory, not the result)",
                f"the run's folder: {section.run_dir}",
            )
        )

    def _specs(self) -> dict[Enum, RoleSpec]:
        """What the workers of each role are."""
        return {self.role: self._spec()}

    def _spec(self) -> RoleSpec:
        config = self.config
        worker = ClassWithInitArgs(
            self._worker_cls,
            config=config.policy(self._sampling()),
            role=str(self.role),
            seed=config.trainer.seed,
            pad_token_id=self.tokenizer.pad_token_id,
            total_updates=self.total_steps,
            make_loss=self._make_loss,
            keys=STAGE_KEYS,
            head=self.head,
        )
        return RoleSpec(worker, self._load_of, (count_parameters(str(config.model.path)) or 0) * TRAINED)

    def _load_of(self, ranks: int) -> Load:
        rows = -(-self.rows_per_step // ranks) * self.rows_per_example
        return Load(longest=self.longest, step_rows=rows, update_rows=rows, unit=self.rows_per_example)


def whole_batches(count: int, size: int) -> list[tuple[int, int]]:
    """Where batches of `size` of so many rows begin and end. The last one has what is left too: alone it may be too few rows for a loss
    that compares them."""
    starts = range(0, max(1, count - size + 1), size)
    return list(zip(starts, [*starts[1:], count], strict=True))


def denominators_of(batch: DataProto) -> Denominators:
    """Those of a whole mini-batch."""
    mask = batch.ragged("response_mask")
    return Denominators.of(mask.values, Rows(mask.lengths))
