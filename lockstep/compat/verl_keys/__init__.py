"""verl's keys: `lockstep verl-keys SCRIPT`, and `lockstep ppo --from-verl`."""
