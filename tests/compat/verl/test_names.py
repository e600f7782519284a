"""verl's import lines with the package renamed, and what the functions behind them give."""

import importlib
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import lockstep
from lockstep.algorithms.kl import FixedKLController
from lockstep.algorithms.masking import masked_mean
from lockstep.compat.verl import RayPPOTrainer, functions, numbers
from lockstep.compat.verl.functions import copy_to_local
from lockstep.compat.verl.loop import VerlTrainer
from lockstep.compat.verl.names import ADDED, MODULES
from lockstep.compat.verl.padded import collate_fn
from lockstep.config import as_config
from lockstep.errors import ConfigError
from lockstep.protocol import DataProto, Ragged

CORE = Path(lockstep.__file__).parent
CLEAN = """
import sys
finders, hooks = list(sys.meta_path), list(sys.path_hooks)
import lockstep, lockstep.cli, lockstep.data, lockstep.trainer.main_ppo
assert (list(sys.meta_path), list(sys.path_hooks)) == (finders, hooks)
import lockstep.trainer.ppo.core_algos, lockstep.utils.reward_score
import lockstep.trainer.ppo.ray_trainer as ray_trainer
for finder in (*sys.meta_path, *sys.path_hooks):  # other libraries have finders of their own
    owners = (getattr(finder, "__module__", ""), type(finder).__module__)
    assert not any(owner.startswith("lockstep") for owner in owners), finder
trainer = ray_trainer.RayPPOTrainer
assert "__init_subclass__" not in vars(trainer)
class Mine(trainer):
    def fit(self):
        pass
assert Mine.__bases__ == (trainer,)
for name, module in list(sys.modules.items()):
    if name.partition(".")[0] == "lockstep":
        path = name.replace(".", "/")
        assert module.__name__ == name and module.__file__.endswith((f"/{path}.py", f"/{path}/__init__.py")), name
assert not [name for name in sys.modules if name.startswith("lockstep.compat.verl")]
assert not hasattr(ray_trainer, "compute_advantage")
for name in ("lockstep.utils.fs", "lockstep.workers.fsdp_workers"):
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    raise AssertionError(name)
"""
"""Every module of Lockstep's is its own file, and nothing of Python's has changed."""


def test_importing_lockstep_and_its_trainer_changes_nothing():
    subprocess.run([sys.executable, "-c", CLEAN], check=True, timeout=240)


def test_every_name_of_the_tables_can_be_imported():
    for path, names in (ADDED | MODULES).items():
        module = importlib.import_module(f"lockstep.{path}")
        for name in names:
            assert getattr(module, name) is not None, (path, name)


def test_a_module_is_added_only_where_lockstep_has_none():
    for path in ADDED:
        assert (CORE / f"{path.replace('.', '/')}.py").exists() or (CORE / path.replace(".", "/") / "__init__.py").exists(), path
    for path in MODULES:
        assert not (CORE / f"{path.replace('.', '/')}.py").exists(), path
        assert not (CORE / path.replace(".", "/")).exists(), path


def test_lockstep_keeps_its_own_names():
    from lockstep.rewards.manager import RewardManager
    from lockstep.trainer.ppo import ray_trainer
    from lockstep.workers import reward_manager

    assert reward_manager.RewardManager is RewardManager
    assert ray_trainer.RayPPOTrainer.__module__ == "lockstep.trainer.ppo.ray_trainer"
    assert RayPPOTrainer is VerlTrainer


IMPORTS = """
from lockstep import DataProto
from lockstep.protocol import DataProtoFuture, DataProtoItem, pad_dataproto_to_divisor, fold_batch_dim
from lockstep.single_controller.base import Worker
from lockstep.single_controller.base.decorator import Dispatch, Execute, register
from lockstep.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, create_colocated_worker_cls
from lockstep.single_controller.ray.base import create_colocated_worker_cls
from lockstep.trainer.main_ppo import create_rl_dataset, create_rl_sampler, run_ppo
from lockstep.trainer.ppo import core_algos
from lockstep.trainer.ppo.core_algos import agg_loss, AdvantageEstimator
from lockstep.trainer.ppo.metric_utils import compute_data_metrics, compute_throughout_metrics, compute_timing_metrics, reduce_metrics
from lockstep.trainer.ppo.ray_trainer import RayPPOTrainer, ResourcePoolManager, Role, apply_kl_penalty, compute_advantage
from lockstep.trainer.ppo.reward import compute_reward, compute_reward_async, get_custom_reward_fn, load_reward_manager
from lockstep.trainer.ppo.utils import Role, need_critic, need_reference_policy
from lockstep.utils import hf_processor, hf_tokenizer
from lockstep.utils.dataset.rl_dataset import RLHFDataset, collate_fn
from lockstep.utils.fs import copy_to_local
from lockstep.utils.hdfs_io import copy, exists, makedirs
from lockstep.utils.profiler import marked_timer
from lockstep.utils.reward_score import default_compute_score, gsm8k, math, math_reward
from lockstep.utils.reward_score.math_reward import compute_score, last_boxed_only_string, remove_boxed
from lockstep.utils.torch_functional import masked_mean, masked_whiten
from lockstep.utils.tracking import Tracking
from lockstep.workers.fsdp_workers import ActorRolloutRefWorker, AsyncActorRolloutRefWorker, CriticWorker, RewardModelWorker
from lockstep.workers.megatron_workers import ActorRolloutRefWorker, CriticWorker
from lockstep.workers.reward_manager import DAPORewardManager, NaiveRewardManager, PrimeRewardManager
from lockstep.workers.reward_manager.abstract import AbstractRewardManager
from lockstep.trainer.main_ppo_v0 import TaskRunner
from lockstep.trainer.main_ppo import TaskRunner, run_ppo
from lockstep.trainer.constants_ppo import PPO_RAY_RUNTIME_ENV, get_ppo_ray_runtime_env
from lockstep.trainer.ppo.ray_trainer import WorkerType, _timer, compute_response_mask
from lockstep.trainer.ppo.reward import extract_reward
from lockstep.utils.config import omega_conf_to_dataclass, validate_config
from lockstep.utils.device import auto_set_device, get_device_name, is_cuda_available, is_npu_available
from lockstep.utils.import_utils import deprecated, load_extern_object
from lockstep.utils.metric import reduce_metrics
from lockstep.utils.profiler import marked_timer, simple_timer
import lockstep.utils.torch_functional as verl_F
import lockstep.utils.reward_score.math_reward
from lockstep.utils import torch_functional, tracking
from lockstep.utils.py_functional import append_to_dict, convert_to_regular_types
from lockstep.utils.reward_score.math import compute_score, is_equiv, last_boxed_only_string, remove_boxed
from lockstep.utils.rollout_skip import RolloutSkip
from lockstep.utils.seqlen_balancing import get_seqlen_balanced_partitions, log_seqlen_unbalance
from lockstep.experimental.reward_loop import migrate_legacy_reward_impl
from lockstep.experimental.dataset.sampler import AbstractSampler
from lockstep.workers.reward_manager import get_reward_manager_cls, register
"""


@pytest.mark.parametrize("line", IMPORTS.strip().splitlines())
def test_an_import_line_of_a_recipe_works(line):
    exec(line, {})


RECIPE = """# A recipe.
from __future__ import annotations
import os
import verl.utils.torch_functional as verl_F
from verl.trainer.ppo.ray_trainer import (
    compute_advantage,
)
def data():
    from verl import DataProto
    return DataProto
"""
MOVED = """# A recipe.
from __future__ import annotations
import os
import lockstep.compat.verl
import lockstep.utils.torch_functional as verl_F
from lockstep.trainer.ppo.ray_trainer import (
    compute_advantage,
)
def data():
    from lockstep import DataProto
    return DataProto
"""


def test_the_command_of_the_docs_moves_a_recipe(tmp_path):
    page = (CORE.parent / "docs/from_verl.md").read_text()
    (command,) = (line for line in page.splitlines() if line.startswith("sed -i -E"))
    for name in ("one.py", "two.py"):  # the import is put into every file
        (tmp_path / name).write_text(RECIPE)
        subprocess.run(["bash", "-c", command.replace("dapo/*.py", name)], check=True, cwd=tmp_path, timeout=60)
        assert (tmp_path / name).read_text() == MOVED
    names: dict = {}
    exec(compile(MOVED, "recipe", "exec"), names)
    assert names["verl_F"].masked_mean is masked_mean
    assert names["data"]() is DataProto


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("from lockstep.tools.base_tool import BaseTool", "agent.tools"),
        ("from lockstep.workers.actor.dp_actor import DataParallelPPOActor", "lockstep.workers.engine"),
        ("from lockstep.utils.metric import Metric", "docs/from_verl.md"),
        ("import lockstep.tools.utils.tool_registry", "agent.tools"),
    ],
)
def test_a_name_without_a_counterpart_says_what_replaces_it(line, said):
    with pytest.raises(ImportError, match=said):
        exec(line, {})


def test_partitions_are_measured():
    assert functions.log_seqlen_unbalance([1, 2, 3, 4], [[0, 3], [1, 2]], "x") == {
        "x/min": 3, "x/max": 7, "x/minmax_diff": 4, "x/balanced_min": 5, "x/balanced_max": 5, "x/mean": 5.0,
    }  # fmt: skip


def test_metrics_are_reduced_by_their_names():
    found = {}
    for loss in (1.0, 2.0):
        functions.append_to_dict(found, {"loss": loss, "loss/max": [loss, 5.0]})
    assert numbers.reduce_metrics(found) == {"loss": 1.5, "loss/max": 5.0}


def test_a_reward_manager_of_ones_own_has_its_name():
    @functions.register("mine")
    class Mine:
        pass

    assert functions.get_reward_manager_cls("mine") is Mine
    assert functions.get_reward_manager_cls("dapo") is functions.VerlRewardManager


def test_what_is_nobodys_is_missing_as_ever():
    for name in ("lockstep.nothing", "lockstep.trainer.ppo.nothing"):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(name)
    with pytest.raises(ImportError):
        importlib.import_module("lockstep.utils.fs.nothing")
    assert not hasattr(importlib.import_module("lockstep.utils.fs"), "nothing")
    with pytest.raises(pickle.PicklingError):  # pickle looks for the name in every module
        pickle.dumps(np.frompyfunc(abs, 1, 1))
    with pytest.raises(AttributeError):
        importlib.import_module("lockstep.data").nothing  # noqa: B018


def two_rows():
    """Two rows of two prompt and three response tokens, of which the second row lacks one each."""
    attention = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 1, 0]])
    numbers = {
        name: torch.arange(6.0).view(2, 3) * attention[:, 2:] for name in ("token_level_scores", "advantages", "returns", "values")
    }
    return {"prompts": torch.zeros(2, 2), "responses": torch.zeros(2, 3), "attention_mask": attention, "response_mask": attention[:, 2:],
            "token_level_rewards": torch.zeros(2, 3), **numbers}  # fmt: skip


def test_metrics_of_padded_blocks():
    batch = SimpleNamespace(batch=two_rows(), meta_info={"global_token_num": [5, 3]}, non_tensor_batch={})
    found = numbers.compute_data_metrics(batch)
    assert (found["critic/score/mean"], found["response_length/mean"], found["prompt_length/min"]) == (5.0, 2.5, 1.0)
    assert found["response_length/clip_ratio"] == 0.5
    assert "critic/values/mean" in found
    assert "critic/values/mean" not in numbers.compute_data_metrics(batch, use_critic=False)
    assert numbers.compute_timing_metrics(batch, {"gen": 1.0}) == {"timing_s/gen": 1.0, "timing_per_token_ms/gen": 200.0}
    assert numbers.compute_throughout_metrics(batch, {"step": 2.0}, 2)["perf/throughput"] == 2.0
    assert numbers.reduce_metrics({"a": [1, 3], "a/max": [1, 3], "min": [1, 3]}) == {"a": 2.0, "a/max": 3, "min": 1}


def test_validation_metrics_are_nested_by_source_and_variable():
    found = numbers.process_validation_metrics(["s/1", "s/1"], ["a", "a"], {"reward": [1.0, 0.0], "pred": ["x", "y"]})
    assert found["s/1"]["reward"]["mean@2"] == 0.5
    assert "maj@2/mean" in found["s/1"]["reward"]
    assert numbers.calc_maj_val([{"p": "a", "v": 1}, {"p": "b", "v": 2}, {"p": "b", "v": 3}], "p", "v") == 2.0
    mean, largest = numbers.bootstrap_metric([1, 2, 3], 3, [np.mean, np.max])
    assert mean[0] == pytest.approx(2.0, abs=0.1)
    assert 2.0 < largest[0] < 3.0


def test_kl_and_advantages_are_written_into_a_batch():
    data = DataProto.from_dict(
        {**two_rows(), "old_log_probs": torch.ones(2, 3), "ref_log_prob": torch.zeros(2, 3)}, {"uid": ["p", "p"]}
    )
    _, told = functions.apply_kl_penalty(data, FixedKLController(0.5))
    assert told == {"actor/reward_kl_penalty": 1.0, "actor/reward_kl_penalty_coeff": 0.5}
    assert data.batch["token_level_rewards"][1].tolist() == [2.5, 3.5, 0.0]
    functions.compute_advantage(data, "rloo")
    scores = data.batch["token_level_rewards"].sum(-1)
    assert data.batch["advantages"][0, 0] == pytest.approx((scores[0] - scores[1]).item())
    assert functions.compute_response_mask(data).tolist() == [[1, 1, 1], [1, 1, 0]]


def test_a_correction_of_padded_blocks():
    old, mask = torch.zeros(2, 2), torch.tensor([[1, 1], [1, 0]])
    rollout = torch.tensor([[0.0, -1.0], [0.0, 5.0]])
    weights, left, told = numbers.compute_rollout_correction_and_rejection_mask(
        old, rollout, mask, rollout_is="token", rollout_is_threshold=2.0, rollout_rs="token_k1", rollout_rs_threshold=2.0
    )
    assert weights.batch["rollout_is_weights"].tolist() == [[1.0, 2.0], [1.0, 0.0]]
    assert left.tolist() == [[1, 0], [1, 0]]
    assert told["rollout_corr/rollout_rs_seq_masked_fraction"] == 0.5
    batch = DataProto.from_dict({"old_log_probs": old, "rollout_log_probs": rollout, "response_mask": mask})
    batch, _ = numbers.compute_rollout_correction_and_add_to_batch(batch, {"rollout_is": "token"})
    assert "rollout_is_weights" in batch
    with pytest.raises(TypeError, match="not a boolean"):
        numbers.compute_rollout_correction_and_rejection_mask(old, rollout, mask, rollout_is="token", rollout_is_threshold=True)


def test_small_helpers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert copy_to_local("a/b") == "a/b"
    with pytest.raises(ValueError, match="HDFS"):
        copy_to_local("hdfs://a")
    rows = collate_fn([{"x": torch.ones(2), "y": [1]}, {"x": torch.zeros(2), "y": [2, 3]}])
    assert rows["x"].shape == (2, 2)
    assert list(rows["y"]) == [[1], [2, 3]]
    timing = {}
    with functions.marked_timer("gen", timing):
        pass
    assert timing["gen"] >= 0
    parts = functions.get_seqlen_balanced_partitions([5, 1, 1, 5], 2)
    assert sorted(row for part in parts for row in part) == [0, 1, 2, 3]
    assert functions.get_seqlen_balanced_partitions([9, 1, 1, 1], 2, equal_size=True) == [[0, 3], [1, 2]]
    assert [functions.is_equiv("0.5", other) for other in ("\\frac{1}{2}", "2")] == [True, False]
    assert functions.remove_boxed(functions.last_boxed_only_string("so \\boxed{7}")) == "7"
    with functions.Tracking("project", "run", ["console"]) as tracking:
        tracking.log({"a": 1.0}, step=1)
    assert (tmp_path / "checkpoints/project/run/metrics.jsonl").exists()
    sampler = functions.create_rl_sampler(SimpleNamespace(shuffle=True, seed=1), range(5))
    assert sorted(sampler) == [0, 1, 2, 3, 4]
    assert functions.need_reference_policy(as_config({"actor_rollout_ref": {"actor": {"use_kl_loss": True}}}))


def test_rewards_come_from_the_configuration(tmp_path, embedded_task):
    from lockstep.utils.tokenizer import hf_tokenizer

    (tmp_path / "mine.py").write_text("def score(data_source, solution_str, ground_truth, extra_info=None):\n    return 2.0\n")
    config = {"reward": {"custom_reward_function": {"path": str(tmp_path / "mine.py"), "name": "score"}}}
    manager = functions.load_reward_manager(config, hf_tokenizer(str(embedded_task.model)))
    data = DataProto({"responses": Ragged.from_rows([[5, 6], [7]])}, {"reward_model": [{"ground_truth": "x"}] * 2})
    tensor, extra = functions.compute_reward(data, manager)
    manager.close()
    assert tensor.sum(-1).tolist() == [2.0, 2.0]
    assert extra["score"] == [2.0, 2.0]
    assert functions.get_custom_reward_fn({}) is None


def test_a_pool_and_a_dataset_take_verls_arguments(embedded_config, embedded_task):
    from lockstep.single_controller.ray import RayResourcePool
    from lockstep.utils.dataset.rl_dataset import RLHFDataset
    from lockstep.utils.tokenizer import hf_tokenizer

    pool = RayResourcePool([2], False, max_colocate_count=1)
    assert (pool.world_size, pool.use_gpu) == (2, False)
    data, tokenizer = embedded_config().data, hf_tokenizer(str(embedded_task.model))
    assert len(RLHFDataset(data.train_files, tokenizer, data, None, -1)) > 3
    with pytest.raises(ConfigError, match="training is on text"):
        RLHFDataset(data_files=data.train_files, tokenizer=tokenizer, config=data, processor=object())
