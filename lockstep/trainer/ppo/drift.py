"""Drift: how far the sampler's log-probs are from the trainer's, and so where a step's old log-probs come from."""

from collections.abc import Callable
from enum import Enum

from lockstep.config.ppo import PPOConfig
from lockstep.trainer.ppo.resolved import Estimation, reads_old_log_probs


class Source(Enum):
    """Where the old log-probs of a batch come from."""

    SAMPLER = "the sampler's are used as they are"
    UPDATE = "the batch's one update computes them in its own forward pass"
    PASS = "the trainer computes them in a pass of their own"


class Drift:
    """Remembers the last measurement, and says when the sampler has left rollout.exactness_bound."""

    def __init__(self, config: PPOConfig, say: Callable[[str], None]) -> None:
        self._say, self._critic_warmup = say, config.trainer.critic_warmup
        self._bound = config.actor_rollout_ref.rollout.exactness_bound
        self._bypass = config.algorithm.rollout_correction.bypass_mode
        self._read_before_update = reads_old_log_probs(config.algorithm, config.actor_rollout_ref.actor)
        # Near the teacher their difference is all there is: rounding of the sampler would be learned, at the optimizer's full step.
        self._compares = "ref_log_prob" in Estimation.of(config.algorithm).estimator.columns
        self._update_computes = False
        self.largest: float | None = None
        """Largest |log-prob| difference between sampler and trainer at the last measurement; None before the first."""

    def source(self, step: int, num_updates: int, is_recorded: bool) -> Source:
        """The sampler, where bypass_mode asks for it, or where it was exact when last compared and the estimator does not compare policy
        and reference. Else the batch's one update, where there is one and nothing before it reads old log-probs. Else a pass."""
        self._update_computes = step > self._critic_warmup and num_updates == 1 and not is_recorded and not self._read_before_update
        if self._bypass or (self.largest is not None and self.largest < self._bound and not self._compares):
            return Source.SAMPLER
        return Source.UPDATE if self._update_computes else Source.PASS

    def heed(self, source: Source, difference: float | None) -> None:
        """Remember a measurement (None: the sampler gives no log-probs), and tell when it is over the bound and was not before.

        Where `source` is no pass, the first update of the step has measured what the pass would have.
        """
        if self._bypass:
            return
        was_over = self.largest is not None and self.largest >= self._bound
        self.largest = difference
        if difference is None or difference < self._bound or was_over:
            return
        later = "those of the batch's one update itself" if self._update_computes else "recomputed from the next step on"
        self._say(
            f"the sampler's log-probs are {difference:.2g} from the trainer's, over rollout.exactness_bound={self._bound:g}: "
            f"old log-probs are {'recomputed' if source is Source.PASS else later}"
        )
