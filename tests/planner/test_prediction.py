"""What is predicted against what was measured on an H200, and against what must hold of any prediction."""

import dataclasses
from pathlib import Path

import pytest
from transformers import Qwen2Config

from benchmarks import plan
from benchmarks.workload import SHAPES
from lockstep.config import load_config
from lockstep.errors import ConfigError, ResourceError
from lockstep.planner.decode import Generation, generate_s, spread_lengths
from lockstep.planner.hardware import DEVICES, find_device
from lockstep.planner.needs import reusing_models
from lockstep.planner.prediction import SAVE, Lengths, predict
from lockstep.planner.time import read_shape

H200 = find_device("NVIDIA H200")


@pytest.fixture(scope="module")
def cases():
    return plan.cases()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shapes")
    for name in ("0.5b", "7b"):
        Qwen2Config(**SHAPES[name], architectures=["Qwen2ForCausalLM"]).save_pretrained(folder / name)
    with reusing_models():
        yield folder


def config_of(folder, *overrides, algorithm="grpo"):
    named = ["data.train_files=x", f"actor_rollout_ref.model.path={folder}"]
    return load_config([*named, *overrides], algorithm=algorithm)


def test_memory_is_within_a_tenth_and_time_within_a_fifth_of_what_was_measured(cases):
    held_out = [case for case in cases if not case.is_fit]
    assert len(held_out) > 40
    assert len(cases) - len(held_out) == len(plan.FIT)
    assert [case for case in cases if case.unit == "GiB" and abs(case.error) > 0.10] == []
    assert [case for case in cases if case.unit in ("s", "ms") and abs(case.error) > 0.20] == []


def test_the_page_has_the_table_as_it_is_now(cases):
    assert plan.table(cases) in (Path(plan.__file__).parents[1] / "docs/plan.md").read_text()


def test_what_takes_longer_or_more_is_predicted_to(models):
    base = predict(config_of(models / "0.5b"), H200)
    longer = predict(config_of(models / "0.5b", "data.max_response_length=2048"), H200)
    eight = predict(config_of(models / "0.5b", "trainer.n_gpus_per_node=8"), H200)
    short = predict(config_of(models / "0.5b"), H200, Lengths(512, 100))
    slow = predict(config_of(models / "0.5b"), find_device("a100-80gb"))
    assert set(base.seconds) == {"gen", "ref", "update_actor", "update_weights", SAVE}
    for stage in ("gen", "ref", "update_actor"):
        assert short.seconds[stage] < base.seconds[stage] < longer.seconds[stage], stage
        assert eight.seconds[stage] < base.seconds[stage] < slow.seconds[stage], stage
    assert eight.memory["gen"]["actor weights"] * 8 == pytest.approx(base.memory["gen"]["actor weights"])
    assert longer.peak >= base.peak
    assert base.step_s == pytest.approx(sum(base.seconds.values()) - base.seconds[SAVE])


def test_float32_takes_longer_and_more(models):
    half, whole = (
        predict(config_of(models / "0.5b", f"actor_rollout_ref.actor.fsdp_config.dtype={name}"), H200)
        for name in ("bfloat16", "float32")
    )
    for stage in ("gen", "ref", "update_actor"):
        assert whole.seconds[stage] > 1.5 * half.seconds[stage], stage
    assert whole.memory["gen"]["key-value cache"] == 2 * half.memory["gen"]["key-value cache"]
    assert whole.memory["gen"]["rollout weights"] == 0  # the trainer's own


def test_keys_and_values_in_fewer_bits_take_less_memory_and_less_time(models):
    """Key and value of a head of 64 numbers: 132 bytes instead of 256."""
    long = ["data.max_response_length=16384", "data.train_batch_size=32", "actor_rollout_ref.rollout.n=1"]
    half, eight = (
        predict(config_of(models / "0.5b", *long, f"actor_rollout_ref.rollout.kv_cache_dtype={name}"), H200)
        for name in ("auto", "fp8")
    )
    caches = [found.memory["gen"]["key-value cache"] for found in (half, eight)]
    assert caches[1] * 256 == caches[0] * 132
    assert eight.seconds["gen"] < 0.8 * half.seconds["gen"]
    assert eight.seconds["update_actor"] == half.seconds["update_actor"]
    assert eight.memory["gen"]["rollout weights"] == half.memory["gen"]["rollout weights"]


def test_every_role_is_counted_where_it_is(models):
    keys = ["reward_model.enable=true", f"reward_model.model.path={models / '0.5b'}", "critic.enable_resource_pool=true"]
    found = predict(config_of(models / "0.5b", *keys, "actor_rollout_ref.actor.use_kl_loss=true", algorithm="ppo"), H200)
    assert {"gen", "ref", "reward_model", "update_critic", "update_actor"} <= set(found.seconds)
    assert "values" not in found.seconds  # they come with the critic's only update
    assert "values" in predict(config_of(models / "0.5b", "critic.ppo_epochs=2", algorithm="ppo"), H200).seconds
    assert found.num_gpus == 2
    assert not any(name.startswith("critic") for name in found.memory["update_actor"])
    assert "gen_max" in predict(config_of(models / "0.5b", algorithm="remax"), H200).seconds


def test_what_does_not_fit_is_refused_with_a_key(models):
    with pytest.raises(ResourceError, match=r"on 1 x h100, pool global_pool: .* raise trainer.n_gpus_per_node"):
        predict(config_of(models / "7b"), find_device("h100"))


def test_a_smaller_cache_generates_fewer_at_once(models):
    keys = ["data.train_batch_size=128", "data.max_response_length=4096", "actor_rollout_ref.rollout.max_num_seqs=1024"]
    large = predict(config_of(models / "0.5b", *keys), H200)
    small = predict(config_of(models / "0.5b", *keys, "actor_rollout_ref.rollout.gpu_memory_utilization=0.1"), H200)
    assert small.seats < large.seats <= 1024
    assert small.seconds["gen"] > large.seconds["gen"]


def test_micro_batches_are_chosen_for_the_share_of_one_rank_as_in_a_run(models):
    key = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    batch = (
        "data.train_batch_size=64",
        "actor_rollout_ref.rollout.n=1",
        "data.max_prompt_length=512",
        "data.max_response_length=512",
    )
    chosen = [predict(config_of(models / "0.5b", *batch, f"trainer.n_gpus_per_node={n}"), H200).chosen for n in (1, 8)]
    assert [numbers[key] for numbers in chosen] == [65536, 8192]
    assert [numbers["actor_rollout_ref.rollout.max_num_seqs"] for numbers in chosen] == [64, 8]
    assert predict(config_of(models / "0.5b", f"{key}=4096"), H200).chosen.keys().isdisjoint({key})


def test_lengths_are_spread_around_their_mean():
    for mean, longest, count in ((100, 320, 512), (300, 320, 64), (10, 4096, 7)):
        lengths = spread_lengths(mean, longest, count)
        assert len(lengths) == count
        assert sum(lengths) / count == pytest.approx(mean, rel=1e-3)
        assert max(lengths) <= longest
    assert spread_lengths(512, 512, 3) == [512, 512, 512]


def test_every_sequence_is_generated_once(models):
    """Without a limit of seats, and with costs per step alone, the time is that of the longest."""
    shape = read_shape(config_of(models / "0.5b").actor_rollout_ref.model, plan.Head.LANGUAGE_MODEL)
    one = generate_s(shape, Generation([1.0], [1000.0], 1, 1), H200)
    many = generate_s(shape, Generation([1.0] * 4, [1000.0, 10.0, 10.0, 10.0], 1, 4), H200)
    waves = generate_s(shape, Generation([1.0] * 4, [1000.0] * 4, 1, 1), H200)
    assert many == pytest.approx(one, rel=0.02)
    assert waves == pytest.approx(4 * one, rel=0.02)


def test_a_gpu_is_found_by_its_name():
    assert find_device("H200") is find_device("nvidia h200") is DEVICES["h200"]
    assert [dataclasses.replace(device, name="") for device in DEVICES.values() if device.is_measured] == [
        dataclasses.replace(DEVICES["h200"], name="")
    ]
    with pytest.raises(ConfigError, match="the nearest is h100"):
        find_device("h101")
