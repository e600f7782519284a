"""Whether there is a metric of the name trainer.best_metric."""

from types import SimpleNamespace

import pytest

from lockstep.checkpoint.best import check_best
from lockstep.errors import ConfigError


def test_while_only_the_critic_learns_a_metric_of_the_actor_is_not_missed():
    told = []
    section = SimpleNamespace(best_metric="actor/entropy", critic_warmup=2)
    for step in (1, 2):
        check_best(section, {"val-core/x": 1.0}, {}, step, told.append)
    assert told == []
    check_best(section, {"val-core/x": 1.0}, {}, 3, told.append)
    assert len(told) == 1
    with pytest.raises(ConfigError, match="trainer.best_metric=actor/entropy"):
        check_best(SimpleNamespace(best_metric="actor/entropy"), {"val-core/x": 1.0}, {}, 1, told.append)
