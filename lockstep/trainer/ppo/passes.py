"""Which passes and updates a step makes, and why. `Drift` measures how far the sampler's log-probs are from the trainer's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from torch import Tensor

from lockstep.config.ppo import PPOConfig
from lockstep.trainer.ppo.algorithm import Estimation, reads_old_log_probs


class Source(Enum):
    """Where the old log-probs of a batch come from."""

    SAMPLER = "the sampler's are used as they are"
    UPDATE = "the batch's one update computes them in its own forward pass"
    PASS = "the trainer computes them in a pass of their own"


@dataclass(frozen=True)
class Passes:
    """The passes and updates of one step."""

    old_log_probs: Source
    learns_values: bool
    """The critic's one update of the batch computes the values, in its own forward pass. Otherwise a pass does, before the advantages."""
    critic_updates: Sequence[Tensor]
    """Row numbers of each optimizer step of the critic, after the advantages."""
    actor_updates: Sequence[Tensor]
    """Row numbers of each optimizer step of the actor."""
    trains_actor: bool
    """False in the steps of trainer.critic_warmup."""
    is_recorded: bool
    """The batch is written for `lockstep compare`, with old log-probs and values from separate passes."""


class Drift:
    """Remembers the last difference between sampler and trainer, and reports when it exceeds rollout.exactness_bound."""

    def __init__(self, config: PPOConfig, say: Callable[[str], None]) -> None:
        self._say = say
        self._critic_warmup = config.trainer.critic_warmup
        self._bound = config.actor_rollout_ref.rollout.exactness_bound
        self._bypass = config.algorithm.rollout_correction.bypass_mode
        self._read_before_update = reads_old_log_probs(config.algorithm, config.actor_rollout_ref.actor)
        # Near the teacher their difference is all there is: rounding of the sampler would be learned, at the optimizer's full step.
        self._compares = "ref_log_prob" in Estimation.of(config.algorithm).estimator.columns
        self._source = Source.PASS
        self._update_computes = False
        self.largest: float | None = None
        """Largest |log-prob| difference between sampler and trainer at the last measurement; None before the first."""

    def source(self, step: int, num_updates: int, is_recorded: bool) -> Source:
        """Decide where the old log-probs of a step come from.

        From the sampler, if bypass_mode is on, or if it was exact when last compared and the estimator does not compare policy and
        reference. Otherwise from the batch's one update, if there is only one and nothing reads old log-probs before it. Otherwise from a
        pass.
        """
        self._update_computes = step > self._critic_warmup and num_updates == 1 and not is_recorded and not self._read_before_update
        is_exact = self.largest is not None and self.largest < self._bound and not self._compares
        if self._bypass or is_exact:
            self._source = Source.SAMPLER
        else:
            self._source = Source.UPDATE if self._update_computes else Source.PASS
        return self._source

    def note(self, difference: float | None) -> None:
        """Remember the measurement of this step's pass, or of its first update if it has no pass (None: the sampler gives no log-probs).
        Tell the user when it is over the bound and was not before."""
        if self._bypass:
            return
        was_over = self.largest is not None and self.largest >= self._bound
        self.largest = difference
        if difference is None or difference < self._bound or was_over:
            return
        if self._source is Source.PASS:
            now = "recomputed"
        elif self._update_computes:
            now = "those of the batch's one update itself"
        else:
            now = "recomputed from the next step on"
        self._say(
            f"the sampler's log-probs are {difference:.2g} from the trainer's, over rollout.exactness_bound={self._bound:g}: "
            f"old log-probs are {now}"
        )
