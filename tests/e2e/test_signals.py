"""A signal ends a run after its step, with a checkpoint to go on from."""

import signal
import subprocess

import pytest
from helpers.program import PROGRAM, arguments, num_steps, wait_until
from helpers.run import read_metrics


@pytest.mark.ray
@pytest.mark.timeout(600)  # a start under load takes minutes
@pytest.mark.parametrize(
    ("ranks", "number"), [(1, signal.SIGINT), (2, signal.SIGTERM)], ids=["Ctrl-C in one process", "SIGTERM under Ray"]
)
def test_a_signal_saves_the_step_and_the_run_goes_on_from_it(embedded_config, warm_ray, tmp_path, ranks, number):
    config = embedded_config()
    command = [
        *PROGRAM, *arguments(config), "trainer.val_before_train=false", "trainer.test_freq=0",
        "ray_kwargs.ray_init={address: local, num_cpus: 4, object_store_memory: 100000000}",
        *(f"+ray_kwargs.ray_init.runtime_env.{key}='{value}'" for key, value in warm_ray.items()),
    ]  # fmt: skip
    endless = [*command, "trainer.total_training_steps=100000", f"trainer.n_gpus_per_node={ranks}"]
    with (tmp_path / "log").open("w") as log:
        driver = subprocess.Popen(endless, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_until(
                lambda: num_steps(config) >= 1,
                240,
                driver,
                tmp_path / "log",
            )
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
