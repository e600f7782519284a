"""The user's document is true: its code, with only the package name changed, trains."""

import json
from pathlib import Path

import pytest
from helpers.tiny import save_tiny_model

from lockstep.rewards.graders import _select_rm_score_fn
from lockstep.utils.tokenizer import hf_tokenizer

HERE = Path(__file__).parent
SOURCE = (HERE / "ppo_example.py").read_text()
SEED = HERE.parents[2] / "shared/seed/ppo_example_architecture.txt"
SPANS = (
    ("from verl.single_controller.ray import RayWorkerGroup", "Role.RefPolicy: global_pool_id,", 1),
    ("class Role(Enum):", "ActorRolloutRef = 6 #", 0),
    ("# we should adopt a multi-source reward function here", "resource_pool_manager = ResourcePoolManager(", 0),
    ("def _select_rm_score_fn(data_source):", "raise NotImplementedError", 0),
    ("trainer = RayPPOTrainer(config=config,", "trainer.fit()", 0),
)
"""First line, start of the last line, and lines after that one, of each piece of code in the document."""


def run_tutorial(config, group="RayWorkerGroup"):
    """Execute the document's code; returns its names."""
    source = SOURCE.replace("ray_worker_group_cls = RayWorkerGroup", f"ray_worker_group_cls = {group}")
    if group == "LocalWorkerGroup":
        source = "from lockstep.single_controller.local import LocalWorkerGroup\n" + source
    names = {"config": config, "tokenizer": hf_tokenizer(config.actor_rollout_ref.model.path), "__name__": "tutorial"}
    try:
        exec(compile(source, "ppo_example.py", "exec"), names)
    finally:
        if "trainer" in names:
            names["trainer"].close()
    return names


@pytest.mark.skipif(not SEED.exists(), reason="the user's document is not beside this checkout")
def test_the_code_is_the_documents_line_by_line():
    seed = [line.strip() for line in SEED.read_text().splitlines()]
    expected = []
    for first, last, more in SPANS:
        start = seed.index(first)
        end = next(i for i in range(start, len(seed)) if seed[i].startswith(last)) + more
        expected += [line.replace("verl", "lockstep") for line in seed[start : end + 1]]
    body = SOURCE.split("# --- the document begins ---\n")[1]
    assert [line.strip() for line in body.splitlines() if line.strip()] == expected


def metrics_of(config):
    return [json.loads(line) for line in (config.trainer.run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("group", ["LocalWorkerGroup", pytest.param("RayWorkerGroup", marks=pytest.mark.ray)])
def test_the_document_trains(group, embedded_config, request):
    if group == "RayWorkerGroup":
        request.getfixturevalue("ray_cluster")
    config = embedded_config("trainer.total_training_steps=2", "trainer.test_freq=2")
    run_tutorial(config, group)
    steps = metrics_of(config)
    assert [row["step"] for row in steps] == [0, 1, 2]
    assert steps[-1]["actor/grad_norm"] > 0
    assert steps[-1]["critic/grad_norm"] > 0
    assert "actor/reward_kl_penalty" in steps[-1]
    assert 0 < steps[-1]["critic/score/mean"] < 1
    assert "val-core/lockstep/reverse/reward/mean@1" in steps[-1]


def test_the_reward_model_branch_trains_on_the_models_scores_and_validates_with_the_rule(embedded_config, tmp_path):
    path = save_tiny_model(tmp_path / "rm", score_head=True)
    config = embedded_config(
        "trainer.total_training_steps=1", "trainer.test_freq=1", "reward_model.enable=true", f"reward_model.model.path={path}"
    )
    names = run_tutorial(config, "LocalWorkerGroup")
    last = metrics_of(config)[-1]
    assert last["critic/score/min"] < last["critic/score/max"] != 1.0  # a rule would give 0 and 1
    assert 0 <= last["val-core/lockstep/reverse/reward/mean@1"] <= 1
    assert names["trainer"].rm_wg is not None


def test_the_documents_selection_agrees_with_ours(embedded_config):
    names = run_tutorial(embedded_config("trainer.total_training_steps=1"), "LocalWorkerGroup")
    for source in ("openai/gsm8k", "lighteval/MATH"):
        assert names["_select_rm_score_fn"](source) is _select_rm_score_fn(source)
    for select in (names["_select_rm_score_fn"], _select_rm_score_fn):
        with pytest.raises(NotImplementedError):
            select("unknown/source")
