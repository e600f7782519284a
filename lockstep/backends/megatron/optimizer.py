"""AdamW as megatron-core shards it, and the state it keeps for a parameter as one tensor, wherever its shards are.

In the distributed optimizer each data-parallel rank has a range of a parameter's numbers: the master weight and both moments of that
range. Without it each has all of them. In bfloat16 the master weight is a float32 copy; in float32 it is the parameter itself.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.backends.megatron.library import (
    DistributedDataParallel,
    DistributedOptimizer,
    OptimizerConfig,
    clip_grad_by_total_norm_fp32,
    get_megatron_optimizer,
    quiet,
)
from lockstep.config.engine import OptimConfig

MASTER = "master"


class AdamW:
    """torch's AdamW with its defaults: weight decay on every parameter, eps 1e-8."""

    def __init__(
        self, model: DistributedDataParallel, config: OptimConfig, dtype: torch.dtype, distributed: bool, data: dist.ProcessGroup
    ) -> None:
        self._weight_decay = config.weight_decay
        self._max_norm = config.clip_grad or math.inf
        with quiet():
            self._optimizer = get_megatron_optimizer(
                OptimizerConfig(
                    optimizer="adam",
                    lr=config.lr,
                    weight_decay=config.weight_decay,
                    adam_beta1=config.betas[0],
                    adam_beta2=config.betas[1],
                    adam_eps=1e-8,
                    bf16=dtype == torch.bfloat16,
                    params_dtype=dtype,
                    use_distributed_optimizer=distributed,
                ),
                [model],
                use_gloo_process_groups=False,
            )
        (self._inner,) = self._optimizer.chained_optimizers
        self._data = data if distributed and data.size() > 1 else None

    def gradient_norm(self) -> float:
        """The norm of the whole gradient, over all ranks; prepares the gradients for `step`."""
        self._optimizer.prepare_grads()
        return float(self._optimizer.get_grad_norm())

    def step(self, norm: float, lr: float) -> None:
        """Clip the gradient, whose norm is `norm`, and update the weights."""
        parameters = self._inner.get_parameters()
        if parameters and norm > self._max_norm:
            clip_grad_by_total_norm_fp32(parameters, self._max_norm, norm)
        for group in self._optimizer.param_groups:  # megatron would leave norms and biases without weight decay
            group["lr"], group["weight_decay"] = lr, self._weight_decay
        self._optimizer.step_with_ready_grads()

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    @torch.no_grad()
    def read(self, kind: str, parameter: nn.Parameter) -> Tensor:
        """MASTER or a moment of a parameter, in its shape and float32. Every data-parallel rank has to call this."""
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        main, own = self._shard(parameter)
        if main is not None:
            value = main if kind == MASTER else self._inner.optimizer.state.get(main, {}).get(kind)
            if value is not None:  # before the first step there are no moments
                whole[own].copy_(value.detach().view(-1))
        if self._data is not None:
            dist.all_reduce(whole, group=self._data)  # each number is not zero on one rank at most
        return whole.view(parameter.shape)

    @torch.no_grad()
    def write(self, kind: str, parameter: nn.Parameter, value: Tensor) -> None:
        """What `read` gives; of `value` [the parameter's shape] each rank keeps its range."""
        main, own = self._shard(parameter)
        if main is None:
            return
        target = main
        if kind != MASTER:
            state = self._inner.optimizer.state[main]
            target = state.setdefault(kind, torch.zeros_like(main, dtype=torch.float32))
        target.view(-1).copy_(value.reshape(-1)[own])

    def set_steps(self, steps: int) -> None:
        """How many steps were made, for AdamW's bias correction; `write` the moments first."""
        inner: torch.optim.Optimizer = self._inner.optimizer
        for group in inner.param_groups:
            for main in group["params"]:
                if isinstance(inner, torch.optim.AdamW):
                    inner.state[main]["step"] = torch.tensor(float(steps))
            if not isinstance(inner, torch.optim.AdamW):  # the fused one of TransformerEngine or Apex counts by group
                group["step"] = steps

    def _shard(self, parameter: nn.Parameter) -> tuple[Any, slice]:
        """What the inner optimizer updates of a parameter on this rank (None: nothing), and which of its numbers that is."""
        inner = self._inner
        if not isinstance(inner, DistributedOptimizer):
            return getattr(parameter, "main_param", parameter), slice(0, parameter.numel())
        if parameter not in inner.model_param_group_index_map:
            return None, slice(0, 0)
        group, order = inner.model_param_group_index_map[parameter]
        own = inner._get_model_param_range_map(parameter)["param"]
        return inner.optimizer.param_groups[group]["params"][order], slice(own.start, own.end)
