"""A teacher inside PPO: sampled distillation through its own stages."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers.run import make_trainer, roles, train
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from lockstep.config.actor_rollout_ref import POLICY_ROLES
from lockstep.errors import ConfigError, DataError
from lockstep.planner.needs import Load, policy_needs
from lockstep.trainer import main_ppo

POOL = {"global_pool": [1]}
DISTILL = (
    "algorithm.use_kl_in_reward=false", "algorithm.adv_estimator=distill", "trainer.val_before_train=false",
    "trainer.total_training_steps=3", "actor_rollout_ref.actor.optim.weight_decay=0.0",
)  # fmt: skip


@pytest.fixture(scope="module")
def larger(embedded_task, tmp_path_factory) -> Path:
    """Another model, wider than the student, with its tokenizer."""
    folder = tmp_path_factory.mktemp("larger")
    config = AutoModelForCausalLM.from_pretrained(embedded_task.model).config
    config.hidden_size, config.intermediate_size, config.head_dim = 2 * config.hidden_size, 2 * config.intermediate_size, None
    config.head_dim = config.hidden_size // config.num_attention_heads
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(embedded_task.model).save_pretrained(folder)
    return folder


def test_a_self_teacher_teaches_exactly_nothing(embedded_config, embedded_task):
    config = embedded_config(*DISTILL, f"actor_rollout_ref.ref.model.path={embedded_task.model}")
    rows = train(config, POOL, roles("ActorRollout", "RefPolicy"))
    assert len(rows) == 3
    for row in rows:
        assert row["critic/advantages/max"] == row["critic/advantages/min"] == row["actor/grad_norm"] == 0
        assert "critic/score/mean" in row  # the reward is measured, and not learned from


@pytest.mark.parametrize("adapters", [False, True])
def test_the_student_comes_closer_to_a_larger_teacher(embedded_config, larger, adapters):
    config = embedded_config(
        *DISTILL, "trainer.total_training_steps=8", f"actor_rollout_ref.ref.model.path={larger}", "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.actor.optim.lr=3e-3", f"actor_rollout_ref.model.lora_rank={8 * adapters}",
    )  # fmt: skip
    rows = train(config, POOL, roles(*(["ActorRolloutRef"] if adapters else ["ActorRollout", "RefPolicy"])))
    kl = [-row["critic/advantages/mean"] for row in rows]
    assert kl[-1] < 0.8 * kl[0]


def test_rows_without_a_judge_are_learned_from_and_have_no_score(embedded_config, embedded_task, larger, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": w, "data_source": "unknown"}) + "\n" for w in ("abc", "face", "bed", "dig") * 4))
    arguments = [f"data.train_files={file}", f"actor_rollout_ref.ref.model.path={larger}", "data.val_files=null"]
    assert main_ppo.main([*embedded_overrides(embedded_task, tmp_path), *DISTILL, *arguments]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["actor/grad_norm"] > 0
    assert "critic/score/mean" not in rows[0]


def embedded_overrides(task, folder):
    return [
        f"actor_rollout_ref.model.path={task.model}", "data.max_prompt_length=16", "data.max_response_length=12",
        "data.train_batch_size=8", f"trainer.default_local_dir={folder / 'run'}", "trainer.device=cpu", "trainer.save_freq=0",
        "trainer.test_freq=0",
    ]  # fmt: skip


def test_a_teacher_with_another_tokenizer_is_refused_before_models_are_loaded(embedded_config, embedded_task, tmp_path):
    shutil.copytree(embedded_task.model, tmp_path / "other")
    path = tmp_path / "other" / "tokenizer.json"
    words = json.loads(path.read_text())
    vocabulary = words["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(words))
    config = embedded_config(*DISTILL, f"actor_rollout_ref.ref.model.path={tmp_path / 'other'}")
    with pytest.raises(DataError, match=r"actor_rollout_ref.ref.model.path=.*another tokenizer: '[ab]' is"):
        make_trainer(config, POOL, roles("ActorRollout", "RefPolicy"))


def test_a_teacher_that_nothing_reads_is_refused(embedded_config, embedded_task):
    with pytest.raises(ConfigError, match="nothing reads a reference"):
        embedded_config("algorithm.use_kl_in_reward=false", f"actor_rollout_ref.ref.model.path={embedded_task.model}")


@pytest.mark.parametrize("rank", [0, 4])
def test_the_plan_counts_the_teachers_own_weights(embedded_config, larger, rank):
    overrides = (*DISTILL, f"actor_rollout_ref.ref.model.path={larger}", f"actor_rollout_ref.model.lora_rank={rank}")
    config = embedded_config(*overrides).actor_rollout_ref
    load = Load(longest=32, step_rows=4, update_rows=4)
    models, _ = policy_needs(config, POLICY_ROLES["actor_rollout_ref"], load=load, world_size=1, element=4)
    actor, teacher = models
    assert teacher.name == "ref"
    assert teacher.weights == 4 * AutoModelForCausalLM.from_pretrained(larger).num_parameters()
    assert "ref" not in actor.passes
