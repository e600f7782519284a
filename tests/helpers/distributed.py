"""Run a function on several gloo ranks of this machine."""

from __future__ import annotations

import gc
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable
from queue import Empty
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_distributed(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """`function(*args)` on every rank of a new gloo group; returns what each rank returned, in order.

    Ranks are forked, so the imports are paid once; the function may be a closure. Results travel as pickled bytes: torch's own way
    to send a tensor through a queue needs the sender to be alive when it is read.
    """
    listener = socket.create_server(("127.0.0.1", 0))  # held until rank 0 has it: nobody else takes the port meanwhile
    context = mp.get_context("fork")
    queue = context.Queue()
    ranks = [context.Process(target=_rank, args=(function, rank, world_size, listener, queue, args)) for rank in range(world_size)]
    try:
        for process in ranks:
            process.start()
        listener.close()
        results: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        while len(results) < world_size:
            try:
                rank, error, value = queue.get(timeout=1.0)
            except Empty:
                dead = {rank: p.exitcode for rank, p in enumerate(ranks) if p.exitcode not in (None, 0) and rank not in results}
                assert not dead, f"ranks died, with exit codes {dead}"
                assert time.monotonic() < deadline, f"only ranks {sorted(results)} answered in {timeout_s} s"
                continue
            assert error is None, f"rank {rank} failed:\n{error}"
            results[rank] = pickle.loads(value)
        return [results[rank] for rank in range(world_size)]
    finally:
        listener.close()
        for process in ranks:
            if process.pid is not None:
                process.join(timeout=5)
                process.kill()


def _rank(
    function: Callable[..., Any], rank: int, world_size: int, listener: socket.socket, queue: Any, args: tuple[Any, ...]
) -> None:
    # The parent's garbage is not this process's to collect: a destructor that ends a thread aborts where there is no such thread.
    gc.freeze()
    try:
        torch.set_num_threads(1)
        host, port = listener.getsockname()
        os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))
        own = listener.detach() if rank == 0 else listener.close()
        store = dist.TCPStore(host, port, world_size, is_master=rank == 0, master_listen_fd=own)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        queue.put((rank, None, pickle.dumps(function(*args))))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        queue.put((rank, traceback.format_exc(), None))
