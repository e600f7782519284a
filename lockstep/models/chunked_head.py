"""The output layer of a language model, applied to a chunk of tokens at a time: log-probs, entropies, and losses of them.

The logits of M tokens over a vocabulary of V are by far the largest tensor of a training step, and all that a step needs of them is two
numbers per token. Here they exist for a chunk of tokens at a time, and what is kept between forward and backward grows with the tokens
alone. There are two ways:

- `chunked_log_probs` returns the columns; the backward pass makes the logits of each chunk again.
- `ChunkedLoss` calls the loss on each chunk while its logits are there, so that they are made once: a quarter less work.

Both run inside the model's forward, where whatever shards the model has gathered the weights of the output layer. So the engine passes
the function to the model, and the loss is computed inside the forward:

```text
hand_out_hidden(model)                       at loading: the class of the model gets HandsOutHidden in front

engine:  loss = module(input_ids, layout, read=partial(ChunkedLoss.apply, loss_pass, chunks, targets), read_at=places)
           |
           v   FSDP gathers weights, layer by layer
         HandsOutHidden.forward
           |   hidden [M, H] = body(input_ids, layout)[places]
           v
         read(hidden, weight [V, H], bias [V], part)  =  ChunkedLoss.forward(...)
           |   for each chunk of rows:
           |       logits     [m, V] = hidden weight^T + bias            only here, only for this chunk
           |       log_probs, entropy [m]                                leaves of a graph of the loss alone
           |       loss_pass.loss(log_probs, entropy, rows)  ->  loss, d loss / d log_probs, d loss / d entropy  (torch.autograd.grad)
           |       gradients of logits [m, V]  ->  += gradients of hidden, weight, bias                          (LayerGradients)
           v
         loss, a scalar
engine:  loss.backward()  ->  ChunkedLoss.backward multiplies the kept gradients by that of the loss  ->  the body's own backward
```

If the vocabulary is divided among ranks (`VocabularyPart`), each rank has the logits of its part and they exchange a number or two per
token. Legend: M tokens, m tokens of a chunk, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from lockstep.models.attention import PackedLayout
from lockstep.models.mixin import extend_class
from lockstep.models.packing import PackedRows, TokenRows

MAX_LOGITS = {"cuda": 1 << 29, "cpu": 1 << 24}
"""Entries of one chunk of logits, at least one token: large enough to fill the device, small beside the model."""


@dataclass(frozen=True)
class TokenOutputs:
    """What a model says about M tokens of some rows, [M] each if nothing else is said."""

    log_probs: Tensor | None = None
    """Language model: log-prob of each token."""
    entropy: Tensor | None = None
    """Language model: entropy at each token."""
    values: Tensor | None = None
    """Value model: the value before each token."""
    top_log_probs: Tensor | None = None
    """Language model: log-prob of the most likely token at each place. Without a gradient."""
    scores: Tensor | None = None
    """Score model: the score of each row, [rows]."""
    divergence: Tensor | None = None
    """Student: the divergence from its teacher at each token (chunked_kl.py). Without a gradient."""
    divergence_sum: Tensor | None = None
    """Student: the sum [] of that over trained tokens, which has the gradient."""
    agreement: Tensor | None = None
    """Student: 1 where it and its teacher have the same most likely token."""


@dataclass(frozen=True)
class LossOutput:
    """The loss of a chunk of tokens, with its metrics and checks, which may be pending on the device (workers/engine/pending.py)."""

    loss: Tensor
    """[]. The losses of all chunks of all ranks add up to the mini-batch's loss."""
    metrics: Mapping[str, Any]
    checks: Sequence[Any] = ()


LossFn = Callable[[TokenOutputs, TokenRows], LossOutput]
"""(outputs, the rows of these tokens with their columns) -> their loss."""


@dataclass(frozen=True)
class TokenLoss:
    """A LossFn that looks at tokens alone: it may be called with parts of rows."""

    function: LossFn

    def __call__(self, outputs: TokenOutputs, tokens: TokenRows) -> LossOutput:
        """Return the loss of these tokens."""
        return self.function(outputs, tokens)


@dataclass(frozen=True)
class LossPass:
    """The loss that a backward pass computes on every micro-batch of a mini-batch, and the results so far."""

    loss: LossFn
    temperature: float
    """The logits are divided by it, as in sampling."""
    entropy_grad: bool
    """Whether the loss reads the entropy."""
    scale: float = 1.0
    """Multiplies the gradient, not the losses in `found`."""
    found: list[tuple[LossOutput, TokenRows]] = field(default_factory=list)
    """For each chunk its loss, without a graph, and its rows."""

    @property
    def by_token(self) -> bool:
        """Whether the loss may be called with parts of rows."""
        return isinstance(self.loss, TokenLoss)

    @property
    def function(self) -> LossFn:
        """The function in `loss`: a call of it is one frame less on the way to the formula."""
        return self.loss.function if isinstance(self.loss, TokenLoss) else self.loss

    def of(self, packed: PackedRows) -> LossPass:
        """Return this pass; for a placeholder a pass whose loss is 0 and whose results are dropped."""
        return replace(self, loss=_no_loss, found=[]) if packed.is_placeholder else self

    def loss_of(self, columns: Mapping[str, Tensor], tokens: TokenRows) -> Tensor:
        """Return the loss of a whole micro-batch, with its graph, and append it to `found`."""
        names = ("log_probs", "entropys", "values", "top_log_probs", "scores", "divergence", "divergence_sum", "agreement")
        output = self.loss(TokenOutputs(*map(columns.get, names)), tokens)
        self.found.append((replace(output, loss=output.loss.detach()), tokens))
        return output.loss * self.scale


def _no_loss(outputs: TokenOutputs, tokens: TokenRows) -> LossOutput:
    columns = (outputs.log_probs, outputs.entropy, outputs.values, outputs.scores, outputs.divergence_sum)
    read = [column for column in columns if column is not None]
    return LossOutput(sum((column.sum() for column in read), torch.zeros((), device=read[0].device)) * 0.0, {})


# -- inside the model's forward ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VocabularyPart:
    """A vocabulary divided among ranks: the rows of an output layer that one rank of `group` has."""

    group: dist.ProcessGroup
    start: int
    """The token of the first row."""
    size: int
    """How many of the rows are tokens; those after them are padding."""
    most: int
    """The most rows that a rank of the group has: all of them cut the tokens into the same chunks."""
    sums_hidden_grad: bool = False
    """Whether every rank gets the whole gradient of the hidden states, not only the share of its part."""

    @classmethod
    def of(cls, weight: DTensor, *, sums_hidden_grad: bool = False) -> VocabularyPart:
        """Return this rank's part of an output layer that is split by rows over the ranks of a mesh."""
        mesh = weight.device_mesh
        _, (start, *_) = compute_local_shape_and_global_offset(weight.shape, mesh, weight.placements)
        return cls(mesh.get_group(), start, len(weight.to_local()), -(-weight.shape[0] // mesh.size()), sums_hidden_grad)

    def log_normaliser(self, logits: Tensor) -> Tensor:
        """Return logsumexp [M] over the logits of all ranks."""
        own = torch.logsumexp(logits, dim=-1)
        parts = [torch.empty_like(own) for _ in range(self.group.size())]
        dist.all_gather(parts, own, group=self.group)
        return torch.logsumexp(torch.stack(parts), dim=0)

    def places(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the row of each target [M] on this rank (0 if another rank has it), and whether this rank has it."""
        here = (targets >= self.start) & (targets < self.start + self.size)
        return torch.where(here, targets - self.start, 0), here


Read = Callable[[Tensor, Tensor, Tensor | None, VocabularyPart | None], Any]
"""(hidden states [M, H], weight [V, H] and bias [V] of the output layer or this rank's part of them, which part) -> anything."""


class HandsOutHidden:
    """Comes before a model's own class (`hand_out_hidden`)."""

    def forward(self, *args: Any, read: Read | None = None, read_at: Tensor | None = None, **inputs: Any) -> Any:
        """Return what `read` returns for the last hidden states at the places `read_at` [M]; without `read` the model's own output."""
        if read is None:
            return super().forward(*args, **inputs)  # type: ignore[misc]
        model: Any = self
        body = model.base_model
        if body is self:  # Llama 4's prefix names no module
            body = model.model
        hidden = body(**inputs).last_hidden_state[0, read_at]
        layer = model.get_output_embeddings()
        if not isinstance(layer.weight, DTensor):
            return read(hidden, layer.weight, layer.bias, None)
        bias = None if layer.bias is None else layer.bias.to_local()
        return read(hidden, layer.weight.to_local(), bias, VocabularyPart.of(layer.weight, sums_hidden_grad=True))


def hand_out_hidden(model: PreTrainedModel) -> bool:
    """Let the model's forward take `read` and `read_at`, in place. Return False if its output layer is not a plain linear layer."""
    if type(model.get_output_embeddings()) is not nn.Linear:
        return False
    extend_class(model, HandsOutHidden)
    return True


@torch.no_grad()
def logits_are_the_layers(model: nn.Module, layer: nn.Module, device: torch.device) -> bool:
    """Whether `layer`, the output layer, makes the model's logits from the hidden states that the model hands out.

    Some families scale or cap one or the other. Runs two forward passes of two tokens; every rank of a sharded model has to call it.
    """
    calls: list[tuple[Tensor, Tensor]] = []
    handle = layer.register_forward_hook(lambda module, args, output: calls.append((args[0], output)))
    ids = torch.arange(2, device=device)[None]
    inputs = {"input_ids": ids, "position_ids": ids, "use_cache": False, "layout": PackedLayout(torch.tensor([2]), device)}
    try:
        logits = model(**inputs, logits_to_keep=ids[0, 1:]).logits
        hidden = model(**inputs, read=lambda hidden, *weights: hidden, read_at=ids[0, 1:])
    finally:
        handle.remove()
    if len(calls) != 1 or logits.shape[1] != 1:
        return False
    layer_input, layer_output = calls[0]
    return torch.equal(layer_output.to(logits.dtype), logits) and torch.equal(layer_input[0], hidden)


# -- columns -----------------------------------------------------------------------------------------------------------------


def chunked_log_probs(
    targets: Tensor,
    temperature: float,
    entropy_grad: bool,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    part: VocabularyPart | None = None,
    max_logits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob [M] of `targets` [M], entropy [M] and log-prob of the most likely token [M] under
    softmax((hidden [M, H] weight^T [V, H] + bias [V]) / temperature).

    In float32 (float64 for float64 inputs). At most `max_logits` logits exist at a time (None: what suits the device), or one token's.
    The entropy carries a gradient only when `entropy_grad` asks for it. A logit of -inf is a token that cannot occur.

    With `part` the weight (and bias) are that part of the vocabulary, and every rank of its group has to call this with the same hidden
    states and targets. Each gets the same results; for the gradient of `hidden` see `VocabularyPart`.
    """
    chunk = max(1, (max_logits or most_logits(hidden.device)) // (weight.shape[0] if part is None else part.most))
    return _LogProbs.apply(hidden, weight, bias, targets, temperature, entropy_grad, chunk, part)


def stacked_log_probs(targets: Tensor, temperature: float, entropy_grad: bool, *layer: Any) -> Tensor:
    """The columns of `chunked_log_probs` side by side, [M, 3]."""
    return torch.stack(chunked_log_probs(targets, temperature, entropy_grad, *layer), dim=-1)


class _LogProbs(torch.autograd.Function):
    """With z the logits over the temperature, p = softmax(z), t the target, S the entropy:

    log p_t = z_t - logsumexp(z),  S = -sum p log p,  d log p_t / dz = onehot(t) - p,  dS / dz = -p (log p + S)
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        entropy_grad: bool,
        chunk: int,
        part: VocabularyPart | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        log_probs = torch.empty(len(targets), dtype=sum_dtype(hidden.dtype), device=hidden.device)
        log_normaliser, entropy, top = (torch.empty_like(log_probs) for _ in range(3))
        for rows in slices(len(targets), chunk):
            logits = layer_logits(hidden[rows], weight, bias, part)
            found = _statistics(logits, targets[rows], temperature, part)
            log_probs[rows], log_normaliser[rows], entropy[rows], top[rows] = found
        _join(part, log_probs, entropy, top)
        ctx.save_for_backward(hidden, weight, bias, targets, log_normaliser, entropy)
        ctx.temperature = temperature
        ctx.entropy_grad = entropy_grad
        ctx.chunk = chunk
        ctx.part = part
        ctx.mark_non_differentiable(top, *(() if entropy_grad else (entropy,)))
        return log_probs, entropy, top

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, log_normaliser, entropy = ctx.saved_tensors
        log_prob_grad, entropy_grad, _ = grads
        gradients = LayerGradients(hidden, weight, bias, ctx.needs_input_grad)
        for rows in slices(len(targets), ctx.chunk):
            logits = layer_logits(hidden[rows], weight, bias, ctx.part)
            more = entropy_grad[rows].contiguous() if ctx.entropy_grad else None
            known = targets[rows], log_normaliser[rows], entropy[rows], log_prob_grad[rows].contiguous(), more
            gradients.add(rows, _logit_gradient(logits, *known, ctx.temperature, hidden.dtype, ctx.part))
        return *gradients.rounded(ctx.part), *(None,) * 5


def logits_log_probs(logits: Tensor, targets: Tensor, temperature: float, entropy_grad: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob [M] of `targets` [M], entropy [M] and log-prob of the most likely token [M] under softmax(logits [M, V] / temperature).

    For models whose logits are not the plain product of their output layer (`logits_are_the_layers`). The entropy carries a gradient only
    when `entropy_grad` asks for it.
    """
    logits = logits.float() / temperature
    log_normaliser = torch.logsumexp(logits, dim=-1)
    log_probs = logits.gather(-1, targets[:, None]).squeeze(-1) - log_normaliser
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        probs = torch.exp(logits - log_normaliser[:, None])
        # 0 * -inf at a forbidden token would be NaN, in the value and in the gradient; such a token adds nothing to the entropy.
        finite = logits.masked_fill(logits == -torch.inf, 0.0)
        entropy = log_normaliser - (probs * finite).sum(-1)
    return log_probs, entropy, logits.detach().amax(-1) - log_normaliser.detach()


# -- the loss, chunk by chunk ------------------------------------------------------------------------------------------------


class ChunkedLoss(torch.autograd.Function):
    """The loss of M tokens, chunk by chunk: `apply(loss_pass, chunks, targets, hidden, weight, bias, part)` is the sum over `chunks`,
    which follow each other, of `loss_pass.loss`, with a gradient of that sum alone. Formulas and arguments are those of
    `chunked_log_probs`; all logits of a chunk exist at once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        loss_pass: LossPass,
        chunks: Sequence[TokenRows],
        targets: Tensor,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        part: VocabularyPart | None,
    ) -> Tensor:
        gradients = LayerGradients(hidden, weight, bias, ctx.needs_input_grad[3:])
        total = torch.zeros((), dtype=sum_dtype(hidden.dtype), device=hidden.device)
        start = 0
        for chunk in chunks:
            tokens = slice(start, start + chunk.rows.num_tokens)
            start = tokens.stop
            logits = layer_logits(hidden[tokens], weight, bias, part)
            log_probs, log_normaliser, entropy, top = _statistics(logits, targets[tokens], loss_pass.temperature, part, keep=True)
            _join(part, log_probs, entropy, top)
            with torch.enable_grad():
                leaves = log_probs.requires_grad_(), entropy.requires_grad_(loss_pass.entropy_grad)
                output = loss_pass.function(TokenOutputs(*leaves, top_log_probs=top), chunk)
                read = leaves[: 1 + loss_pass.entropy_grad]
                of_log_probs, *of_entropy = torch.autograd.grad(output.loss * loss_pass.scale, read, materialize_grads=True)
            loss = output.loss.detach()
            loss_pass.found.append((replace(output, loss=loss), chunk))
            more = of_entropy[0].contiguous() if of_entropy else None
            known = targets[tokens], log_normaliser, entropy.detach(), of_log_probs.contiguous(), more
            gradients.add(tokens, _logit_gradient(logits, *known, loss_pass.temperature, hidden.dtype, part))
            total += loss
        ctx.save_for_backward(*gradients.rounded(part))
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found = (None if gradient is None else gradient * grads[0].to(gradient.dtype) for gradient in ctx.saved_tensors)
        return None, None, None, *found, None


class LayerGradients:
    """The gradients of hidden states [M, H], weight [V, H] and bias [V], added up from those of some rows' logits."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: Sequence[bool]) -> None:
        self._hidden, self._weight, self._bias = hidden, weight, bias
        self._of_hidden = torch.empty_like(hidden) if needs[0] else None
        self._of_weight = torch.zeros_like(weight, dtype=sum_dtype(weight.dtype)) if needs[1] else None
        self._of_bias = torch.zeros_like(bias, dtype=sum_dtype(bias.dtype)) if bias is not None and needs[2] else None

    def add(self, rows: slice, delta: Tensor) -> None:
        """`delta` [rows, V] is the gradient of these rows' logits."""
        if self._of_bias is not None:
            self._of_bias += delta.sum(0, dtype=self._of_bias.dtype)
        if self._of_hidden is not None:
            self._of_hidden[rows] = delta @ self._weight
        if self._of_weight is not None:
            _add_product(self._of_weight, delta.t(), self._hidden[rows])

    def rounded(self, part: VocabularyPart | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The three, in the types of what they are gradients of."""
        if part is not None and part.sums_hidden_grad and self._of_hidden is not None:
            dist.all_reduce(self._of_hidden, group=part.group)
        of_weight, of_bias = self._of_weight, self._of_bias
        return (
            self._of_hidden,
            None if of_weight is None else of_weight.to(self._weight.dtype),
            None if of_bias is None or self._bias is None else of_bias.to(self._bias.dtype),
        )


def slices(total: int, size: int) -> Iterator[slice]:
    """Parts of `size` that make up `total`; the last may go beyond it."""
    return (slice(start, start + size) for start in range(0, total, size))


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums of numbers of this type are added up in."""
    return torch.promote_types(dtype, torch.float32)


def layer_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, part: VocabularyPart | None) -> Tensor:
    """[M, V], or this part of it, in the type that its products are summed up in; a tensor of its own."""
    if hidden.is_cuda and hidden.dtype in (torch.bfloat16, torch.float16):
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)  # what the product sums up in, not rounded again
    else:
        logits = (hidden @ weight.t()).to(sum_dtype(hidden.dtype))
    if bias is not None:
        logits.add_(bias)
    if part is not None:
        logits[:, part.size :] = -torch.inf
    return logits


def _join(part: VocabularyPart | None, log_probs: Tensor, entropy: Tensor, top: Tensor) -> None:
    """From those of parts of the vocabulary to those of all of it, in place."""
    if part is not None:
        dist.all_reduce(log_probs, group=part.group)
        dist.all_reduce(entropy, group=part.group)
        dist.all_reduce(top, dist.ReduceOp.MAX, group=part.group)


def most_logits(device: torch.device) -> int:
    """Logits that exist at a time."""
    return MAX_LOGITS.get(device.type, MAX_LOGITS["cpu"])


def _statistics(
    logits: Tensor, targets: Tensor, temperature: float, part: VocabularyPart | None, keep: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-prob, log of the normaliser, entropy and largest log-prob, each [M]. Of a part of the vocabulary: log-prob and entropy are what
    it adds, the largest is its own.

    The logits are used up, unless they are to be kept.
    """
    if logits.is_cuda and logits.dtype == torch.float32 and part is None:
        from lockstep.kernels import tokens as token_kernels

        return token_kernels.statistics(logits, targets, temperature)
    logits = logits / temperature if keep else logits.div_(temperature)
    log_normaliser = torch.logsumexp(logits, dim=-1) if part is None else part.log_normaliser(logits)
    logits.sub_(log_normaliser[:, None])
    places, here = (targets, None) if part is None else part.places(targets)
    own = logits.gather(-1, places[:, None]).squeeze(-1)
    log_probs, top = own if here is None else torch.where(here, own, 0.0), logits.amax(-1)
    # entr(p) = -p log p, and 0 at p = 0: a forbidden token adds nothing.
    return log_probs, log_normaliser, torch.special.entr(logits.exp_()).sum(-1), top


def _logit_gradient(
    logits: Tensor,
    targets: Tensor,
    log_normaliser: Tensor,
    entropy: Tensor,
    log_prob_grad: Tensor,
    entropy_grad: Tensor | None,
    temperature: float,
    dtype: torch.dtype,
    part: VocabularyPart | None,
) -> Tensor:
    """[M, V] in `dtype`: the gradient that reaches the logits. They are used up."""
    if logits.is_cuda and logits.dtype == torch.float32 and part is None:
        from lockstep.kernels import tokens as token_kernels

        return token_kernels.logit_gradient(
            logits, targets, log_normaliser, entropy, log_prob_grad, entropy_grad, temperature, dtype
        )
    probs = logits.div_(temperature).sub_(log_normaliser[:, None]).exp_()
    factor = -log_prob_grad
    if entropy_grad is not None:
        surprise = torch.special.entr(probs).mul_(entropy_grad[:, None])
        factor = factor - entropy_grad * entropy
    delta = probs.mul_(factor[:, None])
    if entropy_grad is not None:
        delta.add_(surprise)
    places, here = (targets, None) if part is None else part.places(targets)
    own_grad = log_prob_grad if here is None else torch.where(here, log_prob_grad, 0.0)
    return delta.scatter_add_(-1, places[:, None], own_grad[:, None]).div_(temperature).to(dtype)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, summed in the precision of `total`."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b
