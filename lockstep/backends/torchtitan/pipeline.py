"""One pipeline stage a rank: micro-batches go through the stages in turn, one forward and one backward alternating (1F1B).

torch's own schedules want micro-batches of one shape; packs differ in their tokens. Every rank of a copy has all packs, so each knows the
shape of what will come to it.

consumes: hidden states of the stage before, gradients of the stage after. produces: the reverse. waits for: the neighbour's message, up to
the timeout of the process group. A rank that raises leaves its neighbours waiting; the controller ends them.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

Inputs = tuple[Tensor, Tensor, Any, Any]
"""(token ids [1, N], positions [1, N], layout, question) of one micro-batch."""


class Pipeline:
    """The stage `module` between its neighbours in `group`; without one it is the whole model. Hidden states have `width` numbers of type
    `dtype` a token.

    With tensor parallelism (`mesh`) the ranks of a stage divide the tokens, and each sends its own.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup | None,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        mesh: DeviceMesh | None,
    ) -> None:
        self._module = module
        self._group = group
        self._width = width
        self._dtype = dtype
        self._device = device
        self._mesh = mesh
        self._stage, self._stages = (group.rank(), group.size()) if group else (0, 1)
        self._before = self._stage - 1 if self._stage else None
        self._after = self._stage + 1 if self._stage + 1 < self._stages else None
        if group:
            dist.all_reduce(torch.zeros(1, device=device), group=group)  # NCCL wants all ranks at a group's first message

    @torch.no_grad()
    def forward(self, batches: Sequence[Inputs]) -> list[Tensor]:
        """The answers to all micro-batches on the last stage; on the others nothing."""
        answers = []
        for inputs in batches:
            output = self._compute(inputs, self._exchange(self._before, None, self._shape(inputs)))
            if self._after is None:
                answers.append(output)
            else:
                self._exchange(self._after, output, None)
        return answers

    def backward(
        self,
        batches: Sequence[Inputs],
        loss_of: Callable[[int, Tensor], Tensor],
        gradient_sync: Callable[[bool], AbstractContextManager[None]],
    ) -> None:
        """Forward and backward of all micro-batches. `loss_of(number, answer)` is called on the last stage."""
        count = len(batches)
        # This stage is so many micro-batches ahead of the last one, and the gradients come back that much later.
        ahead = min(self._stages - self._stage - 1, count)
        running: deque[tuple[Tensor | None, Tensor]] = deque()

        def forward(number: int, arrived: Tensor | None) -> Tensor:
            output = self._compute(batches[number], arrived)
            output = loss_of(number, output) if self._after is None else output
            running.append((arrived, output))
            return output

        def backward(number: int, gradient: Tensor | None) -> Tensor | None:
            arrived, output = running.popleft()
            with gradient_sync(number == count - 1):
                torch.autograd.backward(output, gradient)
            return None if arrived is None else arrived.grad

        for number in range(ahead):
            self._exchange(self._after, forward(number, self._arriving(batches, number)), None)
        arrived = self._arriving(batches, ahead)
        for number in range(ahead, count):
            output = forward(number, arrived)
            gradient = backward(number - ahead, self._exchange(self._after, output, running[0][1].shape))
            arrived = self._arriving(batches, number + 1, gradient)
        for number in range(count - ahead, count):
            gradient = backward(number, self._exchange(self._after, None, running[0][1].shape))
            self._exchange(self._before, gradient, None)

    def _arriving(self, batches: Sequence[Inputs], number: int, gradient: Tensor | None = None) -> Tensor | None:
        """What micro-batch `number` has become in the stages before, if there is one; `gradient` goes back to them at the same time."""
        arrived = self._exchange(self._before, gradient, self._shape(batches[number]) if number < len(batches) else None)
        return arrived if arrived is None else arrived.requires_grad_()

    def _compute(self, inputs: Inputs, arrived: Tensor | None) -> Tensor:
        """The module's output; where the ranks of a stage divide the tokens, this rank's part."""
        tokens, positions, layout, question = inputs
        entering = tokens if arrived is None else arrived
        if arrived is not None and self._mesh is not None:
            shape = torch.Size((1, tokens.shape[1], self._width))
            stride = (shape[1] * shape[2], shape[2], 1)
            entering = DTensor.from_local(arrived, self._mesh, [Shard(1)], run_check=False, shape=shape, stride=stride)
        output = self._module(entering, positions, layout, question)
        return output.to_local() if isinstance(output, DTensor) else output

    def _shape(self, inputs: Inputs) -> torch.Size:
        """The shape of this rank's hidden states of a micro-batch."""
        shape = (1, inputs[0].shape[1], self._width)
        return torch.Size(shape if self._mesh is None else compute_local_shape_and_global_offset(shape, self._mesh, [Shard(1)])[0])

    def _exchange(self, stage: int | None, send: Tensor | None, receive: torch.Size | None) -> Tensor | None:
        """Send and receive a tensor at the same time: one after the other, two neighbours that both send first would wait forever.

        Nothing where there is no such stage.
        """
        if stage is None:
            return None
        received = None if receive is None else torch.empty(receive, dtype=self._dtype, device=self._device)
        operations = []
        if send is not None:
            operations.append(dist.P2POp(dist.isend, send.detach().contiguous(), group=self._group, group_peer=stage))
        if received is not None:
            operations.append(dist.P2POp(dist.irecv, received, group=self._group, group_peer=stage))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        return received
