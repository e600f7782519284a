"""Write a safetensors file one tensor at a time: the library's own writer needs all of them in memory at once.

The format: 8 bytes with the length of a JSON header, the header (name -> type, shape, place), then the tensors end to end.
"""

import ctypes
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

TensorSpec = tuple[torch.dtype, tuple[int, ...]]
"""Type and shape of a tensor."""
Tensors = Iterable[tuple[str, Tensor]]
"""(name, tensor), as they come."""

_TYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def layout(specs: Mapping[str, TensorSpec]) -> tuple[bytes, dict[str, int], int]:
    """How a file of tensors begins, where in the file each of them is, and the bytes of the whole."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    places: dict[str, int] = {}
    end = 0
    for name, (dtype, shape) in specs.items():
        places[name] = end
        end += torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": _TYPES[dtype], "shape": list(shape), "data_offsets": [places[name], end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8 bytes
    start = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: start + place for name, place in places.items()}, start + end


def placed(
    file: Path, specs: Mapping[str, TensorSpec], places: Mapping[str, int], tensors: Tensors
) -> Iterator[tuple[int, Tensor]]:
    """(place in the file, tensor) of each of `tensors`, as they come.

    Raises ValueError for a tensor that is not in `specs`, comes twice, or has another type or shape, and when one is left out.
    """
    left = dict(places)
    for name, tensor in tensors:
        if name not in left:
            raise ValueError(f"{name} was not expected in {file}, or comes twice")
        if (tensor.dtype, tuple(tensor.shape)) != specs[name]:
            raise ValueError(f"{name} is {tensor.dtype} of {tuple(tensor.shape)}, not {specs[name][0]} of {specs[name][1]}")
        yield left.pop(name), tensor
    if left:
        raise ValueError(f"{len(left)} tensors of {file} never came, first {sorted(left)[:3]}")


def write_weights(file: Path, specs: Mapping[str, TensorSpec], tensors: Tensors) -> None:
    """Write `tensors` to `file` as they come. `specs` says beforehand what comes, in any order of names.

    Raises ValueError as `placed` does.
    """
    start, places, _ = layout(specs)
    with file.open("wb") as out:
        out.write(start)
        for place, tensor in placed(file, specs, places, tensors):
            out.seek(place)
            data = tensor.detach().contiguous().cpu()
            # Its bytes where they are: a numpy view would forbid for good to resize that memory, which offloading does.
            out.write((ctypes.c_char * data.nbytes).from_address(data.data_ptr()))
