"""Files of a checkpoint's optimizer: AdamW's moments under Hugging Face names, so that they fit any layout and any number of ranks.

```text
optimizer/exp_avg-00001.safetensors      the first moments of the first parameters, as whole tensors in float32
optimizer/exp_avg-00002.safetensors      ...
optimizer/exp_avg_sq-00001.safetensors   the second moments
```
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from lockstep.errors import DataError
from lockstep.workers.engine.megatron.convert import Read

MAX_FILE_BYTES = 1 << 30
"""Tensors gathered before they are written; what saving takes of the host's memory, beside one tensor."""


def clear_folder(folder: Path) -> None:
    """An empty folder: files of an earlier checkpoint would be read with the new ones."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def write_tensors(folder: Path, kind: str, tensors: Iterable[tuple[str, Tensor]], *, keep: bool) -> None:
    """Write the tensors into files of about MAX_FILE_BYTES. Ranks that do not `keep` them only take part in gathering them."""
    files, size = 0, 0
    waiting: dict[str, Tensor] = {}

    def write() -> None:
        nonlocal files, waiting, size
        files += 1
        save_file(waiting, folder / f"{kind}-{files:05d}.safetensors")
        waiting, size = {}, 0

    for name, tensor in tensors:
        if keep:
            waiting[name] = tensor.contiguous().cpu()
            size += tensor.nbytes
            if size >= MAX_FILE_BYTES:
                write()
    if waiting:
        write()


def tensor_reader(folder: Path, kind: str) -> Read:
    """Reads rows of what `write_tensors` wrote. Raises DataError where there is nothing."""
    files = {}
    for file in sorted(folder.glob(f"{kind}-*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            files.update(dict.fromkeys(opened.keys(), file))
    if not files:
        raise DataError(
            f"{folder} has no {kind} of a megatron engine; a checkpoint of another strategy gives its weights (as model.path), not its "
            "optimizer"
        )

    def read(name: str, start: int, stop: int) -> Tensor:
        with safe_open(files[name], framework="pt") as opened:
            return opened.get_slice(name)[start:stop]

    return read
