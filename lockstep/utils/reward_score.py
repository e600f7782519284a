"""The tutorial's path to `lockstep.rewards.graders`."""

from lockstep.judging import code, math
from lockstep.rewards.graders import default_compute_score, exact_match, gsm8k, multiple_choice, register_score

__all__ = ["code", "default_compute_score", "exact_match", "gsm8k", "math", "multiple_choice", "register_score"]
