"""A checkpoint of Megatron's dist_checkpointing, as verl writes it, becomes a Hugging Face folder. Read by torch: Megatron is not needed.

```text
global_step_N/actor/model/dist_ckpt/   verl 0.9: .metadata and the files of all ranks        actor/dist_ckpt/   before
                    model/huggingface/ config and tokenizer                                  actor/huggingface/
```

The tensors are whole, whatever the ranks were: layers stacked into one tensor, or each under its number; gate above up, or as w and v; in
each group of heads its queries, its key, its value; the vocabulary padded.
"""

import io
import json
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

from lockstep.errors import DataError

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
    """What merges it with verl's own tool."""
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
    """Hugging Face's tensors of one of Megatron's."""
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
