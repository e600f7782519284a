"""Planner: the memory and the time that a run needs, by arithmetic alone.

Other rooms import from here; the names below are loaded on first use.
"""

from typing import TYPE_CHECKING

from lockstep.utils.lazy import lazy_names

if TYPE_CHECKING:
    from lockstep.planner.built import reusing_models
    from lockstep.planner.choices import PLAIN, Counted, Kept, RolloutNumbers, candidates, choose, describe_chosen
    from lockstep.planner.count import LEAST_SEQUENCES, Load
    from lockstep.planner.hardware import Device, find_device
    from lockstep.planner.memory import SHARE, Contents, MemoryPlan, Model, Rollout, describe_plan, host_bytes
    from lockstep.planner.needs import (
        Needs,
        Numbers,
        place_policy,
        place_training,
        policy_needs,
        settle_policy,
        settle_training,
        training_needs,
    )
    from lockstep.planner.prediction import SAVE, Lengths, Prediction, predict
    from lockstep.planner.stage_prediction import predict_stage

__getattr__ = lazy_names(
    __name__,
    {
        "built": "reusing_models",
        "choices": "PLAIN Counted Kept RolloutNumbers candidates choose describe_chosen",
        "count": "LEAST_SEQUENCES Load",
        "hardware": "Device find_device",
        "memory": "SHARE Contents MemoryPlan Model Rollout describe_plan host_bytes",
        "needs": "Needs Numbers place_policy place_training policy_needs settle_policy settle_training training_needs",
        "stage_prediction": "predict_stage",
        "prediction": "SAVE Lengths Prediction predict",
    },
)
