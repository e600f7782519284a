"""Ray workers as forks of a process that has torch, transformers and lockstep imported, which is most of what a Ray worker costs to start.

`warm_workers` starts that process and gives the `py_executable` for `ray.init(runtime_env=...)`: this file as a script, which Ray starts
instead of Python. The script hands its arguments, environment, folder and files over, and waits: it ends as the worker ends, and the
worker ends with it. What a worker does is its own; only where its modules come from differs. Tests that kill a program, or look at
what it leaves, start it as users do.
"""

import array
import contextlib
import ctypes
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

IMPORTED = ("lockstep.workers.engine_workers", "lockstep.workers.distill")
"""What every worker imports. Nothing that draws a number or starts a thread: a fork would share it, or lack it. Nor Ray, which reads its
settings, the token of the cluster among them, from the environment when it is imported."""


@contextmanager
def warm_workers(folder: Path) -> Iterator[str]:
    """The `py_executable`; its server, with a socket in `folder`, lasts as long as the block."""
    address = folder / "warm"
    server = subprocess.Popen([sys.executable, __file__, "--serve", str(address)], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n", "the server of warm workers did not start"
        yield f"{sys.executable} -S {__file__} {address}"
    finally:
        server.kill()
        server.wait()


# -- the script that Ray starts: standard library only, so that it costs nothing ---------------------------------------------


def ask(address: str, arguments: list[str]) -> int:
    """Have a worker started, and wait for its end; its exit status."""
    message = json.dumps({"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        files = array.array("i", [0, 1, 2])
        connection.sendmsg([len(message).to_bytes(4, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
        connection.sendall(message)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: connection.sendall(bytes([number])))
        status = connection.recv(1)
    return status[0] if status else 1


# -- the server --------------------------------------------------------------------------------------------------------------


def serve(address: str) -> None:
    """Import, and fork a keeper with its worker for each connection, until killed."""
    sys.path[0] = str(
        Path(__file__).resolve().parents[1]
    )  # what workers unpickle may be of `helpers`, as in the tests' own process
    for module in IMPORTED:
        __import__(module)
    _end_with_the_parent()
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        print("ready", flush=True)
        while True:
            connection, _ = listener.accept()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:  # keepers that have ended
                    pass
            if os.fork() == 0:
                listener.close()
                _keep(connection)
            connection.close()


def _keep(connection: socket.socket) -> None:
    """Fork the worker, tell its end, and pass signals on; never returns."""
    _end_with_the_parent()
    size, files, _, _ = socket.recv_fds(connection, 4, 3)
    asked = json.loads(_receive(connection, int.from_bytes(size, "big")))
    worker = os.fork()
    if worker == 0:
        connection.close()
        _work(files, **asked)
    ended = os.pidfd_open(worker)
    while True:
        ready, _, _ = select.select([ended, connection], [], [])
        if ended in ready:
            status = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
            with contextlib.suppress(OSError):
                connection.sendall(bytes([status if status >= 0 else 128 - status]))
            os._exit(0)
        number = connection.recv(1)
        os.kill(worker, number[0] if number else signal.SIGKILL)
        if not number:
            os._exit(0)


def _receive(connection: socket.socket, size: int) -> bytes:
    parts = b""
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        assert part, "the script that asked is gone"
        parts += part
    return parts


def _work(files: list[int], arguments: list[str], environment: dict[str, str], folder: str) -> None:
    """Be `python *arguments`; never returns."""
    _end_with_the_parent()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = arguments
    status = 0
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _end_with_the_parent() -> None:
    """The kernel kills this process when the one that forked it is gone."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(sys.argv[2])
    else:
        sys.exit(ask(sys.argv[1], sys.argv[2:]))
