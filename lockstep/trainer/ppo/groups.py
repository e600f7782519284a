"""Groups: the scored responses that one step learns from, a group per prompt."""

from collections.abc import Callable

from lockstep.config.algorithm import FilterGroupsConfig
from lockstep.errors import RewardError
from lockstep.observability.metrics import Metric, merge_metrics, values
from lockstep.protocol import DataProto
from lockstep.trainer.ppo.reward_columns import rows_with_signal
from lockstep.trainer.ppo.scored import Scored


class Groups:
    """Collects `wanted` groups of `n` rows for a step.

    One batch of prompts is enough, unless `config` drops groups whose rewards are all the same (DAPO's dynamic sampling). Then batches are
    added until the groups that are left fill the step.
    """

    def __init__(self, config: FilterGroupsConfig, wanted: int, n: int, batches_per_epoch: int) -> None:
        self._config, self._wanted, self._n = config, wanted, n
        self._limit = (config.max_num_gen_batches or batches_per_epoch) if config.enable else 1
        self._num_batches = self._num_groups = self._num_with_signal = 0
        self._batches: list[DataProto] = []
        self._scored: list[Scored] = []
        self._metrics: list[dict[str, Metric]] = []

    @property
    def are_complete(self) -> bool:
        """Whether the step needs no further batch of prompts."""
        return self._num_groups >= self._wanted or self._num_batches >= self._limit

    def add(self, batch: DataProto, scored: Scored, metrics: dict[str, Metric]) -> None:
        """Keep the groups of a batch that the step can use. Its metrics are those of all its rows."""
        self._num_batches += 1
        self._metrics.append(metrics)
        if self._config.enable:
            rows = rows_with_signal(batch, scored, self._config.metric)
            self._num_with_signal += len(rows) // self._n
            rows = rows[: (self._wanted - self._num_groups) * self._n]
            if not len(rows):
                return
            batch, scored = batch.select_idxs(rows), scored.select(rows.tolist())
        self._num_groups += len(batch) // self._n
        self._batches.append(batch)
        self._scored.append(scored)

    def join(self, say: Callable[[str], None]) -> tuple[DataProto, Scored, dict[str, float]]:
        """All that was kept: rows with token_level_scores, what else the judges said of them, and the metrics of all that was generated.

        Raises RewardError when nothing was kept; tells the user when it is less than was wanted.
        """
        metrics = values(merge_metrics(self._metrics))
        if not self._config.enable:
            return self._batches[0], self._scored[0], metrics
        if not self._batches:
            raise RewardError(
                f"{self._num_batches} batches of prompts gave no group whose responses differ in {self._config.metric!r}, so there is "
                "nothing to learn from: the task is too hard or too easy for this model, or its reward is constant (lockstep rewards "
                f"check); algorithm.filter_groups.max_num_gen_batches={self._config.max_num_gen_batches} limits the search"
            )
        if self._num_groups < self._wanted:
            say(
                f"{self._num_groups} of {self._wanted} groups have a signal after {self._num_batches} batches of prompts; the step goes "
                "on with these"
            )
        share = self._num_with_signal / (self._num_batches * self._wanted)
        metrics |= {"training/num_gen_batches": self._num_batches, "training/groups_with_signal": share}
        return DataProto.concat(self._batches), Scored.concat(self._scored), metrics
