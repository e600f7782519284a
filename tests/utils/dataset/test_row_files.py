from __future__ import annotations

import gc

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lockstep.utils.dataset.row_files import RowFiles

NUM_ROWS = 200_000
GROUP = 10_000


@pytest.fixture(scope="module")
def large_file(tmp_path_factory):
    """200,000 rows: a short prompt, and 200 bytes that do not compress."""
    path = tmp_path_factory.mktemp("large") / "large.parquet"
    noise = np.random.default_rng(0).bytes(200 * NUM_ROWS)
    schema = pa.schema([("prompt", pa.string()), ("ballast", pa.binary(200))])
    with pq.ParquetWriter(path, schema, compression="none") as writer:
        for start in range(0, NUM_ROWS, GROUP):
            prompts = [f"prompt {i}" for i in range(start, start + GROUP)]
            ballast = [noise[200 * i : 200 * (i + 1)] for i in range(start, start + GROUP)]
            writer.write_table(pa.table([prompts, pa.array(ballast, pa.binary(200))], schema=schema))
    return path


def test_opening_and_scanning_one_column_of_a_large_file_holds_a_small_part_of_it(large_file):
    before = pa.total_allocated_bytes()
    rows = RowFiles([large_file])
    assert len(rows) == NUM_ROWS
    most = pa.total_allocated_bytes() - before
    for i, prompt in enumerate(rows.scan("prompt")):
        assert prompt == f"prompt {i}"
        most = max(most, pa.total_allocated_bytes() - before)
    assert most < large_file.stat().st_size / 20


@pytest.mark.parametrize("groups_that_fit", [0.5, 2])
def test_random_access_keeps_a_bounded_number_of_row_groups(large_file, groups_that_fit):
    group_bytes = large_file.stat().st_size / NUM_ROWS * GROUP
    gc.collect()  # what earlier tests left behind would be counted as ours, or against us when it goes
    before = pa.total_allocated_bytes()
    rows = RowFiles([large_file], cache_bytes=int(groups_that_fit * group_bytes))
    for i in np.random.default_rng(1).integers(NUM_ROWS, size=60).tolist():
        assert rows.row(i)["prompt"] == f"prompt {i}"
        # Arrow's buffers are larger than what they hold, by less than their size; one group is read while an old one is let go, and
        # its reader's threads may hold another. All the groups touched would be several times more.
        assert pa.total_allocated_bytes() - before < 2 * (groups_that_fit + 3) * group_bytes


def test_a_row_group_is_read_once_while_it_is_kept(large_file):
    pool = pa.default_memory_pool()
    rows = RowFiles([large_file])
    rows.row(0)
    after_first = pool.total_bytes_allocated()
    for i in range(100):
        assert rows.row(i)["prompt"] == f"prompt {i}"
    assert pool.total_bytes_allocated() == after_first
