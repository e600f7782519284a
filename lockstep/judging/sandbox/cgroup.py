"""Control groups: the kernel's own bound on the memory of a process tree, where this process may make one.

A group is charged for all that its processes hold: private and shared memory, files in the scratch folder, and the kernel's buffers of
pipes and sockets. A container seldom lets its processes make groups; then watch.py counts what it can see and seccomp.py refuses what it
cannot.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path

KERNEL_MB = 32
"""What a group may hold beyond the memory and the scratch folder of its program: page tables, stacks and buffers of the kernel."""
_PREFIX = "lockstep-sandbox-"
_REMOVE_S = 2.0
_numbers = count()


@dataclass(frozen=True)
class Groups:
    """A folder in which groups can be made."""

    folder: Path
    settings: dict[str, str]
    """File -> what is written to it; {limit} is the limit in bytes. The first must be there."""
    events: str
    """The file that counts the processes which the kernel ended at the limit."""

    def make(self, limit: int) -> Group:
        """A group whose processes may hold `limit` bytes together. Raises OSError when that is refused."""
        folder = self.folder / f"{_PREFIX}{os.getpid()}-{next(_numbers)}"
        folder.mkdir()
        try:
            first = next(iter(self.settings))
            for name, text in self.settings.items():
                if name == first or (folder / name).exists():
                    (folder / name).write_text(text.format(limit=limit))
        except OSError:
            folder.rmdir()
            raise
        return Group(folder, self.events)


@dataclass(frozen=True)
class Group:
    """One group."""

    folder: Path
    events: str

    def entering(self) -> list[str]:
        """The words before a command that put it into the group, with all that it starts."""
        return ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.folder / "cgroup.procs")]

    def is_over(self) -> bool:
        """Whether the kernel has ended a process of the group at the limit."""
        try:
            found = re.search(r"^oom_kill (\d+)", (self.folder / self.events).read_text(), re.MULTILINE)
        except OSError:
            return False
        return found is not None and found[1] != "0"

    def close(self) -> None:
        """Remove the group, whose processes have ended; one that the kernel does not let go is left to the next run."""
        deadline = time.monotonic() + _REMOVE_S
        while True:
            with suppress(FileNotFoundError):
                try:
                    self.folder.rmdir()
                except OSError:
                    if time.monotonic() < deadline:
                        time.sleep(0.01)
                        continue
            return


@cache
def find_groups() -> Groups | None:
    """Where this process can make groups that bound memory; None where it cannot. Removes groups of processes that are gone."""
    for groups in (_second_version(), _first_version()):
        if groups is None:
            continue
        try:
            groups.make(1 << 30).close()
        except OSError:
            continue
        for folder in groups.folder.glob(f"{_PREFIX}*"):
            if not Path("/proc", folder.name.removeprefix(_PREFIX).partition("-")[0]).exists():
                with suppress(OSError):
                    folder.rmdir()
        return groups
    return None


def _second_version() -> Groups | None:
    """A sibling of our own group: a group that has processes has no groups below it."""
    mount = _mounted(" cgroup2 ", "")
    own = _own("")
    if mount is None or own is None:
        return None
    folder = Path(f"{mount}{own}")
    for parent in (folder.parent, folder):
        with suppress(OSError):
            if "memory" in (parent / "cgroup.subtree_control").read_text().split():
                settings = {"memory.max": "{limit}", "memory.swap.max": "0", "memory.oom.group": "1"}
                return Groups(parent, settings, "memory.events")
    return None


def _first_version() -> Groups | None:
    mount = _mounted(" cgroup ", "memory")
    own = _own("memory")
    if mount is None or own is None:
        return None
    settings = dict.fromkeys(("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"), "{limit}")
    settings["memory.kmem.tcp.limit_in_bytes"] = str(KERNEL_MB << 20)  # the buffers of TCP are counted apart
    return Groups(Path(f"{mount}{own}"), settings, "memory.oom_control")


def _mounted(kind: str, option: str) -> str | None:
    """Where the control groups of a kind are."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, _, options, *_ = line.split()
        if kind in line and (not option or option in options.split(",")):
            return place
    return None


def _own(controller: str) -> str | None:
    """The group that this process is in."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path.rstrip("/")
    return None
