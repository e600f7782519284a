"""Convert verl's checkpoints into a Hugging Face folder: the shards of FSDP's ranks, or Megatron's dist_checkpointing.

```text
global_step_N/actor/model_world_size_W_rank_R.pt   the shard of each of FSDP's ranks
                    huggingface/                   config and tokenizer, and the weights where hf_model was saved too
global_step_N/actor/model/dist_ckpt/               Megatron, verl 0.9: .metadata and the files of all ranks (before: actor/dist_ckpt/)
                    model/huggingface/             config and tokenizer                                     (before: actor/huggingface/)
```

Torch reads both; neither FSDP's ranks nor Megatron are needed.
"""

import io
import json
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

from lockstep.errors import DataError

_SHARD = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
_MERGE = "merge it first with verl's own tool (python -m verl.model_merger merge), and name the folder that it writes"


def verl_checkpoint(path: Path) -> Path | None:
    """Return the weights of a checkpoint folder of verl; None for another folder.

    That is its folder `huggingface` if that has the weights, else a file of the first rank: a shard of FSDP (.pt) or one of Megatron's
    dist_checkpointing (.distcp). Raises DataError for a checkpoint of Megatron without such files.
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
    """Return the tensor that the ranks' parts make up."""
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


# -- Megatron --------------------------------------------------------------------------------------------------------------
#
# Its tensors are whole, whatever the ranks were: layers stacked into one tensor, or each under its number; gate above up, or as w and v;
# in each group of heads its queries, its key, its value; the vocabulary padded.

_LAYER = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_qkv.": "self_attn.{}_proj.",
    "self_attention.linear_proj.": "self_attn.o_proj.",
    "self_attention.q_layernorm.": "self_attn.q_norm.",
    "self_attention.k_layernorm.": "self_attn.k_norm.",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.weight_w": "mlp.gate_proj.weight",
    "mlp.linear_fc1.weight_v": "mlp.up_proj.weight",
    "mlp.linear_fc1.": "mlp.{}_proj.",
    "mlp.linear_fc2.": "mlp.down_proj.",
    "input_layernorm.": "input_layernorm.",
    "pre_mlp_layernorm.": "post_attention_layernorm.",
}
"""How Megatron's name of a part of a layer begins -> Hugging Face's; {} is q, k and v, or gate and up."""
_OUTSIDE = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_SAFE = ("torch.distributed.checkpoint.", "torch", "collections", "pathlib")
_ALSO = (("builtins", "set"), ("torch.serialization", "_get_layout"))
"""What a file .metadata may name."""


def merge_command(folder: Path) -> str:
    """Return the command that merges the folder with verl's own tool."""
    return f"python -m verl.model_merger merge --backend megatron --local_dir {folder} --target_dir MERGED, and name MERGED"


def merge_dist_checkpoint(first: Path, folder: Path) -> None:
    """Write the model to whose checkpoint this file belongs, with the config and tokenizer beside it, into `folder`.

    Raises DataError when the config is missing, a file cannot be read, or the model has a part that is not known here (experts, MLA).
    """
    from safetensors.torch import save_file

    source = first.parent.parent / "huggingface"
    if not (source / "config.json").is_file():
        raise DataError(f"{source}/config.json is missing, which says what model {first.parent} is; a checkpoint of verl's has it")
    config = json.loads((source / "config.json").read_text())
    try:
        tensors = _read(first.parent)
    except Exception as error:  # torch and pickle have no one class for what they cannot or may not load
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{first.parent} cannot be read ({said}): {merge_command(source.parent)}") from error
    weights: dict[str, Any] = {}
    for name, tensor in tensors.items():
        weights |= _hugging_face(name, tensor, config, source.parent)
    if config.get("tie_word_embeddings"):
        weights.pop("lm_head.weight", None)
    save_file(
        {name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors", metadata={"format": "pt"}
    )
    for file in source.iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            shutil.copy(file, folder)


def _hugging_face(name: str, tensor: Any, config: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    """Return Hugging Face's tensors for one tensor of Megatron."""
    if name in _OUTSIDE:
        return {_OUTSIDE[name]: tensor[: config["vocab_size"]] if "norm" not in name else tensor}
    found = re.fullmatch(r"decoder\.layers\.(?:(\d+)\.)?(.+)", name)
    start = next((start for start in _LAYER if found and found[2].startswith(start)), None)
    if found is None or start is None:
        raise DataError(f"{name} is a part of a model that is not known here: {merge_command(checkpoint)}")
    layers = {int(found[1]): tensor} if found[1] else dict(enumerate(tensor))
    parts: dict[str, Any] = {}
    for layer, whole in layers.items():
        theirs = f"model.layers.{layer}.{_LAYER[start]}{found[2].removeprefix(start)}"
        if start.startswith("self_attention.linear_qkv") and "{}" in theirs:
            groups = whole.unflatten(0, (config["num_key_value_heads"], -1))
            size = groups.shape[1] // (config["num_attention_heads"] // config["num_key_value_heads"] + 2)
            cut = groups.split([groups.shape[1] - 2 * size, size, size], dim=1)
            parts |= {theirs.format(x): piece.flatten(0, 1) for x, piece in zip("qkv", cut, strict=True)}
        elif "{}" in theirs:
            parts |= {theirs.format(x): piece for x, piece in zip(("gate", "up"), whole.chunk(2), strict=True)}
        else:
            parts[theirs] = whole
    return parts


def _read(folder: Path) -> dict[str, Any]:
    """All tensors of a checkpoint, by Megatron's names; extra states are left out."""
    import torch
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

    class Reader(checkpoint.FileSystemReader):
        """Makes nothing but what describes tensors, where torch's own would make any object that the file names."""

        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            found: Metadata = _SafeUnpickler(io.BytesIO((folder / ".metadata").read_bytes())).load()
            found.storage_meta = found.storage_meta or StorageMeta()
            found.storage_meta.load_id = self.load_id
            return found

    reader = Reader(folder)
    described = {
        name: entry
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in described.items()}
    checkpoint.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


class _SafeUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.startswith(_SAFE[0]) or module in _SAFE[1:] or (module, name) in _ALSO:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f".metadata names {module}.{name}, which describes no tensor")
