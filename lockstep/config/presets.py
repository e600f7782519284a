"""The embedded task's values: what `lockstep ppo` runs when it is given neither data nor a model.

They suit a model of a few hundred thousand parameters, where the defaults of the dataclasses suit a language model.
"""

from typing import Any

EMBEDDED_PRESET: dict[str, Any] = {
    "data": {"train_batch_size": 64, "max_prompt_length": 8, "max_response_length": 8},
    "actor_rollout_ref": {
        "model": {"enable_gradient_checkpointing": False},
        "actor": {
            "ppo_mini_batch_size": 32,
            "entropy_coeff": 0.005,
            "optim": {"lr": 5e-4, "lr_scheduler_type": "cosine", "min_lr_ratio": 0.1},
        },
        "rollout": {"n": 8},
    },
    "critic": {"model": {"enable_gradient_checkpointing": False}, "optim": {"lr": 1e-3}},
    "algorithm": {"use_kl_in_reward": True},
    "trainer": {
        "total_training_steps": 100,
        "critic_warmup": 5,
        "test_freq": 20,
        "experiment_name": "embedded",
        "resume_mode": "disable",
    },
}
