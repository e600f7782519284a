"""What becomes of verl's keys. scripts.txt has the arguments of its example scripts with their verdicts, one test a script."""

from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from lockstep.compat.verl_keys.command import read_arguments, read_yaml
from lockstep.compat.verl_keys.keys import judge, judge_all, overrides
from lockstep.compat.verl_keys.table import DEFAULTS, IGNORED, REFUSED, RENAMED, VALUES
from lockstep.config.actor_rollout_ref import ROLLOUTS
from lockstep.config.engine import SCHEDULES, STRATEGIES
from lockstep.config.keys import check_key, valid_keys
from lockstep.config.load import load_config
from lockstep.observability.trackers import KNOWN_TRACKERS
from lockstep.trainer.main_ppo import main

SIGNS = {"=": "accepted", ">": "translated", "-": "ignored", "!": "refused"}


def read_scripts():
    """Script -> [(verdict, argument)]."""
    scripts: dict = {}
    for line in (Path(__file__).parent / "scripts.txt").read_text().splitlines():
        if line.startswith("["):
            scripts[line[1:-1]] = lines = []
        elif line.startswith("@"):
            lines += scripts[line[1:]]
        elif line and not line.startswith("#"):
            lines.append((SIGNS[line[0]], line[2:]))
    return {name: lines for name, lines in scripts.items() if "/" in name or name == "refused"}


SCRIPTS = read_scripts()


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_argument_of_a_script_has_its_verdict(name):
    given = {key: value for _, text in SCRIPTS[name] for key, value in read_arguments([text]).items()}
    found = {verdict.key: verdict for verdict in judge_all(given)}
    # Twice in one section: each value by itself.
    expected = [(kind, *read_arguments([text]).items()) for kind, text in SCRIPTS[name]]
    for kind, (key, value) in expected:
        verdict = found[key] if given[key] == value else judge(key, value)
        assert verdict.kind == kind, (key, value, verdict)
        assert verdict.kind in ("accepted", "translated") or verdict.why, key
        for new_key, _ in verdict.sets:
            check_key(new_key)


def test_the_scripts_are_enough():
    assert sum(map(len, SCRIPTS.values())) > 300
    assert {name.partition("/")[0] for name in SCRIPTS} >= {
        "grpo_trainer", "ppo_trainer", "rloo_trainer", "remax_trainer", "gspo_trainer", "reinforce_plus_plus_trainer", "dapo",
    }  # fmt: skip


def test_a_translation_keeps_the_value():
    given = {
        "actor_rollout_ref.actor.grad_clip": 0.5,
        "actor_rollout_ref.ref.fsdp_config.param_offload": True,
        "algorithm.adv_estimator": "rloo_vectorized",
        "actor_rollout_ref.actor.tis_imp_ratio_cap": 2.0,
        "trainer.logger": ["console", "clearml"],
        "data.train_files": ["a b.parquet", "it's.parquet"],
        "actor_rollout_ref.rollout.val_kwargs.do_sample": False,
        "trainer.test_freq": -1,
        "actor_rollout_ref.model.path": "org/model",
        "reward_model.reward_kwargs.overlong_buffer_cfg.len": 7,
    }
    config = load_config(overrides(judge_all(given)))
    assert config.actor_rollout_ref.actor.optim.clip_grad == 0.5
    assert config.actor_rollout_ref.ref.param_offload is True
    assert config.algorithm.adv_estimator == "rloo"
    assert config.algorithm.rollout_correction.rollout_is == "token"
    assert config.trainer.logger == ["console"]
    assert config.data.train_files == ["a b.parquet", "it's.parquet"]
    assert config.actor_rollout_ref.rollout.val_kwargs.temperature == 0
    assert config.trainer.test_freq == 0
    assert config.reward.overlong_buffer.len == 7
    # What verl means without saying it.
    assert (config.data.train_batch_size, config.trainer.total_epochs) == (1024, 30)
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size == 256


def test_every_key_of_the_tables_exists_and_is_in_one_of_them():
    ignored = [pattern for patterns in IGNORED.values() for pattern in patterns.split()]
    entries = [*RENAMED, *REFUSED, *ignored]
    assert sorted(set(entries)) == sorted(entries)
    for key in DEFAULTS:
        check_key(key)
    ours = list(valid_keys())
    for pattern in VALUES:
        assert any(fnmatchcase(key, pattern) for key in ours), pattern
    for pattern, targets in RENAMED.items():
        assert not any(fnmatchcase(key, pattern) and "*" not in pattern for key in ours), pattern
        for target in (targets,) if isinstance(targets, str) else targets:
            # It may be a key of verl's that is looked up again.
            assert any(fnmatchcase(key, target) for key in ours) or target in RENAMED, target


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("actor_rollout_ref.rollout.name", ROLLOUTS),
        ("critic.strategy", STRATEGIES),
        ("actor_rollout_ref.actor.optim.lr_scheduler_type", SCHEDULES),
        ("trainer.logger", KNOWN_TRACKERS),
    ],
)
def test_the_table_knows_every_value_that_lockstep_knows(key, values):
    for value in values:
        verdict = judge(key, [value] if key == "trainer.logger" else value)
        assert (verdict.kind, verdict.key) == ("accepted", key), value
    verdict = judge(key, ["nonsense"] if key == "trainer.logger" else "nonsense")
    assert verdict.kind == ("translated" if key == "trainer.logger" else "refused")


def test_a_key_of_lockstep_keeps_its_meaning_unless_verl_means_another_thing_by_it():
    usual = {"reward_model.strategy": "fsdp", "critic.strategy": "fsdp", "actor_rollout_ref.actor.strategy": "fsdp",
             "actor_rollout_ref.rollout.name": "hf", "trainer.device": "cuda", "trainer.logger": ["console"],
             "actor_rollout_ref.actor.optim.lr_scheduler_type": "cosine", "critic.optim.lr_scheduler_type": "cosine"}  # fmt: skip
    other = {key.rpartition(".")[2] for key in valid_keys() if judge(key, usual.get(key, 3)).kind != "accepted"}
    assert other == set()
    assert judge("actor_rollout_ref.actor.fsdp_config.use_torch_compile", True).kind == "ignored"


def test_an_empty_value_is_refused():
    assert judge("trainer.nnodes", "").kind == "refused"
    assert judge("actor_rollout_ref.actor.megatron.dist_checkpointing_prefix", "").kind == "ignored"


def test_pasted_into_lockstep_ppo_all_of_verls_keys_are_in_one_error(capsys):
    arguments = [text for kind, text in SCRIPTS["gspo_trainer/test_gspo_3b_math"]]
    assert main([*arguments, "--config-path=config", "trainer.nonsense=1"]) == 1
    said = capsys.readouterr().err
    for kind, text in SCRIPTS["gspo_trainer/test_gspo_3b_math"]:
        (key,) = read_arguments([text])
        try:
            check_key(key)
        except Exception:
            assert f"{key} " in said, (kind, key)
    assert "--from-verl" in said
    assert "--config-path" in said
    assert "trainer.nonsense" in said


def test_a_file_of_verls_is_one_error_with_its_whole_table_and_runs_with_from_verl(tmp_path, capsys):
    path = tmp_path / "verl.yaml"
    path.write_text("actor_rollout_ref: {rollout: {mode: async}}\ntrainer: {balance_batch: true, device: npu}\n")
    assert main(["--config", str(path)]) == 1
    said = capsys.readouterr().err
    for word in ("--from-verl", "actor_rollout_ref.rollout.mode", "trainer.balance_batch"):
        assert word in said
    assert main(["--from-verl", "--config", str(path)]) == 1
    assert "trainer.device" in capsys.readouterr().err


def test_a_refused_key_stops_from_verl(capsys):
    assert main(["--from-verl", "trainer.device=npu", "algorithm.use_pf_ppo=True"]) == 1
    said = capsys.readouterr().err
    assert "trainer.device" in said
    assert "algorithm.use_pf_ppo" in said


NOT_HERE = ("megatron", "npu", "sandbox", "rm_", "refused")
"""Scripts that need another machine, a server or a reward model."""
RUN = [name for name in SCRIPTS if not any(word in name for word in NOT_HERE)]


@pytest.mark.parametrize("name", RUN)
def test_a_script_runs_its_first_step_with_another_model_and_sizes(name, embedded_task, tmp_path, capsys):
    replaced = [
        f"data.train_files={embedded_task.train_file}",
        f"data.val_files={embedded_task.val_file}",
        f"actor_rollout_ref.model.path={embedded_task.model}",
        "actor_rollout_ref.rollout.name=native",
        "actor_rollout_ref.rollout.n=2" if "ppo_trainer" not in name else "actor_rollout_ref.rollout.n=1",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "data.max_prompt_length=16",
        "data.max_response_length=12",
        "reward.overlong_buffer.len=4",
        "algorithm.filter_groups.metric=score",
        "trainer.n_gpus_per_node=1",
        "trainer.device=cpu",
        "trainer.logger=[console]",
        "trainer.total_training_steps=1",
        "trainer.save_freq=0",
        "trainer.test_freq=0",
        f"trainer.default_local_dir={tmp_path}",
    ]
    if "ppo_trainer" in name:
        replaced.append(f"critic.model.path={embedded_task.model}")
    assert main(["--from-verl", *(text for _, text in SCRIPTS[name]), *replaced]) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert "from verl:" in said
    assert (tmp_path / "metrics.jsonl").read_text().count("training/global_step") == 1


def test_ten_scripts_are_run():
    assert len(RUN) >= 10


def test_every_leaf_of_a_yaml_of_verls_has_a_verdict(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "defaults: [_self_]\n"
        "actor_rollout_ref:\n"
        "  rollout: {name: vllm, n: '${oc.select:nothing,4}'}\n"
        "  actor: {_target_: x.Y, clip_ratio: 0.1}\n"
    )
    found = {verdict.key: verdict.kind for verdict in judge_all(read_yaml(path)) if verdict.kind != "default"}
    assert found == {
        "defaults": "ignored",
        "actor_rollout_ref.rollout.name": "accepted",
        "actor_rollout_ref.rollout.n": "accepted",
        "actor_rollout_ref.actor._target_": "ignored",
        "actor_rollout_ref.actor.clip_ratio": "accepted",
    }


@pytest.mark.parametrize("pattern", [pattern for pattern in REFUSED if not pattern.startswith("-")])
def test_a_refused_key_is_let_through_with_the_values_that_ask_for_nothing(pattern):
    refusal = REFUSED[pattern]
    key = pattern.replace("*", "actor_rollout_ref.actor", 1) if pattern.startswith("*.") else pattern.removeprefix("*")
    key = key.replace("*", "x")
    for value in refusal.harmless or (None, False, 0, ""):
        assert judge(key, value).kind == "ignored", value
    assert judge(key, "another").kind == "refused"
    assert judge(key, "another").why == refusal.instead


def test_a_value_that_is_a_list_has_a_verdict_too():
    assert judge("algorithm.adv_estimator", ["gae", "grpo"]).key == "algorithm.adv_estimator"
