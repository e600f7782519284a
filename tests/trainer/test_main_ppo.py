"""The program: bad input ends with one clear message and a non-zero exit, before a model is loaded."""

import importlib.util
import json
import os
import signal
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers.tiny import save_tiny_model

from lockstep.config import load_config
from lockstep.embedded import task
from lockstep.errors import ResourceError
from lockstep.single_controller.ray import RayWorkerGroup
from lockstep.trainer import main_ppo
from lockstep.trainer.role import Role

ENGINES = ("megatron", "torchtitan", "veomni")
"""Those that are packages of their own."""


@pytest.fixture
def good(embedded_task, tmp_path):
    """Arguments that would train."""
    return {
        "data.train_files": embedded_task.train_file,
        "data.max_prompt_length": 16,
        "data.max_response_length": 12,
        "data.train_batch_size": 8,
        "actor_rollout_ref.model.path": embedded_task.model,
        "trainer.default_local_dir": tmp_path / "run",
        "trainer.total_training_steps": 1,
    }


@pytest.fixture
def no_model_is_loaded(monkeypatch):
    """Fail the test when a model is loaded."""

    def loaded(*args, **kwargs):
        pytest.fail("a model was loaded before the input was checked")

    for name in ("engine.spec.load_model", "engine.spec.load_on_meta", "policy.load_model"):
        monkeypatch.setattr(f"lockstep.workers.{name}", loaded)


@pytest.fixture
def every_engine_is_installed(monkeypatch):
    """As far as the checks before the start can see."""
    for engine in ENGINES:
        monkeypatch.setattr(f"lockstep.backends.{engine}.check.find_spec", lambda name: name)


def write_rows(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def write_empty(path):
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), path)
    return path


def broken(path):
    path.write_bytes(b"not a parquet file")
    return path


CASES = {
    "a missing file": (lambda t: {"data.train_files": t / "none.parquet"}, ["none.parquet"]),
    "an unreadable file": (lambda t: {"data.train_files": broken(t / "bad.parquet")}, ["bad.parquet"]),
    "an unknown format": (lambda t: {"data.train_files": broken(t / "rows.csv")}, ["rows.csv", "parquet"]),
    "a missing validation file": (lambda t: {"data.val_files": t / "none.parquet"}, ["none.parquet"]),
    "no prompt column": (
        lambda t: {"data.train_files": write_rows(t / "a.parquet", [{"question": "x"}])}, ["'prompt'", "question", "data.prompt_key"],
    ),
    "no rows": (lambda t: {"data.train_files": write_empty(t / "empty.parquet")}, ["no rows", "empty.parquet"]),
    "a batch larger than the data": (lambda t: {"data.train_batch_size": 4096}, ["data.train_batch_size", "4096", "2048"]),
    "an unknown strategy": (lambda t: {"actor_rollout_ref.actor.strategy": "deepspeed"}, ["deepspeed", "fsdp2"]),
    "an unknown critic strategy": (lambda t: {"critic.strategy": "zero"}, ["critic.strategy", "zero", "fsdp"]),
    "ranks that a layout does not divide": (
        lambda t: {
            "actor_rollout_ref.actor.strategy": "torchtitan", "actor_rollout_ref.actor.torchtitan.pipeline_parallel_size": 2,
            "trainer.n_gpus_per_node": 1,
        },
        ["actor_rollout_ref.actor.torchtitan.pipeline_parallel_size=2", "1 ranks"],
    ),
    "megatron without a GPU": (lambda t: {"critic.strategy": "megatron", "trainer.device": "cpu"}, ["critic.megatron", "GPU", "fsdp2"]),
    "heads that a layout does not divide": (
        lambda t: {
            "critic.strategy": "torchtitan", "critic.torchtitan.tensor_parallel_size": 8, "critic.enable_resource_pool": "true",
            "critic.n_gpus_per_node": 8,
        },
        ["critic.torchtitan.tensor_parallel_size=8", "heads"],
    ),
    "a family that a strategy does not know": (
        lambda t: {"critic.strategy": "veomni", "critic.model.path": save_tiny_model(t / "gpt2", "gpt2")}, ["veomni", "gpt2"],
    ),
    "keys in eight bits without a GPU": (
        lambda t: {"actor_rollout_ref.rollout.kv_cache_dtype": "fp8", "trainer.device": "cpu"}, ["kv_cache_dtype=fp8", "GPU", "auto"],
    ),
    "values in four bits without a GPU": (
        lambda t: {"actor_rollout_ref.rollout.kv_cache_dtype": "fp8", "trainer.device": "cpu"}, ["kv_cache_dtype=fp8", "GPU", "auto"],
    ),
    "an unknown estimator": (lambda t: {"algorithm.adv_estimator": "gea"}, ["gea", "gae"]),
    "an unknown loss": (lambda t: {"actor_rollout_ref.actor.policy_loss.loss_mode": "vanila"}, ["vanila", "vanilla"]),
    "an unknown key": (lambda t: {"data.train_batchsize": 4}, ["data.train_batchsize", "data.train_batch_size"]),
    "an empty folder as model": (lambda t: {"actor_rollout_ref.model.path": t}, ["config.json"]),
    "a model that does not exist": (lambda t: {"actor_rollout_ref.model.path": t / "nothing"}, ["nothing"]),
    "a file as model": (lambda t: {"actor_rollout_ref.model.path": broken(t / "model.bin")}, ["model.bin"]),
    "a critic that is not a model": (lambda t: {"critic.model.path": t}, ["config.json"]),
    "a reward model that is not one": (lambda t: {"reward_model.enable": "true", "reward_model.model.path": t}, ["config.json"]),
    "a prompt and response too long for the model": (lambda t: {"data.max_response_length": 60}, ["data.max_response_length", "76", "64"]),
    "a data source without a reward": (
        lambda t: {"data.train_files": write_rows(t / "s.parquet", [{"prompt": "ab", "data_source": "my/data"}] * 8)},
        ["my/data", "reward.custom_reward_function.path"],
    ),
    "rows without a data source": (lambda t: {"data.train_files": write_rows(t / "s.parquet", [{"prompt": "ab"}] * 8)}, ["data_source"]),
    "a reward file that does not exist": (lambda t: {"reward.custom_reward_function.path": t / "reward.py"}, ["reward.py"]),
    "a config file that does not exist": (lambda t: {"--config": t / "none.yaml"}, ["none.yaml"]),
    "more processes than one without Ray": (
        lambda t: {"trainer.worker_group": "local", "trainer.n_gpus_per_node": 2}, ["trainer.worker_group", "trainer.n_gpus_per_node"],
    ),
    "a Ray that is not reachable": (
        lambda t: {"trainer.worker_group": "ray", "ray_kwargs.ray_init.address": "127.0.0.1:1"},
        ["127.0.0.1:1", "ray_kwargs.ray_init.address"],
    ),
    "an unknown logger": (lambda t: {"trainer.logger": "[console,wanbd]"}, ["wanbd", "wandb"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("no_model_is_loaded", "every_engine_is_installed")
def test_bad_input_is_one_clear_error_before_any_model_is_loaded(case, good, tmp_path, capsys):
    changes, expected = CASES[case]
    values = good | changes(tmp_path)
    config_file = values.pop("--config", None)
    arguments = [f"{key}={value}" for key, value in values.items()] + (["--config", str(config_file)] if config_file else [])
    assert main_ppo.main(arguments) == 1
    error = capsys.readouterr().err
    message = error[error.rindex("error: ") :]
    assert "Traceback" not in error
    assert len(message) < 700
    for part in expected:
        assert part in message, message


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["algorithm.adv_estimator=grop"], "algorithm.adv_estimator"),
        (["agent.tools=[nowhere.py:add]"], "nowhere.py"),
        (["reward.custom_reward_function.path=nowhere.py"], "nowhere.py"),
        (["data.val_files=nowhere.parquet"], "nowhere.parquet"),
        (["actor_rollout_ref.model.path=smollm2-135m"], "data.train_files"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_the_embedded_task_refuses_before_its_warm_up_and_leaves_nothing(tmp_path, monkeypatch, capsys, arguments, key):
    monkeypatch.setattr(task, "_WarmUp", lambda *_: pytest.fail("a model was warmed up"))
    folder = tmp_path / "runs" / "mine"
    assert main_ppo.main([*arguments, f"trainer.default_local_dir={folder}", "trainer.device=cpu"], algorithm="grpo") == 1
    out, error = capsys.readouterr()
    assert key in error
    assert "first run" not in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "loads",
    [
        "transformers.AutoTokenizer.from_pretrained",
        "lockstep.rewards.manager.RewardManager.check",
        "transformers.AutoModelForCausalLM.from_pretrained",
        "transformers.AutoModelForTokenClassification.from_pretrained",
        "lockstep.models.load.check_packing",
    ],
)
def test_sigterm_ends_a_run_with_143_whatever_is_being_loaded(good, monkeypatch, capsys, loads):
    """Libraries and our own code around them make errors of their own of every exception that they can catch."""
    before, sent = signal.getsignal(signal.SIGTERM), []

    def interrupted(*args, **kwargs):
        sent.append(loads)
        os.kill(os.getpid(), signal.SIGTERM)
        raise RuntimeError("the signal came too late")

    monkeypatch.setattr(loads, interrupted)
    try:
        assert main_ppo.main([f"{key}={value}" for key, value in good.items()]) == 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)
    assert sent == [loads]
    assert capsys.readouterr().err.startswith("SIGTERM: ended while no step was being done")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_an_error(good, capsys, no_model_is_loaded):
    assert main_ppo.main([f"{key}={value}" for key, value in (good | {"trainer.device": "cuda"}).items()]) == 1
    assert "trainer.device=cuda" in capsys.readouterr().err


PACKAGES = [("megatron", "lockstep-rl[megatron]"), ("torchtitan", "lockstep-rl[torchtitan]"), ("veomni", "pip install")]


@pytest.mark.parametrize(("strategy", "command"), PACKAGES)
def test_a_strategy_without_its_package_names_it_and_the_command(good, capsys, monkeypatch, no_model_is_loaded, strategy, command):
    package = strategy
    found = importlib.util.find_spec
    hidden = lambda name, *args: None if name.split(".")[0] == package else found(name, *args)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", hidden)
    for engine in ENGINES:
        monkeypatch.setattr(f"lockstep.backends.{engine}.check.find_spec", hidden)
    assert main_ppo.main([f"{key}={value}" for key, value in (good | {"actor_rollout_ref.actor.strategy": strategy}).items()]) == 1
    error = capsys.readouterr().err
    assert package in error
    assert command in error


def test_asking_for_ray_without_it_names_the_extra(good, capsys, monkeypatch, no_model_is_loaded):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main_ppo.main([f"{key}={value}" for key, value in (good | {"trainer.worker_group": "ray"}).items()]) == 1
    assert "pip install 'lockstep-rl[ray]'" in capsys.readouterr().err


@pytest.mark.parametrize(("section", "role"), [("critic", Role.Critic), ("reward_model", Role.RewardModel)])
def test_one_key_puts_a_role_on_a_pool_of_its_own_in_other_processes(good, capsys, monkeypatch, tmp_path, section, role):
    given = {}

    def trainer(**arguments):
        given.update(arguments)
        raise ResourceError("this is far enough")

    monkeypatch.setattr("lockstep.trainer.ppo.ray_trainer.RayPPOTrainer", trainer)
    monkeypatch.setattr("lockstep.single_controller.ray.cluster.connect", lambda **arguments: False)
    good |= {
        "reward_model.enable": "true",
        "reward_model.model.path": save_tiny_model(tmp_path / "rm", score_head=True),
        f"{section}.enable_resource_pool": "true",
        f"{section}.n_gpus_per_node": 3,
        f"{section}.nnodes": 2,
    }
    assert main_ppo.main([f"{key}={value}" for key, value in good.items()]) == 1
    assert "this is far enough" in capsys.readouterr().err
    pools = given["resource_pool_manager"]
    own = pools.mapping[role]
    assert pools.resource_pool_spec == {"global_pool": [1], own: [3, 3]}
    assert {other: pool for other, pool in pools.mapping.items() if pool == own} == {role: own}
    assert given["ray_worker_group_cls"] is RayWorkerGroup


def test_everything_local_runs_without_ray(good, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main_ppo.main([f"{key}={value}" for key, value in good.items()]) == 0
    assert "done: 1 steps" in capsys.readouterr().out


def test_a_reward_function_and_a_dataset_class_of_the_users_own(good, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "from lockstep.data.rl_dataset import RLHFDataset\n"
        "async def judge(data_source, solution_str, ground_truth, extra_info, bonus):\n"
        "    return {'score': bonus, 'length': len(solution_str)}\n"
        "class Short(RLHFDataset):\n"
        "    def __len__(self):\n"
        "        return 16\n"
    )
    good |= {
        "reward.custom_reward_function.path": tmp_path / "mine.py",
        "reward.custom_reward_function.name": "judge",
        "reward.custom_reward_function.reward_kwargs": "{bonus: 0.25}",
        "data.custom_cls.path": tmp_path / "mine.py",
        "data.custom_cls.name": "Short",
        "trainer.rollout_data_dir": tmp_path / "samples",
    }
    assert main_ppo.main([f"{key}={value}" for key, value in good.items()]) == 0
    assert "16 training prompts" in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "samples" / "1.jsonl").read_text().splitlines()]
    assert len(rows) == 8
    assert all(row["score"] == 0.25 and row["length"] == len(row["output"]) for row in rows)


def test_prompts_alone_are_enough_with_a_reward_model(good, tmp_path, capsys):
    good |= {
        "data.train_files": write_rows(tmp_path / "p.parquet", [{"prompt": "abc"}, {"prompt": "dd"}] * 4),
        "reward_model.enable": "true",
        "reward_model.model.path": save_tiny_model(tmp_path / "rm", score_head=True),
    }
    assert main_ppo.main([f"{key}={value}" for key, value in good.items()]) == 0


def test_the_run_folder_says_what_was_run(good, tmp_path, capsys):
    assert main_ppo.main([f"{key}={value}" for key, value in (good | {"trainer.seed": 7}).items()]) == 0
    again = load_config(config_file=tmp_path / "run" / "config.yaml")
    assert again.trainer.seed == 7
    assert again.data.train_batch_size == 8
    out = capsys.readouterr().out
    assert "8 prompts x 1 samples = 8 responses" in out
    assert out.count(f"the run's folder: {tmp_path / 'run'}\n") == 1


def test_a_first_run_on_a_cpu_says_its_size_and_the_keys_that_change_it(capsys):
    named = ["data.train_files=rows.parquet", "actor_rollout_ref.model.path=model", "trainer.device=cpu"]
    config = main_ppo.load(named, None, "grpo")
    words = capsys.readouterr().out
    assert (
        f"data.train_batch_size={config.data.train_batch_size} data.max_response_length={config.data.max_response_length}" in words
    )
    assert main_ppo.load([*named, "data.train_batch_size=64"], None, "grpo") == load_config([*named], algorithm="grpo")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        (["agent.tools=[nofile.py:tool]"], "agent.tools"),
        (["agent.tools=[calculator,calculator]"], "calculator"),
        (["agent.environment=nofile.py:Game"], "agent.environment"),
    ],
)
def test_tools_and_environments_that_do_not_exist_are_refused_before_the_embedded_task_is_made(keys, named, tmp_path, capsys):
    folder = tmp_path / "run"
    assert main_ppo.main([*keys, f"trainer.default_local_dir={folder}", "trainer.device=cpu"]) == 1
    said = capsys.readouterr()
    assert named in said.err
    assert "embedded task" not in said.out
    assert not (folder / "embedded_task").exists()
