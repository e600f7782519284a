"""Mixtures of experts with FSDP: their routers are watched, balanced if asked for, and can replay the experts that a sampler chose.

The load-balance loss (Switch Transformer, equations 4 to 6) of a row and a layer is E sum_e f_e P_e: f_e is how often expert e was chosen
per token, P_e its mean probability, over the tokens that predict the row's response. It is top_k where the load is even. The loss of an
update is its mean over rows and layers, times model.router_aux_loss_coef. Taken row by row it does not depend on how rows are cut into
micro-batches or divided among ranks, as the loss over all tokens of a micro-batch would.

Its gradient enters where the router's scores leave it (`_Attached`), inside the layer: so it works with recomputation and with shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from lockstep.models.load import Head
from lockstep.models.packing import Budget, PackedRows, pack_rows
from lockstep.models.routers import RouterOutput, num_changed, replayed, routers
from lockstep.observability.metrics import Mean, Metric
from lockstep.protocol import DataProto, Ragged
from lockstep.workers.engine.base import LazySequence
from lockstep.workers.engine.fsdp.engine import FSDPEngine
from lockstep.workers.engine.spec import EngineSpec

ROW = "row_of_experts"
"""A column of row numbers, by which a micro-batch says which rows it has."""


class SampledExperts:
    """What routers chose for the rows of `data`, for the micro-batches that they are packed into.

    Raises ValueError when a row has not `num_layers` times as many experts for each of its tokens, whatever the number.
    """

    def __init__(self, data: DataProto, num_layers: int) -> None:
        experts = data.ragged("experts")
        lengths = data.token_counts()
        tokens = int(lengths.sum())
        width = len(experts.values) // tokens if tokens else num_layers
        if not torch.equal(experts.lengths, lengths * width) or width % num_layers:
            raise ValueError(
                f"the column experts does not fit {num_layers} routers: its rows have {experts.lengths.tolist()} numbers for "
                f"{lengths.tolist()} tokens"
            )
        self._table = experts.values.view(-1, num_layers, max(1, width // num_layers))
        """[tokens of all rows, layers, k]"""
        self._places = _places(data)

    def of_rows(self, rows: Tensor, device: torch.device) -> Tensor:
        """[N, layers, k]: for the N tokens of the micro-batch that has these rows."""
        packed = pack_rows(self._places.select_idxs(rows.cpu()), torch.device("cpu"))
        return self._table[packed.input_ids[0]].to(device, torch.int64)


def _places(data: DataProto) -> DataProto:
    """The rows with the number of each token among all of them in the place of the token: packed as the tokens are, it says which lies
    where. Equal prompts have equal numbers, so that they are shared as the tokens are."""
    prompts = data.ragged("prompts")
    responses = data.ragged("responses")
    starts = torch.cumsum(data.token_counts(), 0) - data.token_counts()
    first: dict[bytes, int] = {}
    own = [first.setdefault(row.numpy().tobytes(), int(start)) for row, start in zip(prompts.rows(), starts, strict=True)]
    columns = {
        "prompts": _counting(torch.tensor(own, dtype=torch.int64), prompts.lengths),
        "responses": _counting(starts + prompts.lengths, responses.lengths),
    }
    return DataProto.from_dict(columns)


def _counting(starts: Tensor, lengths: Tensor) -> Ragged:
    """Rows of these lengths that count up from these numbers."""
    return Ragged.from_rows([torch.arange(start, start + n) for start, n in zip(starts.tolist(), lengths.tolist(), strict=True)])


class Routing:
    """Watches these routers. `coef` is the weight of the load-balance loss; gradients are averaged over `ranks`, so they are multiplied."""

    def __init__(self, found: Sequence[nn.Module], coef: float, ranks: int) -> None:
        self._coef = coef
        self._ranks = ranks
        self._num_layers = len(found)
        self._packed: PackedRows | None = None
        """The micro-batch that is computed, where it is watched."""
        self._given: Tensor | None = None
        """[N, layers, k]: what the sampler chose for its tokens."""
        self._num_rows = self._num_packs = self._num_rows_seen = 0
        self._losses: dict[tuple[int, int], Tensor] = {}
        """(micro-batch, layer) -> the sum over its rows. A layer that is computed again writes the same."""
        self._counts: dict[tuple[int, int], Tensor] = {}
        """(micro-batch, layer) -> [experts]: tokens of each."""
        self._changed: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        """(micro-batch, layer) -> tokens that would have gone to other experts than the sampler's, and those whose experts it said."""
        for number, router in enumerate(found):
            router.register_forward_hook(self._hook(number))

    def begin(self, num_rows: int, device: torch.device) -> None:
        """An update begins, with so many rows on this rank."""
        total = torch.tensor(num_rows, device=device)
        if dist.get_world_size() > 1:
            dist.all_reduce(total)
        self._num_rows = max(1, int(total))
        self._num_packs = 0
        self._num_rows_seen = 0
        self._losses.clear()
        self._counts.clear()
        self._changed.clear()

    def end(self) -> dict[str, Metric]:
        """It is over. The loss without its weight; tokens of the busiest expert over those of an even load, and the share of experts
        without any, in the mean over layers and ranks."""
        self._packed = self._given = None
        if not self._losses:
            return {}
        rows = self._num_rows_seen
        loss = float(torch.stack(list(self._losses.values())).sum()) / self._num_layers
        layers = [[counts for (_, layer), counts in self._counts.items() if layer == number] for number in range(self._num_layers)]
        counts = torch.stack([torch.stack(of_layer).sum(0) for of_layer in layers])
        busiest = counts.max(1).values * counts.shape[1] / counts.sum(1)
        metrics: dict[str, Metric] = {
            "moe/aux_loss": Mean(loss, rows),
            "moe/max_load": Mean(float(busiest.mean())),
            "moe/idle_experts": Mean(float((counts == 0).float().mean())),
        }
        if self._changed:
            changed, known = (int(torch.stack(part).sum()) for part in zip(*self._changed.values(), strict=True))
            metrics["moe/rerouted"] = Mean(float(changed), float(max(known, 1)))
        return metrics

    def noted(self, packs: Sequence[PackedRows], sampled: SampledExperts | None) -> Sequence[PackedRows]:
        """The micro-batches, each noted when it is read: it is then computed before the next is. Its routers choose what was `sampled`."""

        def note(number: int) -> PackedRows:
            packed = packs[number]
            self._packed = None if packed.is_placeholder else packed
            self._given = None
            if sampled is not None and not packed.is_placeholder:
                self._given = sampled.of_rows(packed.tokens.row_columns[ROW], packed.input_ids.device)
            self._num_packs += 1
            self._num_rows_seen += 0 if packed.is_placeholder else len(packed.tokens.rows)
            return packed

        return LazySequence(len(packs), note)

    def _hook(self, layer: int) -> Callable[[nn.Module, Any, RouterOutput], RouterOutput | None]:
        def watch(router: nn.Module, args: Any, output: RouterOutput) -> RouterOutput | None:
            learns = self._packed is not None and torch.is_grad_enabled()
            given = None if self._given is None else self._given[:, layer]
            if given is not None:
                if learns:
                    self._changed[self._num_packs, layer] = num_changed(output[2], given)
                output = replayed(router, output, given)
            return self._balanced(layer, *output) if learns else output

        return watch

    def _balanced(self, layer: int, logits: Tensor, scores: Tensor, chosen: Tensor) -> RouterOutput:
        """Note what the router of a layer chose; its output, with the load-balance loss attached."""
        assert self._packed is not None
        loss, counts = balance(logits, chosen, self._packed)
        self._losses[self._num_packs, layer] = loss.detach()
        self._counts[self._num_packs, layer] = counts
        if not self._coef:
            return logits, scores, chosen
        scale = self._coef * self._ranks / (self._num_rows * self._num_layers)
        return logits, _Attached.apply(scores, loss, scale), chosen


def balance(logits: Tensor, chosen: Tensor, packed: PackedRows) -> tuple[Tensor, Tensor]:
    """The load-balance loss of one layer, summed over the rows of a micro-batch, and [experts] how many tokens each expert got."""
    at = packed.predict_at
    lengths = packed.tokens.rows.lengths.to(logits.device)
    experts = logits.shape[-1]
    probabilities = logits[at].float().softmax(-1)
    picked = torch.zeros_like(probabilities).scatter_(-1, chosen[at], 1.0)
    # The tokens of a row lie together. (Adding them up by their row's number would be atomic on a GPU, in an order that changes.)
    shares, means = (torch.segment_reduce(x, "sum", lengths=lengths, axis=0) / lengths[:, None] for x in (picked, probabilities))
    return experts * (shares * means).sum(), picked.sum(0)


class _Attached(torch.autograd.Function):
    """The first tensor as it is; in the backward pass the second gets `scale` as its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient,) = gradients
        return gradient, torch.full((), ctx.scale, device=gradient.device), None


class MixtureEngine(FSDPEngine):
    """See FSDPEngine. Updates also say what the routers chose, and their gradient has the load-balance loss of
    model.router_aux_loss_coef in it. Where ranks divide the tokens of a micro-batch, neither is there.

    The routers of a language model that learns choose what the column `experts` says, where rows have it; a reference, with adapters off
    too, and a critic choose for themselves.
    """

    _routing: Routing | None = None
    _replays: bool = False
    _prefix = ""

    def __init__(self, module: PreTrainedModel, spec: EngineSpec, **options: Any) -> None:
        super().__init__(module, spec, **options)
        if spec.optim is not None and self.token_ranks == 1:
            self._num_routers = len(routers(module))
            self._replays = spec.head is Head.LANGUAGE_MODEL
            self._prefix = "critic/" if spec.head is Head.VALUE else ""  # an actor of the same step says moe/* too
            self._routing = Routing(routers(module), spec.model.router_aux_loss_coef, self.gradient_ranks)

    def forward_backward(self, data: DataProto, *args: Any, **options: Any) -> dict[str, Metric]:
        if self._routing is None:
            return super().forward_backward(data, *args, **options)
        self._routing.begin(int((data.ragged("responses").lengths > 0).sum()), self.device)
        metrics = super().forward_backward(data, *args, **options)
        chosen = self._routing.end()
        return metrics | {f"{self._prefix}{name}": metric for name, metric in chosen.items()} if self.reports else metrics

    @contextmanager
    def adapter_off(self) -> Iterator[None]:
        replays = self._replays
        self._replays = False
        try:
            with super().adapter_off():
                yield
        finally:
            self._replays = replays

    def _packs(self, data: DataProto, budget: Budget) -> Sequence[PackedRows]:
        if self._routing is None:
            return super()._packs(data, budget)
        if not self._replays or "experts" not in data:
            return self._routing.noted(super()._packs(data, budget), None)
        data = data.select_idxs((data.ragged("responses").lengths > 0).nonzero().flatten())
        data.set(ROW, torch.arange(len(data)))
        return self._routing.noted(super()._packs(data, budget), SampledExperts(data, self._num_routers))
