import pytest

from lockstep.trainer.role import Role

SEED = {"Actor": 0, "Rollout": 1, "ActorRollout": 2, "Critic": 3, "RefPolicy": 4, "RewardModel": 5, "ActorRolloutRef": 6}


def test_the_roles_have_the_values_of_the_seed():
    assert {role.name: role.value for role in Role} == SEED


def test_every_role_has_a_string_of_its_own_that_reads_back():
    assert [str(role) for role in Role] == ["actor", "rollout", "actor_rollout", "critic", "ref", "rm", "actor_rollout_ref"]
    assert [Role.from_string(str(role)) for role in Role] == list(Role)


def test_an_unknown_string_is_an_error_that_lists_the_roles():
    with pytest.raises(ValueError, match=r"'teacher' is not a role; there are .*'actor_rollout'"):
        Role.from_string("teacher")
