"""The tutorial's path to `lockstep.rewards`."""

from lockstep.rewards.manager import RewardManager

__all__ = ["RewardManager"]
