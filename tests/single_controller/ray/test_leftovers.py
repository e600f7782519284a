import os
import subprocess
import sys
import time

import pytest
from helpers.processes import runs

DRIVER = """
import subprocess, sys, time
from leftovers import watched
agent = "import os, time; os.setsid(); time.sleep(1000)"
raylet = f"import subprocess, sys, time; print(subprocess.Popen([sys.executable, '-c', {agent!r}]).pid, flush=True); time.sleep(1000)"
own = subprocess.Popen(["sleep", "1000"])
with watched():
    print(own.pid, subprocess.Popen([sys.executable, "-c", raylet]).pid, flush=True)
time.sleep({seconds})
"""


@pytest.mark.parametrize("kill", [True, False])
def test_what_was_started_in_the_block_ends_with_the_driver_and_nothing_else_does(kill):
    """Also what it started, in a session of its own."""
    program = DRIVER.replace("{seconds}", "1000" if kill else "2")
    environment = os.environ | {"PYTHONPATH": "lockstep/single_controller/ray"}  # importing the package takes seconds
    driver = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment)
    own, raylet = map(int, driver.stdout.readline().split())
    agent = int(driver.stdout.readline())
    try:
        time.sleep(2.5)
        if kill:
            assert all(map(runs, (own, raylet, agent)))
            driver.kill()
        driver.wait()
        deadline = time.monotonic() + 20
        while runs(raylet) or runs(agent):
            assert time.monotonic() < deadline, "something lives on"
            time.sleep(0.1)
        assert runs(own)
    finally:
        for pid in filter(runs, (own, raylet, agent)):
            os.kill(pid, 9)
