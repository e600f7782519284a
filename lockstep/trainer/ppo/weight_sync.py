"""Weights from the actor's workers to a rollout in workers of its own: the driver's side. Tensors do not pass through the driver.

```text
offer -> receive                            ipc, disk: the weights lie ready before anybody reads
offer -> send + receive at the same time    broadcast
then: every receiver's manifest equals the sender's, or the run ends
```
"""

from typing import Any

from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.weight_sync import choose_weight_sync
from lockstep.errors import WeightSyncError, WorkerError


class WeightExchange:
    """Keeps the rollout's workers (`rollout`) up to date with the actor's (`actor`).

    `same_process`: a worker of one is in the process of a worker of the other. Raises ConfigError when `config.weight_sync` cannot work.
    """

    def __init__(self, actor: Any, rollout: Any, config: RolloutConfig, *, same_process: bool, cuda: bool) -> None:
        self._actor, self._rollout = actor, rollout
        machines = {*actor.machine(), *rollout.machine()}
        self.method = choose_weight_sync(
            config.weight_sync, config.name, hybrid=False, same_process=same_process, same_machine=len(machines) == 1, cuda=cuda
        )
        self._version = 0

    def sync(self) -> None:
        """Send the actor's present weights. Raises WeightSyncError unless every worker of the rollout has exactly them."""
        self._version += 1
        offer = _only(self._actor.offer_weights(self.method, self._version, self._rollout.world_size))
        try:
            receiving, sent = self._rollout.receive_weights(offer), offer.manifest
            if sent is None:
                try:
                    sent = _only(self._actor.send_weights().get())
                except WorkerError:
                    receiving.get()  # if a receiver failed first, its error says more
                    raise
            received = receiving.get()
        finally:
            self._actor.withdraw_weights()
        for rank, manifest in enumerate(received):
            if manifest != sent:
                different = sorted(name for name in {*sent, *manifest} if sent.get(name) != manifest.get(name))
                raise WeightSyncError(
                    f"rank {rank} of the rollout did not get the weights of version {self._version}: {len(different)} of {len(sent)} "
                    f"tensors differ, first {different[0]}"
                )


def _only(answers: list[Any]) -> Any:
    """Rank 0's answer; the others answer None."""
    (answer,) = (answer for answer in answers if answer is not None)
    return answer
