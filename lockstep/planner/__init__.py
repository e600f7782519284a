"""Planner: the memory and the time that a run needs, by arithmetic alone.

A run loads `memory`, `needs` and `choices`: what is offloaded, recomputed and chosen so that its models fit. `lockstep plan` loads
`prediction` too, which counts time (`time`, `decode`, `hardware`). Other rooms import from here; the names are loaded on first use.
"""

from typing import TYPE_CHECKING

from lockstep.utils.lazy import lazy_names

if TYPE_CHECKING:
    from lockstep.planner.choices import (
        PLAIN,
        Numbers,
        RolloutNumbers,
        SavedChoice,
        candidates,
        choose,
        describe_chosen,
        place_policy,
        place_training,
        settle_policy,
        settle_training,
    )
    from lockstep.planner.hardware import Device, find_device
    from lockstep.planner.memory import SHARE, Contents, MemoryPlan, Model, Rollout, describe_plan, host_bytes
    from lockstep.planner.needs import LEAST_SEQUENCES, Footprint, Load, Needs, policy_needs, reusing_models, training_needs
    from lockstep.planner.prediction import SAVE, Lengths, Prediction, predict, predict_stage

__getattr__ = lazy_names(
    __name__,
    {
        "choices": (
            "PLAIN Numbers RolloutNumbers SavedChoice candidates choose describe_chosen place_policy place_training settle_policy"
            " settle_training"
        ),
        "hardware": "Device find_device",
        "memory": "SHARE Contents MemoryPlan Model Rollout describe_plan host_bytes",
        "needs": "LEAST_SEQUENCES Footprint Load Needs policy_needs reusing_models training_needs",
        "prediction": "SAVE Lengths Prediction predict predict_stage",
    },
)
