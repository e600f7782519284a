"""A program that gets outside is seen; one in the sandbox gets nowhere."""

import subprocess
import sys

import pytest

from lockstep.judging.code import extract_program
from lockstep.judging.sandbox import Limits, LocalSandbox
from lockstep.tools.reward_check.fuzz import Earns
from lockstep.tools.reward_check.traps import Traps

FOUND = ["reads /etc/passwd", "reads the environment", "opens a socket", "writes outside"]
NEVER = ["leaves children behind", "exits with success"]


@pytest.fixture
def traps():
    with Traps() as traps:
        yield traps


def programs(traps):
    responses = traps.responses("print('the right answer')", runs_programs=True)
    return {response.name.removeprefix("program that "): extract_program(response.text) for response in responses}


def test_without_a_sandbox_each_probe_finds_what_it_looks_for(traps):
    assert sorted(programs(traps)) == sorted(FOUND + NEVER)
    for name in [*FOUND, "exits with success"]:
        done = subprocess.run([sys.executable, "-c", programs(traps)[name]], capture_output=True, text=True, timeout=60)
        assert (done.stdout == "the right answer\n") == (name in FOUND), (name, done.stderr)
    assert traps.sprung() == [
        "a program in a response wrote a file outside the sandbox",
        "a program in a response opened a connection to this machine",
    ]


def test_in_the_sandbox_no_probe_finds_anything(traps):
    sandbox = LocalSandbox(limits=Limits(wall_s=2.0))
    for name, program in programs(traps).items():
        assert "the right answer" not in sandbox.run(program).stdout, name
    assert traps.sprung() == []


def test_the_answer_cannot_be_read_off_the_program(traps):
    for response in traps.responses("print('#### 42')", runs_programs=False):
        assert "42'" not in response.text
        assert response.earns is Earns.NOTHING
