"""A step that does everything, watched from outside: who adds which column, and who pads."""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from helpers.mixtures import MIXTURES
from helpers.run import make_trainer, roles, train
from helpers.tiny import save_tiny_model

import lockstep
from lockstep import protocol
from lockstep.agents.episode import Episode, episode_columns
from lockstep.algorithms.rows import Rows
from lockstep.protocol import DataProto, Ragged

POOL = {"global_pool": [1]}
TRAINER = str(Path(lockstep.__file__).parent / "trainer")


def ledger():
    """Column -> who writes it, from the docstring of lockstep.protocol; "-" where it is derived."""
    table = (protocol.__doc__ or "").split("```text\n")[1].split("```")[0]
    fields = [line.split() for line in table.splitlines()[1:] if not line.startswith(" ")]
    assert all(len(row) >= 5 and row[1] in ("R", "D", "O") for row in fields), fields
    return {row[0]: row[3] for row in fields}


class Writers:
    """A profiler: for each function of the trainer, the columns that it adds to its batches; the innermost public one counts."""

    def __init__(self):
        self.found, self._before = {}, {}

    def __call__(self, frame, event, argument):
        file = frame.f_code.co_filename
        if event not in ("call", "return") or not file.startswith(TRAINER) or file.endswith("interfaces.py"):  # which only forwards
            return
        if event == "call":
            batches = [value for value in frame.f_locals.values() if isinstance(value, DataProto)]
            self._before[id(frame)] = [(batch, self._columns(batch)) for batch in batches]
            return
        given = self._before.pop(id(frame), [])
        added = set().union(*(self._columns(batch) - before for batch, before in given))
        if isinstance(argument, DataProto) and all(argument is not batch for batch, _ in given):
            added |= self._columns(argument).difference(*(before for _, before in given))
        for name in added if not frame.f_code.co_name.startswith("_") else ():
            self.found.setdefault(name, frame.f_code.co_name)

    @staticmethod
    def _columns(batch):
        return {*batch.columns, *batch.non_tensor_batch}


@pytest.fixture
def everything(embedded_config, tmp_path):
    """Every stage that a configuration can switch on."""
    return embedded_config(
        "trainer.total_training_steps=1", "trainer.val_before_train=false", "algorithm.adv_estimator=remax", "critic.enable=true",
        "algorithm.rollout_correction.rollout_is=token", "reward_model.enable=true", "algorithm.gdpo_reward_keys=[model]",
        f"reward_model.model.path={save_tiny_model(tmp_path / 'rm', score_head=True)}", "actor_rollout_ref.rollout.router_replay=true",
        f"actor_rollout_ref.model.path={save_tiny_model(tmp_path / 'mixture', 'mixtral', **MIXTURES['mixtral'])}",
    )  # fmt: skip


def test_the_ledger_of_columns_says_who_adds_them(everything):
    trainer = make_trainer(everything, POOL, roles("ActorRolloutRef", "Critic", "RewardModel"))
    of_dataset = {"prompts" if name == "prompt_ids" else name for name in trainer.train_dataset[0]}
    writers = Writers()
    try:
        trainer.init_workers()
        sys.setprofile(writers)
        trainer.fit()
    finally:
        sys.setprofile(None)
        trainer.close()
    written = {name: by for name, by in ledger().items() if by != "-"}
    assert all(writers.found.pop(name) == "make_prompts" for name in of_dataset)
    assert {name for name, by in written.items() if by == "RLHFDataset"} <= of_dataset
    assert writers.found == {name: by for name, by in written.items() if by not in ("RLHFDataset", "play_rows")}


def test_what_episodes_add_is_in_the_ledger():
    columns = episode_columns([Episode([1], finish_reason="stop")], has_contexts=True)
    added = {*columns.columns, *columns.non_tensor_batch} - {
        name for name, by in ledger().items() if by in ("generate", "RLHFDataset")
    }
    assert added == {name for name, by in ledger().items() if by == "play_rows"}


def test_what_the_ledger_says_is_derived_is_there_in_the_views_only():
    rows = Ragged.from_rows([[1, 2], [3]])
    data = DataProto.from_dict({"prompts": rows, "responses": rows})
    derived = {name for name, by in ledger().items() if by == "-"}
    assert {*data.batch} - {*data.columns} == {*data[0].batch} - {*data.columns} == derived


@pytest.fixture
def pads(monkeypatch):
    """Counts of (function, file that asked for it) for everything that goes from rows to blocks or back."""
    counts, package = Counter(), Path(lockstep.__file__).parent

    def counting(owner, name):
        function = owner.__dict__[name]
        plain = function.__func__ if isinstance(function, classmethod) else function

        def counted(*args, **kwargs):
            frame = sys._getframe(1)
            while frame.f_code.co_filename == protocol.__file__:
                frame = frame.f_back
            counts[f"{owner.__name__}.{name}", frame.f_code.co_filename.removeprefix(f"{package}/")] += 1
            return plain(*args, **kwargs)

        monkeypatch.setattr(owner, name, classmethod(counted) if isinstance(function, classmethod) else counted)

    for owner, name in ((Ragged, "pad"), (Ragged, "from_padded"), (Rows, "pad"), (Rows, "unpad")):
        counting(owner, name)
    return counts


GRPO = (
    "trainer.total_training_steps=1", "trainer.test_freq=1", "algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=false",
    "actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "algorithm.rollout_correction.rollout_is=sequence", "algorithm.rollout_correction.rollout_rs=seq_max_k2",
    "algorithm.rollout_correction.rollout_rs_threshold=2.0",
)  # fmt: skip


def run_grpo(embedded_config, tmp_path, **more):
    folders = [f"trainer.{name}_data_dir={tmp_path / name}" for name in ("rollout", "validation")]
    train(embedded_config(*GRPO, *folders), POOL, roles("ActorRolloutRef"), **more)


def test_a_step_neither_pads_nor_unpads(embedded_config, tmp_path, pads):
    run_grpo(embedded_config, tmp_path)
    assert not pads


def test_a_reward_function_of_a_user_pays_for_the_view_it_reads(embedded_config, tmp_path, pads):
    def same_for_all(data):
        return torch.zeros(data.batch["responses"].shape)

    run_grpo(embedded_config, tmp_path, reward_fn=same_for_all)
    assert pads == {("Ragged.pad", __file__): 1, ("Ragged.from_padded", "trainer/ppo/rewards.py"): 1}
