"""What a step calls: groups of workers by role, the rollout, reward functions. Whatever has these methods will do."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from lockstep.algorithms.aggregation import Denominators
from lockstep.config.sampling import SamplingParams
from lockstep.observability.metrics import Metric
from lockstep.protocol import DataProto

RankMetrics = Sequence[dict[str, Metric]]
"""The metrics of each rank."""


class Trained(Protocol):
    """A group of workers whose model is trained and saved. Every method answers with one entry per rank."""

    world_size: int

    def begin_checkpoint(self, local_path: str, in_background: bool, /) -> list[str]:
        """Write the model to a folder as it is now; return the files that will report when the rest is written."""

    def finish_checkpoint(self) -> list[str | None]:
        """Wait until all is written; return what went wrong."""

    def load_checkpoint(self, local_path: str, /) -> Any:
        """Read the model from a folder of `begin_checkpoint`."""


class Actor(Trained, Protocol):
    """The group of the policy."""

    def compute_log_prob(self, data: DataProto, /) -> DataProto:
        """Read prompts, responses; return old_log_probs, entropys."""

    def update_actor(self, mini_batch: DataProto, /, *, denominators: Denominators) -> RankMetrics:
        """Make one optimizer step."""

    def export_weights(self) -> list[list[tuple[str, Tensor]] | None]:
        """Return the whole weights on the CPU from rank 0, None from the others."""

    def weights_checksum(self) -> list[list[tuple[str, int]]]:
        """Return name and checksum of every weight."""


class Critic(Trained, Protocol):
    """The group of the value model."""

    def compute_values(self, data: DataProto, /) -> DataProto:
        """Read prompts, responses; return values."""

    def update_critic(self, mini_batch: DataProto, /, *, denominators: Denominators) -> RankMetrics:
        """Make one optimizer step."""

    def learn_values(
        self, mini_batch: DataProto, /, *, denominators: Denominators, discounts: tuple[float, float] | None
    ) -> DataProto:
        """Make one optimizer step on returns of its own values; return values, and the ranks' metrics in meta_info."""


class Reference(Protocol):
    """The group of the frozen reference policy."""

    def compute_ref_log_prob(self, data: DataProto, /) -> DataProto:
        """Read prompts, responses; return ref_log_prob."""


class RewardModel(Protocol):
    """The group of the reward model."""

    def compute_rm_score(self, data: DataProto, /) -> DataProto:
        """Read responses, raw_prompt, response_text; return rm_scores."""


class Exchange(Protocol):
    """The way of weights from the actor to a rollout in separate workers."""

    def sync(self) -> None:
        """Send the actor's present weights."""


class Rollout(Protocol):
    """What writes responses."""

    @property
    def reads(self) -> Sequence[str] | None:
        """The object columns that are sent with prompts; None for all."""

    def receiving(self, handle: Callable[[Any], None], /) -> AbstractContextManager[Any]:
        """Inside, the yielded object can be given to `generate_sequences` as `on_finished`; its messages reach `handle`."""

    def generate_sequences(self, prompts: DataProto, *, sampling: SamplingParams, step: int, on_finished: Any = None) -> DataProto:
        """Read prompts, index, sample; return responses, rollout_log_probs, response_mask, finish_reason."""

    def record(self, responses: DataProto, prompts: DataProto, step: int, /) -> None:
        """Keep on disk what belongs to responses that a journal had, if anything is kept of responses."""


class RolloutWorkers:
    """A group of rollout workers as a `Rollout`."""

    reads: Sequence[str] | None = ("index", "sample")

    def __init__(self, group: Any) -> None:
        self._group = group

    def receiving(self, handle: Callable[[Any], None]) -> AbstractContextManager[Any]:
        """See Rollout."""
        context: AbstractContextManager[Any] = self._group.receiving(handle)
        return context

    def generate_sequences(self, prompts: DataProto, *, sampling: SamplingParams, step: int, on_finished: Any = None) -> DataProto:
        """See Rollout."""
        found: DataProto = self._group.generate_sequences(prompts, sampling=sampling, step=step, on_finished=on_finished)
        return found

    def record(self, responses: DataProto, prompts: DataProto, step: int) -> None:
        """Nothing is kept of plain responses."""


class Scoring(Protocol):
    """The scoring of a batch whose responses come one by one."""

    def add(self, row: int, response_ids: Tensor, /) -> None:
        """Start to score a row. Called on another thread."""


RewardFunction = Callable[..., Any]
"""Scores a batch; `rewards.score` says what it gets and returns. It may have more methods, as RewardManager does: `begin` (scores responses
while others are generated), `wants_model` (the rows for the reward model), `check` (before training: has every row a judge?), `close`."""
