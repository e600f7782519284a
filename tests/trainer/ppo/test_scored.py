from lockstep.rewards.outcome import Failure
from lockstep.trainer.ppo.scored import Scored


def scored(*failed, rows=4, **extra):
    failures = [Failure("raised", f"row {i}") if i in failed else None for i in range(rows)]
    return Scored(failures, [0.0] * rows, extra)


def test_what_is_known_of_rows_can_be_cut_and_joined():
    first, second = scored(1, rows=2, acc=[1, 2]), scored(rows=1)
    joined = Scored.concat([first, second])
    assert (joined.extra, [f is None for f in joined.failures]) == ({"acc": [1, 2, None]}, [True, False, True])
    assert joined.select([2, 0]).extra == {"acc": [None, 1]}
