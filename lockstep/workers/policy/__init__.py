"""The parts that an ActorRolloutRefWorker is composed of: the actor, the rollout and the reference."""
