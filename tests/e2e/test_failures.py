"""What goes wrong while a run is under way: a killed worker, a debugger, an interrupted run, a signal."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from helpers.run import make_trainer, read_metrics, roles, train

from lockstep.tools.verify_resume.compare import differences

PROGRAM = [sys.executable, "-m", "lockstep.trainer.main_ppo"]


def arguments(config):
    """The command line that says the same as `config` where it differs from the defaults of the tests."""
    return [
        f"data.train_files={config.data.train_files}",
        f"data.val_files={config.data.val_files}",
        "data.val_max_samples=32",
        "data.max_prompt_length=16",
        "data.max_response_length=12",
        "data.train_batch_size=8",
        f"actor_rollout_ref.model.path={config.actor_rollout_ref.model.path}",
        f"trainer.default_local_dir={config.trainer.run_dir}",
        "trainer.device=cpu",
    ]


@pytest.mark.ray
def test_a_killed_worker_ends_the_driver_at_once_and_is_named(embedded_config, tmp_path):
    config = embedded_config()
    command = [
        *PROGRAM, *arguments(config), "trainer.n_gpus_per_node=2", "trainer.total_training_steps=100000",
        "trainer.val_before_train=false", "ray_kwargs.ray_init={num_cpus: 4, object_store_memory: 100000000}",
    ]  # fmt: skip
    with (tmp_path / "log").open("w") as log:
        driver = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_until(lambda: config.trainer.run_dir.joinpath("metrics.jsonl").exists() and len(read_metrics(config)) >= 2, 120)
            victim = next(
                p for p in psutil.Process(driver.pid).children(recursive=True) if process_name(p).startswith("ray::WorkerHost")
            )
            killed_at = time.monotonic()
            victim.send_signal(signal.SIGKILL)
            status = driver.wait(timeout=60)
        finally:
            driver.kill()
    output = (tmp_path / "log").read_text()
    assert time.monotonic() - killed_at < 30
    assert status != 0
    message = output[output.rindex("error: ") :]
    assert f"pid {victim.pid}" in message, message
    assert "died" in message
    assert "rank" in message


def process_name(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def wait_until(condition, timeout_s):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.2)


def test_pdb_stops_inside_a_worker_of_the_program(embedded_config):
    import lockstep.workers.engine_workers as module

    source = Path(module.__file__)
    line = 1 + next(i for i, text in enumerate(source.read_text().splitlines()) if "loss_fn = functools.partial(self._loss" in text)
    commands = [f"b {source}:{line}", "c", "p ('stopped in', self.role, len(mini_batch))", "clear 1", "c", "q"]
    result = subprocess.run(
        [sys.executable, "-m", "pdb", *(part for c in commands for part in ("-c", c)), "-m", "lockstep.trainer.main_ppo",
         *arguments(embedded_config()), "trainer.total_training_steps=1", "trainer.val_before_train=false"],
        capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert "('stopped in', 'actor_rollout', 8)" in result.stdout, result.stdout + result.stderr
    assert "step 1/1" in result.stdout


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_an_interrupted_run_goes_on_from_its_checkpoint(embedded_config, tmp_path, strategy):
    more = [
        "trainer.val_before_train=false",
        "trainer.save_freq=2",
        "algorithm.kl_ctrl.type=adaptive",
        f"actor_rollout_ref.actor.strategy={strategy}",
        f"critic.strategy={strategy}",
    ]
    whole = embedded_config(*more, "trainer.total_training_steps=4", f"trainer.default_local_dir={tmp_path / 'whole'}")
    names = roles("ActorRollout", "Critic", "RefPolicy")
    expected = train(whole, {"global_pool": [1]}, names)
    first = embedded_config(*more, "trainer.total_training_steps=2")
    train(first, {"global_pool": [1]}, names)
    assert (first.trainer.run_dir / "latest_checkpointed_iteration.txt").read_text() == "2"
    resumed = train(embedded_config(*more, "trainer.total_training_steps=4"), {"global_pool": [1]}, names)
    assert [row["step"] for row in resumed] == [1, 2, 3, 4]
    for name in ("critic/score/mean", "actor/grad_norm", "critic/vf_loss", "actor/reward_kl_penalty_coeff", "response_length/mean"):
        assert [row[name] for row in resumed] == pytest.approx([row[name] for row in expected], rel=1e-5), name


def test_a_two_rank_checkpoint_goes_on_in_one_process(ray_cluster, embedded_config):
    from lockstep.single_controller.ray import RayWorkerGroup

    more = ["trainer.val_before_train=false", "trainer.save_freq=1", "trainer.max_ckpt_to_keep=1"]
    names = roles("ActorRolloutRef", "Critic")
    train(embedded_config(*more, "trainer.total_training_steps=1"), {"global_pool": [2]}, names, RayWorkerGroup)
    config = embedded_config(*more, "trainer.total_training_steps=2")
    metrics = train(config, {"global_pool": [1]}, names)
    assert [row["step"] for row in metrics] == [1, 2]
    assert [p.name for p in config.trainer.run_dir.glob("global_step_*")] == ["global_step_2"]


@pytest.mark.ray
@pytest.mark.parametrize(
    ("ranks", "number"), [(1, signal.SIGINT), (2, signal.SIGTERM)], ids=["Ctrl-C in one process", "SIGTERM under Ray"]
)
def test_a_signal_saves_the_step_and_the_run_goes_on_from_it(embedded_config, tmp_path, ranks, number):
    config = embedded_config()
    command = [
        *PROGRAM, *arguments(config), "trainer.val_before_train=false", "trainer.test_freq=0",
        "ray_kwargs.ray_init={num_cpus: 4, object_store_memory: 100000000}",
    ]  # fmt: skip
    endless = [*command, "trainer.total_training_steps=100000", f"trainer.n_gpus_per_node={ranks}"]
    with (tmp_path / "log").open("w") as log:
        driver = subprocess.Popen(endless, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_until(lambda: config.trainer.run_dir.joinpath("metrics.jsonl").exists() and len(read_metrics(config)) >= 1, 240)
            driver.send_signal(number)
            status = driver.wait(timeout=120)
        finally:
            driver.kill()
    output = (tmp_path / "log").read_text()
    assert status == 128 + number, output
    done = len(read_metrics(config))
    assert f"{number.name}: ended after step {done} of 100000; the newest checkpoint is" in output
    again = subprocess.run(
        [*command, f"trainer.total_training_steps={done + 1}"],
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )
    assert again.returncode == 0, again.stderr
    assert f"global_step_{done} at step {done}" in again.stdout
    assert [row["step"] for row in read_metrics(config)] == list(range(1, done + 2))


def test_a_run_whose_worker_is_killed_goes_on_with_new_ones_to_the_same_end(ray_cluster, embedded_config_in, tmp_path):
    """Two processes; one is killed in the third step, while the checkpoint of the second may still be on its way to the disk."""
    from lockstep.single_controller.ray import RayWorkerGroup

    def run(name, victim):
        keys = ("total_training_steps=3", "save_freq=1", "max_restarts=1", "val_before_train=false")
        grpo = ("algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=false")
        config = embedded_config_in(tmp_path / name, *grpo, *(f"trainer.{key}" for key in keys))
        trainer = make_trainer(config, {"global_pool": [2]}, roles("ActorRollout"), RayWorkerGroup)
        step = trainer._step

        def hit():
            if trainer.global_steps == 2 and victim is not None and trainer.num_restarts == 0:
                label = trainer.workers.groups[0]._labels[victim]
                os.kill(int(re.search(r"pid (\d+)", label)[1]), signal.SIGKILL)
            return step()

        trainer._step = hit
        try:
            trainer.init_workers()
            trainer.fit()
        finally:
            trainer.close()
        return trainer, config.trainer.run_dir

    _, whole = run("whole", None)
    trainer, hit = run("hit", 1)
    assert trainer.num_restarts == 1
    assert list(differences(whole, hit)) == []
