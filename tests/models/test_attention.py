"""Packed attention against transformers' eager attention, one row at a time."""

from pathlib import Path

import pytest
import torch
from helpers.tiny import save_tiny_model, tiny_model
from torch import Tensor

from lockstep.config.engine import ModelConfig
from lockstep.models.attention import PackedLayout
from lockstep.models.load import Head, load_model

CASES = {
    "llama": {},
    "llama, one key head": {"num_key_value_heads": 1},
    "llama, no shared heads": {"num_key_value_heads": 4},
    "qwen2": {},
    "qwen3": {},
    "mistral, window 3": {"sliding_window": 3},
    "gpt_neox": {},
    "gemma2, soft caps": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 3, "attn_logit_softcapping": 2.0},
    "gpt_oss, sinks": {"head_dim": 8, "num_local_experts": 4, "sliding_window": 3},
}


def packed_inputs(rows: list[Tensor]) -> dict[str, Tensor | PackedLayout]:
    return {
        "input_ids": torch.cat(rows)[None],
        "position_ids": torch.cat([torch.arange(len(row)) for row in rows])[None],
        "layout": PackedLayout(torch.tensor([len(row) for row in rows])),
    }


@pytest.mark.parametrize("lengths", [(7, 1, 4, 9), (20, 1, 1, 1, 2)], ids=["padded", "one at a time"])
@pytest.mark.parametrize("case", CASES)
def test_packed_attention_equals_eager_one_row_at_a_time(tmp_path: Path, case: str, lengths: tuple[int, ...]) -> None:
    """Logits within 1e-5, gradients within 1e-5 of the largest: float32, another order of additions."""
    model_type, changes = case.split(",")[0], CASES[case]
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(2, 32, (length,), generator=generator) for length in lengths]
    weights = [torch.randn(len(row), 32, generator=generator) for row in rows]

    assert PackedLayout(torch.tensor(lengths)).wastes_little == (len(lengths) == 4)
    packed = load_model(ModelConfig(path=save_tiny_model(tmp_path, model_type, **changes)), Head.LANGUAGE_MODEL, seed=0)
    logits = packed(**packed_inputs(rows), use_cache=False).logits[0]
    (logits * torch.cat(weights)).sum().backward()

    eager = tiny_model(model_type, **changes)
    eager.set_attn_implementation("eager")
    alone = [eager(input_ids=row[None]).logits[0] for row in rows]
    sum((a * w).sum() for a, w in zip(alone, weights, strict=True)).backward()

    torch.testing.assert_close(logits, torch.cat(alone), atol=1e-5, rtol=0)
    for (name, mine), theirs in zip(packed.named_parameters(), eager.parameters(), strict=True):
        scale = theirs.grad.abs().max().item()
        torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-5 * scale + 1e-7, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def test_the_window_matters_for_these_rows() -> None:
    """Else the case above would pass with the window ignored."""
    row = torch.arange(2, 11)[None]
    narrow, wide = (tiny_model("mistral", sliding_window=window)(input_ids=row).logits for window in (3, None))
    assert (narrow - wide).abs().max() > 1e-2


@pytest.mark.parametrize("case", CASES)
def test_rows_that_share_their_prompt_equal_eager_one_row_at_a_time(tmp_path: Path, case: str) -> None:
    """The same bounds; two prompts, one with three responses and one with a single response."""
    model_type, changes = case.split(",")[0], CASES[case]
    generator = torch.Generator().manual_seed(4)
    prompts, responses = ([torch.randint(2, 32, (n,), generator=generator) for n in sizes] for sizes in ((6, 3), (4, 1, 7, 5)))
    prompt_of = [0, 0, 0, 1]
    weights = [torch.randn(len(response), 32, generator=generator) for response in responses]

    packed = load_model(ModelConfig(path=save_tiny_model(tmp_path, model_type, **changes)), Head.LANGUAGE_MODEL, seed=0)
    positions = [torch.arange(len(p)) for p in prompts]
    positions += [len(prompts[i]) + torch.arange(len(r)) for i, r in zip(prompt_of, responses, strict=True)]
    lengths = torch.tensor([len(segment) for segment in (*prompts, *responses)])
    logits = packed(
        input_ids=torch.cat([*prompts, *responses])[None],
        position_ids=torch.cat(positions)[None],
        layout=PackedLayout(lengths, followers=[3, 1]),
        use_cache=False,
    ).logits[0, 9:]
    (logits * torch.cat(weights)).sum().backward()

    eager = tiny_model(model_type, **changes)
    eager.set_attn_implementation("eager")
    rows = [torch.cat([prompts[i], r]) for i, r in zip(prompt_of, responses, strict=True)]
    alone = [eager(input_ids=row[None]).logits[0, -len(r) :] for row, r in zip(rows, responses, strict=True)]
    sum((a * w).sum() for a, w in zip(alone, weights, strict=True)).backward()

    torch.testing.assert_close(logits, torch.cat(alone), atol=1e-5, rtol=0)
    for (name, mine), theirs in zip(packed.named_parameters(), eager.parameters(), strict=True):
        scale = theirs.grad.abs().max().item()
        torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-5 * scale + 1e-7, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
