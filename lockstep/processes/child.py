"""The program of a child of `lockstep.processes`: read a function and its arguments, call it, answer."""

import contextlib
import functools
import importlib
import importlib.util
import inspect
import os
import pickle
import resource
import struct
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

HEADER = struct.Struct("!Q")
"""Precedes every answer: its length."""
MARK = "LOCKSTEP_KILLABLE_CHILD"
"""Environment variable of a child: the process id of its parent."""


@dataclass(frozen=True)
class FunctionReference:
    """A function in a form that the child can import."""

    pickled: bytes
    modules: tuple[tuple[str, str | None], ...]
    """Name and file of the modules that define it: another process may not know the name."""


def serve(max_memory_mb: int | None) -> None:
    """Run the child's program: read a function with its arguments (None: only import it), answer ("ok", value) or ("raised", traceback).

    Return when the parent closes the pipe. The child and each process that it starts may use `max_memory_mb` of memory.
    """
    _die_with_parent()
    if max_memory_mb is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (max_memory_mb << 20,) * 2)
    # The function may print. Its stdout goes to stderr, so that answers stay whole.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    requests = os.fdopen(os.dup(0), "rb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            answer = _answer(*pickle.load(requests))
            answers.write(HEADER.pack(len(answer)) + answer)
            answers.flush()


def _answer(reference: FunctionReference, arguments: bytes | None) -> bytes:
    try:
        function = _load(reference)
        value = None if arguments is None else function(**pickle.loads(arguments))
        if inspect.isawaitable(value):
            import asyncio

            value = asyncio.run(_awaited(value))
        return pickle.dumps(("ok", value), pickle.HIGHEST_PROTOCOL)
    except BaseException as error:  # SystemExit too: the function may call exit()
        return pickle.dumps(("raised", describe(error)))


def describe(error: BaseException) -> str:
    """Return an error's traceback without the frame that caught it."""
    tail = error.__traceback__.tb_next if error.__traceback__ is not None else None
    return "".join(traceback.format_exception(type(error), error, tail))


async def _awaited(value: Any) -> Any:
    return await value


@functools.cache
def _load(reference: FunctionReference) -> Callable[..., Any]:
    for name, file in reference.modules:
        try:
            importlib.import_module(name)
        except ImportError:
            if file is None:
                raise
            spec = importlib.util.spec_from_file_location(name, file)
            assert spec is not None and spec.loader is not None, file  # noqa: PT018
            sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
    function: Callable[..., Any] = pickle.loads(reference.pickled)
    return function


def _die_with_parent() -> None:
    """Make this process and its descendants end with the parent, under a guard (Linux). Elsewhere an idle child ends with its pipe."""
    parent = int(os.environ[MARK])
    if sys.platform == "linux":
        from lockstep.processes.guard import split

        split(parent)
    elif os.getppid() != parent:
        os._exit(1)
