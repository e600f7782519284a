"""Trainers: `main_ppo.py` is the program, `ppo/` the loop."""
