from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import ConfigError
from lockstep.protocol import DataProto, Ragged
from lockstep.workers.engine.packing import Budget, cut_into_micro_batches, pack_rows, pad_rows

LENGTHS = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=8)


@given(counts=st.lists(st.integers(1, 20), max_size=30), max_tokens=st.integers(20, 60), max_rows=st.none() | st.integers(1, 5))
def test_micro_batches_hold_every_row_once_in_order_and_as_much_as_they_may(
    counts: list[int], max_tokens: int, max_rows: int | None
) -> None:
    batches = cut_into_micro_batches(counts, Budget(max_tokens, max_rows))
    assert [row for batch in batches for row in batch] == list(range(len(counts)))

    def fits(rows: list[int]) -> bool:
        return len(rows) <= max_rows if max_rows is not None else sum(counts[row] for row in rows) <= max_tokens

    assert all(batch and fits(batch) for batch in batches)
    assert not any(fits([*batch, after[0]]) for batch, after in pairwise(batches))


def test_a_row_longer_than_the_budget_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"row 1 has 11 tokens.*\(10\).*ppo_max_token_len_per_gpu"):
        cut_into_micro_batches([3, 11], Budget(10))
    assert cut_into_micro_batches([3, 11], Budget(10, max_rows=1)) == [[0], [1]]


@given(lengths=LENGTHS, seed=st.integers(0, 1000))
def test_packed_rows_equal_a_loop(lengths: list[tuple[int, int]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(0, 99, (p,), generator=generator) for p, _ in lengths]
    responses = [torch.randint(0, 99, (t,), generator=generator) for _, t in lengths]
    data = DataProto.from_dict({"prompts": Ragged.from_rows(prompts), "responses": Ragged.from_rows(responses)})
    packed = pack_rows(data, torch.device("cpu"))

    ids, positions, predict_at = [], [], []
    for prompt, response in zip(prompts, responses, strict=True):
        predict_at += [len(ids) + len(prompt) - 1 + t for t in range(len(response))]
        ids += [*prompt.tolist(), *response.tolist()]
        positions += list(range(len(prompt) + len(response)))
    assert packed.input_ids.tolist() == [ids]
    assert packed.position_ids.tolist() == [positions]
    assert packed.predict_at.tolist() == predict_at
    assert packed.targets.tolist() == [token for response in responses for token in response.tolist()]
    assert packed.response_lengths.tolist() == [t for _, t in lengths]


def test_padded_rows_carry_a_mask_that_does_not_depend_on_the_ids() -> None:
    ids, mask = pad_rows(Ragged.from_rows([[4, 0, 5], [0]]), pad_token_id=0, device=torch.device("cpu"))
    assert ids.tolist() == [[4, 0, 5], [0, 0, 0]]
    assert mask.tolist() == [[1, 1, 1], [1, 0, 0]]
