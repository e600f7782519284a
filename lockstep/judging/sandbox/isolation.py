"""The command line that isolates a program. Text in, text out: nothing is started here.

Inside, a program is process 1 of namespaces of its own (process ids, network, users, IPC, host name, cgroups, mounts), without
capabilities or a way to gain any. It sees /usr and the interpreter read-only, a /dev of harmless devices, its own /proc, and one folder to
write in.

Whoever starts it, the program is an ordinary user. That matters when root does: /proc/sys obeys user id 0 of the machine even inside a
namespace, and root has no limit on processes. So root becomes `nobody` first. An interpreter that nobody cannot reach (below /root,
say) is bound where it can before that, in a mount namespace of its own.
"""

import math
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import ResourceError
from lockstep.judging.sandbox.base import ProgramLimits
from lockstep.judging.sandbox.cgroup import Group
from lockstep.judging.sandbox.seccomp import machines

NOBODY = 65534
SCRATCH = "/tmp"
"""The one folder that a program can write in, and where it starts."""
_REACHABLE = "/mnt"
_OLDEST = (0, 8)
_LINKS = ("/bin", "/lib", "/lib32", "/lib64", "/libx32", "/sbin")

BOOT = """
import builtins, marshal, os, resource, sys
ready, source, is_code, *limits = map(int, sys.argv[1:])
for name, limit in zip(("AS", "CPU", "FSIZE", "NOFILE", "CORE", "MEMLOCK", "NPROC"), limits):
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limit, limit))
with open(source, "rb") as file:
    program = marshal.load(file) if is_code else file.read()
os.write(ready, b"ready")
os.closerange(3, 64)
sys.argv[:] = ["program.py"]
builtins.exit = builtins.quit = sys.exit  # from the module site, which is not loaded
del ready, source, is_code, limits, name, limit, file, builtins, marshal, os, resource, sys
exec(compile(program, "program.py", "exec") if isinstance(program, bytes) else program)
"""
"""The first Python inside: sets the limits, says that the sandbox stands, becomes the program."""


@dataclass(frozen=True)
class Isolation:
    """How programs are started on this machine; see `find_isolation`."""

    bwrap: str | None
    """bubblewrap; None: weak isolation."""
    setpriv: str | None
    """Turns root into nobody; None when this process is not root."""
    interpreter: str
    """The base Python, not the virtual environment's."""
    prefix: str | None
    """Folder to bind for it; None when it is part of /usr."""

    @property
    def is_weak(self) -> bool:
        """Whether nothing but limits and a process group holds the program."""
        return self.bwrap is None

    def command(
        self,
        limits: ProgramLimits,
        wall_s: float,
        ready: int,
        source: int,
        info: int,
        seccomp: int,
        is_code: bool,
        group: Group | None,
    ) -> list[str]:
        """The command for one program. `ready`, `source`, `info`, `seccomp` are the descriptors for the mark that the program starts,
        for its text (its marshalled code if `is_code`), for bubblewrap's report of the process id, for the filter of system calls. It
        runs in the control `group`, where there is one.
        """
        rlimits = [limits.memory_mb << 20, math.ceil(wall_s), limits.scratch_mb << 20, limits.num_open_files, 0, 0]
        if not self.is_weak:  # outside a user namespace it would count all processes of the user
            rlimits.append(limits.num_processes)
        numbers = map(str, (ready, source, int(is_code), *rlimits))
        python = [self.interpreter, "-I", "-S", "-B", "-X", "utf8", "-c", BOOT, *numbers]
        if self.bwrap is None:
            return python
        become_nobody = [self.setpriv, f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--"] if self.setpriv else []
        is_hidden = bool(self.setpriv) and self.prefix is not None and not _others_reach(self.prefix)
        bound_at = _REACHABLE if is_hidden else self.prefix
        # For root: bind the interpreter where everyone reaches it, for nobody but what follows. These commands become what follows: a
        # process between it and this one could not pass on that this one died, since root without capabilities may not signal nobody.
        bind = f'mount --bind "$0" {_REACHABLE} && exec "$@"'
        around = (
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", bind, self.prefix] if is_hidden and self.prefix else []
        )
        report = ["--info-fd", str(info), "--seccomp", str(seccomp)]
        return [
            *(group.entering() if group is not None else []),
            *around,
            *become_nobody,
            *_inside(self.bwrap, self.prefix, bound_at, limits.scratch_mb << 20, has_group=group is not None),
            *report,
            "--",
            *python,
        ]


def find_isolation(accept_weak: bool) -> Isolation:
    """What this machine offers. Raises ResourceError when it cannot isolate and `accept_weak` is false."""
    if sys.platform != "linux":
        raise ResourceError(
            f"the local sandbox needs Linux, this is {sys.platform}: set reward.sandbox.url to a SandboxFusion server"
        )
    interpreter = os.path.realpath(sys._base_executable)  # type: ignore[attr-defined]  # not a virtual environment's copy of it
    prefix = os.path.realpath(sys.base_prefix)
    outside_usr = None if Path(prefix).is_relative_to("/usr") else prefix
    problem, bwrap = _find_bwrap()
    setpriv = shutil.which("setpriv") if os.geteuid() == 0 else None
    if problem is None and os.geteuid() == 0 and setpriv is None:
        problem = "setpriv (package util-linux), with which root becomes nobody, is not installed"
    if problem is None and platform.machine() not in machines():
        problem = f"there is no filter of system calls for {platform.machine()} (only for {', '.join(machines())})"
    if problem is None:
        return Isolation(bwrap, setpriv, interpreter, outside_usr)
    if accept_weak:
        return Isolation(None, None, interpreter, outside_usr)
    raise ResourceError(
        f"programs cannot be isolated: {problem}. Install it (Debian, Ubuntu: apt-get install bubblewrap), or set reward.sandbox.url to a "
        "SandboxFusion server, or accept that a program can read your files and use the network: reward.sandbox.accept_weak_isolation=true"
    )


def _find_bwrap() -> tuple[str | None, str | None]:
    """(what is wrong, path)."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        return "bubblewrap (bwrap) is not installed", None
    told = subprocess.run([bwrap, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    version = tuple(map(int, re.findall(r"\d+", told)[:2]))
    if version < _OLDEST:
        return f"bubblewrap is too old: 0.8 is needed, {bwrap} is {told.strip() or 'of an unknown version'}", None
    return None, bwrap


def _inside(bwrap: str, prefix: str | None, bound_at: str | None, scratch_bytes: int, has_group: bool) -> list[str]:
    """bubblewrap with the sandbox's mounts and namespaces; the interpreter's `prefix` lies at `bound_at` where this is run."""
    words = [bwrap, "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session", "--as-pid-1"]
    words += ["--uid", str(NOBODY), "--gid", str(NOBODY), "--cap-drop", "ALL", "--hostname", "sandbox"]
    words += ["--clearenv", "--setenv", "PATH", "/usr/bin:/bin", "--setenv", "HOME", SCRATCH, "--setenv", "LANG", "C.UTF-8"]
    words += _system()
    if prefix is not None and bound_at is not None:
        words += ["--ro-bind", bound_at, prefix]
    # /dev is a file system in memory too, and without a bound: nothing may be written there.
    words += ["--proc", "/proc", "--dev", "/dev"]
    if not has_group:  # mapped, it is shared memory without a file: see seccomp.py
        words += ["--dev-bind", "/dev/null", "/dev/zero"]
    words += ["--remount-ro", "/dev"]
    return [*words, "--size", str(scratch_bytes), "--tmpfs", SCRATCH, "--chdir", SCRATCH, "--remount-ro", "/"]


def _system() -> list[str]:
    """/usr read-only, and /bin, /lib and so on as this machine has them: links into /usr, or folders. The loader's cache says where
    libraries lie: without it an interpreter in /usr/local does not find its own.
    """
    words = [
        "--ro-bind",
        "/usr",
        "/usr",
        "--perms",
        "0755",
        "--dir",
        "/etc",
        "--ro-bind-try",
        "/etc/ld.so.cache",
        "/etc/ld.so.cache",
    ]
    for path in _LINKS:
        if os.path.islink(path):
            words += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            words += ["--ro-bind", path, path]
    return words


def _others_reach(folder: str) -> bool:
    """Whether every user may enter `folder`."""
    return all(path.stat().st_mode & stat.S_IXOTH for path in (Path(folder), *Path(folder).parents))
