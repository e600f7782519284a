"""What is chosen for keys that are auto: from sizes, memory and load alone."""

import dataclasses

import pytest

from lockstep.config.actor_rollout_ref import POLICY_ROLES, PPO_KEYS, ActorRolloutRefConfig
from lockstep.config.stage import STAGE_KEYS
from lockstep.errors import ResourceError
from lockstep.planner.choices import (
    CANDIDATES,
    GRAPHS,
    MOST_SEATS,
    MOST_SENT_SEATS,
    PLAIN,
    candidates,
    choose,
    choose_rollout,
    describe_chosen,
    settle_policy,
)
from lockstep.planner.memory import SHARE, Keys, Model, Rollout, held_bytes, stage_bytes
from lockstep.planner.needs import LEAST_SEQUENCES, Load

GB = 2**30
KEYS = Keys("actor.tokens", "actor.param_offload", "actor.optimizer_offload", "model.recompute=auto")
LOAD = Load(longest=1280, step_rows=2048, update_rows=2048)
SMALL = Rollout(GB // 4, 0, "raise share", seats=64, source="actor", token_bytes=23_040, row_bytes=8 * 49_152, prompt_bytes=28_000)
"""SmolLM2's: a token of its cache, a row of its logits, a token of its prompts."""


def model(tokens: int, weights: int = GB) -> Model:
    """A megabyte of activations per token; a quarter of it where everything is recomputed."""
    kept = {"none": tokens * 2**20, "full": tokens * 2**18}
    return Model(
        "actor", KEYS, ("old_log_prob",), weights=weights, gathered=weights // 2, forward=tokens * 2**12, param_offload="auto",
        update="update_actor", gradients=weights, moments=2 * weights, activations=kept, optimizer_offload="auto",
    )  # fmt: skip


def options(weights: int = GB, load: Load = LOAD):
    return {size: ([model(size, weights)], SMALL) for size in candidates(load)}


def test_the_largest_micro_batch_for_which_nothing_more_is_done():
    assert choose(options(), LOAD, 139 * GB).tokens == CANDIDATES[-1]
    # 16,384 tokens fit without recomputation, 32,768 with it only.
    found = choose(options(), LOAD, 30 * GB)
    assert (found.tokens, found.plans[0].recompute) == (16384, "none")
    # Where even the smallest recomputes, larger ones that recompute as much are no worse.
    tight = choose(options(), LOAD, 12 * GB)
    assert (tight.tokens, tight.plans[0].recompute) == (16384, "full")
    for one in (found, tight):
        assert max(stage_bytes(one.models, one.rollout, one.plans).values()) <= SHARE * 30 * GB
        assert one.models == [model(one.tokens)]
    with pytest.raises(ResourceError, match="actor.tokens"):
        choose(options(), LOAD, int(4.5 * GB))


def test_a_micro_batch_holds_what_is_computed_together_and_no_more_than_an_update():
    assert candidates(LOAD) == CANDIDATES
    assert candidates(dataclasses.replace(LOAD, longest=20_000)) == (20_000, 32768, 65536)
    assert candidates(dataclasses.replace(LOAD, longest=20_000, unit=2)) == (40_000, 65536)
    assert candidates(Load(longest=100, step_rows=64, update_rows=64)) == (8192,)
    assert candidates(Load(longest=100, step_rows=90, update_rows=90)) == (8192, 16384)
    load = dataclasses.replace(LOAD, longest=20_000, auto_tokens=8192)
    assert load.micro_batch("auto", 16384, ranks=1) == 20_000
    assert load.micro_batch("auto", 16384, ranks=4) == 8192
    assert dataclasses.replace(LOAD, auto_tokens=None).micro_batch("auto", 16384, ranks=1) == 16384
    assert load.micro_batch(100, 16384, ranks=1) == 100


def test_all_responses_of_a_step_are_decoded_at_once_as_far_as_there_is_memory():
    free = 120 * GB
    assert choose_rollout(SMALL, LOAD, free).max_num_seqs == 2048
    assert choose_rollout(SMALL, dataclasses.replace(LOAD, step_rows=100), free).max_num_seqs == 100
    assert choose_rollout(SMALL, dataclasses.replace(LOAD, step_rows=10_000), free).max_num_seqs == MOST_SEATS
    assert LEAST_SEQUENCES < choose_rollout(SMALL, LOAD, 10 * GB).max_num_seqs < 2048
    assert choose_rollout(SMALL, LOAD, GB // 2).max_num_seqs == LEAST_SEQUENCES
    seats = [choose_rollout(SMALL, LOAD, size * GB).max_num_seqs for size in range(1, 120)]
    assert seats == sorted(seats)


LONG = dataclasses.replace(LOAD, longest=131_072, step_rows=320, update_rows=320)
ROW = LONG.longest * 57_344
"""Bytes of such a row in the cache of a 7B model."""


def long_rows(*, takes_fewer: bool = True, **changes):
    """A model of 7B with adapters: little that learns, and rows of 7 GB."""
    rollout = Rollout(
        14 * GB, int(64 * ROW / 0.9), "lower longest", seats=64, takes_fewer=takes_fewer, source="actor",
        token_bytes=57_344, row_bytes=8 * 152_064, prompt_bytes=228_000,
    )  # fmt: skip
    frozen = dataclasses.replace(model(0), weights=14 * GB, gathered=GB, gradients=GB // 8, moments=GB // 4)
    return {LONG.longest: ([frozen], dataclasses.replace(rollout, **changes))}


@pytest.mark.parametrize(
    ("free", "keeps_cache", "seats"),
    [(30, False, 1), (40, False, 2), (78, False, 6), (200, False, 20), (40, True, 1), (139, True, 11)],
)
def test_fewer_are_decoded_at_once_where_rows_are_long(free, keeps_cache, seats):
    """As many as fit, down to one; and what the engine takes for its cache holds one row or more."""
    found = choose(long_rows(keeps_cache=keeps_cache), LONG, free * GB)
    assert found.rollout is not None
    stages = stage_bytes(found.models, found.rollout, found.plans)
    assert max(stages.values()) <= 0.95 * free * GB
    more = dataclasses.replace(found.rollout, cache=found.rollout.cache + int(ROW / 0.9))
    assert found.rollout.seats == 1 or stage_bytes(found.models, more, found.plans)["gen"] > SHARE * free * GB
    left = free * GB - held_bytes(found.models, found.rollout, found.plans)
    pool = int(found.numbers.gpu_memory_utilization * left)
    assert pool >= ROW + 2 * 64 * 57_344
    # At half their length or so they are all there.
    assert found.numbers.max_num_seqs <= 2 * max(1, -(-pool // ROW) + 1)
    assert found.rollout.seats == seats


def test_what_cannot_hold_one_row_is_refused_and_so_are_fewer_than_the_user_wants():
    with pytest.raises(ResourceError, match="key-value cache 31.1.*; lower longest"):
        choose(long_rows(cache=int(64 * 4 * ROW / 0.9)), LONG, 40 * GB)
    with pytest.raises(ResourceError, match="key-value cache 498.*; lower longest"):
        choose(long_rows(takes_fewer=False), LONG, 78 * GB)


def test_a_run_with_few_sequences_goes_on_with_as_many():
    """Where half as many are chosen for the memory that is free now, those would take turns: then others are chosen, and that is known."""
    first = choose(long_rows(), LONG, 139 * GB)
    kept = first.saved(LONG)
    assert choose(long_rows(), LONG, 139 * GB, kept) == first
    less = choose(long_rows(), LONG, 120 * GB, kept)
    assert choose(long_rows(), LONG, 120 * GB).numbers.max_num_seqs < less.numbers.max_num_seqs == first.numbers.max_num_seqs
    assert not less.is_new
    least = choose(long_rows(), LONG, 60 * GB, kept)
    assert least == dataclasses.replace(choose(long_rows(), LONG, 60 * GB), is_new=True)


def test_prompts_are_computed_in_larger_passes_where_memory_is_plenty():
    middle = dataclasses.replace(SMALL, prompt_bytes=58_000)
    assert choose_rollout(SMALL, LOAD, 120 * GB).max_num_batched_tokens == 8192
    assert choose_rollout(middle, LOAD, 120 * GB).max_num_batched_tokens == 32768
    large = dataclasses.replace(SMALL, prompt_bytes=230_000)
    assert choose_rollout(large, LOAD, 120 * GB).max_num_batched_tokens == 16384
    assert choose_rollout(large, LOAD, 10 * GB).max_num_batched_tokens == 8192


@pytest.mark.parametrize("free", [4 * GB, 20 * GB, 120 * GB])
def test_the_cache_leaves_room_for_logits_prompts_and_graphs(free):
    found = choose_rollout(SMALL, LOAD, free)
    beside = found.max_num_seqs * SMALL.row_bytes + found.max_num_batched_tokens * SMALL.prompt_bytes + GRAPHS
    assert found.gpu_memory_utilization * free + beside <= free
    assert 0.05 <= found.gpu_memory_utilization <= 0.9


def test_a_cache_that_stays_leaves_room_for_the_update():
    gone = choose(options(), LOAD, 139 * GB).numbers
    kept = {size: (models, dataclasses.replace(SMALL, keeps_cache=True)) for size, (models, _) in options().items()}
    found = choose(kept, LOAD, 139 * GB)
    assert found.numbers.gpu_memory_utilization < gone.gpu_memory_utilization
    assert found.rollout is not None
    left = 139 * GB - stage_bytes(found.models, found.rollout, found.plans)["gen"]
    cache = int(found.numbers.gpu_memory_utilization * left)
    with_cache = dataclasses.replace(found.rollout, cache=cache)
    assert max(stage_bytes(found.models, with_cache, found.plans).values()) <= 139 * GB


def test_other_engines_and_one_shape_get_plain_numbers():
    for name in ("vllm", "sglang"):
        found = choose_rollout(dataclasses.replace(SMALL, engine=name), LOAD, 120 * GB)
        assert found == dataclasses.replace(PLAIN, max_num_seqs=MOST_SENT_SEATS)
    assert choose_rollout(dataclasses.replace(SMALL, engine="hf"), LOAD, 120 * GB) == PLAIN
    assert choose_rollout(dataclasses.replace(SMALL, engine="hf", seats=3), LOAD, GB).max_num_seqs == 3
    for rows in (10, 2048):
        load = dataclasses.replace(LOAD, step_rows=rows)
        found = choose_rollout(dataclasses.replace(SMALL, in_one_shape=True), load, 120 * GB)
        assert (found.max_num_seqs, found.max_num_batched_tokens) == (256, 8192)


def test_what_was_chosen_is_said():
    assert describe_chosen({}) is None
    assert describe_chosen({"a.b": 2048, "a.c": 0.87}) == "chosen for auto: a.b=2048, a.c=0.87"


def test_a_run_that_goes_on_has_the_numbers_it_had():
    """Even where less is free: more is offloaded or recomputed for them. Where they cannot fit, others are chosen, and that is known."""
    first = choose(options(), LOAD, 139 * GB)
    kept = first.saved(LOAD)
    tight = choose(options(), LOAD, 26 * GB, kept)
    assert choose(options(), LOAD, 26 * GB).tokens < tight.tokens == first.tokens
    assert tight.plans[0].recompute == "full"
    assert max(stage_bytes(tight.models, tight.rollout, tight.plans).values()) <= 26 * GB
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        assert getattr(tight.numbers, name) == getattr(first.numbers, name)
    assert not tight.is_new
    assert tight.saved(LOAD) == kept

    small = choose(options(), LOAD, 12 * GB, kept)
    assert small.is_new
    assert small == dataclasses.replace(choose(options(), LOAD, 12 * GB), is_new=True)

    other = dataclasses.replace(LOAD, step_rows=64)
    assert choose(options(load=other), other, 139 * GB, kept) == choose(options(load=other), other, 139 * GB)


def test_numbers_are_told_under_keys_that_the_recipe_has() -> None:
    """Distillation named keys of PPO's rollout, and refused them."""
    parts, load = POLICY_ROLES["actor_rollout"], Load(28, 8, 4)
    (of_ppo, told), (of_stage, told_of_stage) = (
        settle_policy(ActorRolloutRefConfig(), parts, keys, load, PLAIN) for keys in (PPO_KEYS, STAGE_KEYS)
    )
    assert of_ppo == of_stage
    assert told["actor_rollout_ref.rollout.max_num_seqs"] == of_ppo.rollout.max_num_seqs
    assert list(told_of_stage) == ["engine.max_token_len_per_gpu"]
