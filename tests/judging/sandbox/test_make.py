from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from lockstep.errors import ConfigError, ResourceError
from lockstep.judging.sandbox import LocalSandbox, default_sandbox, make, make_sandbox


def test_values_reach_the_sandbox(sandbox):
    with make_sandbox(max_concurrent=3, wall_s=1.5, memory_mb=300) as made:
        assert isinstance(made, LocalSandbox)
        assert (made.max_concurrent, made.limits.wall_s, made.limits.memory_mb) == (3, 1.5, 300)
    with make_sandbox() as made:
        assert made.max_concurrent == len(os.sched_getaffinity(0))
    with pytest.raises(ConfigError, match="memory_mb"):
        make_sandbox(memory_mb=-1)


def test_the_example_of_the_documentation_runs(sandbox):
    (example,) = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[3] / "docs/sandbox.md").read_text(), re.DOTALL)
    exec(example, {})


def test_it_fails_at_once_where_programs_cannot_run(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # a test beside this one looks for leftovers in /tmp
    with pytest.raises(ResourceError, match="bubblewrap"):
        make_sandbox()
    assert make_sandbox(accept_weak_isolation=True).run("print(1)").stdout == "1\n"


def test_the_default_is_one_for_the_process_and_another_after_a_fork(sandbox, monkeypatch):
    first = default_sandbox()
    assert default_sandbox() is first
    monkeypatch.setattr(make, "_default", (os.getpid() + 1, first))
    assert default_sandbox() is not first
