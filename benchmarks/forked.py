"""`lockstep` commands as forks of a server that has imported everything once: several that start at the same time do not wait for it."""

from __future__ import annotations

import multiprocessing
import os
import sys
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from lockstep import cli

_PRELOADED = ["lockstep.trainer.main_ppo", "lockstep.trainer.recipes", "transformers.models.llama.modeling_llama"]


def start(words: list[str], folder: Path, memory_share: float | None = None, threads: int | None = None) -> ForkServerProcess:
    """Start the command; its output goes to output.txt in `folder`. `memory_share`: of the GPU's memory, what it may take."""
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    process = context.Process(target=_command, args=(words, folder / "output.txt", memory_share, threads), daemon=False)
    process.start()
    return process


def finish(words: list[str], folder: Path) -> None:
    """Run the command. Raises SystemExit, with the end of its output, when it fails."""
    process = start(words, folder)
    process.join()
    if process.exitcode:
        raise SystemExit(f"lockstep {words[0]} ended with status {process.exitcode}:\n{last_lines(folder)}")


def last_lines(folder: Path) -> str:
    """The end of a command's output."""
    return "\n".join((folder / "output.txt").read_text().splitlines()[-20:])


def _command(words: list[str], output: Path, memory_share: float | None, threads: int | None) -> None:
    sys.stdout = sys.stderr = output.open("w", buffering=1)
    for descriptor in (1, 2):  # for what is not Python
        os.dup2(sys.stdout.fileno(), descriptor)
    import torch  # here: who only starts commands does without it

    if threads is not None:
        torch.set_num_threads(threads)
    if memory_share is not None:
        torch.cuda.set_per_process_memory_fraction(memory_share)
    sys.argv = ["lockstep", *words]
    sys.exit(cli.main())
