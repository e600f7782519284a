"""What goes wrong in a run of several processes: a worker is killed; a run goes on with other ones."""

import os
import re
import signal
import subprocess
import time

import psutil
import pytest
from helpers.program import PROGRAM, arguments, num_steps, wait_until
from helpers.run import make_trainer, roles, train

from lockstep.tools.verify_resume import differences


@pytest.mark.ray
@pytest.mark.timeout(600)  # a start under load takes minutes
def test_a_killed_worker_ends_the_driver_at_once_and_is_named(embedded_config, tmp_path):
    config = embedded_config()
    command = [
        *PROGRAM, *arguments(config), "trainer.n_gpus_per_node=2", "trainer.total_training_steps=100000",
        "trainer.val_before_train=false", "ray_kwargs.ray_init={address: local, num_cpus: 4, object_store_memory: 100000000}",
    ]  # fmt: skip
    with (tmp_path / "log").open("w") as log:
        driver = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_until(
                lambda: num_steps(config) >= 2,
                240,
                driver,
                tmp_path / "log",
            )
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


def test_a_two_rank_checkpoint_goes_on_in_one_process(ray_cluster, embedded_config):
    from lockstep.single_controller.ray import RayWorkerGroup

    more = ["trainer.val_before_train=false", "trainer.save_freq=1", "trainer.max_ckpt_to_keep=1"]
    names = roles("ActorRolloutRef", "Critic")
    train(embedded_config(*more, "trainer.total_training_steps=1"), {"global_pool": [2]}, names, RayWorkerGroup)
    config = embedded_config(*more, "trainer.total_training_steps=2")
    metrics = train(config, {"global_pool": [1]}, names)
    assert [row["step"] for row in metrics] == [1, 2]
    assert [p.name for p in config.trainer.run_dir.glob("global_step_*")] == ["global_step_2"]


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
