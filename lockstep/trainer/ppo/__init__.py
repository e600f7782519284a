"""PPO: `ray_trainer.py` decides the order of the stages, `stages.py` and `rewards.py` do them, the rest serves them."""
