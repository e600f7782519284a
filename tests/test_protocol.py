import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.protocol import DataProto, DataProtoItem, Ragged, pad_dataproto_to_divisor, unpad_dataproto

PROPERTY = settings(max_examples=40, deadline=None)
PAD = 99

token_rows = st.lists(st.lists(st.integers(1, 50), max_size=5), max_size=6)
some_token_rows = st.lists(st.lists(st.integers(1, 50), max_size=5), min_size=1, max_size=6)


def ragged(rows):
    return Ragged.from_rows(rows, dtype=torch.int64)


def lists(column):
    return [row.tolist() for row in column.rows()]


def make_batch(rows):
    """A batch with a column of every kind; prompts are the reversed responses with one more token."""
    return DataProto.from_dict(
        {
            "prompts": ragged([[7, *reversed(row)] for row in rows]),
            "responses": ragged(rows),
            "weight": torch.arange(len(rows), dtype=torch.float32),
        },
        {"info": [{"row": i} for i in range(len(rows))]},
        {"pad_token_id": PAD},
    )


def plain(batch):
    """The rows as python values, whatever columns there are."""
    columns = {name: lists(c) if isinstance(c, Ragged) else c.tolist() for name, c in batch.columns.items()}
    columns |= {name: list(values) for name, values in batch.non_tensor_batch.items()}
    return [{name: values[i] for name, values in columns.items()} for i in range(len(batch))]


# -- Ragged ----------------------------------------------------------------------------------------------------------------


@PROPERTY
@given(rows=token_rows, side=st.sampled_from(["left", "right"]), more=st.integers(0, 3))
def test_padding_and_cutting_the_padding_off_is_the_identity(rows, side, more):
    column = ragged(rows)
    width = max(map(len, rows), default=0) + more
    padded = column.pad(PAD, side, width)
    fill = [[PAD] * (width - len(row)) for row in rows]
    assert padded.tolist() == [row + f if side == "right" else f + row for row, f in zip(rows, fill, strict=True)]
    assert Ragged.from_padded(padded, column.lengths, side).equal(column)


@PROPERTY
@given(rows=some_token_rows, data=st.data())
def test_selecting_rows_is_selecting_from_the_list_of_rows(rows, data):
    positions = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8))
    assert lists(ragged(rows).select(torch.tensor(positions, dtype=torch.int64))) == [rows[i] for i in positions]


@PROPERTY
@given(rows=token_rows, others=token_rows)
def test_ragged_columns_join_and_index_like_lists(rows, others):
    joined = Ragged.cat([ragged(rows), ragged(others)])
    assert lists(joined) == rows + others
    assert [joined[i].tolist() for i in range(-len(joined), 0)] == rows + others
    with pytest.raises(IndexError):
        joined[len(joined)]


def test_an_empty_row_does_not_turn_the_ids_of_the_others_into_floats():
    column = Ragged.from_rows([[], [1, 2]])
    assert column.values.dtype == torch.int64
    assert lists(column) == [[], [1, 2]]


def test_ragged_equality_is_of_lengths_type_and_bits_with_nan_equal_to_itself():
    column = Ragged.from_rows([[1.0, float("nan")], [2.0]])
    assert column.equal(Ragged.from_rows([[1.0, float("nan")], [2.0]]))
    assert not column.equal(Ragged.from_rows([[1.0], [float("nan"), 2.0]]))
    assert not column.equal(Ragged.from_rows([[1.0, 1.0], [2.0]]))
    assert not column.equal(column.like(column.values.double()))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Ragged(torch.zeros(3), torch.tensor([1, 1])), "add up to 2, but there are 3"),
        (lambda: Ragged(torch.zeros(3, 1), torch.tensor([3])), "flat values"),
        (lambda: ragged([[1, 2]]).pad(width=1), "width 1 is smaller than the longest row, 2"),
        (lambda: ragged([[1, 2]]).pad(side="top"), "'left' or 'right', not 'top'"),
        (lambda: Ragged.from_padded(torch.zeros(1, 2), torch.tensor([3])), "add up to 3"),
    ],
)
def test_ragged_errors_say_the_numbers(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# -- choosing rows ---------------------------------------------------------------------------------------------------------


@PROPERTY
@given(rows=some_token_rows, data=st.data())
def test_every_way_to_choose_rows_equals_choosing_from_a_list(rows, data):
    batch, expected = make_batch(rows), plain(make_batch(rows))
    positions = data.draw(st.lists(st.integers(-len(rows), len(rows) - 1), max_size=8))
    for indices in (positions, np.array(positions, dtype=np.int64), torch.tensor(positions, dtype=torch.int64)):
        assert plain(batch[indices]) == [expected[i] for i in positions]
    mask = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    for indices in (mask, np.array(mask), torch.tensor(mask)):
        assert plain(batch[indices]) == [row for row, chosen in zip(expected, mask, strict=True) if chosen]
    bound = st.none() | st.integers(-8, 8)
    cut = slice(data.draw(bound), data.draw(bound), data.draw(st.sampled_from([None, 1, 2, -1, -3])))
    assert plain(batch[cut]) == plain(batch.slice(cut.start, cut.stop, cut.step)) == expected[cut]


@pytest.mark.parametrize("indices", [[2], [-3], torch.tensor([0, 2]), [True]])
def test_a_row_that_is_not_there_is_an_index_error(indices):
    with pytest.raises(IndexError):
        make_batch([[1], [2]])[indices]
    with pytest.raises(IndexError):
        make_batch([])[[0]]


@PROPERTY
@given(rows=token_rows, chunks=st.integers(1, 9))
def test_chunks_are_balanced_neighbours_and_concatenate_to_the_whole(rows, chunks):
    batch = make_batch(rows)
    parts = batch.chunk(chunks)
    assert len(parts) == chunks
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    whole = DataProto.concat(parts)
    assert plain(whole) == plain(batch)
    assert whole.meta_info == batch.meta_info
    assert {name: c.values.dtype for name, c in whole.columns.items() if isinstance(c, Ragged)} == {
        "prompts": torch.int64,
        "responses": torch.int64,
    }


@PROPERTY
@given(rows=some_token_rows, size=st.integers(1, 7))
def test_split_cuts_runs_of_one_size(rows, size):
    parts = make_batch(rows).split(size)
    assert all(len(part) == size for part in parts[:-1])
    assert [row for part in parts for row in plain(part)] == plain(make_batch(rows))


@PROPERTY
@given(rows=token_rows, times=st.integers(1, 3), data=st.data())
def test_repeat_keeps_copies_together_or_repeats_the_whole(rows, times, data):
    batch, expected = make_batch(rows), plain(make_batch(rows))
    assert plain(batch.repeat(times)) == [row for row in expected for _ in range(times)]
    assert plain(batch.repeat(times, interleave=False)) == expected * times
    counts = data.draw(st.lists(st.integers(0, 3), min_size=len(rows), max_size=len(rows)))
    assert plain(batch.sample_level_repeat(counts)) == [row for row, n in zip(expected, counts, strict=True) for _ in range(n)]


@PROPERTY
@given(rows=token_rows, data=st.data())
def test_reorder_is_in_place(rows, data):
    order = data.draw(st.permutations(range(len(rows))))
    batch = make_batch(rows)
    expected = [plain(batch)[i] for i in order]
    batch.reorder(torch.tensor(order, dtype=torch.int64))
    assert plain(batch) == expected


@PROPERTY
@given(size=st.integers(1, 4), count=st.integers(1, 3), epochs=st.integers(1, 3), seed=st.none() | st.integers(0, 9))
def test_an_epoch_of_the_iterator_visits_every_row_once(size, count, epochs, seed):
    batch = make_batch([[i] for i in range(size * count)])
    visited = [plain(part) for part in batch.make_iterator(size, epochs, seed)]
    assert [len(part) for part in visited] == [size] * (count * epochs)
    rows = [row["info"]["row"] for part in visited for row in part]
    per_epoch = [rows[i : i + size * count] for i in range(0, len(rows), size * count)]
    assert all(sorted(epoch) == list(range(size * count)) for epoch in per_epoch)
    if seed is None:
        assert all(epoch == sorted(epoch) for epoch in per_epoch)


def test_the_iterator_refuses_a_size_that_does_not_divide():
    with pytest.raises(ValueError, match="3 rows cannot be cut into mini-batches of 2"):
        next(make_batch([[1], [2], [3]]).make_iterator(2, 1))


@PROPERTY
@given(rows=some_token_rows, divisor=st.integers(1, 7))
def test_padding_to_a_divisor_repeats_rows_from_the_start_and_is_undone(rows, divisor):
    batch = make_batch(rows)
    padded, added = pad_dataproto_to_divisor(batch, divisor)
    expected = plain(batch)
    assert len(padded) % divisor == 0
    assert added < divisor
    assert plain(padded) == [expected[i % len(rows)] for i in range(len(rows) + added)]
    assert plain(unpad_dataproto(padded, added)) == expected


def test_an_empty_batch_needs_no_padding():
    assert pad_dataproto_to_divisor(make_batch([]), 3)[1] == 0


# -- choosing and joining columns ------------------------------------------------------------------------------------------


def test_select_pop_and_rename_choose_columns():
    batch = make_batch([[1], [2, 3]])
    assert set(batch.select(["responses"], []).columns) == {"responses"}
    assert len(batch.select([], ["info"])) == 2
    with pytest.raises(KeyError, match="nothing"):
        batch.select(["nothing"])
    popped = batch.pop(["weight"], ["info"])
    assert (popped.columns["weight"].tolist(), list(popped.non_tensor_batch["info"])) == ([0, 1], [{"row": 0}, {"row": 1}])
    assert "weight" not in batch
    assert "info" not in batch
    assert set(batch.rename(["responses"], ["answers"]).columns) == {"prompts", "answers"}


def test_union_adds_columns_and_meta_info():
    batch = make_batch([[1], [2, 3]])
    other = DataProto.from_dict({"x": torch.ones(2)}, {"tag": ["a", "b"]}, {"step": 3})
    assert batch.union(other) is batch
    assert {"x", "tag", "responses", "info"} <= set(plain(batch)[0])
    assert batch.meta_info == {"pad_token_id": PAD, "step": 3}
    assert plain(DataProto().union(make_batch([[1]]))) == plain(make_batch([[1]]))


SAME = [
    {"responses": ragged([[1], [2, 3]])},
    {"info": [{"row": 0}, {"row": 1}]},
    {"nested": [{"a": [np.array([1, 2]), float("nan")]}, {"a": [np.array([3, 4]), 0.0]}]},
]
DIFFERENT = [
    {"responses": ragged([[1], [2, 4]])},
    {"responses": ragged([[1, 2], [3]])},
    {"responses": torch.ones(2)},
    {"info": [{"row": 0}, {"row": 5}]},
    {"nested": [{"a": [np.array([1, 2]), float("nan")]}, {"a": [np.array([3, 5]), 0.0]}]},
]


@pytest.mark.parametrize("other", SAME)
def test_union_takes_a_column_that_is_equal_in_both(other):
    batch = make_batch([[1], [2, 3]]).union(DataProto.from_single_dict(SAME[2]))
    batch.union(DataProto.from_single_dict(other))


@pytest.mark.parametrize("other", DIFFERENT)
def test_union_refuses_a_column_that_differs_and_then_adds_nothing(other):
    batch = make_batch([[1], [2, 3]]).union(DataProto.from_single_dict(SAME[2]))
    before = set(plain(batch)[0])
    with pytest.raises(ValueError, match=next(iter(other))):
        batch.union(DataProto.from_single_dict({"new": torch.zeros(2), **other}))
    assert set(plain(batch)[0]) == before


@pytest.mark.parametrize("rows", [[], [[1], [2], [3]]])
def test_union_refuses_another_number_of_rows(rows):
    with pytest.raises(ValueError, match=f"2 rows with one of {len(rows)}"):
        make_batch([[1], [2, 3]]).union(DataProto.from_dict({"x": ragged(rows)}))
    with pytest.raises(ValueError, match=f"{len(rows)} rows with one of 2"):
        make_batch(rows).union(DataProto.from_dict({"x": torch.zeros(2)}))


def test_columns_of_different_lengths_never_form_a_batch():
    with pytest.raises(ValueError, match="'a': 2, 'b': 3"):
        DataProto.from_dict({"a": torch.zeros(2)}, {"b": [1, 2, 3]})
    with pytest.raises(ValueError, match="'x' has 3 rows, the batch has 2"):
        make_batch([[1], [2]]).set("x", torch.zeros(3))
    with pytest.raises(ValueError, match="'x' must be a tensor"):
        DataProto.from_single_dict({"x": 3})


def test_concat_refuses_parts_with_different_columns():
    with pytest.raises(ValueError, match="different columns"):
        DataProto.concat([make_batch([[1]]), make_batch([[1]]).select(["responses"])])
    with pytest.raises(ValueError, match="nothing to concatenate"):
        DataProto.concat([])


def test_lists_of_one_length_stay_one_object_a_row():
    batch = DataProto.from_dict(non_tensors={"pair": [[1, 2], [3, 4]], "array": np.array([[1, 2], [3, 4]])})
    assert batch.non_tensor_batch["pair"].shape == batch.non_tensor_batch["array"].shape == (2,)
    assert list(batch.non_tensor_batch["pair"]) == [[1, 2], [3, 4]]


# -- the padded view -------------------------------------------------------------------------------------------------------


@PROPERTY
@given(rows=token_rows)
def test_the_padded_view_equals_a_plain_loop(rows):
    batch = make_batch(rows)
    prompts = [[7, *reversed(row)] for row in rows]
    width, prompt_width = max(map(len, rows), default=0), max(map(len, prompts), default=0)
    expected = {name: [] for name in ("prompts", "responses", "input_ids", "attention_mask", "position_ids")}
    for prompt, response in zip(prompts, rows, strict=True):
        left, right = prompt_width - len(prompt), width - len(response)
        tokens = len(prompt) + len(response)
        expected["prompts"].append([PAD] * left + prompt)
        expected["responses"].append(response + [PAD] * right)
        expected["input_ids"].append([PAD] * left + prompt + response + [PAD] * right)
        expected["attention_mask"].append([0] * left + [1] * tokens + [0] * right)
        expected["position_ids"].append([0] * left + list(range(tokens)) + [tokens - 1] * right)
    assert {name: batch.batch[name].tolist() for name in expected} == expected
    assert set(batch.batch) == {*expected, "weight"}
    assert len(batch.batch) == len(rows)
    assert len(batch.batch.keys()) == 6
    assert batch.token_counts().tolist() == [len(p) + len(r) for p, r in zip(prompts, rows, strict=True)]


def test_the_view_names_what_there_is_when_a_column_is_missing():
    with pytest.raises(KeyError, match=r"'rewards'.*'responses'"):
        make_batch([[1]]).batch["rewards"]
    assert "input_ids" not in DataProto.from_dict({"responses": ragged([[1]])}).batch
    with pytest.raises(TypeError, match="'weight' is a dense tensor"):
        make_batch([[1]]).ragged("weight")


@PROPERTY
@given(rows=some_token_rows)
def test_writing_a_tensor_of_the_responses_shape_stores_it_without_the_padding(rows):
    batch = make_batch(rows)
    width = max(map(len, rows))
    values = torch.randn(len(rows), width)
    batch.batch["token_level_scores"] = values
    assert lists(batch.ragged("token_level_scores")) == [values[i, : len(row)].tolist() for i, row in enumerate(rows)]
    batch.batch["features"] = torch.ones(len(rows), width + 1)
    assert isinstance(batch.columns["features"], torch.Tensor)
    prompts = batch.batch["prompts"]
    batch.batch["prompts"] = prompts + 1
    assert lists(batch.ragged("prompts")) == [[8, *(t + 1 for t in reversed(row))] for row in rows]


def test_prompts_as_wide_as_the_responses_keep_their_own_lengths():
    batch = DataProto.from_dict({"prompts": ragged([[1], [2, 3]]), "responses": ragged([[4, 5], [6]])})
    batch.batch["prompts"] = batch.batch["prompts"]
    assert lists(batch.ragged("prompts")) == [[1], [2, 3]]


def reward_as_other_systems_write_it(data):
    """Reads a batch row by row, with the arithmetic of a padded row."""
    rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
    seen = []
    for i in range(len(data)):
        item = data[i]
        prompt_ids = item.batch["prompts"]
        prompt_length = prompt_ids.shape[-1]
        valid_prompt_length = item.batch["attention_mask"][:prompt_length].sum()
        valid_response_length = item.batch["attention_mask"][prompt_length:].sum()
        prompt = prompt_ids[-valid_prompt_length:].tolist()
        response = item.batch["responses"][:valid_response_length].tolist()
        seen.append((prompt, response, item.non_tensor_batch["info"]["row"]))
        rewards[i, valid_response_length - 1] = float(i + 1)
    return rewards, seen


@PROPERTY
@given(rows=st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=5), min_size=1, max_size=5), dense=st.booleans())
def test_a_reward_manager_written_for_padded_rows_sees_every_row_whole(rows, dense):
    batch = make_batch(rows)
    if dense:  # a batch as other systems store it
        batch = DataProto.from_dict({name: batch.batch[name] for name in batch.batch}, batch.non_tensor_batch)
    rewards, seen = reward_as_other_systems_write_it(batch)
    assert seen == [([7, *reversed(row)], row, i) for i, row in enumerate(rows)]
    assert [row.nonzero().flatten().tolist() for row in rewards] == [[len(row) - 1] for row in rows]


def test_a_batch_with_dense_tokens_reads_and_writes_as_it_is():
    batch = DataProto.from_dict({"prompts": torch.ones(2, 3), "responses": torch.ones(2, 2)})
    batch.batch["scores"] = torch.zeros(2, 2)
    assert set(batch[0].batch) == {"prompts", "responses", "scores"}


def test_an_item_counts_from_both_ends():
    batch = make_batch([[1], [2, 3]])
    assert isinstance(batch[-1], DataProtoItem)
    assert batch[-1].batch["responses"].tolist() == batch[1].batch["responses"].tolist() == [2, 3]
    assert batch[np.int64(1)].non_tensor_batch == {"info": {"row": 1}}
    assert batch[1].batch["weight"].item() == 1
    with pytest.raises(IndexError):
        batch[2]


def test_an_item_equals_the_padded_view_of_its_row_alone_and_is_made_without_padding(monkeypatch):
    batch = make_batch([[1], [2, 3], [4, 5, 6]])
    alone = [{name: part.batch[name][0] for name in part.batch} for part in batch.split(1)]
    monkeypatch.setattr(Ragged, "pad", lambda *args, **kwargs: pytest.fail("padded"))
    for i, expected in enumerate(alone):
        item = batch[i].batch
        assert item.keys() == expected.keys()
        assert all(torch.equal(item[name], expected[name]) and item[name].dtype == expected[name].dtype for name in item)


# -- keeping ---------------------------------------------------------------------------------------------------------------


@settings(max_examples=10, deadline=None)
@given(rows=token_rows)
def test_a_batch_survives_pickle_and_disk(rows, tmp_path_factory):
    batch = make_batch(rows)
    path = tmp_path_factory.mktemp("batch") / "batch.pt"
    batch.save_to_disk(path)
    for copy in (pickle.loads(pickle.dumps(batch)), DataProto.load_from_disk(path), batch.to("cpu")):
        assert plain(copy) == plain(batch)
        assert copy.meta_info == batch.meta_info
        assert {n: type(c) for n, c in copy.columns.items()} == {n: type(c) for n, c in batch.columns.items()}


def test_results_do_not_share_their_dicts_with_the_source():
    batch = make_batch([[1], [2]])
    for other in (batch.select(), batch[[0, 1]], batch.to("cpu"), DataProto.concat([batch])):
        other.set("new", torch.zeros(2))
        other.meta_info["new"] = 1
    assert "new" not in batch
    assert "new" not in batch.meta_info


def test_units_are_runs_of_rows_with_one_number() -> None:
    rows = torch.arange(5)
    assert DataProto.from_dict({"row": rows}).units() == [[0], [1], [2], [3], [4]]
    assert DataProto.from_dict({"row": rows, "unit": torch.tensor([3, 3, 1, 0, 0])}).units() == [[0, 1], [2], [3, 4]]
    assert DataProto.from_dict({"unit": rows[:0]}).units() == []
    with pytest.raises(ValueError, match="rows of one unit must stand together"):
        DataProto.from_dict({"unit": torch.tensor([1, 2, 1])}).units()


# -- what others' code calls ---------------------------------------------------------------------------------------------------


def test_concat_merges_what_the_parts_say_of_themselves():
    first = DataProto.from_dict({"a": torch.ones(1)}, meta_info={"metrics": [{"loss": 1.0}], "x": 1})
    second = DataProto.from_dict({"a": torch.ones(1)}, meta_info={"metrics": {"loss": 2.0}, "y": [2]})
    assert DataProto.concat([first, second]).meta_info == {"x": 1, "y": [2], "metrics": {"loss": [1.0, 2.0]}}
    second.meta_info["x"] = 3
    with pytest.raises(ValueError, match="Conflicting values for meta_info key 'x'"):
        DataProto.concat([first, second])


def test_rows_are_folded_unfolded_and_added():
    data = DataProto(batch={"a": torch.arange(4)}, non_tensor_batch={"b": list("wxyz")})
    folded = data.fold_batch_dim(2)
    assert folded.batch["a"].tolist() == [[0, 1], [2, 3]]
    assert list(folded.non_tensor_batch["b"][1]) == ["y", "z"]
    again = folded.unfold_batch_dim()
    assert again.batch["a"].tolist() == [0, 1, 2, 3]
    assert list(again.non_tensor_batch["b"]) == list("wxyz")
    with pytest.raises(ValueError, match="cannot be folded"):
        data.fold_batch_dim(3)
    data.padding(2, "last")
    assert data.batch["a"].tolist() == [0, 1, 2, 3, 3, 3]
    assert data.batch.batch_size == torch.Size([6])
    assert data.batch.pop("a").tolist() == [0, 1, 2, 3, 3, 3]
    assert "a" not in data


def test_meta_info_is_popped_by_name():
    data = DataProto.from_dict({"a": torch.ones(1)}, meta_info={"x": 1, "y": 2}, auto_padding=True)
    popped = data.pop(["a"], meta_info_keys=["x"])
    assert (popped.meta_info, data.meta_info) == ({"x": 1}, {"y": 2})


def test_a_batch_survives_a_tensordict():
    pytest.importorskip("tensordict")
    data = DataProto.from_dict({"a": torch.arange(2)}, {"b": ["x", "y"]}, {"c": "z"})
    again = DataProto.from_tensordict(data.to_tensordict())
    assert again.batch["a"].tolist() == [0, 1]
    assert list(again.non_tensor_batch["b"]) == ["x", "y"]
    assert again.meta_info == {"c": "z"}
