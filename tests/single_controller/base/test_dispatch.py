from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.protocol import DataProto, Ragged
from lockstep.single_controller.base.decorator import Dispatch
from lockstep.single_controller.base.dispatch import balanced_partition, find_mode, register_dispatch_mode, row_cost, share_rows

world_sizes = st.integers(1, 6)
prompt_lengths = st.lists(st.integers(0, 9), max_size=20)


def tokens(lengths: list[int]) -> DataProto:
    """A batch whose row i has `lengths[i]` prompt tokens, all of them i."""
    prompts = Ragged.from_rows([[i] * n for i, n in enumerate(lengths)], dtype=torch.int64)
    return DataProto.from_dict({"prompts": prompts, "row": torch.arange(len(lengths))}, {"tag": list(range(len(lengths)))})


def plan(mode: Dispatch | str, args: tuple[Any, ...], kwargs: dict[str, Any], world_size: int) -> Any:
    return find_mode(mode)(args, kwargs, world_size)


def run(mode: Dispatch | str, method: Callable[..., Any], world_size: int, *args: Any, **kwargs: Any) -> Any:
    """What a group does, without processes."""
    calls, collect = plan(mode, args, kwargs, world_size)
    return collect([method(*a, **k) for a, k in calls])


@given(prompt_lengths, world_sizes, st.integers(1, 3))
def test_rows_come_back_in_the_order_of_the_input_however_they_were_cut(lengths: list[int], world_size: int, copies: int) -> None:
    data = tokens(lengths)

    def generate(part: DataProto) -> DataProto:
        return part.repeat(copies)

    result = run(Dispatch.DP_COMPUTE_PROTO, generate, world_size, data)

    expected = data.repeat(copies)
    assert result.ragged("prompts").equal(expected.ragged("prompts"))
    assert torch.equal(result.batch["row"], expected.batch["row"])
    assert result.non_tensor_batch["tag"].tolist() == expected.non_tensor_batch["tag"].tolist()


@given(prompt_lengths.filter(any), world_sizes)
def test_rows_with_tokens_are_cut_by_tokens(lengths: list[int], world_size: int) -> None:
    calls, _ = plan(Dispatch.DP_COMPUTE_PROTO, (tokens(lengths),), {}, world_size)
    assert [args[0].batch["row"].tolist() for args, _ in calls] == share_rows(tokens(lengths), world_size)


@given(st.integers(0, 20), world_sizes)
def test_rows_without_tokens_are_cut_into_neighbours(rows: int, world_size: int) -> None:
    calls, _ = plan(Dispatch.DP_COMPUTE_PROTO, (DataProto.from_dict({"row": torch.arange(rows)}),), {}, world_size)
    parts = [args[0].batch["row"].tolist() for args, _ in calls]
    assert [row for part in parts for row in part] == list(range(rows))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(prompt_lengths, world_sizes)
def test_two_batches_are_cut_alike_and_other_arguments_go_to_all(lengths: list[int], world_size: int) -> None:
    scores = DataProto.from_dict({"score": torch.arange(len(lengths))})
    calls, _ = plan(Dispatch.DP_COMPUTE_PROTO, (scores, 0.5), {"data": tokens(lengths)}, world_size)
    for (part, temperature), kwargs in calls:
        assert torch.equal(part.batch["score"], kwargs["data"].batch["row"])
        assert temperature == 0.5


def test_a_rank_without_rows_has_no_say_in_columns_and_types() -> None:
    def value(part: DataProto) -> DataProto:
        return DataProto.from_dict({"v": part.batch["row"].half()} if len(part) else {})

    result = run(Dispatch.DP_COMPUTE_PROTO, value, 3, tokens([5, 4]))
    assert result.batch["v"].dtype == torch.half
    assert result.batch["v"].tolist() == [0, 1]


def test_a_lone_rank_gets_the_batch_itself() -> None:
    data = tokens([1, 2])
    assert run(Dispatch.DP_COMPUTE_PROTO, lambda part: part, 1, data) is data


@pytest.mark.parametrize("answer", [{"loss": 1.0}, None])
def test_results_that_are_not_rows_come_back_as_a_list(answer: object) -> None:
    assert run(Dispatch.DP_COMPUTE_PROTO, lambda part: answer, 3, tokens([1, 2])) == [answer] * 3


def test_metrics_of_every_rank_come_back_as_a_list_even_when_they_are_rows() -> None:
    results = run(Dispatch.DP_COMPUTE_METRIC, lambda part: part, 2, tokens([3, 3, 3]))
    assert [len(part) for part in results] == [2, 1]


@pytest.mark.parametrize(
    "method",
    [
        lambda part: part.slice(0, 1),  # too few
        lambda part: part.repeat(1 + int(part.batch["row"][0])),  # not the same multiple everywhere
        lambda part: DataProto(meta_info={"loss": 1.0}),  # no rows at all
    ],
)
def test_a_wrong_number_of_resulting_rows_is_an_error_with_the_numbers(method: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"given \[2, 2\] rows and returned"):
        run(Dispatch.DP_COMPUTE_PROTO, method, 2, DataProto.from_dict({"row": torch.arange(4)}))


def test_ranks_that_disagree_on_the_kind_of_result_are_an_error() -> None:
    with pytest.raises(ValueError, match="every rank returns a DataProto or none"):
        run(Dispatch.DP_COMPUTE_PROTO, lambda part: part if part.batch["row"][0] == 0 else None, 2, tokens([1, 1]))


def test_batches_of_different_sizes_are_an_error_with_the_sizes() -> None:
    with pytest.raises(ValueError, match=r"same number of rows, got .*2.*'argument 1': 3"):
        plan(Dispatch.DP_COMPUTE_PROTO, (tokens([1, 1]), tokens([1, 1, 1])), {}, 2)


def test_sharing_out_rows_needs_rows() -> None:
    with pytest.raises(ValueError, match="none of its 1 arguments is a DataProto"):
        plan(Dispatch.DP_COMPUTE_PROTO, (3,), {}, 2)


def test_a_leading_function_goes_to_all() -> None:
    def apply(function: Callable[[DataProto], DataProto], part: DataProto) -> DataProto:
        return function(part)

    data = tokens([3, 1, 2])
    result = run(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC, apply, 2, lambda part: part.select(["row"]), data)
    assert result.batch["row"].tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="takes a function first, got DataProto"):
        plan(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC, (data,), {}, 2)


@given(world_sizes)
def test_one_to_all_and_rank_zero(world_size: int) -> None:
    assert run(Dispatch.ONE_TO_ALL, lambda a, b: a + b, world_size, 1, b=2) == [3] * world_size
    assert run(Dispatch.RANK_ZERO, lambda a, b: a + b, world_size, 1, b=2) == 3


@pytest.mark.parametrize("mode", [Dispatch.ALL_TO_ALL, Dispatch.DP_COMPUTE])
def test_arguments_with_one_entry_a_rank(mode: Dispatch) -> None:
    assert run(mode, lambda a, b: (a, b), 2, [1, 2], b=["x", "y"]) == [(1, "x"), (2, "y")]
    assert run(mode, lambda: "ok", 2) == ["ok", "ok"]
    with pytest.raises(ValueError, match="argument 'b' has 3 entries, but there are 2 ranks"):
        plan(mode, ([1, 2],), {"b": [1, 2, 3]}, 2)
    with pytest.raises(ValueError, match="argument 0 must be a list with one entry for each of 2 ranks, got int"):
        plan(mode, (1,), {}, 2)


def test_a_users_own_mode() -> None:
    def number_the_ranks(args: tuple[Any, ...], kwargs: dict[str, Any], world_size: int) -> list[Any]:
        return [((rank, *args), kwargs) for rank in range(world_size)]

    register_dispatch_mode("numbered", number_the_ranks, sum)
    assert run("numbered", lambda rank, scale: rank * scale, 4, 10) == 60
    with pytest.raises(ValueError, match="already registered"):
        register_dispatch_mode("numbered", number_the_ranks, sum)
    with pytest.raises(ValueError, match=r"unknown dispatch mode 'numberd'.*numbered"):
        plan("numberd", (), {}, 2)
    register_dispatch_mode("too_many", lambda args, kwargs, n: [((), {})] * (n + 1), list)
    with pytest.raises(ValueError, match="made 3 calls for 2 ranks"):
        plan("too_many", (), {}, 2)


@given(st.lists(st.integers(0, 5000), max_size=60), st.integers(1, 9))
def test_every_index_once_in_order_and_no_part_above_the_average_by_more_than_the_largest_size(
    sizes: list[int], parts: int
) -> None:
    shares = balanced_partition(sizes, parts)

    assert len(shares) == parts
    assert sorted(index for share in shares for index in share) == list(range(len(sizes)))
    assert all(share == sorted(share) for share in shares)
    loads = [sum(sizes[index] for index in share) for share in shares]
    assert max(loads) <= sum(sizes) / parts + max(sizes, default=0)


@given(st.integers(0, 5), st.integers(0, 30), st.integers(1, 7))
def test_equal_sizes_give_counts_that_differ_by_at_most_one(size: int, rows: int, parts: int) -> None:
    counts = [len(share) for share in balanced_partition([size] * rows, parts)]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(("sizes", "parts"), [([1, 2], 0), ([1, -2], 2)])
def test_bad_arguments_are_refused(sizes: list[int], parts: int) -> None:
    with pytest.raises(ValueError, match=r"parts must be|negative, got -2"):
        balanced_partition(sizes, parts)


def test_a_long_row_costs_more_than_its_tokens_in_short_rows() -> None:
    assert row_cost(32768) == 2 * 32768
    assert 8 * row_cost(512) == pytest.approx(8 * 512, rel=0.02)


@given(groups=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), min_size=1, max_size=40), parts=st.integers(1, 4))
def test_rows_of_a_prompt_stay_together_where_there_are_enough_prompts(groups: list[tuple[int, int]], parts: int) -> None:
    prompts = [[number] * length for number, (length, samples) in enumerate(groups) for _ in range(samples)]
    batch = DataProto.from_dict({"prompts": Ragged.from_rows(prompts)})
    shares = share_rows(batch, parts)
    assert sorted(row for share in shares for row in share) == list(range(len(prompts)))
    costs = [row_cost(len(prompt)) for prompt in prompts]
    loads = [sum(costs[row] for row in share) for share in shares]
    if len(groups) >= 4 * parts:
        owners = [next(rank for rank, share in enumerate(shares) if row in share) for row in range(len(prompts))]
        assert all(owners[i] == owners[i - 1] for i in range(1, len(prompts)) if prompts[i] == prompts[i - 1])
        largest = max(samples * row_cost(length) for length, samples in groups)
        assert max(loads) <= sum(costs) / parts + largest
    else:
        assert shares == balanced_partition(costs, parts)


@given(
    units=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3), max_size=20), parts=world_sizes, same_prompt=st.booleans(),
    has_tokens=st.booleans(),
)  # fmt: skip
def test_a_unit_is_on_one_rank_in_order(units: list[list[int]], parts: int, same_prompt: bool, has_tokens: bool) -> None:
    """Whatever the sizes and the number of ranks, and where prompts of neighbouring units are the same."""
    ids = [7 * number for number, unit in enumerate(units) for _ in unit]
    lengths = [n * has_tokens for unit in units for n in unit]
    prompts = Ragged.from_rows([[0 if same_prompt else i] * n for i, n in enumerate(lengths)], dtype=torch.int64)
    data = DataProto.from_dict({"prompts": prompts, "unit": torch.tensor(ids, dtype=torch.int64)})
    calls, _ = plan(Dispatch.DP_COMPUTE_METRIC, (data,), {}, parts)
    shares = [args[0].columns["unit"].tolist() for args, _ in calls]
    assert sorted(unit for share in shares for unit in share) == ids
    for share in shares:
        runs = [unit for i, unit in enumerate(share) if i == 0 or share[i - 1] != unit]
        assert all(share.count(unit) == ids.count(unit) for unit in runs)
        assert len(runs) == len(set(runs))
