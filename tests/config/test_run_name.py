import dataclasses
import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.config.load import load_config, load_recipe, to_yaml
from lockstep.config.resume import kept_values
from lockstep.config.sft import SFTConfig
from lockstep.config.trainer import RunConfig
from lockstep.errors import ConfigError

NAMED = ["data.train_files=train.parquet", "actor_rollout_ref.model.path=Org/Model-1B"]
CHOICES = {
    "algorithm.lam": (1.0, 0.9), "data.train_batch_size": (64, 32), "trainer.seed": (0, 1), "trainer.total_training_steps": ("null", 7),
    "trainer.save_freq": (-1, 5), "actor_rollout_ref.actor.optim.lr": (1e-6, 2e-6), "critic.strategy": ("fsdp2", "fsdp"),
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": (16384, 8192), "data.val_files": ("null", "val.parquet"),
}  # fmt: skip


def folder(*overrides, **options):
    return load_config([*NAMED, *overrides], **options).trainer.run_dir


@settings(max_examples=30, deadline=None)
@given(*(st.fixed_dictionaries({}, optional={key: st.sampled_from(values) for key, values in CHOICES.items()}) for _ in range(2)))
def test_runs_meet_in_a_folder_if_and_only_if_one_may_go_on_from_the_other(one, other):
    first, second = (load_config([*NAMED, *(f"{key}={value}" for key, value in keys.items())]) for keys in (one, other))
    assert (first.trainer.run_dir == second.trainer.run_dir) == (kept_values(first) == kept_values(second))


def test_the_name_says_algorithm_and_model():
    assert re.fullmatch(r"checkpoints/lockstep/ppo-Model-1B-[0-9a-f]{8}", str(folder()))
    names = {name: folder(algorithm=name).name.split("-")[0] for name in ("grpo", "dapo", "gspo", "rloo")}
    assert names == {name: name for name in names}
    assert load_config().trainer.experiment_name.startswith("ppo-embedded-")
    own = folder("algorithm.adv_estimator='my/file.py:best'").name
    assert own.startswith("best-Model-1B-")


def test_a_model_of_a_run_is_called_after_the_run():
    config = load_recipe(SFTConfig, ["data.train_files=a.parquet", "model.path=runs/my run/global_step_7/actor"])
    assert config.trainer.experiment_name.startswith("sft-my_run-")


def test_a_name_that_was_given_stays_and_one_that_was_made_is_written_down(tmp_path):
    assert str(folder("trainer.experiment_name=mine")) == "checkpoints/lockstep/mine"
    config = load_config(NAMED)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load_config(config_file=tmp_path / "config.yaml") == config
    data = dataclasses.replace(config.data, train_batch_size=8)
    assert dataclasses.replace(config, data=data).trainer.run_dir == config.trainer.run_dir  # a run that has begun keeps its folder


def test_a_value_of_the_environment_gives_the_same_name_each_time(monkeypatch):
    monkeypatch.setenv("ROWS_FILE", "rows_of_this_test_alone.parquet")
    name = "data.train_files='${oc.env:ROWS_FILE}'"
    assert folder(name) == folder(name)


@pytest.mark.parametrize(
    ("given_key", "samples", "expected"),
    [(None, 1, 8), (None, 4, 2), (None, 16, 1), (-1, 1, 100), (20, 2, 10), (500, 1, 100)],
)
def test_the_rows_of_the_first_validation_are_spread_evenly(given_key, samples, expected):
    rows = RunConfig(val_before_train_samples=given_key).first_validation_rows(100, samples, samples_per_step=8)
    assert len(rows) == expected
    assert len(set(rows)) == expected
    gaps = {b - a for a, b in itertools.pairwise(rows)}
    assert rows[0] == 0
    assert max(gaps, default=0) - min(gaps, default=0) <= 1
    assert max(rows) < 100


def test_a_validation_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="val_before_train=false"):
        RunConfig(val_before_train_samples=0)
