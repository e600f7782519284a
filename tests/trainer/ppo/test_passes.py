import pytest

from lockstep.config import load_config
from lockstep.trainer.ppo.passes import Drift, Source

MODEL = ["data.train_files=train.parquet", "actor_rollout_ref.model.path=model"]
ONE_UPDATE = {"step": 1, "num_updates": 1, "is_recorded": False}


def make(*overrides):
    said = []
    return Drift(load_config([*MODEL, "actor_rollout_ref.rollout.exactness_bound=0.01", *overrides]), said.append), said


def test_the_sampler_is_trusted_while_its_last_measurement_is_under_the_bound():
    drift, said = make()
    assert drift.source(1, 2, False) is Source.PASS
    drift.note(0.001)
    assert drift.source(2, 2, False) is Source.SAMPLER
    drift.note(0.02)
    assert drift.source(3, 2, False) is Source.PASS
    drift.note(0.03)
    assert said == [
        "the sampler's log-probs are 0.02 from the trainer's, over rollout.exactness_bound=0.01: old log-probs are recomputed from "
        "the next step on"
    ]


@pytest.mark.parametrize(
    ("more", "overrides", "source"),
    [
        ({}, [], Source.UPDATE),
        ({"num_updates": 2}, [], Source.PASS),
        ({"is_recorded": True}, [], Source.PASS),
        ({}, ["trainer.critic_warmup=1"], Source.PASS),
        ({}, ["algorithm.use_kl_in_reward=true"], Source.PASS),
        ({}, ["algorithm.rollout_correction.bypass_mode=true"], Source.SAMPLER),
    ],
)
def test_the_one_update_of_a_batch_computes_them_unless_somebody_reads_them_before(more, overrides, source):
    assert make(*overrides)[0].source(**ONE_UPDATE | more) is source


def test_a_bound_of_zero_never_takes_the_sampler_not_even_where_it_was_exact():
    drift, _ = make("actor_rollout_ref.rollout.exactness_bound=0")
    drift.note(0.0)
    assert drift.source(2, 2, False) is Source.PASS


def test_it_says_what_the_old_log_probs_are_now():
    for source, num_updates, words in (
        (Source.PASS, 2, "recomputed"),
        (Source.UPDATE, 1, "those of the batch's one update itself"),
        (Source.SAMPLER, 1, "those of the batch's one update itself"),
    ):
        drift, said = make()
        if source is Source.SAMPLER:
            drift.largest = 0.0
        assert drift.source(**ONE_UPDATE | {"num_updates": num_updates}) is source
        drift.note(1.0)
        assert said[0].endswith(f"old log-probs are {words}")


def test_a_sampler_without_log_probs_and_one_that_is_used_as_it_is_are_not_watched():
    drift, said = make()
    drift.note(None)
    assert (drift.largest, said) == (None, [])
    drift, said = make("algorithm.rollout_correction.bypass_mode=true")
    drift.note(1.0)
    assert (drift.largest, said) == (None, [])
