"""Which rows are tried."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from lockstep.tools.reward_check.rows import choose_rows


def item(source, number=0):
    return {
        "data_source": source,
        "raw_prompt": [{"role": "system", "content": "be brief"}, {"role": "user", "content": f"question {number}"}],
        "reward_model": {"style": "rule", "ground_truth": str(number), "test_cases": None},
        "index": 100 + number,
    }


@given(st.lists(st.integers(1, 30), min_size=1, max_size=4), st.integers(1, 60), st.integers(0, 5))
def test_rows_are_spread_over_the_sources_as_evenly_as_these_allow(sizes, num_rows, seed):
    rows = [item(f"source {s}", i) for s, size in enumerate(sizes) for i in range(size)]
    datasets = {"train": rows[::2], "val": rows[1::2]}
    chosen = choose_rows(datasets, num_rows, len(sizes), seed)
    assert len(chosen) == min(num_rows, len(rows))
    assert len({(row.split, row.position) for row in chosen}) == len(chosen)
    counts = Counter(row.data_source for row in chosen)
    for s, size in enumerate(sizes):
        fewer = size > counts[f"source {s}"]
        assert not fewer or counts[f"source {s}"] >= max(counts.values()) - 1
    assert chosen == choose_rows(datasets, num_rows, len(sizes), seed)


def test_a_row_is_what_a_reward_function_sees():
    (row,) = choose_rows({"val": [item("mine", 7)]}, 5, 1, seed=0)
    assert (row.split, row.position, row.index, row.data_source) == ("val", 0, 107, "mine")
    assert (row.prompt, row.ground_truth, row.test_cases, row.extra_info) == ("be brief\nquestion 7", "7", "7", None)


def test_a_row_with_nothing_but_a_prompt_is_a_row():
    (row,) = choose_rows({"train": [{"raw_prompt": "hello", "prompt_ids": [1]}]}, 5, 1, seed=0)
    assert (row.prompt, row.data_source, row.ground_truth) == ("hello", None, None)
