from typing import Any

import pytest
import torch
from helpers.tiny import tiny_model
from torch import Tensor

from lockstep.models.attention import PACKED, PackedLayout
from lockstep.models.fast_layers import compile_layers


def run(model: Any, lengths: list[int]) -> tuple[Tensor, list[Tensor]]:
    ids = torch.arange(sum(lengths))[None] % 30 + 2
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    logits = model(input_ids=ids, position_ids=positions, use_cache=False, layout=PackedLayout(torch.tensor(lengths))).logits
    model.zero_grad()
    logits.square().sum().backward()
    return logits.detach(), [p.grad.clone() for p in model.parameters()]


@pytest.mark.slow
def test_compiled_layers_give_the_same_numbers_and_share_their_code() -> None:
    """Traced and run by torch, without the code generator: what is tested is that layers can be traced and are shared."""
    torch._dynamo.reset()
    graphs = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    plain, compiled = (tiny_model("llama", num_hidden_layers=4).train() for _ in range(2))
    for model in (plain, compiled):
        model.set_attn_implementation(PACKED)
    compile_layers(compiled, backend=count)
    for lengths in ([5, 4], [7, 2, 8], [3, 21, 5]):
        mine, want = run(compiled, lengths), run(plain, lengths)
        torch.testing.assert_close(mine[0], want[0], atol=1e-5, rtol=1e-5)
        for a, b in zip(mine[1], want[1], strict=True):
            torch.testing.assert_close(a, b, atol=1e-5 * b.abs().max().item() + 1e-7, rtol=0)
    assert 0 < len(graphs) <= 6, "apart, four layers of two parts and three lengths would be 24"
