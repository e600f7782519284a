"""Run programs on this machine, each in a process tree of its own that bubblewrap isolates (see isolation.py)."""

import marshal
import os
import platform
import re
import select
import selectors
import signal
import subprocess
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from functools import cache
from typing import IO

from lockstep.errors import ResourceError
from lockstep.judging.sandbox.base import ProgramLimits, Result, Sandbox, Status, exit_status, judge_program
from lockstep.judging.sandbox.cgroup import KERNEL_MB, Group, find_groups
from lockstep.judging.sandbox.isolation import find_isolation
from lockstep.judging.sandbox.seccomp import filter_program
from lockstep.judging.sandbox.watch import GroupTree, NamespaceTree, Tree

_START_S = 30.0
_END_S = 30.0
_WATCH_S = 0.02
_CHUNK = 1 << 16
_CUT = b"\n[cut: output limit]"


class LocalSandbox(Sandbox):
    """Programs on this machine.

    Args:
        max_concurrent: Programs at a time; None: as many as this process may use cores.
        limits: What each may use.
        accept_weak_isolation: Run programs without isolation where bubblewrap is missing. They can then read what you can read, use
            the network, and leave processes behind.
        queue_s: Longest wait for a place.

    Raises ResourceError when the machine cannot isolate and weak isolation is not accepted.
    """

    def __init__(
        self,
        max_concurrent: int | None = None,
        limits: ProgramLimits | None = None,
        accept_weak_isolation: bool = False,
        queue_s: float = 300.0,
    ) -> None:
        self.isolation = find_isolation(accept_weak_isolation)
        self.groups = None if self.isolation.is_weak else find_groups()
        super().__init__(
            len(os.sched_getaffinity(0)) if max_concurrent is None else max_concurrent, limits or ProgramLimits(), queue_s
        )
        self._running: set[_Run] = set()
        self._lock = threading.Lock()

    def _execute(self, program: str | None, stdin: str, wall_s: float) -> Result:
        with ExitStack() as stack:
            run = _Run(self, program, stdin, wall_s, stack)
            with self._lock:
                self._running.add(run)
            if self._closed:  # perhaps before it was in the set
                run.abandon()
            try:
                return run.finish()
            finally:
                with self._lock:
                    self._running.discard(run)

    def _end_all(self) -> None:
        with self._lock:
            for run in self._running:
                run.abandon()


@cache
def _compiled_judge() -> bytes:
    """The judge is our own, so it can be compiled here, once, for the same interpreter inside."""
    return marshal.dumps(compile(judge_program(), "judge.py", "exec"))


class _Run:
    """One program from start to end. Everything it opens is closed by `stack`."""

    def __init__(self, sandbox: LocalSandbox, program: str | None, stdin: str, wall_s: float, stack: ExitStack) -> None:
        self._limits = sandbox.limits
        self._wall_s = wall_s
        self._stack = stack
        self._is_weak = sandbox.isolation.is_weak
        self._input = memoryview(stdin.encode("utf-8", "surrogatepass"))
        self._output = {"stdout": bytearray(), "stderr": bytearray(), "report": bytearray()}
        self._abandoned = threading.Event()
        self._tree: Tree | None = None
        self._process = self._start(sandbox, program)
        self._ended = self._own(os.pidfd_open(self._process.pid))
        self._selector = stack.enter_context(selectors.DefaultSelector())
        self._selector.register(self._ended, selectors.EVENT_READ, "ended")
        self._selector.register(self._stdin, selectors.EVENT_WRITE, "stdin")
        for name, descriptor in self._open.items():
            self._selector.register(descriptor, selectors.EVENT_READ, name)

    def abandon(self) -> None:
        """From another thread: end the program soon; `finish` will raise."""
        self._abandoned.set()

    def finish(self) -> Result:
        """Feed, read and watch the program until it ends or passes a limit; then end all of it."""
        try:
            self._wait_until_ready()
            began = time.monotonic()
            status = self._wait_until_over(began + self._wall_s)
            seconds = time.monotonic() - began
        finally:
            self._end()
        return self._result(status, seconds)

    # -- start -------------------------------------------------------------------------------------------------------------

    def _start(self, sandbox: LocalSandbox, program: str | None) -> subprocess.Popen[bytes]:
        source = self._file(_compiled_judge() if program is None else program.encode("utf-8", "surrogatepass"))
        self._group = self._make_group(sandbox)
        seccomp = self._file(
            b"" if self._is_weak else filter_program(platform.machine(), allow_shared_memory=self._group is not None)
        )
        scratch = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-sandbox-")) if self._is_weak else None
        report, ready = os.pipe()
        self._own(report)
        os.set_blocking(report, False)
        info = os.dup(ready)
        try:
            process = subprocess.Popen(
                sandbox.isolation.command(
                    self._limits, self._wall_s, ready, source, info, seccomp, is_code=program is None, group=self._group
                ),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                pass_fds=(ready, source, info, seccomp),
                cwd=scratch,
                env={} if scratch is None else {"HOME": scratch, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
                start_new_session=True,
            )
        except OSError as error:
            raise ResourceError(f"a sandboxed process cannot be started: {error}") from error
        finally:
            os.close(ready)
            os.close(info)
        self._stdin = self._nonblocking(process.stdin)
        stdout = self._nonblocking(process.stdout)
        stderr = self._nonblocking(process.stderr)
        self._open = {"stdout": stdout.fileno(), "stderr": stderr.fileno(), "report": report}
        return process

    def _make_group(self, sandbox: LocalSandbox) -> Group | None:
        """The program's control group; None where there are none."""
        if sandbox.groups is None:
            return None
        try:
            group = sandbox.groups.make((self._limits.memory_mb + self._limits.scratch_mb + KERNEL_MB) << 20)
        except OSError as error:
            raise ResourceError(f"no control group can be made in {sandbox.groups.folder}: {error}") from error
        self._stack.callback(group.close)
        return group

    def _file(self, content: bytes) -> int:
        """A file without a name, open at its start."""
        descriptor = self._own(os.memfd_create("lockstep"))
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        return descriptor

    def _own(self, descriptor: int) -> int:
        self._stack.callback(os.close, descriptor)
        return descriptor

    def _nonblocking(self, pipe: IO[bytes] | None) -> IO[bytes]:
        assert pipe is not None
        os.set_blocking(pipe.fileno(), False)
        return self._stack.enter_context(pipe)

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_S
        while not self._output["report"].endswith(b"ready"):
            if self._step(deadline) or time.monotonic() > deadline:
                self._read_the_rest()
                if self._output["report"].endswith(b"ready"):
                    break  # a short program may have ended before anybody looked
                told = self._output["stderr"].decode(errors="replace").strip()
                raise ResourceError(
                    f"the sandbox could not be built: {told or f'no answer within {_START_S:g} s'}. bubblewrap needs user namespaces for "
                    "ordinary users (sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns; in a container also "
                    "its seccomp profile); without them, set reward.sandbox.url to a SandboxFusion server"
                )
        if self._is_weak:
            self._tree = GroupTree(self._process.pid)
        else:
            self._tree = NamespaceTree(self._child_pid(), counts_sockets=self._group is None)

    def _child_pid(self) -> int:
        found = re.search(rb'"child-pid": (\d+)', self._output["report"])
        if found is None:
            raise ResourceError(f"bubblewrap did not report the process it started: {bytes(self._output['report'])!r}")
        return int(found[1])

    # -- run ---------------------------------------------------------------------------------------------------------------

    def _wait_until_over(self, deadline: float) -> Status | None:
        """The limit that the program passed, or None when it ended by itself."""
        assert self._tree is not None
        while not self._step(deadline):
            if self._prints_too_much():
                return "output"
            if time.monotonic() > deadline:
                return "timeout"
            if over := self._tree.over(self._limits):
                return over
            if self._group is not None and self._group.is_over():
                return "memory"
        return None

    def _step(self, deadline: float) -> bool:
        """Move what can be moved through the pipes, waiting a moment for it; whether the first process has ended."""
        if self._abandoned.is_set():
            raise ResourceError("the sandbox was closed while a program ran")
        ended = False
        for key, _ in self._selector.select(max(0.0, min(deadline - time.monotonic(), _WATCH_S))):
            if key.data == "ended":
                ended = True
            elif key.data == "stdin":
                self._feed()
            else:
                self._read(key.data)
        return ended

    def _feed(self) -> None:
        try:
            self._input = self._input[os.write(self._stdin.fileno(), self._input[:_CHUNK]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:  # it does not want to read more
            self._input = self._input[:0]
        if not self._input:
            self._selector.unregister(self._stdin)
            self._stdin.close()

    def _read(self, name: str) -> bool:
        """Take one chunk from a pipe that is open; whether there was one."""
        try:
            chunk = os.read(self._open[name], _CHUNK)
        except BlockingIOError:
            return False
        if not chunk:
            self._selector.unregister(self._open.pop(name))
        self._output[name] += chunk
        return bool(chunk)

    def _prints_too_much(self) -> bool:
        return any(len(self._output[name]) > self._limits.output_bytes for name in ("stdout", "stderr"))

    # -- end ---------------------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """Leave nothing: every process dead and reaped."""
        if self._tree is not None:
            self._stack.callback(self._tree.close)
            self._tree.kill()
        else:
            # The first process of the namespace may be there already, unknown, and wait for the command: until then it is in its group.
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        # With the first process of a namespace everything in it is dead, and the command ends when it has seen that.
        if not select.select([self._ended], [], [], _END_S)[0]:
            raise ResourceError(f"sandboxed process {self._process.pid} did not end within {_END_S:g} s of being killed")
        self._process.wait()
        self._read_the_rest()

    def _read_the_rest(self) -> None:
        while "report" in self._open and self._read("report"):
            pass
        for name in ("stdout", "stderr"):
            while name in self._open and not self._prints_too_much() and self._read(name):
                pass

    def _result(self, status: Status | None, seconds: float) -> Result:
        stdout, stderr = (self._text(self._output[name]) for name in ("stdout", "stderr"))
        if status is None and self._prints_too_much():
            status = "output"
        if status is None and self._group is not None and self._group.is_over():
            status = "memory"
        if status is not None:
            return Result(status=status, exit_code=None, stdout=stdout, stderr=stderr, seconds=seconds)
        code = self._process.returncode
        code = 128 - code if code < 0 else code
        return Result(status=exit_status(code, stderr), exit_code=code, stdout=stdout, stderr=stderr, seconds=seconds)

    def _text(self, raw: bytearray) -> str:
        limit = self._limits.output_bytes
        return (raw[:limit] + _CUT if len(raw) > limit else raw).decode("utf-8", "replace")
