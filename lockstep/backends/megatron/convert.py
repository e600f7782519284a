"""Hugging Face's parameters as megatron's, and back: which go where, and how each is divided among the ranks of tensor parallelism.

megatron lays queries, keys and values of a layer into one matrix, group after group of the heads that share a key (q.. q k v), and gate
and up projection of an MLP into another, where each rank has its part of both. Norms are whole on every rank. The rows of the vocabulary
are padded until the ranks can divide them.

Nothing here communicates: a `Piece` takes its part from a reader of rows, and puts parts together into whole tensors.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

Read = Callable[[str, int, int], Tensor]
"""(Hugging Face name, start, stop) -> those rows of the parameter."""
Shapes = Mapping[str, tuple[int, ...]]
"""Hugging Face name -> shape."""


@dataclass(frozen=True)
class Piece(ABC):
    """One of megatron's parameters, made of the Hugging Face parameters `names`."""

    names: tuple[str, ...]
    rows: tuple[int, ...]
    """The rows of each of `names`."""
    divided_along: ClassVar[int | None] = 0
    """The dimension along which ranks have a part each; None where each has the whole."""

    @abstractmethod
    def take(self, read: Read, rank: int, size: int) -> Tensor:
        """The part of rank `rank` of `size`."""

    @abstractmethod
    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """From the parts of all ranks, in order, the whole tensor of each of `names`."""


class Whole(Piece):
    """The same on every rank."""

    divided_along = None

    def take(self, read: Read, rank: int, size: int) -> Tensor:
        return read(self.names[0], 0, self.rows[0])

    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [parts[0]]


class Vocabulary(Piece):
    """Rows divided among the ranks, after rows of zeros that make them divisible."""

    def take(self, read: Read, rank: int, size: int) -> Tensor:
        count = padded_vocabulary(self.rows[0], size) // size
        start, stop = (min(self.rows[0], edge) for edge in (rank * count, (rank + 1) * count))
        part = read(self.names[0], start, stop)
        return F.pad(part, (0, 0, 0, count - len(part)))

    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat(list(parts))[: self.rows[0]]]


class Columns(Piece):
    """Columns divided among the ranks."""

    divided_along = 1

    def take(self, read: Read, rank: int, size: int) -> Tensor:
        return read(self.names[0], 0, self.rows[0]).chunk(size, dim=1)[rank].contiguous()

    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat(list(parts), dim=1)]


class GateUp(Piece):
    """Rows of several matrices, each divided; a rank has, in each of its groups, its part of the first above its part of the next."""

    def take(self, read: Read, rank: int, size: int) -> Tensor:
        groups = self._groups(size) // size
        own = []
        for name, rows in zip(self.names, self.rows, strict=True):
            count = rows // size
            own.append(read(name, rank * count, (rank + 1) * count).unflatten(0, (groups, -1)))
        return torch.cat(own, dim=1).flatten(0, 1)

    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        groups = self._groups(len(parts))
        whole = torch.cat(list(parts)).unflatten(0, (groups, -1))
        return [tensor.flatten(0, 1) for tensor in whole.split([rows // groups for rows in self.rows], dim=1)]

    def _groups(self, size: int) -> int:
        """The groups of all ranks: here one for each."""
        return size


@dataclass(frozen=True)
class QueryKeyValue(GateUp):
    """Groups of heads divided among the ranks; in each group its queries, then its key, then its value."""

    head_size: int

    def _groups(self, size: int) -> int:
        return self.rows[1] // self.head_size


@dataclass(frozen=True)
class Placed:
    """A piece and the parameter that it fills."""

    piece: Piece
    stage: int
    parameter: str
    """Its name in the model of that stage."""
    is_copy: bool = False
    """A second copy of a tied weight, in another stage than the first."""


_LAYER: list[tuple[Any, ...]] = [
    ("self_attention.linear_qkv", QueryKeyValue, *(f"self_attn.{x}_proj" for x in "qkv")),
    ("self_attention.q_layernorm", Whole, "self_attn.q_norm"),
    ("self_attention.k_layernorm", Whole, "self_attn.k_norm"),
    ("self_attention.linear_proj", Columns, "self_attn.o_proj"),
    ("mlp.linear_fc1", GateUp, "mlp.gate_proj", "mlp.up_proj"),
    ("mlp.linear_fc2", Columns, "mlp.down_proj"),
    ("input_layernorm", Whole, "input_layernorm"),
    ("pre_mlp_layernorm", Whole, "post_attention_layernorm"),
]
"""Of each part of a layer that a family may have: megatron's name, the kind of piece, Hugging Face's names."""


def padded_vocabulary(size: int, ranks: int) -> int:
    """The smallest multiple of `ranks` that holds `size` tokens."""
    return -(-size // ranks) * ranks


def place_parameters(shapes: Shapes, layers: int, head_size: int, stages: int) -> list[Placed]:
    """Where each parameter of a model with these Hugging Face names and shapes goes, in the order of the model.

    A language model without lm_head.weight is one whose output layer is tied to the embedding.
    """
    last = stages - 1
    embedding = "model.embed_tokens"
    placed: list[Placed] = []

    def place(stage: int, parameter: str, kind: type[Piece], *names: str, is_copy: bool = False) -> None:
        for end in ("weight", "bias"):
            full = tuple(f"{name}.{end}" for name in names)
            if full[0] in shapes:
                rows = tuple(shapes[name][0] for name in full)
                piece = QueryKeyValue(full, rows, head_size) if kind is QueryKeyValue else kind(full, rows)
                placed.append(Placed(piece, stage, f"{parameter}.{end}", is_copy))

    place(0, "embedding", Vocabulary, embedding)
    for layer in range(layers):
        stage, local = divmod(layer, layers // stages)
        for parameter, kind, *names in _LAYER:
            place(stage, f"decoder.layers.{local}.{parameter}", kind, *(f"model.layers.{layer}.{name}" for name in names))
    place(last, "decoder.final_layernorm", Whole, "model.norm")
    place(last, "head", Vocabulary, "lm_head")
    place(last, "head", Whole, "score")
    if not {"lm_head.weight", "score.weight"} & set(shapes) and stages > 1:
        place(last, "head", Vocabulary, embedding, is_copy=True)
    missing = set(shapes) - {name for entry in placed for name in entry.piece.names}
    assert not missing, f"parameters that are not converted: {sorted(missing)}"
    return placed
