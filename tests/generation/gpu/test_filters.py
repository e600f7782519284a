"""The filters' kernels in Triton's interpreter: TRITON_INTERPRET=1 pytest tests/generation/gpu.

tests/gpu has the compiled ones.
"""

from __future__ import annotations

import os
import random

import pytest
import torch
from helpers.kept import check_kept, draw_options, odd_rows

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 from the start: triton reads it when it is imported", allow_module_level=True)

from helpers import filtered
from helpers.filtered import FILTERS, check_drawn, kept_of, make_rows

from lockstep.generation.gpu import filters


@pytest.mark.parametrize("vocabulary", [3, 500, 9000])
@pytest.mark.parametrize(("collected", "chunk"), [(16, 4096), (256, 256), (4096, 4096)])
def test_what_is_kept_is_what_a_sort_keeps(vocabulary: int, collected: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few collected tokens, rows come to their ends by the other ways; with many chunks a sample is looked at first."""
    monkeypatch.setattr(filters, "_COLLECTED", collected)
    if vocabulary > chunk:
        monkeypatch.setattr(filtered, "chunk_size", lambda vocabulary: chunk)
        monkeypatch.setattr(filtered, "num_chunks", lambda vocabulary: -(-vocabulary // chunk))
    rng = random.Random(vocabulary)
    rows = odd_rows(vocabulary, 0)
    for _ in range(1 if vocabulary > 1000 else 3):
        options = [draw_options(rng, vocabulary) for _ in rows]
        for row, kept, own in zip(rows.values(), kept_of(torch.stack(list(rows.values())), options), options, strict=True):
            check_kept(kept, row, *own)


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_a_filtered_draw_is_the_cpus(options: dict[str, float]) -> None:
    torch.manual_seed(2)
    check_drawn(2 * torch.randn(12, 300), options)


def test_a_row_that_is_not_finite_says_so_and_ends() -> None:
    logits = torch.zeros(3, 60)
    logits[0, 7], logits[1, 7] = torch.nan, torch.inf
    rows = make_rows(3, 60, {"top_k": 5, "top_p": 0.9})
    filters_kind = filters.Filter(penalises=False, truncates=True)
    from lockstep.generation.gpu.draw import draw

    draw(logits, rows, 0, filters_kind)
    assert rows.done[:3].tolist() == [3, 3, 0]


@pytest.mark.parametrize("spread", [0.5, 2.0])
def test_a_sample_finds_the_border_of_a_flat_row(spread: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("the estimate was not near enough")

    monkeypatch.setattr(filters, "_search", never)
    row = spread * torch.randn(70_000, generator=torch.Generator().manual_seed(0))
    check_kept(kept_of(row[None], [(-1, 0.95, 0.0)])[0], row, -1, 0.95, 0.0)
