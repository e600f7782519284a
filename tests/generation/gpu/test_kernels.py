"""The GPU kernels in Triton's interpreter, on a machine without a GPU: paged attention and the sampler against plain torch.

tests/gpu has the compiled ones. These need the package triton: TRITON_INTERPRET=1 pytest tests/generation/gpu
"""

import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 from the start: triton reads it when it is imported", allow_module_level=True)

from helpers.new_tokens import spoil

from lockstep.generation.gpu.attention import paged_attention
from lockstep.generation.gpu.block_attention import block_attention
from lockstep.generation.gpu.draw import draw, num_chunks
from lockstep.generation.gpu.rows import RUNNING, RowState
from lockstep.workers.rollout.sampling import request_keys, sample, uniforms


@pytest.mark.parametrize("splits", [1, 2])
def test_paged_attention_equals_plain_torch(splits):
    torch.manual_seed(0)
    query = torch.randn(2, 6, 24)
    k, v = torch.randn(2, 7, 16, 2, 24)
    table = torch.tensor([[3, 1, 5], [2, 6, 4]], dtype=torch.int32)
    context = torch.tensor([35, 16], dtype=torch.int32)
    spoil((k, v), table, [36, 17])
    out = paged_attention(query, k, v, table, context, scale=0.2, window=20, splits=splits)
    for row in range(2):
        n = int(context[row]) + 1
        keys, values = (x[table[row].long()].flatten(0, 1)[:n].repeat_interleave(3, 1) for x in (k, v))
        score = torch.einsum("hd,nhd->hn", query[row], keys) * 0.2
        score[:, : max(n - 20, 0)] = -torch.inf
        torch.testing.assert_close(out[row], torch.einsum("hn,nhd->hd", score.softmax(-1), values), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("window", [None, 20])
def test_blocks_of_tokens_see_what_each_of_them_sees_alone(splits, window):
    torch.manual_seed(0)
    query = torch.randn(12, 6, 24)
    k, v = torch.randn(2, 9, 16, 2, 24)
    table = torch.tensor([[3, 1, 5], [2, 6, 4], [7, 8, 0]], dtype=torch.int32)
    context = torch.tensor([30, 31, 32, 33, 0, 1, 2, 2, 15, 16, 17, 17], dtype=torch.int32)
    spoil((k, v), table, [34, 3, 18])
    out = block_attention(query, k, v, table, context, scale=0.2, window=window, splits=splits)
    alone = paged_attention(query, k, v, table.repeat_interleave(4, 0), context, scale=0.2, window=window, splits=1)
    torch.testing.assert_close(out, alone, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("of_keys", [False, True])
@pytest.mark.parametrize(("window", "place"), [(None, 32), (20, 12), (20, 33)])
def test_a_token_that_is_not_finite_harms_only_those_of_its_block_that_see_it(window, place, of_keys):
    torch.manual_seed(0)
    query = torch.randn(4, 6, 24)
    k, v = torch.randn(2, 9, 16, 2, 24)
    table = torch.tensor([[3, 1, 5]], dtype=torch.int32)
    context = torch.tensor([30, 31, 32, 33], dtype=torch.int32)
    (k if of_keys else v)[table[0, place // 16], place % 16, :, 7] = torch.inf if of_keys else torch.nan
    out = block_attention(query, k, v, table, context, scale=0.2, window=window, splits=1)
    sees = (context >= place) & (place > context - (window or 99))
    assert 0 < sees.sum() < 4
    alone = paged_attention(query, k, v, table.repeat_interleave(4, 0), context, scale=0.2, window=window, splits=1)
    torch.testing.assert_close(out[~sees], alone[~sees], atol=1e-6, rtol=1e-5)
    if not of_keys:
        assert out[sees].isnan().any(2).all()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_sampler_draws_the_cpus_tokens(temperature):
    torch.manual_seed(1)
    count = 6
    vocabulary = 50
    rows = RowState.make(count, 1, vocabulary, num_chunks(vocabulary), torch.device("cpu"))
    rows.key[:count] = request_keys(0, [(0, i, 0) for i in range(count)])
    rows.limit[:count], rows.done[:count] = 9, RUNNING
    rows.inverse_temperature.fill_(1 / (temperature or 1.0))
    rows.greedy.fill_(temperature == 0)
    logits = 2 * torch.randn(count, vocabulary)
    draw(logits, rows, 0)
    uniform = uniforms(rows.key[:count], torch.zeros(count, dtype=torch.int64))
    want, log_probs = sample(logits, uniform, temperature, -1, 1.0, 0.0, 1.0)
    assert rows.token[:count].tolist() == want.tolist()
    torch.testing.assert_close(rows.out_log_probs[:count, 0], log_probs, atol=1e-5, rtol=0)
    assert rows.context[:count].tolist() == [1] * count
