"""Role: what a group of workers does."""

from enum import Enum


class Role(Enum):
    """A role names the workers that live in the same process and do one job.

    Python does not allow subclassing an Enum that has members, so further roles are members of an Enum of your own; mappings accept
    them beside these. The trainer starts their workers and keeps the group under `trainer.worker_groups[MyRole.Teacher]`:

    ```python
    class MyRole(Enum):
        Teacher = 7

    role_worker_mapping = {Role.ActorRollout: ActorRolloutRefWorker, MyRole.Teacher: TeacherWorker}
    ```
    """

    Actor = 0  # only the actor
    Rollout = 1  # only the rollout
    ActorRollout = 2  # actor and rollout in one process, sharing weights
    Critic = 3  # only the critic
    RefPolicy = 4  # only the reference policy
    RewardModel = 5  # only the reward model
    ActorRolloutRef = 6  # actor, rollout and reference policy in one process

    def __str__(self) -> str:
        return _NAMES[self.name]

    @classmethod
    def from_string(cls, name: str) -> "Role":
        """The role whose `str` is `name`; ValueError for any other."""
        for role in cls:
            if str(role) == name:
                return role
        raise ValueError(f"{name!r} is not a role; there are {[str(role) for role in cls]}")


_NAMES = {
    "Actor": "actor",
    "Rollout": "rollout",
    "ActorRollout": "actor_rollout",
    "Critic": "critic",
    "RefPolicy": "ref",
    "RewardModel": "rm",
    "ActorRolloutRef": "actor_rollout_ref",
}
