"""The filters, compiled: what a sort keeps in float64, the CPU's tokens, and the same bits in any batch."""

import random

import pytest
import torch
from helpers.kept import check_kept, draw_options, odd_rows

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from helpers.filtered import FILTERS, check_drawn, kept_of

from lockstep.generation.gpu import filters

VOCABULARY = 151_936


@pytest.mark.parametrize("vocabulary", [3, 5000, VOCABULARY])
@pytest.mark.parametrize("collected", [16, 4096])
def test_what_is_kept_is_what_a_sort_keeps(vocabulary, collected, monkeypatch):
    """With few collected tokens, rows come to their ends by the other ways."""
    monkeypatch.setattr(filters, "_COLLECTED", collected)
    rng = random.Random(vocabulary)
    for seed in range(3):
        rows = odd_rows(vocabulary, seed)
        options = [draw_options(rng, vocabulary) for _ in rows]
        for row, kept, own in zip(rows.values(), kept_of(torch.stack(list(rows.values())).cuda(), options), options, strict=True):
            check_kept(kept, row, *own)


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_a_filtered_draw_is_the_cpus(options):
    torch.manual_seed(2)
    check_drawn(2 * torch.randn(128, VOCABULARY, device="cuda"), options, equal=0.99)


def test_the_cut_of_a_row_has_the_same_bits_in_any_batch():
    torch.manual_seed(3)
    logits = torch.randn(200, VOCABULARY, device="cuda")
    options = [(-1, 0.9 + 0.0005 * i, 0.0) for i in range(200)]
    whole = kept_of(logits, options)
    for first, count in ((0, 1), (17, 3), (60, 140)):
        here = slice(first, first + count)
        assert torch.equal(kept_of(logits[here].clone(), options[here]), whole[here])
