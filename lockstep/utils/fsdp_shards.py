"""verl's checkpoints as a start: the shards of FSDP ranks become a Hugging Face folder.

```text
global_step_N/actor/model_world_size_W_rank_R.pt   the shard of each rank
                    huggingface/                   config and tokenizer, and the weights where hf_model was saved too
```
"""

import re
import shutil
from pathlib import Path
from typing import Any

from lockstep.errors import DataError

_SHARD = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
_MERGE = "merge it first with verl's own tool (python -m verl.model_merger merge), and name the folder that it writes"


def verl_checkpoint(path: Path) -> Path | None:
    """Of a checkpoint folder of verl's: its folder `huggingface` where that has the weights, else a file of the first rank, which is a
    shard of FSDP's (.pt) or one of Megatron's dist_checkpointing (.distcp). None for others.

    Raises DataError for a checkpoint of Megatron's without such files.
    """
    for folder in (path, path / "actor", path / "model", path / "actor" / "model"):
        whole = folder / "huggingface"
        if any(whole.glob("*.safetensors")):
            return whole
        first = [file for file in folder.glob("model_world_size_*_rank_0.pt") if _SHARD.fullmatch(file.name)]
        if first:
            return first[0]
        if (folder / "dist_ckpt").is_dir():
            files = sorted((folder / "dist_ckpt").glob("*.distcp"))
            if not files or not files[0].with_name(".metadata").is_file():
                raise DataError(f"{folder}/dist_ckpt lacks .metadata or *.distcp, which a checkpoint of Megatron's has")
            return files[0]
    return None


def merge_shards(first: Path, folder: Path) -> None:
    """Write the weights of all ranks' files beside `first`, with the config and tokenizer of its folder `huggingface`, into `folder`.

    Raises DataError when a rank's file is missing, a file cannot be read, or tensors are divided in a way that is not known here.
    """
    import torch
    import torch.distributed.tensor  # its types are then among those that torch.load may make
    from safetensors.torch import save_file

    named = _SHARD.fullmatch(first.name)
    assert named is not None, first
    files = [first.with_name(f"model_world_size_{named.group(1)}_rank_{rank}.pt") for rank in range(int(named.group(1)))]
    missing = [file.name for file in files if not file.is_file()]
    source = first.parent / "huggingface"
    if missing or not (source / "config.json").is_file():
        raise DataError(f"{first.parent} lacks {', '.join(missing) or 'huggingface/config.json'}; a checkpoint of verl's has it")
    try:
        shards = [torch.load(file, map_location="cpu", weights_only=True) for file in files]
    except Exception as error:  # torch has no one class for what it cannot or may not load
        raise DataError(f"{first.parent} cannot be read ({str(error).splitlines()[0]}): {_MERGE}") from error
    weights = {name: _whole(name, [shard[name] for shard in shards]).contiguous() for name in shards[0]}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for file in source.iterdir():
        if file.is_file():
            shutil.copy(file, folder)


def _whole(name: str, parts: list[Any]) -> Any:
    """The tensor of which each rank has a part."""
    import torch
    from torch.distributed.tensor import DTensor, Replicate, Shard

    first = parts[0]
    if not isinstance(first, DTensor):
        return first
    *outer, last = first.placements
    if not all(isinstance(place, Replicate) for place in outer) or not isinstance(last, Replicate | Shard):
        raise DataError(f"{name} is divided as {first.placements}, which is not known here: {_MERGE}")
    if isinstance(last, Replicate):
        return first._local_tensor
    ranks = first.device_mesh.mesh.shape[-1]  # of the first copy of the model, where there are several
    return torch.cat([part._local_tensor for part in parts[:ranks]], dim=last.dim)
