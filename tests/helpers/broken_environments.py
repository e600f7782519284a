"""Environments that go wrong in every way, each its own; found by other processes."""

import os
import signal
import subprocess
import sys
import threading
import time

from lockstep.agents import Action, Environment, Turn

_KEPT = []
"""What leaks."""


class _Unreadable:
    def __reduce__(self):
        return (int, ("no number",))


class _Turns:
    """Something that is no Turn, or half of one."""

    none = None
    text = "not a Turn"
    messages = Turn(None)  # type: ignore[arg-type]
    content = Turn([{"role": "user", "content": None}])
    raw = Turn([{"role": "user", "content": b"bytes"}])
    role = Turn([{"content": "x"}])
    halves = Turn([{"role": "user", "content": "half a character: \ud83d"}])
    reward = Turn(reward="much")  # type: ignore[arg-type]
    nan = Turn(reward=float("nan"))
    info = Turn(info=[1])  # type: ignore[arg-type]
    closure = Turn(info={"f": lambda: 0})
    unreadable = Turn(info={"x": _Unreadable()})


WRONG = [name for name in vars(_Turns) if not name.startswith("_")]
FAILS = ["raise", "exit", "exit_early", "kill", "hang", "hang_early", "busy", "memory", *(f"wrong_{name}" for name in WRONG)]
"""Those whose episode is missing."""
WORKS = ["fine", "fine", "prints", "huge", "leaks", "children", "bad_close", "hang_close", "cut"]
"""Those whose episode is played in spite of it."""


class Broken(Environment):
    """Two turns, in which something happens that `how` names."""

    def __init__(self, how: str) -> None:
        self.how, self.turn = how, 0

    def reset(self, row, seed):
        if self.how in ("exit_early", "hang_early"):
            self._happen()
        return Turn([{"role": "user", "content": f"row {seed % 100}"}])

    def step(self, action: Action):
        self.turn += 1
        found = self._happen() if self.turn == 1 else None
        if isinstance(found, Turn) or self.how.startswith("wrong_"):
            return found
        return Turn([{"role": "user", "content": "again"}], reward=0.5, done=self.turn == 2)

    def close(self):
        if self.how == "bad_close":
            raise OSError("cannot close")
        if self.how == "hang_close":
            time.sleep(1000)

    def _happen(self):
        how = self.how
        if how.startswith("wrong_"):
            return getattr(_Turns, how.removeprefix("wrong_"))
        match how:
            case "raise":
                raise OSError("no disk")
            case "exit" | "exit_early":
                os._exit(3)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang" | "hang_early":
                time.sleep(1000)
            case "busy":
                while True:
                    pass
            case "memory":
                raise MemoryError
            case "prints":
                for _ in range(1000):
                    print("x" * 1000)
                    print("y" * 100, file=sys.stderr)
            case "huge":
                return Turn([{"role": "user", "content": "z" * 20_000_000}])
            case "leaks":
                _KEPT.append(bytearray(2_000_000))
                _KEPT.append(open(os.devnull))  # noqa: SIM115
                threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
            case "children":
                subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
            case "cut":
                return Turn([{"role": "user", "content": "é" * 500}])
        return None
