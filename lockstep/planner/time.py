"""How long one rank computes, from counts of its work. The constants were measured on an H200 (docs/plan.md).

```text
a pass     products of matrices + attention + numbers that are read and written between them
an update  three passes' work, what is recomputed, gradients added up per micro-batch, the optimizer
```

Rates are shares of what the GPU's data sheet promises, so that they carry over to another GPU of the kind.
"""

import math
from dataclasses import dataclass

from lockstep.config.engine import ModelConfig
from lockstep.kernels.long_rows import LEAST
from lockstep.models.fast_layers import has_fast_layers
from lockstep.models.flops import ModelCost, head_size, mlp_width, model_cost
from lockstep.models.load import Head
from lockstep.models.packing import MAX_LONGER, MIN_SHARED
from lockstep.planner.hardware import NODE_LINK, Device
from lockstep.planner.needs import build, cache_bytes

PRODUCTS = 0.728
"""Of the peak, what matrix products reach in a step that runs at the power limit."""
ATTENTION, HALF_LENGTH = 0.273, 1045
"""Flash attention over rows of L tokens reaches ATTENTION * L / (L + HALF_LENGTH) of the peak."""
LONG_ATTENTION, LONG_HALF_LENGTH = 0.48, 1400
"""The same for rows that go one at a time (kernels/long_rows.py), on the GPUs that have the kernels for it."""
WITH_LONG_ROWS = ("h200", "h100", "h20", "b200")
HIDDEN_BYTES, INTERMEDIATE_BYTES, LOGIT_BYTES = 346, 18, 12
"""Moved in an update for each number of the stream and of the MLP (per token and layer), and for each logit. A pass moves a third."""
SLOW_LAYERS = 1.6
"""Transformers' own layers move this much more between the products than models/fast_layers.py."""
GRADIENT_BYTES, OPTIMIZER_BYTES = 12, 64
"""Per parameter: adding up the gradient of a micro-batch; clipping, AdamW and the cast to half precision."""
LAUNCH_S = 0.25e-3
"""The least time of a layer's forward pass: the host launches its kernels. Backward passes take twice as long."""
LINK_SHARE = 0.7
"""Of a link's peak, what collectives reach."""
EXPOSED = 0.1
"""Of communication that hides behind computation, what does not."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that decide how long it computes."""

    cost: ModelCost
    parameters: int
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    cache_numbers: int
    """Numbers of the key-value cache for one token."""
    head_size: int
    fast: bool
    """Whether the layers run as written in models/fast_layers.py."""

    def token_bytes(self, element: int, kept: str) -> int:
        """Return the bytes of keys and values of one token; `kept` is `rollout.kv_cache_dtype`."""
        return cache_bytes(self.cache_numbers, self.head_size, element, kept)


def read_shape(model: ModelConfig, head: Head) -> Shape:
    """Return the shape of the model in `model.path`. Raise DataError if transformers cannot build it with this head."""
    module = build(model, head)
    text = module.config.get_text_config()
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return Shape(
        cost=model_cost(module),
        parameters=sum(p.numel() for p in module.parameters()),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=mlp_width(text),
        vocabulary=text.vocab_size,
        cache_numbers=2 * text.num_hidden_layers * kv_heads * head_size(text),
        head_size=head_size(text),
        fast=has_fast_layers(module),
    )


@dataclass(frozen=True)
class RowGroups:
    """The rows that one rank computes: groups of `n` responses that share a prompt."""

    groups: float
    n: int
    prompt: float
    """Mean tokens of a prompt."""
    response: float
    """Mean tokens of a response."""
    budget: int
    """Tokens of a micro-batch."""

    @property
    def prompts_computed(self) -> float:
        """How often the prompt of a group is computed: once per micro-batch that has rows of it."""
        shared = self.n > 1 and self.prompt >= MIN_SHARED and self.response <= MAX_LONGER * self.prompt
        return max(1.0, self.n * self.response / max(1.0, self.budget - self.prompt)) if shared else float(self.n)

    @property
    def tokens(self) -> float:
        """Tokens that are computed."""
        return self.groups * (self.prompts_computed * self.prompt + self.n * self.response)

    @property
    def response_tokens(self) -> float:
        return self.groups * self.n * self.response

    @property
    def pairs(self) -> float:
        """Pairs of tokens that attention looks at."""
        per_response = self.response * self.prompt + self.response**2 / 2
        return self.groups * (self.prompts_computed * self.prompt**2 / 2 + self.n * per_response)

    @property
    def micro_batches(self) -> int:
        return max(1, -(-int(self.tokens) // self.budget))


@dataclass(frozen=True)
class Ranks:
    """Who computes a model together."""

    count: int
    per_node: int
    sharing: int
    """Ranks that share one copy of it."""

    def gather_s(self, num_bytes: float, device: Device) -> float:
        """Seconds until every rank has had `num_bytes` of which each holds a share."""
        near = device.link * LINK_SHARE
        link = near if self.sharing <= self.per_node else min(near, NODE_LINK)
        return num_bytes * (self.sharing - 1) / self.sharing / link

    def reduce_s(self, num_bytes: float, device: Device) -> float:
        """Seconds until every rank has its share of a sum over all ranks."""
        copies = self.count // self.sharing
        return self.gather_s(num_bytes, device) + 2 * num_bytes / self.sharing * (copies - 1) / copies / NODE_LINK


def pass_s(shape: Shape, rows: RowGroups, device: Device, ranks: Ranks) -> float:
    """A forward pass without gradient over the rows."""
    computing = max(_forward_s(shape, rows, device), rows.micro_batches * shape.layers * LAUNCH_S)
    talking = rows.micro_batches * ranks.gather_s(2 * shape.parameters, device)
    return _together(computing, talking)


def update_s(shape: Shape, rows: RowGroups, device: Device, ranks: Ranks, recompute: str, updates: int, trained: int) -> float:
    """Forward and backward passes over the rows, in `updates` optimizer steps of `trained` parameters."""
    forward = _forward_s(shape, rows, device)
    again = {"none": 0.0, "selective": _mlp_s(shape, rows, device), "full": forward - _head_s(shape, rows, device)}[recompute]
    micro_batches = max(rows.micro_batches, updates)
    computing = max(3 * forward + again, 3 * micro_batches * shape.layers * LAUNCH_S)
    computing += micro_batches * GRADIENT_BYTES * trained / device.bandwidth
    # Weights are gathered for the forward and for the backward pass; gradients are reduced in float32.
    talking = micro_batches * (2 * ranks.gather_s(2 * shape.parameters, device) + ranks.reduce_s(4 * trained, device))
    return _together(computing, talking) + updates * OPTIMIZER_BYTES * trained / ranks.count / device.bandwidth


def _forward_s(shape: Shape, rows: RowGroups, device: Device) -> float:
    products = 2 * shape.cost.body * rows.tokens / (PRODUCTS * device.flops)
    reach = device.flops * _attention_share(shape, rows.prompt + rows.response, device)
    attention = 2 * shape.cost.widths * len(shape.cost.windows) * rows.pairs / reach
    moved = rows.tokens * shape.layers * (HIDDEN_BYTES * shape.hidden + INTERMEDIATE_BYTES * shape.intermediate) / 3
    between = moved * (1.0 if shape.fast else SLOW_LAYERS) / device.bandwidth
    return products + attention + between + _head_s(shape, rows, device)


def _attention_share(shape: Shape, length: float, device: Device) -> float:
    """Of the peak, what attention reaches over rows of this length."""
    if device.name in WITH_LONG_ROWS and length >= LEAST.get(shape.head_size, math.inf):
        return LONG_ATTENTION * length / (length + LONG_HALF_LENGTH)
    return ATTENTION * length / (length + HALF_LENGTH)


def _head_s(shape: Shape, rows: RowGroups, device: Device) -> float:
    if not shape.cost.head:
        return 0.0
    products = 2 * shape.cost.head * rows.response_tokens / (PRODUCTS * device.flops)
    return products + rows.response_tokens * shape.vocabulary * LOGIT_BYTES / 3 / device.bandwidth


def _mlp_s(shape: Shape, rows: RowGroups, device: Device) -> float:
    products = 6 * shape.hidden * shape.intermediate * shape.layers * rows.tokens / (PRODUCTS * device.flops)
    return products + rows.tokens * shape.layers * INTERMEDIATE_BYTES * shape.intermediate / 3 / device.bandwidth


def _together(computing: float, talking: float) -> float:
    """Collectives run beside the computation; what is longer decides."""
    return max(computing, talking) + EXPOSED * min(computing, talking)
