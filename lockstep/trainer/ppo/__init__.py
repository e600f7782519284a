"""PPO: `ray_trainer.py` decides the order of the stages, `stages.py` does one stage, the rest serves them."""
