"""A warm-up compiles; what is learned after it is the same to the bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.conformance import STEPS, TWO_MICRO_BATCHES, engine_step, weights_of
from helpers.distributed import run_distributed
from helpers.engines import make_tiny_engine
from helpers.tiny import save_tiny_model
from torch import Tensor

from lockstep.models.load import Head
from lockstep.protocol import DataProto
from lockstep.workers.warm_up import PROMPT, RESPONSE, ROWS, warm_update


@pytest.mark.parametrize("head", [Head.LANGUAGE_MODEL, Head.VALUE])
@pytest.mark.parametrize("section", [{}, {"param_offload": True, "optimizer_offload": True}])
def test_a_warm_up_changes_nothing(tmp_path: Path, head: Head, section: dict[str, bool]) -> None:
    path = save_tiny_model(tmp_path, value_head=head is Head.VALUE, max_position_embeddings=128)

    def train(warm: bool) -> tuple[Tensor, list[bool], dict[str, Tensor]]:
        torch.manual_seed(5)
        engine = make_tiny_engine(path, head=head, section=section)
        if warm:
            warm_update(engine, learns=True, temperature=0.7, entropy_grad=True)
        cleared = [parameter.grad is None for parameter in engine.module.parameters()]
        drawn = torch.rand(3)
        for update, rows in enumerate(STEPS):
            engine_step(engine, rows, update, TWO_MICRO_BATCHES)
        return drawn, cleared, weights_of(engine)

    plain, warmed = (run_distributed(lambda warm=warm: train(warm), 1)[0] for warm in (False, True))
    assert all(warmed[1])
    assert torch.equal(plain[0], warmed[0])
    assert all(torch.equal(plain[2][name], warmed[2][name]) for name in plain[2])


@pytest.mark.parametrize("context", [32, 128])
def test_a_frozen_engine_passes_only_and_over_rows_that_its_context_holds(tmp_path: Path, context: int) -> None:
    path = save_tiny_model(tmp_path, max_position_embeddings=context)

    def run() -> tuple[bool, list[int]]:
        engine, counts = make_tiny_engine(path, optim=None), list[int]()
        forward = engine.forward

        def noted(rows: DataProto, *args: Any) -> DataProto:
            counts.extend(rows.token_counts().tolist())
            return forward(rows, *args)

        engine.forward = noted  # type: ignore[method-assign]
        warm_update(engine, learns=False, temperature=1.0)
        return all(parameter.grad is None for parameter in engine.module.parameters()), counts

    assert run_distributed(run, 1) == [(True, [min(context, PROMPT + RESPONSE)] * ROWS)]
