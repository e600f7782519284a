"""A process that ends what Ray leaves when the driver that started it is killed: Ray's agents do not notice.

It is started beside Ray, looks once a second which processes Ray has started, and ends those that are still there when the driver is
gone. It is run as a script: importing the package would take longer than Ray does.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

_LOOK_S = 1.0
_GRACE_S = 3.0
"""What Ray ends itself is ended by then."""


@contextmanager
def watched() -> Iterator[None]:
    """The processes that are started in the block, and what these start later, end soon after this process, however that ends."""
    own = psutil.Process()
    before = {child.pid for child in own.children(recursive=True)}
    yield
    roots = [child.pid for child in own.children(recursive=True) if child.pid not in before]
    if roots:
        subprocess.Popen(
            [sys.executable, __file__, str(own.pid), *map(str, roots)],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is the driver's
        )


def follow(driver: int, *roots: int) -> None:
    """Follow the processes `roots` and their descendants until the process `driver` is gone, then end those that live on."""
    known: dict[int, psutil.Process] = {}
    for pid in roots:
        with contextlib.suppress(psutil.Error):
            known[pid] = psutil.Process(pid)
    while os.getppid() == driver:
        for process in list(known.values()):
            with contextlib.suppress(psutil.Error):
                known |= {child.pid: child for child in process.children() if child.pid != os.getpid()}
        known = {pid: process for pid, process in known.items() if process.is_running()}
        if not known:  # Ray was shut down
            return
        time.sleep(_LOOK_S)
    psutil.wait_procs(list(known.values()), _GRACE_S)
    for process in known.values():
        # is_running: the number may be another process's by now.
        with contextlib.suppress(psutil.Error):
            if process.is_running():
                process.send_signal(signal.SIGKILL)


if __name__ == "__main__":
    follow(*map(int, sys.argv[1:]))
