"""Episodes in a training run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import environments
from helpers.run import roles, train

from lockstep.config import load_config
from lockstep.errors import ConfigError, DataError, RewardError
from lockstep.rewards.manager import RewardManager
from lockstep.single_controller.local import LocalWorkerGroup
from lockstep.single_controller.ray import RayWorkerGroup
from lockstep.tools.compare.algorithms import read_algorithm
from lockstep.tools.compare.measure import compare
from lockstep.trainer.ppo.recording import load_recording
from lockstep.utils.tokenizer import hf_tokenizer

TEMPLATES = Path(__file__).parents[1] / "data" / "templates"
ENVIRONMENT = "helpers.environments:Counts"


@pytest.fixture
def config_of(chat_model, tmp_path):
    def make(*more, rows=None):
        rows = rows or [{"prompt": f"row {i}", "env_kwargs": {"turns": 1 + i % 3}} for i in range(8)]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
        return load_config(
            [
                f"data.train_files={tmp_path / 'train.parquet'}",
                "data.train_batch_size=4",
                "data.max_prompt_length=64",
                "data.max_response_length=150",
                f"actor_rollout_ref.model.path={chat_model}",
                "actor_rollout_ref.rollout.n=2",
                "algorithm.adv_estimator=grpo",
                f"agent.environment={ENVIRONMENT}",
                "agent.max_turn_tokens=10",
                f"trainer.default_local_dir={tmp_path / 'run'}",
                f"trainer.rollout_data_dir={tmp_path / 'samples'}",
                "trainer.device=cpu",
                "trainer.total_training_steps=2",
                *more,
            ]
        )

    return make


def test_episodes_are_generated_scored_recorded_and_learned_from(config_of, tmp_path):
    for more in (
        (),
        (
            "algorithm.adv_estimator=gae",
            "algorithm.use_kl_in_reward=true",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "algorithm.discount_unit=turn",
            "algorithm.gamma=0.9",
            f"agent.environment={Path(environments.__file__)}:Counts",
        ),
    ):
        config = config_of(*more, f"trainer.default_local_dir={tmp_path / str(len(more))}")
        names = ("ActorRolloutRef", *(["Critic"] if more else []))
        metrics = train(config, {"p": [1]}, roles(*names, pool="p"))
        assert len(metrics) == 2
        for row in metrics:
            assert 1 < row["agent/turns"] <= 3
            assert row["agent/missing"] == 0
            assert row["actor/grad_norm"] > 0
            assert 0.25 <= row["critic/score/mean"] <= 2.0
            assert row["agent/info/said"] > 0
    lines = [json.loads(line) for line in (tmp_path / "samples" / "1.jsonl").read_text().splitlines()]
    assert len(lines) == 8
    for line in lines:
        said = line["episode"]["messages"]
        assert [m["role"] for m in said] == ["user", *["assistant", "user"] * (line["episode"]["turns"] - 1), "assistant"]


@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_an_episode_in_several_contexts_is_trained_as_it_was_sampled_and_counts_once(config_of, chat_model, tmp_path, estimator):
    """The trainer's log-probs are the sampler's in every context: it computes each from its own first token."""
    folder = tmp_path / "drops_thinking"
    shutil.copytree(chat_model, folder)
    (folder / "chat_template.jinja").write_text((TEMPLATES / "qwen3.jinja").read_text())
    config = config_of(
        f"actor_rollout_ref.model.path={folder}",
        "agent.history=template",
        "data.apply_chat_template_kwargs={enable_thinking: false}",
        "data.max_response_length=400",
        f"algorithm.adv_estimator={estimator}",
        "actor_rollout_ref.actor.use_kl_loss=true",
    )
    names = ("ActorRolloutRef", *(["Critic"] if estimator == "gae" else []))
    for row in train(config, {"p": [1]}, roles(*names, pool="p")):
        assert row["agent/contexts"] == row["agent/turns"] > 1
        assert row["agent/broken_prefix_ratio"] == 1
        assert row["actor/grad_norm"] > 0
        assert abs(row["actor/kl_loss"]) < 1e-3
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["training/rollout_log_probs_diff_max"] < 5e-5
    assert len((tmp_path / "samples" / "1.jsonl").read_text().splitlines()) == 8  # an episode is a row


@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_an_episode_of_one_turn_is_the_response_of_a_run_without_environments_bit_for_bit(
    config_of, chat_model, tmp_path, estimator
):
    rows = [
        {"prompt": [{"role": "user", "content": f"row {i}"}], "data_source": "s", "reward_model": {"ground_truth": ""}}
        for i in range(8)
    ]
    names = ("ActorRolloutRef", *(["Critic"] if estimator == "gae" else []))
    runs = []
    for name in ("lockstep.agents:ToolEnvironment", "null"):
        judge = RewardManager(hf_tokenizer(str(chat_model)), 0, lambda solution_str, **_: float(len(solution_str)))
        folders = (f"trainer.default_local_dir={tmp_path / name[:4]}", f"trainer.rollout_data_dir={tmp_path / name[:4]}")
        keys = (f"agent.environment={name}", "agent.max_turn_tokens=null", f"algorithm.adv_estimator={estimator}")
        metrics = train(config_of(*keys, *folders, rows=rows), {"p": [1]}, roles(*names, pool="p"), reward_fn=judge)
        said = [
            json.loads(line)["output"]
            for step in (1, 2)
            for line in (tmp_path / name[:4] / f"{step}.jsonl").read_text().splitlines()
        ]
        compared = ("actor/", "critic/", "response_length", "training/")
        runs.append((said, [{k: v for k, v in row.items() if k.startswith(compared)} for row in metrics]))
    assert len(runs[0][0]) == 16
    assert runs[0] == runs[1]
    assert runs[0][1][0]["actor/grad_norm"] > 0


def test_a_resumed_run_plays_the_same_episodes(config_of, tmp_path):
    """All that is random comes from keys: not a bit differs."""

    def run(name, steps):
        config = config_of(
            f"trainer.default_local_dir={tmp_path / name}", f"trainer.total_training_steps={steps}", "trainer.save_freq=1"
        )
        return train(config, {"p": [1]}, roles("ActorRolloutRef", pool="p"))

    whole, _ = run("whole", 2)[-1], run("cut", 1)
    resumed = run("cut", 2)[-1]
    own = ("timing", "perf/", "agent/environment_s", "agent/wait_s", "time")
    assert {k: v for k, v in resumed.items() if not k.startswith(own)} == {k: v for k, v in whole.items() if not k.startswith(own)}


@pytest.mark.ray
def test_two_workers_play_the_episodes_of_one(config_of, tmp_path, ray_cluster):
    """Whoever plays them: the same words, rewards and tokens, and an update that differs by rounding."""
    found = {}
    for count, group in ((1, LocalWorkerGroup), (2, RayWorkerGroup)):
        folders = (f"trainer.default_local_dir={tmp_path / f'run{count}'}", f"trainer.rollout_data_dir={tmp_path / str(count)}")
        config = config_of(*folders, "data.train_batch_size=3", "actor_rollout_ref.rollout.n=3")
        metrics = train(config, {"p": [count]}, roles("ActorRolloutRef", pool="p"), group)
        lines = [json.loads(line) for step in (1, 2) for line in (tmp_path / str(count) / f"{step}.jsonl").read_text().splitlines()]
        said = [(line["output"], line["score"], line["episode"]["messages"], line["episode"]["seed"]) for line in lines]
        found[count] = said, [row["actor/grad_norm"] for row in metrics]
    assert len(found[1][0]) == 18
    assert found[1][0] == found[2][0]
    assert found[1][1] == pytest.approx(found[2][1], rel=1e-4)


def test_missing_episodes_are_counted_and_too_many_end_the_run(config_of, tmp_path):
    rows = [{"prompt": "row", "env_kwargs": {"how": "raise"}} for _ in range(8)]
    config = config_of("agent.environment=helpers.environments:Breaks", rows=rows)
    with pytest.raises(RewardError, match=r"(?s)8 of 8 rewards are missing \(environment: 8\).*no disk"):
        train(config, {"p": [1]}, roles("ActorRolloutRef", pool="p"))


def test_an_info_by_the_name_of_reward_is_not_the_reward_of_validation(config_of, tmp_path):
    keys = (f"data.val_files={tmp_path / 'train.parquet'}", "trainer.val_only=true", f"trainer.validation_data_dir={tmp_path}")
    config = config_of("agent.environment=helpers.environments:TellsAReward", *keys)
    (metrics,) = train(config, {"p": [1]}, roles("ActorRolloutRef", pool="p"))
    assert metrics["val-core/unknown/reward/mean@1"] == 0.5
    assert {json.loads(line)["reward"] for line in (tmp_path / "0.jsonl").read_text().splitlines()} == {0.5}


def test_a_missing_episode_is_written_without_a_score_in_validation_too(config_of, tmp_path):
    rows = [{"prompt": "row", "env_kwargs": {"how": "raise" if i else "none"}} for i in range(2)]
    keys = (f"data.val_files={tmp_path / 'train.parquet'}", "trainer.val_only=true", f"trainer.validation_data_dir={tmp_path}")
    config = config_of(
        "agent.environment=helpers.environments:Breaks", "reward.max_failure_rate=0.5", "data.train_batch_size=2", *keys, rows=rows
    )
    train(config, {"p": [1]}, roles("ActorRolloutRef", pool="p"))
    played, lost = [json.loads(line) for line in (tmp_path / "0.jsonl").read_text().splitlines()]
    assert played["score"] == played["reward"] > 0
    assert "no disk" in lost["episode"]["error"]
    assert lost["score"] is lost["reward"] is None


@pytest.mark.parametrize("estimator", ["grpo", "gae"])
@pytest.mark.parametrize("prompts", ["one", "all"])
def test_a_mini_batch_of_missing_episodes_alone_changes_nothing(config_of, estimator, prompts):
    rows = [{"prompt": "row", "env_kwargs": {"how": "raise" if prompts == "all" or i == 2 else "none"}} for i in range(4)]
    config = config_of(
        "agent.environment=helpers.environments:Breaks",
        "actor_rollout_ref.actor.ppo_mini_batch_size=1",
        "actor_rollout_ref.actor.optim.weight_decay=0",
        "actor_rollout_ref.actor.use_kl_loss=true",
        f"algorithm.adv_estimator={estimator}",
        "reward.max_failure_rate=1",
        "trainer.total_training_steps=1",
        rows=rows,
    )
    names = ("ActorRolloutRef", *(["Critic"] if estimator == "gae" else []))
    (row,) = train(config, {"p": [1]}, roles(*names, pool="p"))
    assert row["agent/missing"] == (8 if prompts == "all" else 2)
    assert (row["actor/grad_norm"] > 0) == (prompts == "one")


def test_a_row_with_an_environment_of_its_own_is_rewarded_as_that_one_says(config_of, chat_model, tmp_path):
    """Where it leaves the reward to the run's function, by that; else by itself. Each gets its own arguments, though parquet gives every
    row the fields of all."""
    own = {"environment": "helpers.environments:LeftToTheReward", "env_kwargs": {"phrase": "x"}, "data_source": "s"}
    other = dict.fromkeys(own)
    rows = [{"prompt": f"row {i}"} | (own if i % 2 else other | {"env_kwargs": {"turns": 1 + i % 3}}) for i in range(8)]
    keys = ("trainer.total_training_steps=1", "data.train_batch_size=8")
    judge = RewardManager(hf_tokenizer(str(chat_model)), 0, lambda **_: -7.0)
    for validation in (False, True):
        more = (f"data.val_files={tmp_path / 'train.parquet'}", "trainer.val_only=true") if validation else ()
        folder = "trainer.validation_data_dir" if validation else "trainer.rollout_data_dir"
        out = tmp_path / str(validation)
        config = config_of(*keys, *more, f"{folder}={out}", f"trainer.default_local_dir={tmp_path / f'run{validation}'}", rows=rows)
        train(config, {"p": [1]}, roles("ActorRolloutRef", pool="p"), reward_fn=judge, val_reward_fn=judge)
        lines = [json.loads(line) for file in out.glob("*.jsonl") for line in file.read_text().splitlines()]
        by_turns = [line["score"] for line in lines if line["episode"]["heard"][-1]["reward"] is not None]
        judged = [line["score"] for line in lines if line["episode"]["heard"][-1]["reward"] is None]
        assert len(by_turns) == len(judged) > 0
        assert set(judged) == {-7.0}
        assert all(score > 0 for score in by_turns)


def test_calls_that_cannot_be_made_are_counted_beside_those_that_can(config_of, tmp_path):
    """Of every turn: a call of a tool that is there, of one that is not, one with wrong arguments, and one that is none."""
    (tmp_path / "parse.py").write_text(
        "from lockstep.agents.parsers import Fault, Parsed, ToolCall\n"
        "CALLS = (ToolCall('double', {'x': 1}), ToolCall('treble', {}), ToolCall('double', {'x': 'a'}))\n"
        "def parse(text, schemas):\n    return Parsed(text, CALLS, (Fault('no call'),))\n"
    )
    keys = ("agent.environment=helpers.environments:HasTools", f"agent.parser={tmp_path / 'parse.py'}:parse", "agent.max_turns=2")
    rows = [{"prompt": "row", "data_source": "openai/gsm8k", "reward_model": {"ground_truth": "1"}}] * 4
    config = config_of(*keys, "data.max_prompt_length=600", "data.max_response_length=400", rows=rows)
    for row in train(config, {"p": [1]}, roles("ActorRolloutRef", pool="p")):
        assert row["agent/bad_call_ratio"] == 0.75
        assert row["agent/faults"] == 3 * row["agent/calls"] > 0


@pytest.mark.parametrize(
    ("row", "keys", "message"),
    [
        ({"environment": "helpers.environments:Nothing"}, (), "has no 'Nothing'"),
        ({"environment": ENVIRONMENT}, ("agent.environment=null",), "agent.environment is null"),
        ({"tools": ["nothing"]}, ("agent.environment=null", "agent.tools=[calculator]"), "names nothing; .* have calculator"),
        ({"tools": [{"name": "f"}]}, ("agent.environment=null", "agent.tools=[calculator]"), "lists of names"),
        ({"environment": ENVIRONMENT}, ("agent.environment=null", "agent.tools=[calculator]"), "Counts is none"),
    ],
)
def test_what_the_last_row_names_is_looked_at_before_a_model_is_loaded(config_of, row, keys, message):
    rows = [{"prompt": "row", "data_source": "openai/gsm8k", **dict.fromkeys(row)} for _ in range(7)]
    with pytest.raises((ConfigError, DataError), match=message):
        train(config_of(*keys, rows=[*rows, rows[0] | row]), {"p": [1]}, roles("ActorRolloutRef", pool="p"))


def test_rows_with_tools_need_a_parser_that_reads_them(config_of, chat_model, tmp_path):
    """auto looks at the environment of the configuration, which has none."""
    folder = tmp_path / "llama"
    shutil.copytree(chat_model, folder)
    (folder / "chat_template.jinja").write_text(
        "{% if tools %}<|python_tag|>{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    rows = [{"prompt": "row", "environment": "helpers.environments:HasTools"}]
    keys = (f"actor_rollout_ref.model.path={folder}",)
    with pytest.raises(ConfigError, match="agent.parser=llama_json must be set"):
        train(config_of(*keys, rows=rows), {"p": [1]}, roles("ActorRolloutRef", pool="p"))


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("agent.environment=helpers.environments:Nothing", "has no 'Nothing'"),
        ("agent.environment=json:loads", "not a subclass"),
        ("agent.environment=lockstep.agents:Environment", "has no method step"),
        ("agent.environment=Counts", "file.py:name"),
        ("agent.tools=[calculator]", "called by a ToolEnvironment, and agent.environment=helpers.environments:Counts is none"),
        ("agent.tools=[helpers.environments:missing]", "has no 'missing'"),
        ("agent.parser=unknown", "file.py:name"),
    ],
)
def test_what_cannot_be_used_is_said_before_a_model_is_loaded(config_of, key, message):
    with pytest.raises(ConfigError, match=message):
        train(config_of(key), {"p": [1]}, roles("ActorRolloutRef", pool="p"))


@pytest.mark.parametrize("key", ["name=sglang", "router_replay=true"])
def test_rollouts_that_cannot_play_episodes_are_said(config_of, key):
    with pytest.raises(ConfigError, match=f"rollout.{key} does not go with episodes"):
        config_of(f"actor_rollout_ref.rollout.{key}")


def test_values_out_of_range_name_their_key(config_of):
    for key in ("history=some", "max_turns=0", "retries=-1", "step_timeout_s=0", "max_turn_tokens=0"):
        with pytest.raises(ConfigError, match=f"agent.{key.partition('=')[0]}"):
            config_of(f"agent.{key}")


def test_a_recorded_batch_of_episodes_is_compared_and_the_environments_tokens_are_not_pushed(config_of, tmp_path, capsys):
    keys = ("algorithm.discount_unit=turn", "algorithm.gamma=0.5", f"trainer.record_batch_dir={tmp_path / 'recorded'}")
    config = config_of(*keys, "critic.enable=true", "trainer.total_training_steps=1")
    train(config, {"p": [1]}, roles("ActorRolloutRef", "Critic", pool="p"))
    recording = load_recording(tmp_path / "recorded")
    named = ("ppo", "grpo", "remax", "rloo")
    found = compare(recording, [read_algorithm(name) for name in named], changes={"trainer.device": "cpu"})
    assert [result.name for result in found.results] == list(named), found.not_comparable
    assert all(result.grad_norm > 0 for result in found.results)
    own = {
        (row, place)
        for row, mask in enumerate(recording.batch.ragged("response_mask").rows())
        for place in mask.nonzero().flatten().tolist()
    }
    for result in found.results:
        assert {(token.row, token.position) for token in (*result.pushed_up, *result.pushed_down)} <= own
    by_token = compare(
        recording, [read_algorithm(name) for name in named], changes={"trainer.device": "cpu", "algorithm.discount_unit": "token"}
    )
    assert by_token.results[0].grad_norm != found.results[0].grad_norm
