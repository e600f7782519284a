"""Tiny mixtures of experts, and plain models whose routers are watched or forced."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from lockstep.models.routers import NOT_RECORDED, routers

MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8, "norm_topk_prob": True},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
}
"""Family -> what its tiny config has beside the shape of all (tiny.py)."""


def chosen_experts(model: Any, ids: Tensor) -> Tensor:
    """[tokens, layers * k]: what the routers of a plain model choose for one row."""
    found: list[Tensor] = []
    with ExitStack() as hooks:
        for router in routers(model):
            hooks.enter_context(router.register_forward_hook(lambda _, args, output: found.append(output[2])))
        with torch.no_grad():
            model(input_ids=ids[None])
    return torch.cat(found, 1).to(torch.int16)


@contextmanager
def forced(model: Any, experts: Tensor) -> Iterator[None]:
    """Inside, the routers of a plain model choose `experts` [tokens, layers * k] for a row: written out token by token."""
    found = routers(model)
    k = experts.shape[1] // len(found)

    def force(layer: int) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
        def hook(router: Any, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            logits, own_weights, own = output
            weights, chosen = [], []
            for token, given in enumerate(experts[:, layer * k : (layer + 1) * k].tolist()):
                if given[0] < 0:
                    given = own[token].tolist()
                exponentials = logits[token].exp()
                picked = torch.stack([exponentials[expert] for expert in given]) / exponentials.sum()
                weights.append(picked / picked.sum() if getattr(router, "norm_topk_prob", True) else picked)
                chosen.append(torch.tensor(given))
            return logits, torch.stack(weights).to(own_weights.dtype), torch.stack(chosen)

        return hook

    with ExitStack() as hooks:
        for layer, router in enumerate(found):
            hooks.enter_context(router.register_forward_hook(force(layer)))
        yield


def draw_experts(tokens: int, seed: int, layers: int = 2, experts: int = 4, k: int = 2) -> Tensor:
    """[tokens, layers * k] int16: k different experts for each token and layer; the last token's are not known."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.stack([torch.randperm(experts, generator=generator)[:k] for _ in range(tokens * layers)])
    drawn = drawn.view(tokens, layers * k).to(torch.int16)
    drawn[-1] = NOT_RECORDED
    return drawn
