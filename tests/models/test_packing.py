from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import ConfigError
from lockstep.models import packing
from lockstep.models.packing import (
    Budget,
    PackedRows,
    cut_into_micro_batches,
    pack_rows,
    shared_prompt_tokens,
)
from lockstep.protocol import DataProto, Ragged


@pytest.fixture(autouse=True, scope="module")
def every_prompt_is_worth_sharing() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "MIN_SHARED", 1)
        yield


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


def row_of_place(packed: PackedRows) -> list[list[int]]:
    """For each segment of the pack, the places of all that its last token sees, in order: a row, by its layout alone."""
    ends = packed.layout.lengths.cumsum(0).tolist()
    segments = [list(range(end - n, end)) for end, n in zip(ends, packed.layout.lengths.tolist(), strict=True)]
    shared = packed.layout.num_shared
    return segments[:shared] + [
        (segments[packed.layout.continued[i]] if shared else []) + segment for i, segment in enumerate(segments[shared:])
    ]


@given(lengths=LENGTHS, same=st.lists(st.booleans(), min_size=8, max_size=8), seed=st.integers(0, 1000))
def test_a_pack_holds_every_row_as_it_is(lengths: list[tuple[int, int]], same: list[bool], seed: int) -> None:
    """Read back through the layout: ids, positions and the place that predicts each response token. `same` repeats prompts."""
    generator = torch.Generator().manual_seed(seed)
    prompts, responses = [], []
    for i, (p, t) in enumerate(lengths):
        prompts.append(prompts[-1] if i and same[i] else torch.randint(0, 99, (p,), generator=generator))
        responses.append(torch.randint(0, 99, (t,), generator=generator))
    data = DataProto.from_dict({"prompts": Ragged.from_rows(prompts), "responses": Ragged.from_rows(responses)})
    packed = pack_rows(data, torch.device("cpu"))
    ids, positions = packed.input_ids[0].tolist(), packed.position_ids[0].tolist()

    seen = {places[-1]: places for places in row_of_place(packed)}
    predicted = iter(packed.predict_at.tolist())
    for prompt, response in zip(prompts, responses, strict=True):
        places = [next(predicted) for _ in response]
        if not places:
            continue
        # The last response token lies after the place that predicts it, except where it is alone behind a shared prompt.
        row = next(
            r
            for r in seen.values()
            if r[len(prompt) - 1 : -1] == places and [ids[x] for x in r[len(prompt) :]] == response.tolist()
        )
        assert [ids[place] for place in row] == [*prompt.tolist(), *response.tolist()]
        assert [positions[place] for place in row] == list(range(len(row)))
    assert packed.targets.tolist() == [token for response in responses for token in response.tolist()]
    assert packed.tokens.rows.lengths.tolist() == [t for _, t in lengths]
    distinct = sum(len(p) for i, p in enumerate(prompts) if not (i and torch.equal(p, prompts[i - 1])))
    assert len(ids) == distinct + sum(t for _, t in lengths)


def test_a_shared_prompt_counts_once_in_a_micro_batch_and_again_in_the_next() -> None:
    counts, shared = [6, 7, 8, 9], [0, 5, 5, 5]
    assert cut_into_micro_batches(counts, Budget(11), shared) == [[0, 1, 2], [3]]
    assert cut_into_micro_batches(counts, Budget(11)) == [[0], [1], [2], [3]]
    prompts = Ragged.from_rows([[1, 2], [1, 2], [1, 3], [1], [1]])
    data = DataProto.from_dict({"prompts": prompts, "responses": prompts})
    assert shared_prompt_tokens(data) == [0, 2, 0, 0, 1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "MIN_SHARED", 2)
        assert shared_prompt_tokens(data) == [0, 2, 0, 0, 0]
