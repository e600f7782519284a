from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.errors import ResourceError
from lockstep.judging.sandbox import ProgramLimits, isolation
from lockstep.judging.sandbox.isolation import Isolation, find_isolation

ROOT = Path(__file__).parents[3]
NUMBERS = {"ready": 5, "source": 6, "info": 7, "seccomp": 8, "is_code": False, "group": None}


def test_without_bubblewrap_it_refuses_and_names_the_package_and_the_keys(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(
        ResourceError, match=r"apt-get install bubblewrap.*reward\.sandbox\.url.*reward\.sandbox\.accept_weak_isolation=true"
    ):
        find_isolation(accept_weak=False)
    assert find_isolation(accept_weak=True).is_weak


def test_an_old_bubblewrap_is_refused(monkeypatch, tmp_path):
    old = tmp_path / "bwrap"
    old.write_text("#!/bin/sh\necho bubblewrap 0.6.1\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ResourceError, match=r"too old: 0\.8 is needed.*0\.6\.1"):
        find_isolation(accept_weak=False)


def test_a_machine_without_a_filter_is_refused(sandbox, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(ResourceError, match="riscv64"):
        find_isolation(accept_weak=False)


def test_another_system_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ResourceError, match=r"needs Linux.*reward\.sandbox\.url"):
        find_isolation(accept_weak=True)


def test_weak_isolation_never_replaces_what_is_there(sandbox):
    assert not find_isolation(accept_weak=True).is_weak


def test_root_becomes_nobody_before_the_sandbox_is_built(monkeypatch):
    open_prefix = Isolation("bwrap", "setpriv", "/opt/python/bin/python", "/opt/python")
    monkeypatch.setattr(isolation, "_others_reach", lambda folder: True)
    words = open_prefix.command(ProgramLimits(), 10.0, **NUMBERS)
    assert words[:4] == ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    assert _after(words, "--ro-bind", "/opt/python") == "/opt/python"
    monkeypatch.setattr(isolation, "_others_reach", lambda folder: False)
    words = open_prefix.command(ProgramLimits(), 10.0, **NUMBERS)
    assert words[0] == "unshare"
    assert words.index("/opt/python") < words.index("setpriv") < words.index("bwrap")
    assert _after(words, "--ro-bind", "/mnt") == "/opt/python"


def _after(words, option, value):
    """What follows the first `option value`."""
    return next(words[i + 2] for i in range(len(words)) if words[i : i + 2] == [option, value])


def test_the_limit_on_processes_is_set_only_where_it_counts_the_sandbox_alone():
    strong = Isolation("bwrap", None, "/usr/bin/python3", None).command(ProgramLimits(num_processes=77), 10.0, **NUMBERS)
    weak = Isolation(None, None, "/usr/bin/python3", None).command(ProgramLimits(num_processes=77), 10.0, **NUMBERS)
    assert strong[-1] == "77"
    assert "77" not in weak
    assert weak[0] == "/usr/bin/python3"


def test_an_ordinary_user_can_build_the_sandbox(sandbox):
    python = shutil.which("python3", path="/usr/bin")
    if os.geteuid() != 0 or python is None or not isolation._others_reach(str(ROOT)):
        pytest.skip("needs root, a system Python and a checkout that others can read")
    has_packages = subprocess.run(
        [python, "-c", "import sys, psutil; assert sys.version_info >= (3, 11)"], capture_output=True, check=False
    )
    psutil_at = Path(__import__("psutil").__file__).parents[1]
    if has_packages.returncode and not isolation._others_reach(str(psutil_at)):
        pytest.skip("no psutil that another user can read")
    code = (
        "import os, sys\nfrom lockstep.judging.sandbox import LocalSandbox, ProgramLimits\n"
        "s = LocalSandbox(1, ProgramLimits(wall_s=2, memory_mb=200, num_processes=16))\ns.check()\n"
        "many = 'import os, time\\nfor i in range(10):\\n    if os.fork() == 0: x = b\"1\" * (60 * 10**6); time.sleep(9)\\ntime.sleep(9)'\n"
        "bomb = 'import os\\nwhile True: os.fork()'\n"
        "print(os.getuid(), s.run('import os; print(os.getuid())').stdout.strip(), s.run(many, wall_s=20).status, s.run(bomb).status)"
    )
    command = ["setpriv", "--reuid=4321", "--regid=4321", "--clear-groups", python, "-c", code]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{ROOT}:{psutil_at}", "PYTHONDONTWRITEBYTECODE": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/", timeout=60, check=False)
    assert result.stdout == "4321 65534 memory error\n", result.stderr
