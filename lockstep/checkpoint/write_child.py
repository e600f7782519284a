"""Writes memory that another process filled to files which that process opened: what a background save does beside the training.

    python -I -S write_child.py MEMORY:FILE:BYTES ...

MEMORY and FILE are descriptors. Prints a line of JSON for each file when it is on the disk: its manifest entry, or {"errno": n}, which is
the last. A process of its own, so that writing and hashing never hold the interpreter that launches the kernels of an update; it
has no names of files, so one whose run was killed cannot touch what the next run writes. It imports nothing of ours and no package.

It gives way to others until a byte comes by its input: then somebody waits. A thread that gave way may not ask for its priority back,
so the main thread, which never did, goes on with its work.
"""

import hashlib
import json
import mmap
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any

Job = tuple[int, int, int]
"""Descriptor of the memory, descriptor of the file, bytes."""
_CHUNK = 1 << 24
_NICE = 10


def write(memory: int, file: int, size: int) -> Iterator[dict[str, Any] | None]:
    """Write `size` bytes of `memory` to `file`, both descriptors; yields None after each piece, then the manifest entry. Raises OSError."""
    digest = hashlib.sha256()
    with mmap.mmap(memory, size, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as data:
        done = 0
        while done < size:
            with data[done : done + _CHUNK] as chunk:
                written = os.pwrite(file, chunk, done)
                with chunk[:written] as part:
                    digest.update(part)
            done += written
            yield None
    os.fsync(file)
    yield {"size": size, "sha256": digest.hexdigest()}


def answers(jobs: Iterable[Job]) -> Iterator[dict[str, Any] | None]:
    """Do the jobs in order; yields the manifest entry of each, or {"errno": n} for one that fails, which is the last; None in between."""
    for job in jobs:
        try:
            yield from write(*job)
        except OSError as error:
            yield {"errno": error.errno}
            return


def main(arguments: list[str]) -> None:
    """Do the jobs that the arguments are, and print the answers."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they are for the run, which saves and then ends
        signal.signal(number, signal.SIG_IGN)
    jobs = [tuple(map(int, argument.split(":"))) for argument in arguments]
    work = answers((memory, file, size) for memory, file, size in jobs)
    awaited = threading.Event()
    threading.Thread(target=_hear, args=(awaited,), daemon=True).start()
    giving_way = threading.Thread(target=_print, args=(work, awaited))
    giving_way.start()
    giving_way.join()
    _print(work)


def _hear(awaited: threading.Event) -> None:
    if os.read(0, 1):
        awaited.set()


def _print(work: Iterator[dict[str, Any] | None], until: threading.Event | None = None) -> None:
    """Print what comes of the work: giving way to others `until` that is set, or all that is left."""
    if until is not None:
        os.nice(_NICE)
    for answer in work:
        try:
            if answer is not None:
                os.write(1, json.dumps(answer).encode() + b"\n")
        except BrokenPipeError:  # the run was killed: nobody wants the rest
            os._exit(1)
        if until is not None and until.is_set():
            return


if __name__ == "__main__":
    main(sys.argv[1:])
