import json
from types import SimpleNamespace

import pytest

from lockstep.data import seen
from lockstep.data.seen import seen_data, tell_of_other_data


def of_files(files, num_rows):
    return seen_data(SimpleNamespace(train_files=files), num_rows)


def told(then, now):
    """What is said, in one text."""
    said = []
    tell_of_other_data(then, now, said.append)
    return " ".join(said)


ROWS = [f'{{"prompt": "{i:09}"}}\n' for i in range(100)]


@pytest.fixture(autouse=True)
def small_ends(monkeypatch):
    monkeypatch.setattr(seen, "_END_BYTES", 64)


def state(folder, rows, num_rows=20, name="rows.jsonl"):
    """What a checkpoint keeps of this file, read back."""
    (folder / name).write_text("".join(rows))
    return json.loads(json.dumps(of_files([str(folder / name)], num_rows)))


def test_the_same_rows_are_the_same_data_wherever_they_lie(tmp_path):
    (tmp_path / "moved").mkdir()
    then = state(tmp_path, ROWS)
    assert not told(then, state(tmp_path / "moved", ROWS, name="other_name.jsonl"))
    assert not told({"num_train_rows": 20}, then), "a checkpoint of a version without a digest"


@pytest.mark.parametrize("rows", [ROWS + ROWS[:1], ["x" * len(ROWS[0]), *ROWS[1:]], [*ROWS[:-1], "x" * len(ROWS[0])]])
def test_other_rows_are_said_also_where_as_many_are_trained_on(tmp_path, rows):
    assert "contents of data.train_files" in told(state(tmp_path, ROWS), state(tmp_path, rows))


def test_another_number_of_rows_is_said_with_both(tmp_path):
    assert "100 training rows, now there are 60" in told(state(tmp_path, ROWS, 100), state(tmp_path, ROWS[:60], 60))


def test_what_is_no_file_has_no_part(tmp_path):
    assert of_files("a://table", 3) == of_files(None, 3) == of_files([str(tmp_path / "none")], 3)
