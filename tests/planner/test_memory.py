"""The plan against a slow count of its own, and its order of preference."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lockstep.errors import ResourceError
from lockstep.planner.memory import LIMIT, SHARE, Keys, MemoryPlan, Model, Rollout, describe_plan, plan_memory, stage_bytes

GB = 2**30
OFFLOAD = st.sampled_from(["auto", "auto", True, False])
SIZE = st.integers(0, 40)
NAMES = ("actor", "ref", "critic", "reward_model")
KINDS = ("none", "selective", "full")


@st.composite
def models(draw: st.DrawFn) -> list[Model]:
    """Up to four models in any order, the actor and the critic trained."""
    found = []
    for name in draw(st.permutations(NAMES))[: draw(st.integers(1, 4))]:
        trained = name in ("actor", "critic")
        kinds = draw(st.sampled_from([KINDS, KINDS, ("none",), ("full",)]))
        activations = sorted((draw(SIZE) for _ in kinds), reverse=True)
        found.append(
            Model(
                name,
                Keys(f"{name}.tokens", f"{name}.param_offload", f"{name}.optimizer_offload", f"{name}.recompute=auto"),
                passes=(f"pass_{name}",),
                weights=draw(SIZE),
                gathered=draw(SIZE),
                forward=draw(SIZE),
                update=f"update_{name}" if trained else None,
                gradients=draw(SIZE) if trained else 0,
                moments=draw(SIZE) if trained else 0,
                activations=dict(zip(kinds, activations, strict=True)) if trained else {},
                param_offload=draw(OFFLOAD),
                optimizer_offload=draw(OFFLOAD) if trained else False,
            )
        )
    return found


ROLLOUTS = st.none() | st.builds(
    Rollout,
    weights=SIZE,
    cache=SIZE,
    remedy=st.just("raise rollout.share"),
    source=st.sampled_from([None, "actor"]),
    shares=st.booleans(),
    keeps_weights=st.booleans(),
    keeps_cache=st.booleans(),
)


def slow_count(models: list[Model], rollout: Rollout | None, plans: list[MemoryPlan]) -> dict[str, int]:
    """The bytes of each stage, thing by thing: everything that exists is asked whether it is on the device at that moment."""
    where = dict(zip([model.name for model in models], plans, strict=True))
    peaks: dict[str, int] = {}
    stages = [(stage, model) for model in models for stage in (*model.passes, *([model.update] if model.update else []))]
    for stage, worker in [*stages, *([("gen", None)] if rollout else [])]:
        for moment in ("first", "last"):
            updates = worker is not None and stage == worker.update
            lending = rollout is not None and worker is None and moment == "first"
            used = 0
            for model in models:
                plan = where[model.name]
                lends = lending and rollout.source == model.name
                if not plan.offload_weights or model is worker or lends:
                    used += model.weights
                if not plan.offload_moments or (model is worker and updates and moment == "last"):
                    used += model.moments
                if model is worker:
                    used += model.gradients if updates else 0
                    if not (updates and moment == "last"):
                        used += model.gathered + (model.activations[plan.recompute] if updates else model.forward)
            if rollout is not None:
                lender = where.get(rollout.source)
                needs_copy = not (rollout.shares and lender is not None and not lender.offload_weights)
                if needs_copy and (worker is None or rollout.keeps_weights):
                    used += rollout.weights
                if rollout.keeps_cache or (worker is None and moment == "last"):
                    used += rollout.cache
            peaks[stage] = max(peaks.get(stage, 0), used)
    return peaks


def attempt(models: list[Model], rollout: Rollout | None, free: int) -> list[MemoryPlan] | None:
    try:
        return plan_memory(models, rollout, free)
    except ResourceError:
        return None


def offloaded_of(plans: list[MemoryPlan]) -> set[tuple[int, str]]:
    parts = (("weights", "offload_weights"), ("moments", "offload_moments"))
    return {(i, part) for i, plan in enumerate(plans) for part, field in parts if getattr(plan, field)}


@given(models(), ROLLOUTS, st.integers(0, 400))
def test_every_stage_of_a_plan_fits_and_what_the_user_decided_stays(found: list[Model], rollout: Rollout | None, free: int) -> None:
    plans = attempt(found, rollout, free)
    assume(plans is not None)
    peak = max(slow_count(found, rollout, plans).values())
    assert stage_bytes(found, rollout, plans) == slow_count(found, rollout, plans)
    stays = {rollout.source} if rollout is not None and rollout.shares else set()
    all_offloaded = all(
        (model.param_offload != "auto" or plan.offload_weights or model.name in stays)
        and (model.optimizer_offload != "auto" or plan.offload_moments)
        for model, plan in zip(found, plans, strict=True)
    )
    assert peak <= (LIMIT if all_offloaded else SHARE) * free
    for model, plan in zip(found, plans, strict=True):
        if isinstance(model.param_offload, bool):
            assert plan.offload_weights is model.param_offload
        if isinstance(model.optimizer_offload, bool) and model.update:
            assert plan.offload_moments is model.optimizer_offload
        assert (plan.recompute in model.activations) if model.update else plan.recompute is None


@given(models(), ROLLOUTS, st.integers(0, 400), st.integers(0, 100))
def test_more_memory_never_rests_more(found: list[Model], rollout: Rollout | None, free: int, more: int) -> None:
    small, large = attempt(found, rollout, free), attempt(found, rollout, free + more)
    if small is not None:
        assert large is not None
        assert offloaded_of(large) <= offloaded_of(small)


@given(models(), ROLLOUTS, st.data())
def test_letting_one_more_thing_rest_or_be_recomputed_takes_no_stage_more_memory(
    found: list[Model], rollout: Rollout | None, data: st.DataObject
) -> None:
    plans = [
        MemoryPlan(data.draw(st.booleans()), bool(model.update) and data.draw(st.booleans()), next(iter(model.activations), None))
        for model in found
    ]
    before = stage_bytes(found, rollout, plans)
    for number, model in enumerate(found):
        changes = [{"recompute": kind} for kind in model.activations] + [{"offload_moments": True}]
        # Weights that the rollout reads where they are would need a copy for it; a plan leaves them there.
        if not (rollout is not None and rollout.shares and rollout.source == model.name):
            changes.append({"offload_weights": True})
        for change in changes:
            after = list(plans)
            after[number] = dataclasses.replace(after[number], **change)
            assert all(size <= before[stage] for stage, size in stage_bytes(found, rollout, after).items())


@given(models(), ROLLOUTS, st.integers(0, 400))
def test_a_plan_is_refused_only_where_no_choice_at_all_fits(found: list[Model], rollout: Rollout | None, free: int) -> None:
    assume(attempt(found, rollout, free) is None)
    options = []
    for model in found:
        weights = [True, False] if model.param_offload == "auto" else [model.param_offload]
        moments = [True, False] if model.optimizer_offload == "auto" else [model.optimizer_offload]
        options.append([MemoryPlan(*choice) for choice in itertools.product(weights, moments, list(model.activations) or [None])])
    for plans in itertools.product(*options):
        assert max(slow_count(found, rollout, list(plans)).values()) > LIMIT * free


def test_weights_that_the_rollout_shares_rest_where_nothing_else_is_left_and_it_helps() -> None:
    keys = Keys("tokens", "weights", "moments", "recompute=auto")
    actor = Model("actor", keys, ("old_log_prob",), weights=10, gathered=0, forward=0, param_offload="auto")
    critic = Model(
        "critic",
        keys,
        (),
        weights=0,
        gathered=0,
        forward=0,
        param_offload=False,
        update="update_critic",
        gradients=90,
        activations={"none": 0},
    )
    rests = {}
    for copy in (5, 200):
        rollout = Rollout(weights=copy, cache=0, remedy="none", source="actor", shares=True)
        rests[copy] = attempt([actor, critic], rollout, 110)
    assert rests[5] is not None
    assert rests[5][0].offload_weights
    assert rests[200] is not None
    assert not rests[200][0].offload_weights  # 100 of 110 are in use, within LIMIT


def ppo() -> list[Model]:
    """Actor, critic, reference and reward model of 1 GB of weights each; updates keep 6, 3 or 1 GB."""
    keys = {
        name: Keys(f"{name}.tokens", f"{name}.param_offload", f"{name}.optimizer_offload", f"{name}.recompute") for name in NAMES
    }
    trained = {"gradients": GB, "moments": 2 * GB, "activations": {"none": 6 * GB, "selective": 3 * GB, "full": GB}}
    auto = {"weights": GB, "gathered": GB // 2, "forward": GB // 4, "param_offload": "auto"}
    return [
        Model("actor", keys["actor"], ("old_log_prob",), update="update_actor", optimizer_offload="auto", **auto, **trained),
        Model("critic", keys["critic"], ("values",), update="update_critic", optimizer_offload="auto", **auto, **trained),
        Model("ref", dataclasses.replace(keys["ref"], moments=None), ("ref",), **auto),
        Model("reward_model", dataclasses.replace(keys["reward_model"], moments=None), ("reward_model",), **auto),
    ]


ROLLOUT = Rollout(GB // 2, GB, "raise rollout.share", source="actor", keeps_weights=True)


def test_frozen_weights_rest_first_then_moments_then_weights_and_the_critic_before_the_actor() -> None:
    actor, *others = ppo()
    # With the larger update the actor needs the others out of the way, down to the critic's weights.
    found, order = [dataclasses.replace(actor, gradients=2 * GB), *others], []
    for free in range(40 * GB, 0, -GB // 64):
        plans = attempt(found, ROLLOUT, free)
        if plans is None:
            break
        order += [(found[i].name, part) for i, part in sorted(offloaded_of(plans)) if (found[i].name, part) not in order]
    assert order == [
        ("ref", "weights"), ("reward_model", "weights"), ("critic", "moments"), ("actor", "moments"), ("critic", "weights"),
        ("actor", "weights"),
    ]  # fmt: skip


def test_the_least_recomputation_that_fits_is_chosen_once_it_is_known_whoffloaded_ofs() -> None:
    found = ppo()
    kept = [MemoryPlan(False, False, "full" if model.update else None) for model in found]
    # Everything on the device with everything recomputed, exactly.
    least = max(stage_bytes(found, ROLLOUT, kept).values())
    plans = plan_memory(found, ROLLOUT, int(least / SHARE) + 2)
    assert offloaded_of(plans) == set()
    assert [plan.recompute for plan in plans] == ["full", "full", None, None]
    more = plan_memory(found, ROLLOUT, int((least + 2 * GB) / SHARE) + 2)
    assert [plan.recompute for plan in more] == ["selective", "selective", None, None]
    assert {p.recompute for p in plan_memory(found, ROLLOUT, 100 * GB)} == {"none", None}


def test_a_line_says_whoffloaded_ofs_and_why() -> None:
    found = ppo()
    assert describe_plan(found, ROLLOUT, plan_memory(found, ROLLOUT, 40 * GB), 40 * GB) is None
    free = 11 * GB
    plans = plan_memory(found, ROLLOUT, free)
    line = describe_plan(found, ROLLOUT, plans, free)
    assert "ref (weights 1), reward_model (weights 1) GB" in line
    assert "stage update_actor would take" in line
    assert "GB of the 9.35 that may be filled" in line
    assert "Recomputed: actor " in line


@pytest.mark.parametrize(
    ("changes", "free", "says"),
    [
        # With all at rest, the actor's update has 4.5 GB of weights, gradients, moments and the rollout's copy at its end; before that its
        # activations are in the moments' place.
        ({}, 4.5, "raise trainer.n_gpus_per_node"),
        ({"actor": {"activations": {"full": 4 * GB}}}, 4.5, "raise trainer.n_gpus_per_node"),
        ({"actor": {"activations": {"full": 4 * GB}}}, 5.0, "lower actor.tokens"),
        ({"ref": {"param_offload": False}}, 5.0, "set ref.param_offload=auto"),
        ({"critic": {"optimizer_offload": False}}, 5.0, "set critic.optimizer_offload=auto"),
        ({"actor": {"activations": {"none": 6 * GB}}}, 7.0, "set actor.recompute"),
    ],
)
def test_what_cannot_fit_is_refused_with_sizes_and_the_first_key_to_turn(
    changes: dict[str, dict[str, object]], free: float, says: str
) -> None:
    found = [dataclasses.replace(model, **changes.get(model.name, {})) for model in ppo()]
    with pytest.raises(ResourceError) as caught:
        plan_memory(found, ROLLOUT, int(free * GB))
    message = str(caught.value)
    assert says in message
    assert "actor weights 1" in message
    assert f"0.95 of the {free:g} that are free" in message


def test_a_cache_that_cannot_fit_names_the_key_of_the_rollout() -> None:
    large = dataclasses.replace(ROLLOUT, cache=50 * GB)
    with pytest.raises(ResourceError, match=r"stage gen takes .*key-value cache 50.*; raise rollout\.share$"):
        plan_memory(ppo(), large, 40 * GB)


def test_a_teacher_is_on_the_device_in_its_students_update_wherever_it_rests() -> None:
    student, teacher = (model for model in ppo() if model.name in ("actor", "ref"))
    teacher = dataclasses.replace(teacher, passes=(), beside=student.update)
    kind = next(iter(student.activations))
    for offloads in (False, True):
        plans = [MemoryPlan(False, False, kind), MemoryPlan(offloads, False, None)]
        alone = stage_bytes([student], None, plans[:1])[student.update]
        both = stage_bytes([student, teacher], None, plans)
        assert both[student.update] == alone + teacher.weights + teacher.gathered + teacher.forward
        assert "ref" not in both
