"""Hugging Face's parameters as megatron's, and back: which go where, and how each is divided among the ranks of tensor parallelism.

megatron lays queries, keys and values of a layer into one matrix, group after group of the heads that share a key (q.. q k v), and gate
and up projection of an MLP into another, where each rank has its part of both. Norms are whole on every rank. The rows of the vocabulary
are padded until the ranks can divide them.

Nothing here communicates: a `Piece` takes its part from a reader of rows, and puts parts together into whole tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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

    @property
    def divided_along(self) -> int | None:
        """The dimension along which ranks have a part each; None where each has the whole."""
        return 0

    @abstractmethod
    def take(self, read: Read, rank: int, size: int) -> Tensor:
        """The part of rank `rank` of `size`."""

    @abstractmethod
    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """From the parts of all ranks, in order, the whole tensor of each of `names`."""

    def _share(self, read: Read, number: int, rank: int, size: int) -> Tensor:
        """Rank `rank`'s rows of the number-th of `names`."""
        count = self.rows[number] // size
        return read(self.names[number], rank * count, (rank + 1) * count)


class Whole(Piece):
    """The same on every rank."""

    @property
    def divided_along(self) -> int | None:
        return None

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

    @property
    def divided_along(self) -> int | None:
        return 1

    def take(self, read: Read, rank: int, size: int) -> Tensor:
        return read(self.names[0], 0, self.rows[0]).chunk(size, dim=1)[rank].contiguous()

    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat(list(parts), dim=1)]


class GateUp(Piece):
    """Rows of two matrices, each divided; a rank has its part of the first above its part of the second."""

    def take(self, read: Read, rank: int, size: int) -> Tensor:
        return torch.cat([self._share(read, number, rank, size) for number in range(2)])

    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        halves = [part.chunk(2) for part in parts]
        return [torch.cat([half[number] for half in halves]) for number in range(2)]


@dataclass(frozen=True)
class QueryKeyValue(Piece):
    """Groups of heads divided among the ranks; in each group its queries, then its key, then its value."""

    head_size: int

    def take(self, read: Read, rank: int, size: int) -> Tensor:
        groups = self.rows[1] // self.head_size // size
        own = [self._share(read, number, rank, size).unflatten(0, (groups, -1)) for number in range(3)]
        return torch.cat(own, dim=1).flatten(0, 1)

    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        groups = self.rows[1] // self.head_size
        whole = torch.cat(list(parts)).unflatten(0, (groups, -1))
        widths = [rows // groups for rows in self.rows]
        return [tensor.flatten(0, 1) for tensor in whole.split(widths, dim=1)]


@dataclass(frozen=True, slots=True)
class Placed:
    """A piece and the parameter that it fills."""

    piece: Piece
    stage: int
    parameter: str
    """Its name in the model of that stage."""
    is_copy: bool = False
    """A second copy of a tied weight, in another stage than the first."""


def padded_vocabulary(size: int, ranks: int) -> int:
    """The smallest multiple of `ranks` that holds `size` tokens."""
    return -(-size // ranks) * ranks


def place_parameters(shapes: Shapes, layers: int, head_size: int, stages: int) -> list[Placed]:
    """Where each parameter of a model with these Hugging Face names and shapes goes, in the order of the model.

    A language model without lm_head.weight is one whose output layer is tied to the embedding.
    """
    place = _Placer(shapes, head_size)
    last = stages - 1
    embedding = "model.embed_tokens.weight"
    placed = [Placed(place.piece(Vocabulary, embedding), 0, "embedding.weight")]
    for layer in range(layers):
        stage, local = divmod(layer, layers // stages)
        for parameter, piece in place.layer(f"model.layers.{layer}."):
            placed.append(Placed(piece, stage, f"decoder.layers.{local}.{parameter}"))
    placed.append(Placed(place.piece(Whole, "model.norm.weight"), last, "decoder.final_layernorm.weight"))
    if "lm_head.weight" in shapes:
        placed.append(Placed(place.piece(Vocabulary, "lm_head.weight"), last, "head.weight"))
    elif "score.weight" not in shapes and stages > 1:
        placed.append(Placed(place.piece(Vocabulary, embedding), last, "head.weight", is_copy=True))
    for name in ("weight", "bias"):
        if f"score.{name}" in shapes:
            placed.append(Placed(place.piece(Whole, f"score.{name}"), last, f"head.{name}"))
    missing = set(shapes) - {name for entry in placed for name in entry.piece.names}
    assert not missing, f"parameters that are not converted: {sorted(missing)}"
    return placed


@dataclass(frozen=True, slots=True)
class _Placer:
    shapes: Shapes
    head_size: int

    def piece(self, kind: type[Piece], *names: str) -> Piece:
        return kind(names, self._rows(names))

    def layer(self, prefix: str) -> list[tuple[str, Piece]]:
        """(megatron's name inside the layer, piece) of each parameter."""
        pieces: list[tuple[str, Piece]] = []
        for kind in ("weight", "bias"):
            names = tuple(f"{prefix}self_attn.{x}_proj.{kind}" for x in "qkv")
            if names[0] in self.shapes:
                pieces.append((f"self_attention.linear_qkv.{kind}", QueryKeyValue(names, self._rows(names), self.head_size)))
        for parameter, name in (("q_layernorm", "q_norm"), ("k_layernorm", "k_norm")):
            if f"{prefix}self_attn.{name}.weight" in self.shapes:
                pieces.append((f"self_attention.{parameter}.weight", self.piece(Whole, f"{prefix}self_attn.{name}.weight")))
        return pieces + [
            ("self_attention.linear_proj.weight", self.piece(Columns, f"{prefix}self_attn.o_proj.weight")),
            ("mlp.linear_fc1.weight", self.piece(GateUp, *(f"{prefix}mlp.{x}_proj.weight" for x in ("gate", "up")))),
            ("mlp.linear_fc2.weight", self.piece(Columns, f"{prefix}mlp.down_proj.weight")),
            ("input_layernorm.weight", self.piece(Whole, f"{prefix}input_layernorm.weight")),
            ("pre_mlp_layernorm.weight", self.piece(Whole, f"{prefix}post_attention_layernorm.weight")),
        ]

    def _rows(self, names: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(self.shapes[name][0] for name in names)
