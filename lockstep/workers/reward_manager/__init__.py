"""From a batch of responses to a batch of scores."""

from lockstep.workers.reward_manager.manager import RewardManager

__all__ = ["RewardManager"]
