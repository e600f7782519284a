"""The exceptions a user can meet, in one tree. All of them can be pickled, so they cross process boundaries whole.
ConfigError and DataError have a field `key`: the key of the configuration that has to change, as tests and programs read it.

```text
LockstepError
 |- ConfigError      (ValueError)    a key or value in the configuration cannot work
 |- DataError        (ValueError)    a file, row or model folder cannot be used
 |- ResourceError    (RuntimeError)  the machine or cluster is too small, or cannot be reached
 |   '- OutOfMemory                  the memory of a device was not enough for a stage of a step
 |- MissingExtra     (ImportError)   an optional package is needed and not installed
 |- MissingReward    (NotImplementedError)  a data_source has no reward function
 |- RewardError      (RuntimeError)  a reward function raised, hung, or returned something that is not a score
 |- NumericalError   (ArithmeticError) a loss, gradient or log-prob is not finite
 |- Alarmed          (RuntimeError)  an alarm of learning ended the run (trainer.on_alarm=stop); its exit status is 3
 |- WeightSyncError  (RuntimeError)  weights did not reach the engine that generates whole and unchanged
 '- WorkerError      (RuntimeError)  a worker raised; carries the worker's own traceback
     |- WorkerDied                   its process ended
     '- WorkerTimeout                it did not answer before the deadline

Stopped (BaseException, as KeyboardInterrupt)  SIGTERM or SIGINT ended the run; its exit status is 128 + the signal's number
```

The command line prints a `LockstepError` as one message and exits with its `exit_status`: 1, or as said above; any other exception is a
bug and keeps its traceback.
"""

import functools
import sys
from collections.abc import Callable, Sequence

from lockstep.utils.terminal import say


class LockstepError(Exception):
    """Base class of every error that is the user's to fix."""

    @property
    def exit_status(self) -> int:
        """What the command line exits with."""
        return 1


class _InputError(LockstepError, ValueError):
    """What the user gave is invalid. `key` is the whole name of the key that has to change, or None if the error is about no single key."""

    def __init__(self, message: object = "", *, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key


class ConfigError(_InputError):
    """A key or value in the configuration cannot work. `key` names it, such as "data.train_batch_size"."""


class DataError(_InputError):
    """A file, row or model folder cannot be used. `key` names the key of the configuration that is about it, if there is one."""


class ResourceError(LockstepError, RuntimeError):
    """The machine or cluster lacks what the run asks for, or cannot be reached."""


class OutOfMemory(ResourceError):
    """The memory of a device was not enough for a stage of a step."""


class MissingExtra(LockstepError, ImportError):
    """An optional package is needed and not installed."""

    def __init__(self, feature: str, package: str, extra: str) -> None:
        super().__init__(feature, package, extra)
        self.feature = feature
        self.package = package
        self.extra = extra

    def __str__(self) -> str:
        return f"{self.feature} needs the package '{self.package}', which is not installed: pip install 'lockstep-rl[{self.extra}]'"


class MissingReward(LockstepError, NotImplementedError):
    """A data_source has no reward function."""


class RewardError(LockstepError, RuntimeError):
    """A reward function raised, hung, or returned something that is not a score."""


class NumericalError(LockstepError, ArithmeticError):
    """A loss, gradient or log-prob is not finite."""


class Alarmed(LockstepError, RuntimeError):
    """The run does not learn as it should, and was to stop then; the message says why, and what was saved."""

    @property
    def exit_status(self) -> int:
        """See LockstepError."""
        return 3


class Stopped(BaseException):
    """A signal ended the run. `signum` is its number; the message says what was saved.

    It is no Exception, so that `except Exception` and `except RuntimeError` around a load or a save do not turn it into their own error.
    """

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(signum, message)
        self.signum = int(signum)
        self.message = message

    def __str__(self) -> str:
        return self.message

    @property
    def exit_status(self) -> int:
        """What the command line exits with."""
        return 128 + self.signum


class WeightSyncError(LockstepError, RuntimeError):
    """Weights did not reach the engine that generates whole and unchanged; it generates again only after a sync that worked."""


class WorkerError(LockstepError, RuntimeError):
    """A worker's method raised. `worker` names role and rank; `detail` is the worker's own traceback."""

    def __init__(self, worker: str, detail: str) -> None:
        super().__init__(worker, detail)
        self.worker = worker
        self.detail = detail

    def __str__(self) -> str:
        return f"worker {self.worker} failed:\n{self.detail}"


class WorkerDied(WorkerError):
    """A worker's process ended."""

    def __str__(self) -> str:
        return f"worker {self.worker} died: {self.detail}"


class WorkerTimeout(WorkerError):
    """A worker did not answer before the deadline."""

    def __str__(self) -> str:
        return f"worker {self.worker} did not answer in time: {self.detail}"


def is_out_of_memory(error: Exception) -> bool:
    """Whether a device ran out of memory, here or in a worker."""
    if isinstance(error, WorkerError):
        return "OutOfMemory" in error.detail
    return (
        isinstance(error, OutOfMemory) or type(error).__name__ == "OutOfMemoryError"
    )  # torch's own; this file does not import torch


def is_nonfinite(error: Exception) -> bool:
    """Whether numbers that are not finite ended a step, here or in a worker."""
    return isinstance(error, NumericalError) or (isinstance(error, WorkerError) and error.detail.startswith("NumericalError"))


def as_command(main: Callable[[Sequence[str]], int]) -> Callable[[Sequence[str]], int]:
    """Decorator of a command's `main(arguments) -> exit status`: prints an error that is the user's to fix and returns 1; 130 when the
    user interrupts it."""

    @functools.wraps(main)
    def command(arguments: Sequence[str]) -> int:
        try:
            return main(arguments)
        except LockstepError as error:
            say(f"error: {error}", is_error=True)  # it may quote what a model or a file says
            return error.exit_status
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130

    return command
