"""Files of weights (safetensors): check them by their headers, read parts by name, write them one tensor at a time.

The format: 8 bytes with the length of a JSON header, the header (name -> type, shape, place), then the tensors end to end.
"""

import ctypes
import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lockstep.errors import DataError

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
_ONE_FILE = "model.safetensors"
_MAX_HEADER = 100 << 20
"""Bytes of the longest header; safetensors has the same limit."""


# -- checking headers --------------------------------------------------------------------------------------------------------


def check_weight_files(folder: Path) -> None:
    """Raise DataError if a safetensors file of the folder is cut short or is not one, or a file that its index names is missing."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            named = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{index} cannot be read as an index of weights ({error!r}); copy or download it again") from error
        missing = sorted(name for name in named if not (folder / name).is_file())
        if missing:
            raise DataError(
                f"{folder} lacks {len(missing)} of {len(named)} files of weights, first {missing[0]}; copy or download it again"
            )
    for file in sorted(folder.glob("*.safetensors")):
        size, whole = file.stat().st_size, _whole_size(file)
        if whole is None:
            raise DataError(f"{file} is not a safetensors file: it has {size:,} bytes and no header; copy or download it again")
        if size != whole:
            raise DataError(
                f"{file} is damaged: it has {size:,} bytes, and its header tells of {whole:,}; copy or download it again"
            )


def _whole_size(file: Path) -> int | None:
    """Return the bytes of the file by its own header; None without a header."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= _MAX_HEADER:
            return None
        try:
            entries = json.loads(stream.read(length))
            ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            return None
    return 8 + length + max(ends, default=0)


def count_parameters(path: str) -> int | None:
    """Return the parameters in the safetensors files of a local folder; None without such files (a hub id, another format)."""
    return sum(map(_parameters_in, Path(path).glob("*.safetensors"))) or None


def _parameters_in(file: Path) -> int:
    with file.open("rb") as stream:
        (header_size,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(header_size))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")


# -- reading by name ---------------------------------------------------------------------------------------------------------


class WeightFiles:
    """The tensors of a Hugging Face folder in safetensors, by name. Only headers are read until `read`."""

    def __init__(self, folder: Path, one_file: str = _ONE_FILE) -> None:
        """`one_file` is the file of a folder without an index; an index of several files is named after it."""
        self.folder = folder
        self._one_file = one_file
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Name -> shape of every tensor; empty where the folder has no safetensors."""
        self._file_of: dict[str, Path] = {}
        for file in self._files():
            try:
                with safe_open(file, framework="pt") as opened:
                    for name in list(opened.keys()):
                        self.shapes[name] = tuple(opened.get_slice(name).get_shape())
                        self._file_of[name] = file
            except (OSError, SafetensorError) as error:
                raise DataError(f"{file} cannot be read: {error}") from error

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows `start` to `stop` of a tensor (all of a scalar), in float32 on the CPU. Raise DataError if a number is not finite."""
        file = self._file_of[name]
        with safe_open(file, framework="pt") as opened:
            rows = (opened.get_slice(name)[start:stop] if self.shapes[name] else opened.get_tensor(name)).float()
        check_finite(name, rows, str(file))
        return rows

    def _files(self) -> list[Path]:
        index = self.folder / f"{self._one_file}.index.json"
        if index.is_file():
            try:
                names = json.loads(index.read_text())["weight_map"].values()
            except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
                raise DataError(f"{index} cannot be read: {error!r}") from error
            return [self.folder / name for name in sorted(set(names))]
        return [self.folder / self._one_file] if (self.folder / self._one_file).is_file() else []


class WeightSource:
    """The values that fill a model: those of files, and given ones for what the files lack (for all of it, without files)."""

    def __init__(self, files: WeightFiles | None, given: dict[str, Tensor]) -> None:
        self._files = files
        self._given = given

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows `start` to `stop` of a parameter, in float32 on the CPU."""
        if name in self._given:
            return self._given[name][start:stop]
        assert self._files is not None, f"{name} was not given"
        return self._files.read(name, start, stop)


def check_finite(name: str, tensor: Tensor, source: str) -> None:
    """Raise DataError unless all numbers are finite."""
    if torch.isfinite(tensor.sum()):  # one pass over most weights; a sum that is not may have overflowed
        return
    num_nan, num_inf = int(tensor.isnan().sum()), int(tensor.isinf().sum())
    if num_nan or num_inf:
        raise DataError(
            f"{source}: the weight {name} has {num_nan} NaN and {num_inf} inf among {tensor.numel()} numbers; the file is damaged, or "
            "the training that wrote it diverged: take another checkpoint or model"
        )


# -- writing one tensor at a time --------------------------------------------------------------------------------------------


def layout(specs: Mapping[str, TensorSpec]) -> tuple[bytes, dict[str, int], int]:
    """Return the first bytes of a file of such tensors, the place of each in the file, and the bytes of the whole file."""
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
    """Yield (place in the file, tensor) for each of `tensors`, as they come.

    Raise ValueError for a tensor that is not in `specs`, comes twice, or has another type or shape, and when one is left out.
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
    """Write `tensors` to `file` as they come, so that only one is in memory. `specs` says beforehand what comes, in any order.

    Raise ValueError as `placed` does.
    """
    start, places, _ = layout(specs)
    with file.open("wb") as out:
        out.write(start)
        for place, tensor in placed(file, specs, places, tensors):
            out.seek(place)
            data = tensor.detach().contiguous().cpu()
            # Its bytes where they are: a numpy view would forbid for good to resize that memory, which offloading does.
            out.write((ctypes.c_char * data.nbytes).from_address(data.data_ptr()))
