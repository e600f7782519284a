"""The part of a rollout worker that plays episodes."""

from collections.abc import Callable
from typing import Any

from lockstep.config.sampling import SamplingParams
from lockstep.protocol import DataProto
from lockstep.single_controller.base import Dispatch, register


class PlaysEpisodes:
    """Beside `generate_sequences`, for a worker that has a rollout."""

    config: Any
    rollout: Any
    memory: Any

    @register(Dispatch.DP_COMPUTE_PROTO)
    def run_episodes(
        self, prompts: DataProto, sampling: SamplingParams, step: int, agent: Any, on_finished: Callable[[Any], None] | None = None
    ) -> DataProto:
        """`generate_sequences` for episodes: see `lockstep.agents.rows.play_rows`, whose arguments `agent` has."""
        from lockstep.agents.rows import play_rows

        counts, key = prompts.ragged("prompts").lengths.tolist(), "actor_rollout_ref.rollout.gpu_memory_utilization"
        with self.memory.stage("gen", counts, None, key), self.rollout.borrowed():
            columns = play_rows(self.rollout.engine, prompts, sampling, step, agent, on_finished)
        if self.config.rollout.free_cache_engine:
            self.rollout.engine.sleep()
        return columns
