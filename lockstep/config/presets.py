"""The embedded task's values: what `lockstep ppo` runs when it is given neither data nor a model.

They suit a model of a few hundred thousand parameters, where the defaults of the dataclasses suit a language model.
"""

from typing import Any

EMBEDDED_PRESET: dict[str, Any] = {
    "data": {"train_batch_size": 64, "max_prompt_length": 16, "max_response_length": 12},
    "actor_rollout_ref": {
        "model": {"enable_gradient_checkpointing": False},
        "actor": {"ppo_mini_batch_size": 32, "ppo_epochs": 1, "entropy_coeff": 0.0, "optim": {"lr": 3e-4}},
        "rollout": {"n": 4},
    },
    "critic": {"model": {"enable_gradient_checkpointing": False}, "optim": {"lr": 1e-3}},
    "algorithm": {"use_kl_in_reward": True, "kl_ctrl": {"kl_coef": 0.001}, "lam": 0.95},
    "trainer": {
        "total_training_steps": 60,
        "test_freq": 10,
        "save_freq": 60,
        "experiment_name": "embedded",
        "resume_mode": "disable",
    },
}
