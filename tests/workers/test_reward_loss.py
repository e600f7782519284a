"""Training a score head: against plain PyTorch on every layout of fsdp, from any folder, with adapters; and what its metrics say."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import engine_properties as properties
from helpers.conformance import COLUMN_ATOL, reference_model, weights_of
from helpers.engine_properties import SCORE, Layout
from helpers.pairs import WHOLE, denominators
from helpers.scores import assert_scores_learn_as_in_plain_pytorch, make_scored_pairs
from helpers.tiny import save_tiny_model, tiny_model
from torch import Tensor

from lockstep.algorithms.aggregation import Denominators
from lockstep.algorithms.rows import Rows
from lockstep.errors import NumericalError
from lockstep.models import packing
from lockstep.models.chunked_head import TokenOutputs
from lockstep.models.packing import Budget, TokenRows
from lockstep.observability.metrics import merge_metrics, values
from lockstep.protocol import DataProto
from lockstep.workers.engine.pending import read
from lockstep.workers.engine.score import score_rows
from lockstep.workers.reward_loss import NUM_BINS, make_reward_loss

LAYOUTS = {
    "fsdp, 2": Layout("fsdp", 2),
    "fsdp2, 1": Layout("fsdp2", 1),
    "fsdp2, 2": Layout("fsdp2", 2),
    "fsdp2 tp2": Layout("fsdp2", 2, {"tensor_parallel_size": 2}),
    "fsdp2 sp2": Layout("fsdp2", 2, {"ulysses_sequence_parallel_size": 2}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_update_equals_plain_pytorch_whatever_the_cut(tmp_path: Path, layout: str) -> None:
    path = save_tiny_model(tmp_path, "qwen2" if layout == "fsdp2, 2" else "llama", score_head=True)
    assert_scores_learn_as_in_plain_pytorch(LAYOUTS[layout], path, (WHOLE, Budget(25), Budget(999, 2)))


def test_a_prompt_that_a_pair_shares_is_computed_once_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MIN_SHARED", 1)
    monkeypatch.setattr(packing, "MAX_LONGER", 1 << 30)
    assert_scores_learn_as_in_plain_pytorch(Layout(), save_tiny_model(tmp_path, score_head=True), recompute="full")


@pytest.mark.parametrize("layout", ["fsdp, 2", "fsdp2, 2", "fsdp2 tp2"])
def test_a_causal_folder_gets_a_head_from_the_seed(tmp_path: Path, layout: str) -> None:
    path = save_tiny_model(tmp_path)
    properties.assert_a_missing_head_is_drawn_from_the_seed(LAYOUTS[layout], path, SCORE)

    def head() -> Tensor:
        return weights_of(LAYOUTS[layout].engine(path, SCORE))["score.weight"]

    weight = LAYOUTS[layout].run(head)[0]
    assert weight.std().item() == pytest.approx(1 / 33, rel=0.4)  # 32 numbers, of a spread of 1 / (hidden size + 1)


def test_adapters_train_the_head_too_and_the_folder_scores_the_same_in_transformers(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    path, data = save_tiny_model(tmp_path / "model"), make_scored_pairs()
    layout = Layout("fsdp2", 2)

    def train() -> Tensor:
        engine = layout.engine(path, SCORE, model={"lora_rank": 4, "lora_alpha": 8}, pad_token_id=0)
        start = weights_of(engine)["score.weight"]
        mine = data if engine.rank == 0 else data.select_idxs(torch.empty(0, dtype=torch.int64))
        for _ in range(3):
            engine.forward_backward(mine, partial(make_reward_loss("train", 0.0), denominators=denominators(data)), WHOLE)
            engine.optim_step()
        engine.save(tmp_path / "saved")
        assert not torch.equal(weights_of(engine)["score.weight"], start)
        rows = DataProto.from_dict({"input_ids": data.ragged("prompts")})
        return score_rows(engine, rows.ragged("input_ids"), WHOLE, pad_token_id=0)

    scores = layout.run(train)[0]
    merged = reference_model(str(tmp_path / "saved"), SCORE)
    assert merged.config.num_labels == 1
    assert merged.config.pad_token_id == 0
    assert merged.config.architectures == ["LlamaForSequenceClassification"]
    prompts = [row[None] for row in data.ragged("prompts").rows()]
    beside = peft.PeftModel.from_pretrained(_base(path), str(tmp_path / "saved" / "adapter"))
    for model in (merged, beside):
        with torch.no_grad():
            expected = torch.stack([model(input_ids=row).logits[0, 0] for row in prompts])
        torch.testing.assert_close(scores, expected, atol=COLUMN_ATOL, rtol=0)


def _base(path: str) -> Any:
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)


def pair_loss(scores: list[float], coefficient: float = 0.0) -> dict[str, float]:
    rows = Rows(torch.full((len(scores),), 2))
    tokens = TokenRows(rows, {}, list(range(len(scores))), {"margin": torch.zeros(len(scores))})
    outputs = TokenOutputs(scores=torch.tensor(scores, dtype=torch.float32, requires_grad=True))
    _, metrics = make_reward_loss("train", coefficient)(outputs, tokens, Denominators(2 * len(scores), len(scores)))
    return values(merge_metrics(read([metrics])))


def test_the_bins_say_how_far_confidence_is_from_the_share_that_is_right() -> None:
    """Four pairs of confidence 0.731, three of them right, in bin 4; a tie of confidence 0.5, half right, in bin 0."""
    found = pair_loss([1, 0, 2, 1, 0, 1, 5, 4, 3, 3])
    assert found["train/accuracy"] == pytest.approx(3.5 / 5)
    confidence = torch.tensor(1.0).sigmoid().item()
    expected = [0.0] * NUM_BINS
    expected[4] = 4 * confidence - 3
    assert [found[f"train/bin/{i}"] for i in range(NUM_BINS)] == pytest.approx(expected, abs=1e-6)


def test_a_score_that_is_not_finite_names_its_row() -> None:
    with pytest.raises(NumericalError, match=r"scores: not finite in the update for 1 rows; dataset rows \[2\]"):
        pair_loss([1, 0, float("nan"), 1])


@pytest.mark.parametrize(("strategy", "world"), [("fsdp", 2), ("fsdp2", 1), ("fsdp2", 2)])
def test_in_bf16_the_head_is_float32(tmp_path: Path, strategy: str, world: int) -> None:
    """Its weights and what it gives: 0.1 is another number in bfloat16, and scores of bfloat16 come in steps of 2^-8 of their size."""
    layout, data = Layout(strategy, world), make_scored_pairs()

    def train(path: str) -> Tensor:
        engine = layout.engine(path, SCORE, pad_token_id=0, dtype="bfloat16")
        mine = data if engine.rank == 0 else data.select_idxs(torch.empty(0, dtype=torch.int64))
        scores = score_rows(engine, mine.ragged("prompts"), WHOLE, pad_token_id=0)
        engine.forward_backward(mine, partial(make_reward_loss("train", 0.0), denominators=denominators(data)), WHOLE)
        assert engine.optim_step().grad_norm > 0
        return scores

    found, rounded = [], torch.tensor(0.1).bfloat16().item()
    for name, weight in (("exact", 0.1), ("rounded", rounded)):
        model = tiny_model(score_head=True)
        torch.nn.init.constant_(model.score.weight, weight)
        model.save_pretrained(tmp_path / name)
        found.append(layout.run(train, str(tmp_path / name))[0])
    assert not torch.equal(found[0], found[0].bfloat16().float())
    torch.testing.assert_close(found[1] / found[0], torch.full_like(found[0], rounded / 0.1), atol=1e-5, rtol=0)
