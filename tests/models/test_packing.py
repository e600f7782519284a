from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.algorithms.rows import Rows
from lockstep.errors import ConfigError
from lockstep.models import packing
from lockstep.models.packing import (
    Budget,
    PackedRows,
    TokenRows,
    cut_into_micro_batches,
    pack_rows,
    shared_prompt_tokens,
)
from lockstep.protocol import DataProto, Ragged


@pytest.fixture(autouse=True, scope="module")
def every_prompt_is_worth_sharing() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "MIN_SHARED", 1)
        patch.setattr(packing, "MAX_LONGER", 1 << 30)
        yield


LENGTHS = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=8)


@given(counts=st.lists(st.integers(1, 20), max_size=30), max_tokens=st.integers(20, 60), max_rows=st.none() | st.integers(1, 5))
def test_micro_batches_hold_every_row_once_in_order_and_no_more_than_they_may(
    counts: list[int], max_tokens: int, max_rows: int | None
) -> None:
    batches = cut_into_micro_batches(counts, Budget(max_tokens, max_rows))
    assert [row for batch in batches for row in batch] == list(range(len(counts)))

    def fits(rows: list[int]) -> bool:
        return len(rows) <= max_rows if max_rows is not None else sum(counts[row] for row in rows) <= max_tokens

    assert all(batch and fits(batch) for batch in batches)
    if max_rows is not None:
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
        patch.setattr(packing, "MAX_LONGER", 3)
        data.set("responses", Ragged.from_rows([[5] * 7, [5] * 6, [5], [5], [5]]))
        assert shared_prompt_tokens(data) == [0, 2, 0, 0, 0]
        data.set("responses", Ragged.from_rows([[5], [5] * 7, [5], [5], [5]]))
        assert shared_prompt_tokens(data) == [0, 0, 0, 0, 0]


@given(counts=st.lists(st.integers(1, 30), min_size=1, max_size=40), budget=st.integers(30, 120), data=st.data())
def test_micro_batches_are_as_few_as_they_can_be_and_about_equally_full(
    counts: list[int], budget: int, data: st.DataObject
) -> None:
    """No more than filling one after the other makes, and none holds more than its share and a row."""
    shared = [data.draw(st.integers(0, n - 1)) for n in counts] if data.draw(st.booleans()) else [0] * len(counts)
    found = cut_into_micro_batches(counts, Budget(budget), shared)
    assert [row for batch in found for row in batch] == list(range(len(counts)))
    assert len(found) == len(packing._fill(counts, Budget(budget), shared, [[row] for row in range(len(counts))]))
    costs = [sum(counts[row] - shared[row] for row in batch) + shared[batch[0]] for batch in found]
    assert max(costs) <= budget
    share = (sum(counts) - sum(shared)) / len(found) + max(shared)
    assert max(costs) <= share + max(counts) + 1


UNITS = st.lists(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6)), min_size=1, max_size=3), min_size=1, max_size=8)


@given(units=UNITS, max_tokens=st.integers(33, 60), max_rows=st.none() | st.integers(3, 6), alike=st.booleans())
def test_units_are_whole_in_micro_batches_and_in_chunks(
    units: list[list[tuple[int, int]]], max_tokens: int, max_rows: int | None, alike: bool
) -> None:
    """Prompts are `alike` in a unit, as in a pair, or all differ."""
    prompts = [[number if alike else 10 * number + i] * unit[0][0] for number, unit in enumerate(units) for i in range(len(unit))]
    responses = [[1] * t for unit in units for _, t in unit]
    ids = [number for number, unit in enumerate(units) for _ in unit]
    data = DataProto.from_dict(
        {"prompts": Ragged.from_rows(prompts), "responses": Ragged.from_rows(responses), "unit": torch.tensor(ids)}
    )
    counts, shared, budget = data.token_counts().tolist(), shared_prompt_tokens(data), Budget(max_tokens, max_rows)
    batches = cut_into_micro_batches(counts, budget, shared, data.units())
    assert [row for batch in batches for row in batch] == list(range(len(ids)))
    homes = {unit: {i for i, batch in enumerate(batches) if any(ids[row] == unit for row in batch)} for unit in ids}
    assert all(len(home) == 1 for home in homes.values())
    for batch in batches:
        packed = pack_rows(data.select_idxs(batch), torch.device("cpu"))
        assert len(batch) <= max_rows if max_rows else packed.input_ids.shape[1] <= max_tokens
        chunks = packed.tokens.chunks(20) or []
        assert [unit for chunk in chunks for unit in chunk.row_columns["unit"].tolist()] == [ids[row] for row in batch]
        assert all(chunk.rows.num_tokens <= 20 for chunk in chunks)
        for before, after in pairwise(chunks):
            assert before.row_columns["unit"][-1] != after.row_columns["unit"][0]


@given(lengths=st.lists(st.integers(0, 30), min_size=1, max_size=6), most=st.integers(1, 12))
def test_long_rows_are_cut_where_a_loss_allows_it(lengths: list[int], most: int) -> None:
    """Into parts that differ by one token at most; tokens stay in order, and each part has what belongs to its row."""
    tokens, total = torch.arange(sum(lengths)), sum(lengths)
    rows = TokenRows(
        Rows(torch.tensor(lengths)), {"x": tokens}, [str(i) for i in range(len(lengths))], {"y": torch.arange(len(lengths))}
    )
    chunks = rows.chunks(most, cuts_rows=True)
    assert chunks is not None
    assert torch.cat([chunk.columns["x"] for chunk in chunks]).tolist() == list(range(total))
    parts = [(index, int(n)) for chunk in chunks for index, n in zip(chunk.indices, chunk.rows.lengths, strict=True)]
    assert [row for chunk in chunks for row in chunk.row_columns["y"].tolist()] == [int(index) for index, _ in parts]
    for row, length in enumerate(lengths):
        found = [n for index, n in parts if index == str(row)]
        assert sum(found) == length
        assert max(found, default=0) - min(found, default=0) <= 1
        assert len(found) == max(-(-length // most), 1 if max(lengths) <= most else 0)
    assert all(chunk.rows.num_tokens <= most for chunk in chunks)


def test_a_pair_costs_its_prompt_once_and_a_chunk_holds_it_whole() -> None:
    prompts, responses = Ragged.from_rows([[1] * 7] * 4), Ragged.from_rows([[2] * 3, [3] * 5, [4] * 2, [5] * 2])
    data = DataProto.from_dict({"prompts": prompts, "responses": responses, "unit": torch.tensor([0, 0, 1, 1])})
    assert pack_rows(data.select_idxs([0, 1]), torch.device("cpu")).input_ids.shape[1] == 7 + 3 + 5
    tokens = pack_rows(data, torch.device("cpu")).tokens
    assert [chunk.rows.lengths.tolist() for chunk in tokens.chunks(8) or []] == [[3, 5], [2, 2]]
    assert tokens.chunks(7) is None
    counts, shared = data.token_counts().tolist(), shared_prompt_tokens(data)
    assert cut_into_micro_batches(counts, Budget(15), shared, data.units()) == [[0, 1], [2, 3]]
    with pytest.raises(ConfigError, match=r"rows 0 to 1, which are computed together, have 15 tokens.*\(14\)"):
        cut_into_micro_batches(counts, Budget(14), shared, data.units())
    with pytest.raises(
        ConfigError, match="rows 0 to 1 are computed together, but a micro-batch may hold 1; raise micro_batch_size"
    ):
        cut_into_micro_batches(counts, Budget(99, max_rows=1), shared, data.units())


@given(
    rows=st.lists(st.tuples(st.integers(1, 20), st.booleans()), max_size=30), max_tokens=st.integers(20, 60),
    max_rows=st.none() | st.integers(1, 5),
)  # fmt: skip
def test_micro_batches_are_as_few_as_filling_one_after_the_other_makes_them_and_about_equally_full(
    rows: list[tuple[int, bool]], max_tokens: int, max_rows: int | None
) -> None:
    counts = [count for count, _ in rows]
    shared = [count // 2 if again and i else 0 for i, (count, again) in enumerate(rows)]
    filled: list[list[int]] = []
    used = 0
    for row, count in enumerate(counts):
        more = count - shared[row]
        if not filled or (len(filled[-1]) >= max_rows if max_rows else used + more > max_tokens):
            filled.append([])
            used, more = 0, count
        filled[-1].append(row)
        used += more
    batches = cut_into_micro_batches(counts, Budget(max_tokens, max_rows), shared)
    assert batches == cut_into_micro_batches(counts, Budget(max_tokens, max_rows), shared, [[row] for row in range(len(counts))])
    assert [row for batch in batches for row in batch] == list(range(len(counts)))
    assert len(batches) == len(filled)
    if max_rows:
        assert batches == filled
    elif batches:
        share = (sum(counts) - sum(shared)) / len(batches)
        costs = [sum(counts[row] - shared[row] for row in batch) + shared[batch[0]] for batch in batches]
        assert max(costs) <= min(max_tokens, share + max(counts) + max(shared) + 1)


def test_a_token_that_restarts_sees_nothing_before_it_and_its_row_stays_one() -> None:
    prompts, responses = ([1, 2], [3]), ([4, 5, 6, 7, 8], [9, 10])
    restarts = ([0, 0, 1, 0, 1], [0, 0])
    columns = {"prompts": prompts, "responses": responses, "restarts": restarts}
    data = DataProto.from_dict({name: Ragged.from_rows(rows, dtype=torch.int64) for name, rows in columns.items()})
    packed = pack_rows(data, torch.device("cpu"))
    assert packed.layout.lengths.tolist() == [4, 2, 1, 3]
    assert packed.position_ids[0].tolist() == [0, 1, 2, 3, 0, 1, 0, 0, 1, 2]
    assert packed.predict_at.tolist() == [1, 2, 3, 4, 5, 7, 8]
    assert packed.tokens.rows.lengths.tolist() == [5, 2]
    assert shared_prompt_tokens(data) == [0, 0]
