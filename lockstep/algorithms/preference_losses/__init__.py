"""Preference losses: from log-probs of whole responses to a loss per pair, or per response.

A preference loss is a function whose keyword-only arguments say what it reads, from this vocabulary. P pairs, B responses:

```text
log_prob       [P, 2]  log-prob of the response: the sum over its trained tokens; the gradient flows here
ref_log_prob   [P, 2]  the same under the reference. A loss that names it needs one
length         [P, 2]  the number of trained tokens, at least 1
is_chosen      [B]     the label of each response. A loss that names it takes responses alone: all its inputs are [B]
margin         [P, 2]  how much better the chosen response is, where the rows say so
any other name         a number: `beta` and the keys of `loss.loss_kwargs`; or a column that the loss's `prepare` wrote
```

Column 0 of a pair is the chosen response, column 1 the rejected one: `chosen, rejected = log_prob.unbind(-1)`. All are float64.

It returns the loss [P] and the rewards [P, 2] that it sees in the responses (both [B] where it takes responses alone). The mean of the loss
over the whole mini-batch is what is trained on. Rewards are measured only: a pair is right when the chosen one's is larger, a response
alone when its reward has the sign of its label.

The defaults of a loss's numbers are those of its own arguments, since a beta that suits one does not suit another. To each an nll term
can be added: `nll_coef` times the mean negative log-prob of the chosen response's tokens (`NLL_COEF` has the defaults).

What depends on other rows goes into a `prepare`, called once with the whole mini-batch before it is cut. It returns columns [B] by
name. Its vocabulary are `is_chosen` and two more [B], which cost a forward pass of their own: `mismatched_log_prob` and
`mismatched_ref_log_prob`, the log-prob of the response of another prompt's row, put after the prompt of this row.

```text
paired          against a reference: sigmoid, smoothed, robust, hinge, ipo, sigmoid_norm
reference_free  cpo, simpo, orpo
unpaired        kto
```
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lockstep.algorithms.binding import Bound
from lockstep.algorithms.preference_losses.paired import hinge, ipo, robust, sigmoid, sigmoid_norm, smoothed
from lockstep.algorithms.preference_losses.reference_free import cpo, orpo, simpo
from lockstep.algorithms.preference_losses.unpaired import kto, mismatch_kl
from lockstep.algorithms.registry import LossTable, input_names
from lockstep.errors import ConfigError

PreferenceLoss = Callable[..., tuple[Tensor, Tensor]]
Prepare = Callable[..., dict[str, Tensor]]

PREFERENCE_LOSSES: dict[str, PreferenceLoss] = {
    "sigmoid": sigmoid,
    "smoothed": smoothed,
    "robust": robust,
    "hinge": hinge,
    "ipo": ipo,
    "sigmoid_norm": sigmoid_norm,
    "kto": kto,
    "cpo": cpo,
    "simpo": simpo,
    "orpo": orpo,
}
"""Name -> loss: the values of `loss.loss_mode`."""

NLL_COEF: dict[PreferenceLoss, float] = {cpo: 1.0, orpo: 1.0}
"""Loss -> the weight of its nll term unless the configuration says another; 0 for a loss that is not here."""

PREPARATIONS: dict[PreferenceLoss, Prepare] = {kto: mismatch_kl}
"""Loss -> what it needs done once for a mini-batch."""

REMEDY = "add it to loss.loss_kwargs, or give the argument a default"

BATCH_INPUTS = (
    *("log_prob", "ref_log_prob", "length", "is_chosen", "margin"),
    *("mismatched_log_prob", "mismatched_ref_log_prob"),
)
"""The inputs that come from the batch."""


_TABLE = LossTable("preference loss", PREFERENCE_LOSSES, PREPARATIONS, BATCH_INPUTS)
register_preference_loss = _TABLE.register
get_preference_loss = _TABLE.get
missing_numbers = _TABLE.missing_numbers
_what = _TABLE.what


def preference_inputs(loss: PreferenceLoss) -> dict[str, bool]:
    """The names that the loss and its `prepare` read, and whether each is required. ConfigError when one is not keyword-only."""
    prepare = bind_preference_prepare(loss, {})
    return (prepare.columns if prepare is not None else {}) | input_names(_what(loss), loss)


def try_preference_loss(loss: PreferenceLoss, parameters: Mapping[str, Any]) -> None:
    """Call the loss, and its `prepare` before it, on one pair: what it says of its numbers it says now.

    Raises ConfigError where that fails, or gives other shapes than it should.
    """
    pair = torch.tensor([[-1.0, -2.0]], dtype=torch.float64)
    columns = dict.fromkeys(BATCH_INPUTS, pair) | {"length": pair.abs(), "is_chosen": torch.tensor([[True, False]])}
    shape = (1, 2) if takes_pairs(loss) else (2,)
    prepare = bind_preference_prepare(loss, parameters)
    try:
        made = prepare({name: x.flatten() for name, x in columns.items()}, None) if prepare is not None else {}
        found, rewards = bind_preference_loss(loss, parameters)({n: x.reshape(shape) for n, x in (columns | made).items()}, None)
        shapes = tuple(found.shape), tuple(rewards.shape)
    except ConfigError:
        raise
    except Exception as error:  # it may be anyone's code
        raise ConfigError(f"{_what(loss)} fails on a pair: {type(error).__name__}: {error}") from error
    if shapes != (shape[:1], shape):
        raise ConfigError(
            f"{_what(loss)} must return a loss {shape[:1]} and rewards {shape} for log-probs {shape}, but they are {shapes[0]} and "
            f"{shapes[1]}; the mean is taken later"
        )


def takes_pairs(loss: PreferenceLoss) -> bool:
    """Whether the loss couples the two responses of a pair. One that does not takes rows in any number and order."""
    return "is_chosen" not in input_names(_what(loss), loss)


def needs_reference(loss: PreferenceLoss) -> bool:
    """Whether the loss reads log-probs under the reference."""
    return "ref_log_prob" in input_names(_what(loss), loss)


def bind_preference_loss(loss: PreferenceLoss, parameters: Mapping[str, Any]) -> Bound:
    """The loss with those of the `parameters` that it names and that are not None: `bound(columns, None)` gives loss and rewards.

    Raises ConfigError when an argument of the loss is not keyword-only.
    """
    return Bound(_what(loss), loss, parameters, REMEDY)


def bind_preference_prepare(loss: PreferenceLoss, parameters: Mapping[str, Any]) -> Bound | None:
    """The loss's `prepare`: `bound(columns, None)` gives the columns [B] that it computes from a whole mini-batch. None if it has none."""
    prepare = PREPARATIONS.get(loss)
    if prepare is None:
        return None
    return Bound(f"the prepare of {_what(loss)}", prepare, parameters, REMEDY)
