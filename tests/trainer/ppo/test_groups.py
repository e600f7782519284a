import pytest
from helpers.batches import make_batch, rows_of

from lockstep.config.algorithm import FilterGroupsConfig
from lockstep.errors import RewardError
from lockstep.observability.metrics import Max, Mean, Sum
from lockstep.trainer.ppo.groups import Groups
from lockstep.trainer.ppo.scored import Scored


def scored_batch(*totals):
    """Two rows per prompt, whose one token has the score of the row."""
    batch = make_batch([[5]] * len(totals), token_level_scores=[[total] for total in totals])
    return batch, Scored([None] * len(totals), list(totals))


def test_one_batch_is_enough_without_a_filter():
    groups = Groups(FilterGroupsConfig(), wanted=2, n=2, batches_per_epoch=3)
    assert not groups.are_complete
    batch, scored = scored_batch(1.0, 1.0, 0.0, 0.0)
    groups.add(batch, scored, {"a": Sum(1.0)})
    assert groups.are_complete
    assert groups.join(pytest.fail) == (batch, scored, {"a": 1.0})


def test_groups_without_a_signal_make_room_for_those_of_further_batches_and_what_is_too_much_is_left_out():
    groups = Groups(FilterGroupsConfig(enable=True), wanted=2, n=2, batches_per_epoch=3)
    groups.add(*scored_batch(1.0, 1.0, 0.0, 3.0), {"a": Mean(1.0, 1.0), "most": Max(9.0)})
    assert not groups.are_complete
    groups.add(*scored_batch(0.0, 5.0, 0.0, 7.0), {"a": Mean(6.0, 3.0), "most": Max(4.0)})
    assert groups.are_complete
    batch, scored, metrics = groups.join(pytest.fail)
    assert rows_of(batch, "token_level_scores") == [[0.0], [3.0], [0.0], [5.0]]
    assert scored.total == [0.0, 3.0, 0.0, 5.0]
    # Of all that was generated: three of the four groups have a signal, whether the step needs them or not.
    assert metrics == {"a": 1.75, "most": 9.0, "training/num_gen_batches": 2, "training/groups_with_signal": 0.75}


def test_the_search_ends_at_its_limit_with_what_it_has_or_an_error():
    said = []
    groups = Groups(FilterGroupsConfig(enable=True, max_num_gen_batches=1), wanted=2, n=2, batches_per_epoch=3)
    groups.add(*scored_batch(1.0, 1.0, 0.0, 3.0), {})
    assert groups.are_complete
    assert len(groups.join(said.append)[0]) == 2
    assert said == ["1 of 2 groups have a signal after 1 batches of prompts; the step goes on with these"]

    groups = Groups(FilterGroupsConfig(enable=True, max_num_gen_batches=1), wanted=2, n=2, batches_per_epoch=3)
    groups.add(*scored_batch(1.0, 1.0), {})
    with pytest.raises(RewardError, match="1 batches of prompts gave no group whose responses differ in 'score'"):
        groups.join(pytest.fail)


def test_without_a_limit_of_its_own_the_search_ends_with_the_epoch():
    groups = Groups(FilterGroupsConfig(enable=True, max_num_gen_batches=0), wanted=2, n=2, batches_per_epoch=3)
    for _ in range(3):
        assert not groups.are_complete
        groups.add(*scored_batch(1.0, 1.0, 0.0, 0.0), {})
    assert groups.are_complete
