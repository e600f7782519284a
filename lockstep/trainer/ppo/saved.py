"""SavedPPO: what a run of PPO saves, goes on from, and begins again with."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.algorithms.kl import KLController
from lockstep.config.ppo import PPOConfig
from lockstep.data.row_files import warn_of_other_data
from lockstep.trainer.ppo import stages
from lockstep.trainer.ppo.drift import Drift
from lockstep.trainer.ppo.prompts import Prompts
from lockstep.trainer.run.launch import Workers
from lockstep.trainer.run.loop import Run

if TYPE_CHECKING:
    from lockstep.trainer.ppo.journal import Journal


class SavedPPO(Run):
    """What `Run` asks of a recipe around its steps, for RayPPOTrainer."""

    config: PPOConfig
    tokenizer: Any
    describe_data: dict[str, Any]
    """What a checkpoint remembers of the training data (data/row_files.py)."""
    prompts: Prompts
    drift: Drift
    kl_control: KLController
    workers: Workers
    actor_wg: Any
    critic_wg: Any
    weight_exchange: Any
    journal: Journal
    """Only with trainer.max_restarts."""
    _initial: dict[str, Any]
    """`_state` before the first step."""

    @abstractmethod
    def init_workers(self) -> None:
        """Start the workers and load their models."""

    def _position(self) -> int:
        return self.prompts.num_taken

    def _state(self) -> dict[str, Any]:
        return {
            "num_prompt_batches": self.prompts.num_taken,
            "kl_control": self.kl_control.state_dict(),
            "sampler_drift": self.drift.largest,
            "numbers": self.workers.numbers,
            **self.describe_data,
        }

    def _save(self, folder: Path) -> list[Path]:
        in_background = self.config.trainer.save_in_background
        reports = self.actor_wg.begin_checkpoint(str(folder / "actor"), in_background)
        if self.critic_wg is not None:
            reports += self.critic_wg.begin_checkpoint(str(folder / "critic"), in_background)
        self.tokenizer.save_pretrained(folder / "actor")
        return [Path(report) for report in reports]

    def _finish_save(self) -> list[str]:
        groups = [group for group in (self.actor_wg, self.critic_wg) if group is not None]
        return [error for group in groups for error in group.finish_checkpoint() if error is not None]

    def _load(self, folder: Path, state: dict[str, Any]) -> None:
        warn_of_other_data(state, self.describe_data, self.display.message)
        self.actor_wg.load_checkpoint(str(folder / "actor"))
        if self.critic_wg is not None:
            self.critic_wg.load_checkpoint(str(folder / "critic"))
        self._restore(state)
        stages.sync_weights(self.weight_exchange)

    def _restore(self, state: dict[str, Any]) -> None:
        self.prompts.num_taken, self.drift.largest = state["num_prompt_batches"], state["sampler_drift"]
        self.kl_control.load_state_dict(state["kl_control"])

    def _after_step(self, metrics: dict[str, float], *around: Any) -> None:
        super()._after_step(metrics, *around)
        if self.config.trainer.max_restarts:
            self.journal.clear(self.prompts.number)

    def _restart(self) -> None:
        self.workers.close()
        self._restore(self._initial)
        self.init_workers()
