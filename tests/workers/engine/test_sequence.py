"""Sequence parallelism in fsdp and fsdp2, against plain PyTorch (helpers/conformance.py), at its tolerances."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.conformance import (
    COLUMN_ATOL,
    STEPS,
    TWO_MICRO_BATCHES,
    assert_two_updates_equal_the_reference,
    assert_weights_close,
    batch_of,
    engine_run,
    make_rows,
    reference_columns,
    reference_model,
    reference_run,
)
from helpers.distributed import run_distributed
from helpers.engines import engine_choice, make_tiny_engine
from helpers.tiny import save_tiny_model, tiny_config
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.models.load import Head
from lockstep.protocol import DataProto, Ragged
from lockstep.workers.engine import order, packing
from lockstep.workers.engine.packing import Budget
from lockstep.workers.engine.registry import check_engine
from lockstep.workers.engine.sequence import check_sequence_ranks
from lockstep.workers.weight_sync.shared import SharedWeights


def sp(size: int, **section: Any) -> dict[str, Any]:
    return {"section": {"ulysses_sequence_parallel_size": size, **section}}


CASES = {
    "fsdp2 sp2 llama": ("fsdp2", 2, "llama", Head.LANGUAGE_MODEL, sp(2) | {"recompute": "full"}, {}),
    "fsdp2 sp2 qwen2 value": ("fsdp2", 2, "qwen2", Head.VALUE, sp(2), {}),
    "fsdp sp2 qwen2 tied": ("fsdp", 2, "qwen2", Head.LANGUAGE_MODEL, sp(2) | {"recompute": "selective"}, {"tie_word_embeddings": True}),
    "fsdp2 dp2 sp2 qwen3": ("fsdp2", 4, "qwen3", Head.LANGUAGE_MODEL, sp(2), {}),
    "fsdp2 dp2 sp2, two copies": ("fsdp2", 4, "llama", Head.LANGUAGE_MODEL, sp(2, fsdp_size=2), {}),
    "fsdp2 sp4, two keys repeated": ("fsdp2", 4, "llama", Head.LANGUAGE_MODEL, sp(4), {"tie_word_embeddings": True}),
    "fsdp dp2 sp2 llama value": ("fsdp", 4, "llama", Head.VALUE, sp(2) | {"recompute": "full"}, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_two_updates_equal_plain_pytorch(tmp_path: Path, case: str) -> None:
    strategy, world, model_type, head, options, changes = CASES[case]
    path = save_tiny_model(tmp_path, model_type, value_head=head is Head.VALUE, **changes)
    assert_two_updates_equal_the_reference(path, strategy, world, head, options)


@pytest.mark.parametrize("head", [Head.LANGUAGE_MODEL, Head.VALUE])
def test_rows_that_share_their_prompt_update_like_rows_alone(tmp_path: Path, head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights within 5e-5: AdamW turns a gradient that is 0 but for rounding into a step of any size."""
    monkeypatch.setattr(packing, "MIN_SHARED", 1)
    path = save_tiny_model(tmp_path, value_head=head is Head.VALUE)
    steps = [make_rows(6, seed=3), make_rows(6, seed=4)]
    for rows in steps:
        for again, first in ((1, 0), (2, 0), (4, 3)):
            rows[again]["prompts"] = rows[first]["prompts"]
    assert_two_updates_equal_the_reference(path, "fsdp2", 2, head, sp(2), steps, weight_atol=5e-5)


def test_bf16_computes_near_fp32(tmp_path: Path) -> None:
    """The bounds of test_conformance.py: log-probs of this model move by up to a few hundredths, the gradient's norm by a few percent."""
    path = save_tiny_model(tmp_path)
    model = reference_model(path, Head.LANGUAGE_MODEL)
    expected = torch.cat([reference_columns(model, Head.LANGUAGE_MODEL, row)["log_probs"].detach() for row in STEPS[0]])
    _, steps = reference_run(path, Head.LANGUAGE_MODEL, STEPS)
    options = sp(2) | {"dtype": "bfloat16"}
    ranks = run_distributed(engine_run, 2, path, "fsdp2", Head.LANGUAGE_MODEL, STEPS, TWO_MICRO_BATCHES, options)
    columns = DataProto.concat([columns for columns, _, _ in ranks]).ragged("log_probs")
    assert 1e-4 < (columns.values - expected).abs().max() < 0.05
    assert ranks[0][1][0][1]["grad_norm"] == pytest.approx(steps[0]["grad_norm"], rel=0.02)


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_scores_equal_sequence_classification_one_row_at_a_time(tmp_path: Path, strategy: str) -> None:
    path = save_tiny_model(tmp_path, "qwen2", score_head=True)
    sequences = [torch.cat([row["prompts"], row["responses"]]) for row in make_rows(5)]
    sequences += [torch.tensor([5, 0, 9]), torch.tensor([5, 9, 0])]  # with the padding token inside and at the end

    def score() -> Tensor:
        engine = make_tiny_engine(path, strategy, Head.SCORE, optim=None, pad_token_id=0, **sp(2))
        mine = sequences[:1] if engine.rank == 0 else sequences[1:]
        return engine.score(Ragged.from_rows(mine), Budget(10), pad_token_id=0)

    scores = torch.cat(run_distributed(score, 2))
    model = reference_model(path, Head.SCORE)
    with torch.no_grad():
        expected = torch.stack([model(input_ids=ids[None]).logits[0, 0] for ids in sequences])
    torch.testing.assert_close(scores, expected, atol=COLUMN_ATOL, rtol=0)


def test_the_budget_is_that_of_one_rank(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)
    longest = max(len(row["prompts"]) + len(row["responses"]) for row in STEPS[0])
    model, _ = reference_run(path, Head.LANGUAGE_MODEL, STEPS[:1])
    budget = Budget((longest + 1) // 2)
    for _, _, weights in run_distributed(engine_run, 2, path, "fsdp2", Head.LANGUAGE_MODEL, STEPS[:1], budget, sp(2)):
        assert_weights_close(weights, model)

    def refuse() -> None:
        engine = make_tiny_engine(path, **sp(2))
        with pytest.raises(ConfigError, match=f"more than a micro-batch may hold \\({longest - longest % 2 - 2}\\)"):
            engine.forward(batch_of(STEPS[0]), Budget(longest // 2 - 1))

    run_distributed(refuse, 2)


def test_generation_is_each_rank_alone(tmp_path: Path) -> None:
    """A rank that computes more tokens or more often than another would wait for it for ever."""
    path = save_tiny_model(tmp_path)

    def decode() -> Tensor:
        engine = make_tiny_engine(path, decoder_attention="sdpa", **sp(2))
        ids = torch.arange(2, 5 + engine.rank)[None]
        assert engine.decoder is not None
        with torch.no_grad(), SharedWeights(engine, torch.float32).lent():
            return engine.decoder(input_ids=ids).logits if engine.rank else torch.empty(0)

    _, logits = run_distributed(decode, 2)
    with torch.no_grad():
        expected = reference_model(path, Head.LANGUAGE_MODEL)(input_ids=torch.arange(2, 6)[None]).logits
    torch.testing.assert_close(logits, expected, atol=COLUMN_ATOL, rtol=0)


def test_a_layout_that_cannot_be_is_refused_before_the_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(hidden_size=48, num_attention_heads=6, num_key_value_heads=3)
    with pytest.raises(ConfigError, match=r"a\.b=4 must divide the 6 ranks"):
        check_sequence_ranks(4, config, 6, "a.b")
    with pytest.raises(ConfigError, match=r"a\.b=4 must divide the model's 6 attention heads.*choose one of \[1, 2\]"):
        check_sequence_ranks(4, config, 4, "a.b")
    check_sequence_ranks(6, config, 12, "a.b")
    both = engine_choice(ulysses_sequence_parallel_size=2, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match=r"ulysses_sequence_parallel_size=2 does not go with fsdp_config\.tensor_parallel_size=2"):
        check_engine(both, tiny_config(), 4, "cpu")
    path = save_tiny_model(tmp_path, num_attention_heads=1, num_key_value_heads=1)
    monkeypatch.setattr(order, "load_on_meta", None)

    def make() -> None:
        with pytest.raises(ConfigError, match=r"fsdp_config.ulysses_sequence_parallel_size=2 must divide the model's 1 attention"):
            make_tiny_engine(path, **sp(2))

    run_distributed(make, 2)
