"""The judge: a program that runs inside a sandbox, and tests another program there.

It is plain Python that imports nothing of ours but wire.py, so that the text of both (`base.judge_program`) can be sent to any
sandbox. What it reads on stdin are frames (`to_frame`), what it writes on stdout are frames:

```text
stdin   header,  case 1, ..., case n,  a secret
stdout  "started",  (the secret, [outcome of each case that ran])
```

The header is a dict: "programs" (source texts; the first that compiles is the program), "is_script" (whether the cases are the first kind
below), "num_cases", "case_s" (seconds for each), "keep_going" (after a failed case; a case that ran out of time is always the last).

The program under test never meets the tests. For each case the judge forks a child *before* it reads the case, so the child's memory
holds nothing to look for; the child has neither the judge's stdin nor its stdout; the judge cannot be inspected (it is not "dumpable")
and, as process 1 of its namespace, cannot be killed. A test runs in the judge and calls the program's functions through a pipe:
what comes back are plain values that the judge builds itself, so an object that is equal to everything stays an object that is
equal to nothing.

Kinds of case, all dicts:

- {"stdin", "stdout"}: the program reads one and must print the other (`same_output`).
- {"function", "arguments", "expected"}: the function, or the method of a class Solution, must return it (`same_value`).
- {"setup", "names", "code", "entry_point"}: `setup` and `code` must run without an exception. `names` are the globals that `code` takes
  from the program; with an `entry_point` its function `check` is called with the program's function of that name.

An outcome is "" for passed, else the reason.
"""

from __future__ import annotations

import builtins
import os
import select
import sys
import time

from lockstep.rewards.sandbox.wire import decode, to_frame

# Starting must be quick: typing, signal and ctypes would each cost as much as everything else here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_SIGKILL = 9
_PR_GET_DUMPABLE, _PR_SET_DUMPABLE = 3, 4

# -- verdicts ------------------------------------------------------------------------------------------------------------------


def same_output(got: str, expected: str) -> bool:
    """Whether both have the same words; white space between them does not matter. Where a decimal fraction (1.5, 2e-3) is expected, a
    number is right when it differs by at most 1e-6, absolute or relative.
    """
    ours, theirs = got.split(), expected.split()
    return len(ours) == len(theirs) and all(map(_same_word, ours, theirs))


def _same_word(got: str, expected: str) -> bool:
    if got == expected:
        return True
    if expected.lstrip("+-").isdigit() or not set(got + expected) <= set("0123456789+-.eE"):
        return False
    try:
        number, wanted = float(got), float(expected)
    except ValueError:
        return False
    return abs(number - wanted) <= 1e-6 * max(1.0, abs(wanted))


def same_value(got: Any, expected: Any) -> bool:
    """Whether a function returned what is expected: equal, where a tuple is as good as a list, and floats may differ by 1e-6. The
    expected value may stand in a list of its own, as in APPS.
    """
    return _close(got, expected) or (isinstance(expected, list) and len(expected) == 1 and _close(got, expected[0]))


def _close(got: Any, expected: Any) -> bool:
    if isinstance(got, list | tuple) and isinstance(expected, list | tuple):
        return len(got) == len(expected) and all(map(_close, got, expected))
    if isinstance(got, dict) and isinstance(expected, dict):
        return got.keys() == expected.keys() and all(_close(got[key], expected[key]) for key in got)
    if isinstance(got, float) or isinstance(expected, float):
        is_number = isinstance(got, int | float) and isinstance(expected, int | float)
        return is_number and (got == expected or abs(got - expected) <= 1e-6 * max(1.0, abs(expected)))
    return type(got) is type(expected) and bool(got == expected)


# -- the judge's side of the pipe ------------------------------------------------------------------------------------------------

_LARGEST = 1 << 26
_NUM_SHOWN = 300


class CaseFailed(BaseException):
    """The case is lost, whatever the test catches."""


class Link:
    """Calls into the child."""

    def __init__(self, requests: int, replies: int, deadline: float) -> None:
        self._requests, self._replies, self._deadline = requests, replies, deadline

    def ask(self, *request: Any) -> Any:
        """The child's answer. Raises what it raised, as a builtin exception of that name; CaseFailed when it is gone or too late."""
        try:
            _write(self._requests, to_frame(request, lambda value: value._number if isinstance(value, Remote) else _refuse(value)))
            raw = _read_exactly(self._replies, int(_read_exactly(self._replies, 8, self._deadline), 16), self._deadline)
            kind, value, message = decode(raw, lambda number: Remote(self, number))
        except (EOFError, BrokenPipeError):
            raise CaseFailed("the program ended before it answered") from None
        except ValueError:
            raise CaseFailed("the program's answer cannot be read") from None
        if kind == "value":
            return value
        if kind == "module":
            return (__import__(value),) if value in sys.stdlib_module_names else ()
        raised = getattr(builtins, str(value), None)
        if not (isinstance(raised, type) and issubclass(raised, Exception)) or issubclass(raised, UnicodeError):
            raised = RuntimeError
        raise raised(str(message))


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
    for name in case["names"]:
        found = link.ask("global", name)
        if found:
            namespace[name] = found[0]
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
    out, err, left = bytearray(), b"", memoryview(feed)
    poller = select.poll()
    for descriptor in (child.out, child.err):
        poller.register(descriptor, select.POLLIN)
    poller.register(child.into, select.POLLOUT)
    os.set_blocking(child.into, False)
    is_open = {child.out, child.err}
    while is_open:
        ready = poller.poll(1000 * _left(deadline))
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
                err = (err + chunk)[-_NUM_SHOWN:]
            else:
                out += chunk
                if len(out) > most:
                    raise CaseFailed(f"it prints more than {most} bytes")
        # A daemon may hold the pipes; the program itself is what counts.
        if child.has_ended() and not ready:
            break
    while not child.has_ended():
        _left(deadline)
        time.sleep(0.001)
    return child.exit_code, bytes(out), err


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise CaseFailed("timeout")
    return min(left, 0.05)


def _read_exactly(descriptor: int, size: int, deadline: float | None = None) -> bytes:
    """That many bytes. Raises EOFError at the end, ValueError for a size out of bounds, CaseFailed at the deadline."""
    if not 0 <= size <= _LARGEST:
        raise ValueError(f"a frame of {size} bytes")
    parts = bytearray()
    while len(parts) < size:
        while deadline is not None and not select.select([descriptor], [], [], _left(deadline))[0]:
            pass
        chunk = os.read(descriptor, min(size - len(parts), 1 << 20))
        if not chunk:
            raise EOFError
        parts += chunk
    return bytes(parts)


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _read_value() -> Any:
    return decode(_read_exactly(0, int(_read_exactly(0, 8), 16)))


# -- the child -------------------------------------------------------------------------------------------------------------------


class Child:
    """A fork that will be the program. In the child itself, `is_me` is true and fd 0, 1, 2 are its ends of the pipes."""

    def __init__(self) -> None:
        pipes = [os.pipe() for _ in range(3)]
        self.exit_code = -1
        self.pid = os.fork()
        self.group = self.pid
        self.is_me = self.pid == 0
        if self.is_me:
            os.setsid()
            for i, (read, write) in enumerate(pipes):
                os.dup2(read if i == 0 else write, i)
            os.closerange(3, 64)
            return
        (theirs_in, self.into), (self.out, theirs_out), (self.err, theirs_err) = pipes
        for descriptor in (theirs_in, theirs_out, theirs_err):
            os.close(descriptor)

    def close_into(self) -> None:
        if self.into >= 0:
            os.close(self.into)
        self.into = -1

    def has_ended(self) -> bool:
        if self.pid > 0:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid, self.exit_code = -1, os.waitstatus_to_exitcode(status)
        return self.pid < 0

    def end(self) -> None:
        """Kill it and whatever it left."""
        if self.pid > 0:
            os.kill(self.pid, _SIGKILL)
        try:
            if os.getpid() == 1:
                os.kill(-1, _SIGKILL)  # everything in the namespace but this process
            else:
                os.killpg(self.group, _SIGKILL)
        except ProcessLookupError:
            pass
        try:
            while os.waitpid(-1, 0):
                pass
        except ChildProcessError:
            pass
        self.close_into()
        os.close(self.out)
        os.close(self.err)


def _serve(programs: list[str]) -> None:
    """In the child: run the program, then answer the judge until it closes the pipe. What the program prints is dropped."""
    requests, replies = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    objects: list[Any] = []

    def export(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    namespace = _fresh_main()
    problem = None
    try:
        exec(_compile(programs), namespace)
    except BaseException as error:
        problem = ("error", type(error).__name__, f"the program raised {type(error).__name__}: {error}"[:_NUM_SHOWN])
    while True:
        try:
            request = _read_exactly(requests, int(_read_exactly(requests, 8), 16))
        except EOFError:
            os._exit(0)
        try:
            answer = problem or _answer(namespace, *decode(request, objects.__getitem__))
            frame = to_frame(answer, export)
        except BaseException as error:
            frame = to_frame(("error", type(error).__name__, str(error)[:_NUM_SHOWN]))
        _write(replies, frame)


def _answer(namespace: dict[str, Any], what: str, target: Any, *more: Any) -> tuple[str, Any, str]:
    """(kind of answer, value, message) to one request of the judge."""
    if what == "global":
        found = namespace.get(target, namespace)
        if isinstance(found, type(sys)):
            return "module", found.__name__, ""
        return "value", () if found is namespace else (found,), ""
    if what == "call":
        return "value", target(*more[0], **more[1]), ""
    if what == "getattr":
        return "value", getattr(target, more[0]), ""
    if what == "setattr":
        setattr(target, more[0], more[1])
        return "value", None, ""
    if what == "iter":
        return "value", iter(target), ""
    return "value", tuple([item for item in [next(target, namespace)] if item is not namespace]), ""


def _compile(programs: list[str]) -> Any:
    """The code of the first that compiles; the error of the last when none does."""
    for source in programs[:-1]:
        try:
            return compile(source.encode("utf-8", "surrogatepass"), "program.py", "exec")
        except (SyntaxError, ValueError):
            pass
    return compile(programs[-1].encode("utf-8", "surrogatepass"), "program.py", "exec")


def _fresh_main() -> dict[str, Any]:
    """The namespace of a new module __main__."""
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    sys.argv[:] = ["program.py"]
    return module.__dict__


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
    outcomes: list[str] = []
    _write(verdict, to_frame("started"))
    for _ in range(header["num_cases"]):
        child = Child()
        if child.is_me and header["is_script"]:
            return header["programs"]
        if child.is_me:
            _serve(header["programs"])
        case = _read_value()
        outcomes.append(_judge(case, child, time.monotonic() + header["case_s"]))
        child.end()
        if outcomes[-1] and (outcomes[-1] == "timeout" or not header["keep_going"]):
            break
        del case
    for _ in range(header["num_cases"] - len(outcomes)):
        _read_value()
    _write(verdict, to_frame((_read_value(), outcomes)))
    os._exit(0)


def _judge(case: dict[str, Any], child: Child, deadline: float) -> str:
    try:
        if "stdin" in case:
            _judge_stdio(case, child, deadline)
        else:
            link = Link(child.into, child.out, deadline)
            (_judge_code if "code" in case else _judge_call)(case, link)
    except BaseException as error:
        kind = "" if isinstance(error, CaseFailed) else f"{type(error).__name__}: " if str(error) else type(error).__name__
        return f"{kind}{error}"[:_NUM_SHOWN]
    return ""


if __name__ == "__main__":
    exec(_compile(main()), _fresh_main())
