"""The judge: a program that runs inside a sandbox, and tests another program there.

It is plain Python that imports nothing of ours but files beside it of the same kind, so that their text (`base.judge_program`) can be
sent to any sandbox. What it reads on stdin are frames (`to_frame`), what it writes on stdout are frames:

```text
stdin   header,  case 1, ..., case n,  a secret
stdout  "started",  the outcome of each case that ran,  the secret
```

The header is a dict: "programs" (source texts; the first that compiles is the program), "is_script" (whether the cases are the first kind
below), "num_cases", "case_s" (seconds for each), "keep_going" (after a failed case; a case that ran out of time is always the last).

Three processes have a part in a case, each the parent of the next:

```text
keeper     the first process; reads no case, waits for the judge of the case, ends what is late, and at last tells the secret
judge      reads the case and judges it; writes the outcome
program    forked before the judge reads the case, begun after that
```

The program under test never meets the tests: its memory is a copy of what the judge had before it read the case, and of a keeper that
never reads any. It has neither the judge's stdin nor its stdout; the others cannot be inspected (they are not "dumpable"), and the
keeper, as process 1 of its namespace, cannot be killed. A judge that is killed, stopped or kept busy is a case that failed. A test runs in
the judge and calls the program's functions through a pipe: what comes back are plain values that the judge builds itself, so an
object that is equal to everything stays an object that is equal to nothing.

Kinds of case, all dicts:

- {"stdin", "stdout"}: the program reads one and must print the other (`same_output`).
- {"function", "arguments", "expected"}: the function, or the method of a class Solution, must return it (`same_value`).
- {"setup", "names", "code", "entry_point"}: `setup` and `code` must run without an exception. `names` are the globals that `code` takes
  from the program, which must have one of them; with an `entry_point` its function `check` is called with the program's function of that
  name.

An outcome is "" for passed, else the reason.
"""

from __future__ import annotations

import builtins
import os
import select
import time

from lockstep.judging.sandbox.program import (
    NUM_SHOWN,
    SIGKILL,
    CaseFailed,
    Child,
    compile_first,
    end_all,
    fresh_main,
    read_exactly,
    seconds_left,
    serve,
    write,
)
from lockstep.judging.sandbox.same import same_output, same_value
from lockstep.judging.sandbox.wire import decode, to_frame

# Starting must be quick: typing, signal and ctypes would each cost as much as everything else here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_PR_GET_DUMPABLE = 3
_PR_SET_DUMPABLE = 4

# -- the judge's side of the pipe ------------------------------------------------------------------------------------------------

_NOT_RAISED = (StopIteration, StopAsyncIteration, UnicodeError, BaseExceptionGroup)
"""Exceptions that the judge does not raise for the program: the first two would end a loop of the test's and not be seen."""


class Link:
    """Calls into the child."""

    def __init__(self, requests: int, replies: int, deadline: float) -> None:
        self._requests = requests
        self._replies = replies
        self._deadline = deadline
        self.failure = ""
        """Why the case is lost, whatever the test catches."""

    def ask(self, *request: Any) -> Any:
        """The child's answer. Raises what it raised, as a builtin exception of that name; CaseFailed when it is gone or too late, and from
        then on.
        """
        try:
            if self.failure:
                raise CaseFailed(self.failure)
            kind, value, message = self._exchange(request)
        except CaseFailed as failed:
            self.failure = str(failed)
            raise
        if kind == "value":
            return value
        raised = getattr(builtins, str(value), None)
        if not (isinstance(raised, type) and issubclass(raised, Exception)) or issubclass(raised, _NOT_RAISED):
            raise RuntimeError(f"{value}: {message}")
        raise raised(str(message))

    def _exchange(self, request: Any) -> Any:
        try:
            write(self._requests, to_frame(request, lambda value: value._number if isinstance(value, Remote) else _refuse(value)))
            raw = read_exactly(self._replies, int(read_exactly(self._replies, 8, self._deadline), 16), self._deadline)
            return decode(raw, lambda number: Remote(self, number))
        except (EOFError, BrokenPipeError):
            raise CaseFailed("the program ended before it answered") from None
        except ValueError:
            raise CaseFailed("the program's answer cannot be read") from None


def _refuse(value: Any) -> int:
    raise TypeError(
        f"a test passes a {type(value).__name__} to the program; only plain values and the program's own objects can be passed"
    )


class Remote:
    """An object of the program that is no plain value: can be called, asked for attributes, iterated, and passed back."""

    def __init__(self, link: Link, number: int) -> None:
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._link.ask("call", self, arguments, named)

    def __getattr__(self, name: str) -> Any:
        return self._link.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._link.ask("setattr", self, name, value)

    def __iter__(self) -> Any:
        steps = self._link.ask("iter", self)
        while True:
            found = self._link.ask("next", steps)
            if not found:
                return
            yield found[0]


def _judge_code(case: dict[str, Any], link: Link) -> None:
    namespace: dict[str, Any] = {"__name__": "test"}
    exec(compile(case["setup"], "setup", "exec"), namespace)
    found = {name: link.ask("global", name) for name in case["names"]}
    namespace.update((name, value[0]) for name, value in found.items() if value)
    if found and not any(found.values()):
        raise NameError(f"name {case['names'][0]!r} is not defined")
    exec(compile(case["code"], "test", "exec"), namespace)
    if case["entry_point"] is not None:
        namespace["check"](_function(link, case["entry_point"]))


def _judge_call(case: dict[str, Any], link: Link) -> None:
    got = _function(link, case["function"])(*case["arguments"])
    if not same_value(got, case["expected"]):
        raise CaseFailed(f"wrong answer: {got!r:.100} instead of {case['expected']!r:.100}")


def _function(link: Link, name: str) -> Any:
    found = link.ask("global", name)
    if found:
        return found[0]
    solution = link.ask("global", "Solution")
    if not solution:
        raise CaseFailed(f"the program does not define {name}")
    return getattr(solution[0](), name)


def _judge_stdio(case: dict[str, Any], child: Child, deadline: float) -> None:
    most = 2 * len(case["stdout"].encode("utf-8", "replace")) + 65536
    status, out, err = _converse(child, case["stdin"].encode("utf-8", "replace"), most, deadline)
    if status:
        last = err.decode("utf-8", "replace").rstrip().rpartition("\n")[2]
        raise CaseFailed(f"exit code {status}: {last}")
    got = out.decode("utf-8", "replace")
    if not same_output(got, case["stdout"]):
        raise CaseFailed(f"wrong answer: {got!r:.100} instead of {case['stdout']!r:.100}")


def _converse(child: Child, feed: bytes, most: int, deadline: float) -> tuple[int, bytes, bytes]:
    """(exit code, stdout, the end of stderr) of a child that is fed through its stdin. Raises CaseFailed at the deadline, or when it
    prints more than `most` bytes.
    """
    out = bytearray()
    err = b""
    left = memoryview(feed)
    poller = select.poll()
    for descriptor in (child.out, child.err):
        poller.register(descriptor, select.POLLIN)
    poller.register(child.into, select.POLLOUT)
    os.set_blocking(child.into, False)
    is_open = {child.out, child.err}
    while is_open:
        ready = poller.poll(1000 * seconds_left(deadline))
        for descriptor, _ in ready:
            if descriptor == child.into:
                try:
                    left = left[os.write(child.into, left[:65536]) :]
                except BlockingIOError:
                    continue
                except BrokenPipeError:
                    left = left[:0]
                if not left:
                    poller.unregister(child.into)
                    child.close_into()
                continue
            chunk = os.read(descriptor, 65536)
            if not chunk:
                poller.unregister(descriptor)
                is_open.discard(descriptor)
            elif descriptor == child.err:
                err = (err + chunk)[-NUM_SHOWN:]
            else:
                out += chunk
                if len(out) > most:
                    raise CaseFailed(f"it prints more than {most} bytes")
        # A daemon may hold the pipes; the program itself is what counts.
        if child.has_ended() and not ready:
            break
    while not child.has_ended():
        seconds_left(deadline)
        time.sleep(0.001)
    return child.exit_code, bytes(out), err


def _read_value() -> Any:
    return decode(read_exactly(0, int(read_exactly(0, 8), 16)))


# -- the loop --------------------------------------------------------------------------------------------------------------------


def _forbid_inspection() -> None:
    """Other processes of this user may no longer trace this one or open its memory and files: prctl(PR_SET_DUMPABLE, 0)."""
    import _ctypes

    prctl = _ctypes.dlsym(_ctypes.dlopen(None, 0), "prctl")  # type: ignore[arg-type]
    _ctypes.call_function(prctl, (_PR_SET_DUMPABLE, 0, 0, 0, 0))
    if _ctypes.call_function(prctl, (_PR_GET_DUMPABLE, 0, 0, 0, 0)):
        raise OSError("prctl(PR_SET_DUMPABLE) failed")


def main() -> list[str]:
    """Judge all cases, write the verdict and exit. Returns only in a child that must become the program; with its source texts."""
    _forbid_inspection()
    verdict = os.dup(1)  # what tests print goes elsewhere
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    header = _read_value()
    write(verdict, to_frame("started"))
    num_left = header["num_cases"]
    while num_left:
        heard, told = os.pipe()
        judge = os.fork()
        if not judge:
            os.close(heard)
            child = Child()
            if child.is_me and header["is_script"]:
                return header["programs"]
            if child.is_me:
                serve(header["programs"])
            _judge_and_exit(child, header["case_s"], verdict, told)
        os.close(told)
        num_left -= 1
        outcome = _keep(judge, heard, header["case_s"] + _GRACE_S)
        if outcome == _KILLED:
            write(verdict, to_frame("timeout"))
        elif outcome not in (_PASSED, _FAILED, _LATE):
            write(verdict, to_frame("the program ended its judge"))
        if outcome != _PASSED and not (outcome == _FAILED and header["keep_going"]):
            break
    for _ in range(num_left):
        _read_value()
    write(verdict, to_frame(_read_value()))
    os._exit(0)


_PASSED, _FAILED, _LATE = 0, 1, 2
"""The exit codes of a judge."""
_KILLED = -SIGKILL
_GRACE_S = 0.5
"""How long the keeper waits for a judge after the time of its case."""


def _keep(judge: int, heard: int, case_s: float) -> int:
    """In the keeper: the exit code of the case's judge, which is killed when it has not ended `case_s` after the program began. All that
    the program started is dead then. The judge tells through a pipe that the program begins, and its group.
    """
    raw = os.read(heard, 16)
    group = int(raw or b"0", 16)
    is_late = bool(raw) and not select.select([heard], [], [], case_s)[0]
    os.close(heard)
    if is_late:
        os.kill(judge, SIGKILL)
    if group:
        end_all(group)
    outcome = -1
    try:
        while True:
            pid, status = os.waitpid(-1, 0)
            if pid == judge:
                outcome = os.waitstatus_to_exitcode(status)
    except ChildProcessError:
        return _KILLED if is_late else -1 if outcome == _KILLED else outcome


def _judge_and_exit(child: Child, case_s: float, verdict: int, told: int) -> None:
    """In the judge: read the case, let the program begin, write the outcome."""
    case = _read_value()
    os.write(told, b"%x" % child.group)
    child.begin()
    outcome = _judge(case, child, time.monotonic() + case_s)
    end_all(child.group)
    write(verdict, to_frame(outcome))
    os._exit(_PASSED if not outcome else _LATE if outcome == "timeout" else _FAILED)


def _judge(case: dict[str, Any], child: Child, deadline: float) -> str:
    link = Link(child.into, child.out, deadline)
    try:
        if "stdin" in case:
            _judge_stdio(case, child, deadline)
        else:
            (_judge_code if "code" in case else _judge_call)(case, link)
    except BaseException as error:
        kind = "" if isinstance(error, CaseFailed) else f"{type(error).__name__}: " if str(error) else type(error).__name__
        return link.failure or f"{kind}{error}"[:NUM_SHOWN]
    return link.failure


if __name__ == "__main__":
    exec(compile_first(main()), fresh_main())
